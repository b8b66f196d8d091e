"""Seconds of kernels on a CPU."""

from __future__ import annotations

import pytest

from launch.predict.time import rates
from launch.schema.recorded_step import Operator

ADD = Operator("aten::add", "other", "float32", launches=1)
MIB = float(1 << 20)


def kernel_s(operator: Operator, moved: float = MIB, flops: float = 0.0, **of_rank: int) -> float:
    measured = rates.cores_of_rank((), of_rank.get("num_cores", 8), of_rank.get("num_ranks", 1))
    return measured.kernel_s(operator, flops, moved)


def test_a_small_kernel_runs_on_one_thread():
    few, many = 3 * 4 * 1024, 3 * 4 * 1024 * 1024
    assert kernel_s(ADD, few) == kernel_s(ADD, few, num_cores=1)
    assert kernel_s(ADD, many) == pytest.approx(kernel_s(ADD, many, num_cores=1) / 8)


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("aten::tanh", "transcendental"),
        ("aten::tanh_backward", ""),
        ("aten::_log_softmax", "softmax"),
        ("aten::_log_softmax_backward_data", ""),
        ("aten::silu_backward", "sigmoid"),
        ("aten::native_layer_norm_backward", "norm"),
        ("aten::bernoulli_", "random"),
        ("aten::masked_fill", "selection"),
        ("aten::embedding", "gather"),
    ],
)
def test_a_kernel_goes_by_its_name(name, like):
    of_rank = rates.cores_of_rank((), 1, 1)
    share = kernel_s(ADD, num_cores=1) * of_rank.rank.bytes_per_s[""]
    seconds = kernel_s(Operator(name, "other", launches=1), num_cores=1)
    assert seconds == pytest.approx(share / of_rank.rank.bytes_per_s[like])


def test_a_kernel_without_a_known_name_goes_by_its_form():
    cast = Operator("aten::_to_copy", "other", launches=1, form="cast")
    assert kernel_s(cast) > kernel_s(ADD)


def test_a_random_mask_takes_one_thread_whatever_there_are():
    mask = Operator("aten::bernoulli_", "other", launches=1)
    assert kernel_s(mask, num_cores=8) == kernel_s(mask, num_cores=1)


def test_tensors_that_no_cache_holds_come_from_memory():
    assert kernel_s(ADD, 200 * MIB) > 2 * kernel_s(ADD, 90 * MIB) * 200 / 180


def test_products_go_by_their_type_and_others_as_float32():
    def product_s(dtype: str, kind: str = "product") -> float:
        return kernel_s(Operator("aten::mm", kind, dtype), flops=1e9)  # pyright: ignore[reportArgumentType]

    assert product_s("bfloat16") < product_s("float32") / 3
    assert product_s("bfloat16 by 4") == product_s("bfloat16")
    assert product_s("float16") == product_s("float64") == product_s("float32")
    assert product_s("float32", "attention") > product_s("float32")


def test_ranks_share_the_cores_but_each_has_one():
    two, eight = (rates.cores_of_rank((), 8, num_ranks).rank for num_ranks in (2, 8))
    alone = rates.cores_of_rank((), 1, 1).rank
    assert two.flops_per_s["float32"] == pytest.approx(4 * alone.flops_per_s["float32"])
    assert eight.flops_per_s == alone.flops_per_s
    assert eight.bytes_per_s["random"] == alone.bytes_per_s["random"]


def test_measured_figures_replace_the_assumed():
    assumed = rates.cores_of_rank((), 2, 1)
    measured = rates.cpu(2, measured=(assumed.single, assumed.rank))
    assert measured.source == "measured here"
    assert rates.cpu(2).source.startswith("assumed: like an AMD EPYC")
