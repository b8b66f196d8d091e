"""A trace for a CUDA card: the kernels it gets there, what they allocate, and nothing left
behind."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import accelerator
from torch._subclasses.fake_impls import op_implementations_dict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from transformers.integrations import sdpa_attention
from transformers.utils import import_utils

from training.compat import levers_private
from training.trace import cuda_semantics
from training.trace.cuda_semantics import Call, Target, choose
from training.trace.cuda_workspace import cublas_workspace_bytes, summed, workspace
from training.trace.recorder import Recorder

HERE = Path(__file__).parent
MIB = 1 << 20
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SCALAR = 8  # bytes: a number of the host is copied to a card, and taken as it is on the CPU


@pytest.fixture(scope="module")
def forward_passes() -> dict[str, dict[str, list]]:
    done = subprocess.run(
        [sys.executable, str(HERE / "fake_cuda.py")],
        env={**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("family", ["gpt2", "qwen2", "llama", "t5"])
def test_a_forward_pass_allocates_what_it_does_with_cuda_tensors(forward_passes, family):
    cases = {name: case for name, case in forward_passes.items() if name.startswith(family)}
    assert len(cases) == 16
    for name, case in cases.items():
        (labelled, of_labelled), (stand_in, of_stand_in) = case["cuda"], case["stand-in"]
        assert stand_in == pytest.approx(labelled, rel=1e-3), name
        large = [
            [one for one in births if one[1] > SCALAR] for births in (of_labelled, of_stand_in)
        ]
        assert large[0] == large[1], name


# ---- the kernel of attention


def call(
    dtype=BF16,
    seq=128,
    width=64,
    heads=8,
    key_heads=8,
    mask=None,
    dropout_p=0.0,
    is_causal=True,
    gqa=False,
    keys=None,
) -> Call:
    def made(heads: int, length: int) -> torch.Tensor:
        return torch.empty(2, heads, length, width, dtype=dtype, device="meta", requires_grad=True)

    key = made(key_heads, keys or seq)
    of_mask = torch.empty(2, 1, seq, keys or seq, dtype=mask, device="meta") if mask else None
    return Call(
        made(heads, seq),
        key,
        torch.empty_like(key),
        of_mask,
        dropout_p,
        is_causal and mask is None,
        None,
        gqa,
    )


AMPERE, GAMING, TURING, PASCAL, HOPPER = (
    Target(name) for name in ("8.0", "8.6", "7.5", "6.1", "9.0")
)
BLACKWELL, RTX50 = Target("10.0"), Target("12.0")
AMD, OLD_AMD = Target("gfx1100"), Target("gfx906", fused_attention=False)


@pytest.mark.parametrize(
    ("target", "asked", "kernel"),
    [
        (AMPERE, {}, "flash"),
        (AMPERE, {"dtype": FP16}, "flash"),
        (AMPERE, {"dtype": FP32}, "efficient"),  # check_dtypes_low_precision
        (AMPERE, {"mask": torch.bool}, "efficient"),  # check_for_attn_mask
        (AMPERE, {"mask": BF16}, "efficient"),
        (AMPERE, {"key_heads": 2, "gqa": True}, "flash"),
        (AMPERE, {"key_heads": 2}, "math"),  # grouped queries that nobody announced
        # efficient has no grouped queries
        (AMPERE, {"key_heads": 2, "gqa": True, "dtype": FP32}, "math"),
        (AMPERE, {"width": 66}, "flash"),  # padded to 72
        (AMPERE, {"width": 66, "dtype": FP32}, "math"),  # minimum_gemm_alignment: 4 of fp32
        (AMPERE, {"width": 68, "dtype": FP32}, "efficient"),
        (AMPERE, {"width": 68, "mask": torch.bool}, "math"),  # 8 of bf16
        (AMPERE, {"width": 256}, "flash"),
        (AMPERE, {"width": 264}, "efficient"),
        (AMPERE, {"keys": 64}, "efficient"),  # check_flash_causal_non_square_seqlens
        (AMPERE, {"keys": 64, "is_causal": False}, "flash"),
        (AMPERE, {"dropout_p": 0.1}, "flash"),
        # backward of 193 to 224 needs an A100's shared memory
        (GAMING, {"width": 208}, "efficient"),
        (GAMING, {"width": 256}, "flash"),
        (GAMING, {"width": 256, "dropout_p": 0.1}, "efficient"),
        (RTX50, {"width": 208}, "efficient"),
        (RTX50, {}, "flash"),
        (TURING, {"dtype": FP16}, "efficient"),  # flash from 8.0
        (TURING, {}, "math"),  # bf16: not below 8.0
        (TURING, {"dtype": FP32}, "efficient"),
        (PASCAL, {"dtype": FP32, "width": 65}, "efficient"),  # no alignment without tensor cores
        (TURING, {"dtype": FP16, "width": 65}, "math"),
        (Target("3.7"), {"dtype": FP32}, "math"),
        (HOPPER, {}, "cudnn"),
        (HOPPER, {"mask": torch.bool}, "cudnn"),
        (HOPPER, {"key_heads": 2, "gqa": True}, "cudnn"),
        (HOPPER, {"dropout_p": 0.1}, "flash"),  # check_cudnn_dropout: multiples of 1/16
        (HOPPER, {"dropout_p": 0.125}, "cudnn"),
        (HOPPER, {"dtype": FP32}, "efficient"),
        (HOPPER, {"width": 192}, "cudnn"),
        (BLACKWELL, {"width": 192}, "flash"),
        (BLACKWELL, {}, "cudnn"),
        # the CUDA 12 builds: check_prefer_cudnn_attention
        (Target("9.0", cudnn=91002), {}, "flash"),
        (AMD, {}, "flash"),
        (AMD, {"mask": torch.bool}, "efficient"),
        (AMD, {"mask": FP32}, "math"),  # a mask of another type than the query
        (AMD, {"dtype": FP32}, "efficient"),
        (OLD_AMD, {"dtype": FP16}, "math"),
    ],
    ids=lambda value: (
        value.architecture if isinstance(value, Target) else str(value).replace("torch.", "")
    ),
)
def test_attention_gets_the_kernel_that_sdp_utils_chooses(target, asked, kernel):
    assert choose(target, call(**asked)) == kernel


def test_a_mask_that_learns_does_not_go_to_cudnn():
    learned = call(mask=BF16)
    learned.mask.requires_grad_()
    assert choose(HOPPER, learned) == "efficient"


@pytest.mark.parametrize(("asked", "kernel"), [({}, "flash"), ({"mask": torch.bool}, "efficient")])
def test_cudnn_stands_back_where_it_comes_last(asked, kernel):
    assert choose(replace(HOPPER, cudnn=0), call(**asked)) == kernel


@pytest.mark.parametrize(
    ("target", "dtype", "autocast", "kernel"),
    [
        (AMPERE, BF16, False, "flash"),
        (AMPERE, FP32, True, "flash"),
        (AMPERE, FP32, False, "efficient"),
        (TURING, FP16, False, "efficient"),
        (AMD, BF16, False, "flash"),
        (AMD, FP32, False, "efficient"),
    ],
)
def test_transformers_repeats_grouped_heads_where_no_kernel_takes_them(
    fake, target, dtype, autocast, kernel
):
    query, key, value = (
        torch.empty(2, heads, 128, 64, dtype=dtype, requires_grad=True) for heads in (8, 2, 2)
    )
    layer = SimpleNamespace(num_key_value_groups=4, is_causal=True)
    with cuda_semantics.cuda_semantics(target), torch.autocast("cpu", BF16, enabled=autocast):
        names = {
            name
            for name, _ in births(
                lambda: sdpa_attention.sdpa_attention_forward(layer, query, key, value, None)
            )
        }
    assert [name for name in names if "attention" in name] == [
        f"aten::_scaled_dot_product_{kernel}_attention"
    ]


@pytest.mark.parametrize("has_flash", [True, False])
def test_attention_of_grouped_heads_is_the_same_by_repeated_keys(has_flash, monkeypatch):
    torch.manual_seed(0)
    layer = SimpleNamespace(num_key_value_groups=4, is_causal=True)
    heads = [torch.randn(2, heads, 16, 8, requires_grad=True) for heads in (8, 2, 2)]
    expected, _ = sdpa_attention.sdpa_attention_forward(layer, *heads, None)
    # the change itself, as a card's lever makes it, on tensors of the CPU
    monkeypatch.setattr(*levers_private.grouped_heads(has_flash))
    computed, _ = sdpa_attention.sdpa_attention_forward(layer, *heads, None)
    torch.testing.assert_close(computed, expected)
    of_both = [torch.autograd.grad(out.sum(), heads) for out in (computed, expected)]
    torch.testing.assert_close(*of_both)


@pytest.mark.parametrize("masked", ["causal", "boolean", "additive"])
def test_the_math_kernel_computes_attention(masked):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    additive = torch.randn(2, 1, 6, 6)
    mask = {"causal": None, "boolean": additive > -1, "additive": additive}[masked]
    expected = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        None if mask is None else mask.clone(),
        is_causal=mask is None,
        enable_gqa=True,
    )
    computed = cuda_semantics.attention(OLD_AMD)(
        query, key, value, mask, is_causal=mask is None, enable_gqa=True
    )
    torch.testing.assert_close(computed, expected)


# ---- what is allocated


def births(run) -> list[tuple[str, int]]:
    """(operator, bytes) of what `run` allocates; it makes its arguments inside."""
    recorder = Recorder(1)
    with recorder:
        run()
    return [(block.op, block.fixed_bytes + block.sample_bytes) for block in recorder.log.blocks]


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def test_dropout_keeps_a_mask_of_one_byte_per_element(fake):
    tensor = torch.empty(64, 32, dtype=BF16, requires_grad=True)
    with cuda_semantics.cuda_semantics(AMPERE):
        assert births(lambda: functional.dropout(tensor, 0.1)) == [
            ("aten::native_dropout", tensor.numel()),  # which its kernel makes first
            ("aten::native_dropout", tensor.numel() * 2),
        ]
        assert births(lambda: functional.dropout(tensor, 0.0)) == []
    assert "aten::native_dropout" not in dict(births(lambda: functional.dropout(tensor, 0.1)))


def test_a_padded_batch_gets_an_additive_mask_in_rows_of_8(fake):
    with cuda_semantics.cuda_semantics(AMPERE):
        query = torch.empty(2, 4, 20, 64, dtype=BF16, requires_grad=True)
        mask = torch.empty(2, 1, 20, 20, dtype=torch.bool)
        found = births(
            lambda: functional.scaled_dot_product_attention(query, query, query, attn_mask=mask)
        )
    assert ("aten::where", 2 * 20 * 20 * 2) in found
    assert ("aten::constant_pad_nd", 2 * 20 * 24 * 2) in found
    # logsumexp, rows of 32
    assert ("aten::_scaled_dot_product_efficient_attention", 2 * 4 * 32 * 4) in found


@pytest.mark.parametrize(
    ("asked", "kernel"), [({}, "aten::_foreach_sqrt"), ({"fused": True}, None)]
)
def test_adamw_takes_the_loop_that_it_takes_on_a_card(fake, asked, kernel):
    parameters = [torch.nn.Parameter(torch.empty(300, 10)) for _ in range(3)]
    with cuda_semantics.cuda_semantics(AMPERE):
        optimizer = torch.optim.AdamW(parameters, **asked)
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        optimizer.step()
        found = [(op, size) for op, size in births(optimizer.step) if size > SCALAR]
    assert [op for op, size in found if size == 300 * 10 * 4] == ([kernel] * 3 if kernel else [])


def test_the_norm_of_the_gradients_is_one_kernel(fake):
    parameter = torch.nn.Parameter(torch.empty(300, 10))
    parameter.grad = torch.empty_like(parameter)
    with cuda_semantics.cuda_semantics(AMPERE):
        assert "aten::_foreach_norm" in dict(
            births(lambda: torch.nn.utils.clip_grad_norm_([parameter], 1.0))
        )


def test_fp16_is_what_accelerate_casts_to(fake):
    with (
        cuda_semantics.cuda_semantics(TURING, fp16=True),
        accelerator.get_mixed_precision_context_manager(True),
    ):
        scores = torch.empty(8, 8) @ torch.empty(8, 8)
        assert scores.dtype == FP16
        # no fp32 copy of scores
        assert births(lambda: torch.softmax(scores, -1)) == [("aten::_softmax", 8 * 8 * 4)]


# ---- autocast


def listed(name: str) -> set[str]:
    """The operators of a list in autocast_mode.h of the installed torch."""
    header = (Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h").read_text()
    body = re.search(rf"#define {name}\(_\)(.*?)\n\n", header, re.DOTALL)
    return {
        ".".join(part.strip() for part in one.split(","))
        for one in re.findall(r"_\(([^()]*)\)", body[1])
    }


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("AT_FORALL_FP32", cuda_semantics.FP32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", cuda_semantics.FP32_OUT),
        ("AT_FORALL_PROMOTE", cuda_semantics.PROMOTE),
    ],
)
def test_autocast_has_the_lists_of_the_installed_torch(name, ours):
    of_text = {
        one for one in listed(name) if "upsample" not in one and "dimname" not in one.lower()
    }
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert of_text == {one for one in ours if has_kernel(f"aten::{one}", "AutocastCUDA")}


def test_products_are_cast_on_a_card_as_on_the_cpu():
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    missing = {
        one
        for one in listed("AT_FORALL_LOWER_PRECISION_FP")
        if not has_kernel(f"aten::{one}", "AutocastCPU")
    }
    cells = {one for one in missing if "cell" in one}
    # made of products that are cast, or called below those
    known = {
        "_convolution",
        "convolution",
        "addmv",
        "addr",
        "mv",
        "einsum",
        "chain_matmul",
        "linalg_multi_dot",
    }
    assert missing - cells == known | {"_scaled_dot_product_flash_attention"}


def test_cross_entropy_takes_logits_as_they_are_and_casts_what_it_sums(fake):
    logits, labels = (
        torch.empty(16, 10, dtype=BF16, requires_grad=True),
        torch.empty(16, dtype=torch.int64),
    )
    with torch.autocast("cpu", dtype=BF16):
        with cuda_semantics.cuda_semantics(AMPERE):
            on_card = births(lambda: functional.cross_entropy(logits, labels))
            assert torch.cat([logits, logits]).dtype == BF16
            assert logits.cumsum(0).dtype == FP32
        on_cpu = births(lambda: functional.cross_entropy(logits, labels))
        assert logits.cumsum(0).dtype == BF16
    assert on_card[:2] == [("aten::_log_softmax", 16 * 10 * 2), ("aten::_to_copy", 16 * 10 * 4)]
    assert on_cpu[:2] == [("aten::_to_copy", 16 * 10 * 4), ("aten::_log_softmax", 16 * 10 * 4)]


# ---- nothing is left


def state() -> list:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [
        *[
            {name for name in names if has_kernel(name, key)}
            for key in ("AutocastCPU", "AutogradCPU")
        ],
        import_utils.is_fake_tensor,
        torch_optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
        torch_optimizer._get_foreach_kernels_supported_devices,
        accelerator.get_mixed_precision_context_manager,
        dict(op_implementations_dict),
    ]


def test_all_is_undone_also_after_an_error(fake):
    before = state()
    tensor = torch.empty(4, 4, dtype=BF16, requires_grad=True)
    labels = torch.empty(4, dtype=torch.int64)

    def behaviour() -> list:
        with torch.autocast("cpu", dtype=BF16):
            found = births(lambda: functional.cross_entropy(tensor, labels)) + births(
                lambda: tensor.sum()
            )
        found += births(lambda: torch.native_layer_norm(tensor, (4,), None, None, 1e-5))
        query = torch.empty(1, 2, 8, 16, dtype=BF16, requires_grad=True)
        return found + births(lambda: functional.scaled_dot_product_attention(query, query, query))

    as_before = behaviour()
    with pytest.raises(KeyError), cuda_semantics.cuda_semantics(AMPERE, fp16=True):
        assert all(
            now != then
            for now, then in zip(state(), before, strict=True)
            if not isinstance(now, set)
        )
        inside = behaviour()
        raise KeyError
    assert state() == before
    assert behaviour() == as_before
    for op, size in (
        ("aten::_log_softmax", 4 * 4 * 2),
        ("aten::sum", 4),  # fp32
        ("aten::native_layer_norm", 4 * 4),  # fp32 statistics
        ("aten::_scaled_dot_product_flash_attention", 2 * 8 * 4),  # logsumexp
    ):
        assert (op, size) in inside
        assert (op, size) not in as_before
    with cuda_semantics.cuda_semantics(AMPERE):  # and once more
        assert behaviour() == inside
    assert behaviour() == as_before


def test_an_rms_norm_is_one_kernel_and_its_statistics_are_in_float32(fake):
    hidden = torch.empty(2, 3, 16, dtype=BF16, requires_grad=True)
    weight = torch.empty(16, dtype=BF16)

    def run() -> None:
        with cuda_semantics.cuda_semantics(AMPERE), torch.autocast("cpu", BF16):
            out = torch.ops.aten._fused_rms_norm(hidden, (16,), weight, 1e-6)[0]
            out.sum().backward()

    of_norm = [(name, size) for name, size in births(run) if "rms_norm" in name]
    assert of_norm == [
        ("aten::_fused_rms_norm", 2 * 3 * 16 * 2),
        ("aten::_fused_rms_norm", 2 * 3 * 4),
        ("aten::_fused_rms_norm_backward", 2 * 3 * 16 * 2),
    ]


# ---- inside the kernels


def flash_backward(target: Target, heads: int, key_heads: int, seq: int, width: int) -> list[int]:
    grad = torch.empty(2, seq, heads, width, dtype=BF16, device="meta").transpose(1, 2)
    query, key = (
        torch.empty(2, n, seq, width, dtype=BF16, device="meta") for n in (heads, key_heads)
    )
    name = "aten::_scaled_dot_product_flash_attention_backward"
    return workspace(target, name, (grad, query, key, key, query), {}, None)


def test_flash_backward_accumulates_the_query_gradient_in_fp32():
    rows = 2 * 8 * 256  # 200 rounded up to 128s
    assert flash_backward(AMPERE, 8, 8, 200, 64) == [rows * 4, rows * 64 * 4]
    assert flash_backward(AMPERE, 8, 8, 200, 80) == [rows * 4, rows * 96 * 4]
    grouped = 2 * (2 * 8 * 200 * 64) * 2  # key and value gradients of all query heads
    assert flash_backward(AMPERE, 8, 2, 200, 64) == [rows * 4, rows * 64 * 4, grouped]


def test_a_gradient_in_another_layout_is_copied_first():
    query = torch.empty(2, 8, 128, 64, dtype=BF16, device="meta")
    name = "aten::_scaled_dot_product_flash_attention_backward"
    assert (
        workspace(AMPERE, name, (query, query, query, query, query), {}, None)[0]
        == query.numel() * 2
    )


@pytest.mark.parametrize(
    ("target", "dtype", "width", "inside"),
    [
        (AMPERE, BF16, 64, 128 * 64 * 4 + 2 * 16),  # two tiles of 64 x 64, lock and counter
        # one of 128 x 128: its key gradients stay in registers
        (AMPERE, BF16, 128, 128 * 128 * 4 + 16),
        # 64 x 64, key gradients in memory
        (GAMING, BF16, 128, 128 * 128 * 4 + 4 * 16 + 64 * (128 + 128) * 4),
        (GAMING, BF16, 96, 128 * 128 * 4 + 2 * 16),  # 128 x 64
        (AMPERE, FP32, 64, 128 * 64 * 4 + 2 * 16),
        (PASCAL, FP32, 64, 0),  # no split of the keys below 7.0
    ],
)
def test_efficient_backward_takes_the_tiles_of_cutlass(target, dtype, width, inside):
    query = torch.empty(2, 8, 128, width, dtype=dtype, device="meta")
    grad = torch.empty(2, 128, 8, width, dtype=dtype, device="meta").transpose(1, 2)
    name = "aten::_scaled_dot_product_efficient_attention_backward"
    found = workspace(target, name, (grad, query, query, query, None, query), {}, None)
    delta, product = 2 * 8 * 128 * 4, query.numel() * 4 if dtype == FP32 else 0
    assert sum(found) == max(2 * 8 * inside, product) + delta


def test_a_gradient_of_an_embedding_has_a_row_in_fp32_per_token():
    grad, indices = (
        torch.empty(4, 1024, 64, dtype=BF16, device="meta"),
        torch.empty(4, 1024, device="meta").long(),
    )
    found = workspace(
        AMPERE, "aten::embedding_dense_backward", (grad, indices, 300, -1, False), {}, None
    )
    assert found == [4096 * 8] * 6 + [4096 * 64 * 4]
    few = (grad[:3], indices[:3], 300, -1, False)
    assert workspace(AMPERE, "aten::embedding_dense_backward", few, {}, None) == []


def test_a_sum_and_a_mean_over_rows_have_partial_sums():
    update = torch.empty(32768, 896, device="meta")
    sizes = [summed(HOPPER, name, (update, [-2])) for name in ("aten::sum", "aten::mean")]
    assert sizes == [(32768, 896, 132, 2048)] * 2
    assert summed(HOPPER, "aten::mean", (update, [-1])) is None
    assert summed(HOPPER, "aten::amax", (update, [-2])) is None


def test_an_operator_without_inner_buffers_has_none():
    assert workspace(AMPERE, "aten::mm", (torch.empty(2, 2), torch.empty(2, 2)), {}, None) == []


@pytest.mark.parametrize(
    ("architecture", "config", "size"),
    [
        ("8.6", None, 8 * MIB + (128 << 10)),
        ("9.0", None, 32 * MIB),
        ("8.6", ":4096:8", 32 * MIB),
        ("8.6", ":16:8", 128 << 10),
        ("9.0", "none of it", 32 * MIB),
        ("gfx942", None, (128 + 76) * MIB),
        ("gfx1100", None, (32 + 76) * MIB),
    ],
)
def test_cublas_keeps_a_workspace_per_handle(monkeypatch, architecture, config, size):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    if config:
        monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    assert cublas_workspace_bytes(architecture) == size


def test_a_gradient_in_rows_of_16_is_as_large_at_lengths_that_are_no_multiple_of_it(fake):
    recorder = Recorder()
    with recorder:
        rows_of_32 = torch.empty(recorder.log.batch, 2, 24, 32)
        seen = torch.empty_strided((recorder.log.batch, 2, 24, 24), rows_of_32.stride())
    assert [(block.fixed_bytes, block.sample_bytes) for block in recorder.log.blocks] == [
        (0, 4 * 2 * 24 * 32)
    ] * 2
    assert seen.untyped_storage().nbytes() < rows_of_32.untyped_storage().nbytes()
