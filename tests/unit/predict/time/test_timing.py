"""Predicted seconds: what must be slower is slower, volumes as counted by hand, published runs
within a stated band."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.predict.time import operators, rates, timing
from launch.predict.time.operators import RAMP_S
from launch.predict.time.rates import Rates
from launch.predict.time.timing import StepWork, TimeEstimate
from launch.probe import architectures, cards, described
from launch.schema.levers import Levers
from launch.schema.machine import GIB, CardFigures, Gpu, Link
from launch.schema.plan import MemoryEstimate, ModelSize, Strategy
from launch.schema.recorded_step import Operator, Parts, Passes
from tests import cost
from tests.builders import machine

CONFIGS = Path(__file__).resolve().parents[4] / "configs"

# Per layer of transformers' models: (kernels, products among them, bytes of the others per token
# and hidden unit). Counted with a dispatch mode over 2 and 3 layers of hidden size 256, 2 x 256
# tokens; transformers 5.23, peft 0.21.
GPT2_AUTOCAST = (114, 18, 1048)
LLAMA_AUTOCAST = (152, 23, 786)
LLAMA_AUTOCAST_CHECKPOINTED = (200, 30, 1000)  # in proportion to bfloat16, where it was counted
HEAD_BYTES = 90  # per token and entry of the vocabulary: logits, cross-entropy
HEAD_KERNELS = 50


def card(name: str, gib: float, architecture: str) -> Gpu:
    vendor = "amd" if architecture.startswith("gfx") else "nvidia"
    return Gpu(0, name, vendor, int(gib * GIB), int(gib * GIB), architecture, "550", "described")


A100_80 = rates.card(card("NVIDIA A100-SXM4-80GB", 80, "8.0"))
A100_40 = rates.card(card("NVIDIA A100-SXM4-40GB", 40, "8.0"))
H100 = rates.card(card("NVIDIA H100 80GB HBM3", 79.6, "9.0"))
RTX_3080 = rates.card(card("NVIDIA GeForce RTX 3080", 20, "8.6"))


def decoder(
    parameters: float,
    layers: int,
    width: int,
    vocabulary: int,
    length: int,
    counts: tuple[int, int, float],
    **how: Any,
) -> StepWork:
    """A causal decoder's step in bfloat16; passes: over the weights, 3 of 2 FLOP each, 4 with
    checkpointing, and one less where they are frozen."""
    passes = how.get("passes", 3)
    kernels, matmuls, layer_bytes = counts
    # causal: half the scores; backward of FlashAttention computes 2.5 times what forward does
    attention = 2 * 2 * length * length / 2 * width * layers * (3.5 if passes == 3 else 4.5)
    moved = length * (layer_bytes * width * layers + HEAD_BYTES * vocabulary)
    micro_step = passes_of(
        (2 * layers, "attention", "bfloat16", attention),
        ((matmuls - 2) * layers, "product", "bfloat16", 2 * passes * parameters * length),
        ((kernels - matmuls) * layers + HEAD_KERNELS, "other", "", moved),
    )
    return StepWork(with_update(micro_step, 32 * how.get("trained", parameters)))


def passes_of(*groups: tuple[float, Any, str, float]) -> Passes:
    """A micro-step of groups of equal operators: (their number, kind, dtype, FLOPs or bytes that
    all of them take for a sample)."""
    operators, run = [], []
    for number, kind, dtype, size in groups:
        parts: Parts = (0, size / number, 0, 0)
        operator = Operator("aten::any", kind, dtype, launches=1)
        name = "bytes" if kind in ("other", "offload") else "flops"
        run += round(number) * [len(operators)]
        operators.append(replace(operator, **{name: parts}))
    return Passes(operators, [run], [[(0, 1)]])


def with_update(passes: Passes, moved_bytes: float) -> Passes:
    """The passes before an update whose kernels move so many bytes."""
    kernel = Operator("aten::_fused_adamw_", "other", bytes=(moved_bytes, 0, 0, 0), launches=1)
    operators, runs = [*passes.operators, kernel], [*passes.runs, [len(passes.operators)]]
    return replace(passes, operators=operators, runs=runs, update=[(len(passes.runs), 1)])


NO_WORK = StepWork(Passes([], [], [[]]))


def small(counts: tuple[int, int, float] = LLAMA_AUTOCAST, passes: int = 3) -> StepWork:
    return decoder(500e6, 24, 896, 150_000, 1024, counts, passes=passes)


def way(batch: int = 4, accumulation: int = 8, ranks: int = 1, **fields: Any) -> Strategy:
    mode = fields.pop("mode", "single_gpu" if ranks == 1 else "dual_gpu_nccl")
    several = ranks > 1 or mode.startswith("deepspeed")
    given: dict[str, Any] = {
        "mode": mode,
        "device": "cuda",
        "num_processes": ranks,
        "backend": "nccl" if several else None,
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": accumulation,
        "per_device_eval_batch_size": batch,
        "mixed_precision": "bf16",
        "dataloader_num_workers": 0,
    }
    return Strategy(**{**given, **fields})


def whole(
    parameters: float, element_bytes: int = 4, trained: float | None = None
) -> MemoryEstimate:
    trained = parameters if trained is None else trained
    sizes = (parameters * element_bytes, trained * element_bytes, 2 * trained * element_bytes)
    return MemoryEstimate(*map(int, sizes))


def shape(parameters: float, trained: float | None = None, lora: float = 0) -> ModelSize:
    return ModelSize(
        "m", {"model_type": "llama"}, int(parameters), int(trained or parameters), int(lora)
    )


def measured(bytes_per_s: float | None = None, flops_per_s: float | None = None) -> Link:
    return Link("nccl", {}, bytes_per_s, flops_per_s, (), "tested")


def seconds(
    strategy: Strategy,
    work: StepWork | None = None,
    on: Rates = RTX_3080,
    link: Link | None = None,
    element: int = 4,
) -> TimeEstimate:
    """Of a model with 500 M parameters."""
    return timing.estimate(work or small(), strategy, shape(500e6), whole(500e6, element), on, link)


# ---- what must be slower
# ---------------------------------------------------------------------------

GROUP = st.tuples(
    st.integers(1, 500),
    st.sampled_from(["product", "attention", "other"]),
    st.sampled_from(["bfloat16", "float32"]),
    st.floats(0, 1e13),
)
WORK = st.lists(GROUP, min_size=1, max_size=4).map(lambda groups: passes_of(*groups))


@given(WORK, st.integers(0, 5))
def test_on_a_card_a_larger_micro_batch_is_never_slower_at_the_same_effective_batch(
    micro_step, power
):
    work = StepWork(with_update(micro_step, 1e9))
    smaller, larger = (
        seconds(way(batch, 64 // batch), work) for batch in (2**power, 2 ** (power + 1))
    )
    assert larger.step_s <= smaller.step_s * (1 + 1e-9)


@pytest.mark.parametrize("mode", ["single_gpu", "deepspeed_zero2", "deepspeed_zero3_offload"])
def test_more_accumulation_of_smaller_micro_batches_is_slower(mode):
    times = [seconds(way(batch, 32 // batch, mode=mode)).step_s for batch in (1, 2, 4, 8, 16, 32)]
    assert times == sorted(times, reverse=True)
    assert times[0] > 1.02 * times[-1]


def test_checkpointing_is_slower_by_about_its_forward_pass():
    plain = seconds(way()).step_s
    checkpointed = seconds(
        way().with_levers(every_n_layers=1), small(LLAMA_AUTOCAST_CHECKPOINTED, passes=4)
    ).step_s
    assert 1.15 < checkpointed / plain < 1.45


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("stage", ["deepspeed_zero2", "deepspeed_zero3"])
def test_offloading_is_slower_than_not(stage, ranks):
    stays, goes = (seconds(way(ranks=ranks, mode=mode)) for mode in (stage, f"{stage}_offload"))
    assert goes.step_s > stays.step_s
    assert stays.offload_s == 0 < goes.offload_s
    assert goes.optimizer_s > stays.optimizer_s


def test_offloaded_zero3_is_slower_than_offloaded_zero2():
    assert (
        seconds(way(mode="deepspeed_zero3_offload")).step_s
        > seconds(way(mode="deepspeed_zero2_offload")).step_s
    )


@pytest.mark.parametrize(
    "mode", ["dual_gpu_nccl", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"]
)
def test_a_faster_link_is_faster(mode):
    times = [
        seconds(way(ranks=2, mode=mode), link=measured(speed)).step_s for speed in (0.5e9, 2e9, 8e9)
    ]
    assert times[0] > times[1] > times[2]


def test_each_stage_moves_more_than_the_one_before_where_the_weights_are_16_bit():
    modes = ("dual_gpu_nccl", "deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3")
    times = [
        seconds(way(ranks=2, mode=mode), link=measured(1e9), element=2).communication_s
        for mode in modes
    ]
    assert times == sorted(times)
    assert len({*times}) == len(times)


def test_two_cards_are_faster_than_one_unless_their_link_is_slow():
    alone = seconds(way(4, 8)).step_s
    assert seconds(way(4, 4, ranks=2), link=measured(10e9)).step_s < 0.6 * alone
    assert seconds(way(4, 4, ranks=2), link=measured(0.2e9)).step_s > alone


def test_what_the_backward_pass_hides_costs_nothing():
    one = seconds(way(32, 1, ranks=2), link=measured(10e9))
    assert one.communication_s < 0.1 * (
        timing.traffic(way(32, 1, ranks=2), shape(5e8), whole(5e8)).last_bytes / 10e9
    )
    gloo = seconds(way(32, 1, ranks=2, mode="dual_gpu_gloo", backend="gloo"), link=measured(10e9))
    assert gloo.communication_s == pytest.approx(4 * 500e6 / 10e9)  # nothing is hidden


def test_gathers_are_hidden_only_between_cards_with_links():
    work, model = small(), shape(5e8)

    def gathers_s(on: Rates, link: Link | None = None) -> float:
        return seconds(way(16, 1, ranks=2, mode="fsdp2"), work, on, link).communication_s

    once = timing.traffic(way(16, 1, ranks=2, mode="fsdp2"), model, whole(5e8))
    size = once.micro_step_bytes + once.last_bytes
    assert gathers_s(RTX_3080, measured(4e9)) == pytest.approx(size / 4e9)
    assert gathers_s(A100_80, measured(4e9)) < 0.5 * size / 4e9


@pytest.mark.parametrize(("copies", "bus"), [(24e9, 16e9), (0.0, 8e9)])
def test_the_bus_through_the_host_follows_its_copies(copies, bus):
    found = of_card(way(4, 1, ranks=2, mode="fsdp2"), host_device_bytes_per_s=copies)
    assert f"link {bus / 1e9:.1f} GB/s assumed of PCIe" in found.reason


def with_tensors(count: int, ranks: int, mode: str) -> TimeEstimate:
    model = replace(shape(5e8), tensors=count, trained_tensors=count)
    return timing.estimate(small(), way(16, ranks=ranks, mode=mode), model, whole(5e8), A100_80)


@pytest.mark.parametrize("mode", ["deepspeed_zero1", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"])
def test_hooks_of_an_engine_take_the_host_by_its_tensors(mode):
    many, few = with_tensors(60_000, 2, mode), with_tensors(10, 2, mode)
    assert many.launch_s > few.launch_s
    assert (many.optimizer_s > 1.01 * few.optimizer_s) == (mode != "fsdp2")
    ours = [with_tensors(count, 2, "dual_gpu_nccl").step_s for count in (60_000, 10)]
    assert ours[0] == ours[1]


def test_a_compiled_step_is_faster_by_its_other_kernels():
    eager, compiled = (
        seconds(way(levers=Levers(torch_compile=compiles))) for compiles in (False, True)
    )
    assert compiled.compute_s == eager.compute_s
    assert compiled.memory_s < 0.5 * eager.memory_s


def test_an_offloaded_update_is_faster_in_a_server():
    update_s = [
        seconds(way(mode="deepspeed_zero2_offload"), on=on).optimizer_s
        for on in (A100_80, RTX_3080)
    ]
    shares = rates.HOST_BYTES_PER_S / rates.SERVER_BYTES_PER_S
    assert update_s[0] == pytest.approx(shares * update_s[1])


def test_between_machines_the_network_decides():
    near = seconds(way(ranks=4), on=A100_80)
    far = seconds(way(ranks=4, num_machines=2), on=A100_80)
    assert far.step_s > near.step_s
    assert "Ethernet" in far.reason


def test_ranks_on_one_cpu_share_its_cores_and_its_memory():
    alone = seconds(way(4, 4, device="cpu", mode="cpu"), on=rates.cpu(8))
    way_of_two = way(4, 2, ranks=2, device="cpu", mode="multi_cpu", backend="gloo")
    both = seconds(way_of_two, on=rates.cpu(8, 2))
    assert both.compute_s == pytest.approx(alone.compute_s, rel=0.01)
    assert both.step_s > alone.step_s


def test_cores_count():
    two, eight = rates.cpu(2), rates.cpu(8)
    assert eight.flops_per_s["float32"] == 4 * two.flops_per_s["float32"]
    assert eight.source.startswith("assumed")


def test_the_parts_add_up_and_say_where_they_are_from():
    found = seconds(way(ranks=2, mode="deepspeed_zero3_offload"), link=measured(6.1e9))
    parts = (
        found.compute_s,
        found.memory_s,
        found.launch_s,
        found.optimizer_s,
        found.communication_s,
        found.offload_s,
    )
    assert found.step_s == pytest.approx(sum(parts))
    assert found.reason.startswith("RTX 3080: assumed: ")
    assert found.reason.endswith("link 6.1 GB/s as tested")


def test_a_measured_product_replaces_the_share_of_the_peak():
    peak = RTX_3080.flops_per_s["bfloat16"]
    as_assumed, slower = seconds(way()), seconds(way(), link=measured(flops_per_s=0.48 * peak))
    ramps = RAMP_S * 23 * 24 * 8
    assert slower.compute_s - ramps == pytest.approx(2 * (as_assumed.compute_s - ramps))
    assert "measured" in slower.reason


def test_a_precision_that_the_card_lacks_runs_at_the_speed_of_float32():
    t4 = rates.card(card("Tesla T4", 15, "7.5"))
    in_half, in_bf16 = (
        StepWork(passes_of((1, "product", dtype, 1e12))) for dtype in ("float16", "bfloat16")
    )
    assert seconds(way(), in_half, t4).compute_s < seconds(way(), in_bf16, t4).compute_s


@pytest.mark.parametrize(("device", "times"), [(H100, 1 / 0.17), (RTX_3080, 1)])
def test_odd_rows_of_products_in_16_bits_are_slow_where_that_was_measured(device, times):
    def taken_s(dtype: str) -> float:
        work = StepWork(passes_of((1, "product", dtype, 1e15)))
        return seconds(way(), work, device).compute_s

    assert taken_s("bfloat16 by 1") == pytest.approx(times * taken_s("bfloat16"), rel=1e-4)


# ---- volumes against hand arithmetic
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "expected"),
    # 4 ranks, 1000 parameters in float32, computed in bfloat16: 4000 bytes, 2000 on the wire where
    # ranks share
    [
        ("dual_gpu_nccl", (0, 2 * 3 / 4 * 4000, 0)),
        ("deepspeed_zero1", (0, 2 * 3 / 4 * 2000, 3 / 4 * 2000)),
        ("deepspeed_zero2", (2 * 3 / 4 * 2000, 0, 3 / 4 * 2000)),
        ("deepspeed_zero3", (2 * 3 / 4 * 2000 + 3 / 4 * 2000, 0, 0)),
        ("fsdp2", (2 * 3 / 4 * 2000, 3 / 4 * 4000, 0)),  # gradients are reduced in float32
    ],
)
def test_volumes_of_four_ranks(mode, expected):
    found = timing.traffic(way(ranks=4, mode=mode), shape(1000), whole(1000))
    assert (found.micro_step_bytes, found.last_bytes, found.after_bytes) == expected


def test_one_rank_sends_nothing():
    for mode in ("single_gpu", "deepspeed_zero2_offload", "deepspeed_zero3_offload"):
        found = timing.traffic(way(mode=mode), shape(1000), whole(1000))
        assert (found.micro_step_bytes, found.last_bytes, found.after_bytes) == (0, 0, 0)
        assert seconds(way(mode=mode)).communication_s == 0


def test_with_lora_only_the_adapters_are_reduced_and_all_weights_are_gathered():
    adapted, states = shape(1000, trained=100, lora=100), MemoryEstimate(2000 + 400, 400, 800)
    assert timing.traffic(way(ranks=2), adapted, states).last_bytes == 400
    assert (
        timing.traffic(way(ranks=2, mode="deepspeed_zero2"), adapted, states).micro_step_bytes
        == 200
    )
    assert (
        timing.traffic(way(ranks=2, mode="fsdp2"), adapted, states).micro_step_bytes
        == 2 * (1000 + 100) * 2 / 2
    )


def test_an_all_reduce_takes_its_bus_bandwidth():
    """1 GB over 4 ranks: 1.5 GB each; at 10 GB/s and with nothing to hide behind, 0.15 s."""
    strategy, link = way(ranks=4), measured(10e9)
    found = timing.estimate(NO_WORK, strategy, shape(250e6), whole(250e6), A100_80, link)
    assert found.communication_s == pytest.approx(0.15)
    assert found.step_s == pytest.approx(found.communication_s + found.optimizer_s)


def test_copies_of_activations_cost_what_exceeds_the_pass_beside_them():
    """Of 4 passes forward is one: while a copy is shorter than it, it costs nothing; longer than
    the three of backward, it is all that a step takes."""
    work, checkpointed = small(passes=4), way(accumulation=3).with_levers(every_n_layers=1)
    there = checkpointed.with_levers(activation_offloading=True)

    def estimated(strategy: Strategy, size_bytes: float) -> TimeEstimate:
        operators = [*work.passes.operators, Operator("offload", "offload")]
        operators[-1] = replace(operators[-1], bytes=(0, size_bytes / 4, 0, 0))
        offloads = 2 * [len(operators) - 1]
        run = [*work.passes.runs[0], *offloads]
        step = replace(work, passes=Passes(operators, [run], [[(0, 1)]]))
        return timing.estimate(step, strategy, shape(500e6), whole(500e6), RTX_3080)

    plain = estimated(checkpointed, 0)
    micro_step_s = (plain.step_s - plain.optimizer_s) / 3
    rate = timing.HOST_DEVICE_BYTES_PER_S

    def exposed_s(copy_s: float) -> float:
        return estimated(there, copy_s * rate / 2).offload_s / 3

    assert exposed_s(0.24 * micro_step_s) == 0
    assert exposed_s(0.5 * micro_step_s) == pytest.approx(0.25 * micro_step_s)
    assert exposed_s(2 * micro_step_s) == pytest.approx((2 * 2 - 1) * micro_step_s)
    # the host waits for both copies, which a thread copies once more
    there = replace(there, pin_memory=False)
    slower = 1 + rate / timing.PAGEABLE_BYTES_PER_S
    assert exposed_s(0.24 * micro_step_s) == pytest.approx(2 * slower * 0.24 * micro_step_s)


def test_streamed_layers_cost_what_exceeds_the_layer_that_computes_meanwhile():
    """Of 4 layers 2 lie in the slots when the direction turns. Backward takes twice the seconds of
    forward."""
    work, there = small(passes=3), way(accumulation=3)
    plain = seconds(there, work)
    layer_s = (plain.step_s - plain.optimizer_s) / 3 / 3 / 4  # forward

    def exposed_s(copy_s: float, strategy: Strategy = there) -> float:
        size_bytes = int(copy_s * timing.HOST_DEVICE_BYTES_PER_S)
        return seconds(strategy, replace(work, streamed=4 * [size_bytes])).offload_s / 3

    assert exposed_s(0.9 * layer_s) == 0
    assert exposed_s(1.5 * layer_s) == pytest.approx(2 * 0.5 * layer_s, rel=1e-3)
    assert exposed_s(2.5 * layer_s) == pytest.approx(2 * (1.5 + 0.5) * layer_s, rel=1e-3)
    assert exposed_s(layer_s, replace(there, pin_memory=False)) > 2 * 2 * layer_s


def test_offloaded_bytes_of_a_micro_step_and_the_next():
    """1000 parameters on 2 ranks, slices of 1000 bytes. Stage 2: gradients out once, weights back;
    from the second micro-step on gradients come back and go out again."""
    device_s = timing.HOST_DEVICE_BYTES_PER_S

    def moved(mode: str, steps: int) -> float:
        way_there = way(1, steps, ranks=2, mode=mode)
        return (
            timing.estimate(small(), way_there, shape(1000), whole(1000), RTX_3080).offload_s
            * device_s
        )

    assert moved("deepspeed_zero2_offload", 1) == pytest.approx(1000 + 1000)
    assert moved("deepspeed_zero2_offload", 2) == pytest.approx(1000 + 2000 + 1000 + 1000)
    assert moved("deepspeed_zero3_offload", 1) == pytest.approx(2 * 1000 + 1000 + 1000)
    assert moved("deepspeed_zero3_offload", 2) == pytest.approx(4 * 1000 + 3 * 1000 + 1000)


def test_the_host_updates_an_adam_element_by_moving_46_bytes():
    """Read and write two float32 moments (16), read master and gradient, write master (12), norm 4,
    clip 8, cast 6."""
    found = timing.estimate(
        small(), way(mode="deepspeed_zero2_offload"), shape(1e9), whole(1e9), RTX_3080
    )
    assert found.optimizer_s == pytest.approx(46 * 1e9 / rates.HOST_BYTES_PER_S)


@pytest.mark.parametrize("mode", ["deepspeed_zero1", "fsdp2"])
@pytest.mark.parametrize(("precision", "times"), [("bf16", 2), ("no", 1)])
def test_a_rank_updates_its_slice_of_shared_out_states(mode, precision, times):
    """In float32, where the engine has cast the recorded model to 16 bits."""
    whole_update, slice_update = (
        seconds(way(ranks=4, mode=each, mixed_precision=precision)).optimizer_s
        for each in ("dual_gpu_nccl", mode)
    )
    assert slice_update == pytest.approx(times * whole_update / 4, rel=0.01)
    others = replace(small(), least_share=0.9)  # of a record of another precision
    least = seconds(way(ranks=4, mode=mode, mixed_precision=precision), others).optimizer_s
    assert least == pytest.approx(whole_update / 4, rel=0.01)


def test_the_ranks_of_a_machine_share_its_hosts_memory():
    def offloaded(ranks: int) -> TimeEstimate:
        return seconds(way(ranks=ranks, mode="deepspeed_zero2_offload"))

    # all slices, one memory
    assert offloaded(8).optimizer_s == pytest.approx(offloaded(1).optimizer_s)
    assert offloaded(8).offload_s == pytest.approx(seconds_to_move(8, rates.HOST_BYTES_PER_S / 8))
    assert offloaded(2).offload_s == pytest.approx(
        seconds_to_move(2, timing.HOST_DEVICE_BYTES_PER_S)
    )


def seconds_to_move(ranks: int, bytes_per_s: float) -> float:
    """Of 500 M gradients and weights in 16 bit, over 8 micro-steps."""
    return (2 * 8 + 1) * 2 * 500e6 / ranks / bytes_per_s


def test_attention_gets_less_of_the_peak_than_a_product():
    def taken_s(kind: str, on: Rates) -> float:
        work = StepWork(passes_of((1, kind, "bfloat16", 1e13)))
        return seconds(way(1, 1), work, on).compute_s

    unknown = replace(A100_80, multiprocessor_hz=float("inf"))
    ratio = taken_s("attention", unknown) / taken_s("product", unknown)
    assert ratio == pytest.approx(unknown.product_share / operators.ATTENTION_SHARE, rel=1e-3)


# ---- published runs
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card_rates", "length", "batch", "accumulation", "checkpointed", "published"),
    # tokens/s and card; 7b, amp_bf16, FULL_SHARD over 8: mosaicml/llm-foundry
    # scripts/train/benchmarking/README.md
    [
        (A100_80, 2048, 6, 2, False, 4641),  # MFU 64 %
        (A100_80, 1024, 64, 2, True, 4357),  # MFU 58 %
        (A100_80, 4096, 16, 2, True, 3684),  # MFU 55 %
        (H100, 2048, 6, 1, False, 10643),  # MFU 46 %
        (H100, 4096, 16, 2, True, 8611),  # MFU 40 %
    ],
)
def test_a_7b_model_on_eight_cards(
    card_rates, length, batch, accumulation, checkpointed, published
):
    """Within 30 %: theirs had fused layer norms, ours are transformers' eager kernels, so ours may
    be the slower."""
    parameters = 6.65e9
    counts = LLAMA_AUTOCAST_CHECKPOINTED if checkpointed else LLAMA_AUTOCAST
    work = decoder(
        parameters,
        32,
        4096,
        50_368,
        length,
        counts,
        passes=4 if checkpointed else 3,
        trained=parameters,
    )
    plain = way(batch, accumulation, ranks=8, mode="fsdp2")
    strategy = plain.with_levers(every_n_layers=int(checkpointed))
    found = timing.estimate(work, strategy, shape(parameters), whole(parameters), card_rates)
    tokens_per_s = plain.effective_batch_size * length / found.step_s
    assert 0.7 < tokens_per_s / 8 / published < 1.3


def test_gpt2_small_on_an_a100_lies_between_eager_attention_and_a_compiled_step():
    """nanoGPT, 12 x 1024 tokens a micro-step: about 250 ms in eager mode with unfused attention
    (README of 2022); compiled and fused, 5 of them on each of 8 cards in 562 ms (karpathy/nanoGPT
    issue 110). Ours: eager, fused."""
    work = decoder(124e6, 12, 768, 50_304, 1024, GPT2_AUTOCAST)
    found = timing.estimate(work, way(12, 5), shape(124e6), whole(124e6), A100_40)
    assert 12 * 1024 / 0.250 < 5 * 12 * 1024 / found.step_s < 5 * 12 * 1024 / 0.562


@pytest.mark.parametrize(
    ("name", "gib", "architecture", "size", "published_tflops"),
    # torch.mm in float16, n x n: github.com/mli/transformers-benchmarks issue 4; an A800 is an A100
    # but for NVLink
    [
        ("NVIDIA A100 80GB PCIe", 80, "8.0", 512, 31.5),
        ("NVIDIA A100 80GB PCIe", 80, "8.0", 2048, 192.5),
        ("NVIDIA A100 80GB PCIe", 80, "8.0", 8192, 215.3),
        ("NVIDIA GeForce RTX 4090", 24, "8.9", 512, 46.9),
        ("NVIDIA GeForce RTX 4090", 24, "8.9", 2048, 167.1),
        ("NVIDIA GeForce RTX 4090", 24, "8.9", 8192, 158.6),
    ],
)
def test_one_product_by_its_size(name, gib, architecture, size, published_tflops):
    """Within a factor of 2 for the small ones, 40 % for the large: a 4090 boosts beyond its
    sheet."""
    work = StepWork(passes_of((1, "product", "float16", 2 * size**3)))
    on = rates.card(card(name, gib, architecture))
    found = 2 * size**3 / timing.estimate(work, way(1, 1), shape(1), whole(1), on).compute_s / 1e12
    band = 2 if size < 1024 else 1.4
    assert published_tflops / band < found < published_tflops * band


# ---- the table
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("row", cards.table(), ids=lambda row: f"{row.name} {row.gb}")
def test_every_row_has_a_source_and_rates_that_can_be(row):
    peaks = row.flops_per_s
    assert len(row.source) > 10
    assert {"float32", "float16"} <= peaks.keys() <= {*cards.DTYPES}
    assert (
        5e12
        <= peaks["float32"]
        <= peaks.get("tfloat32", peaks["float32"])
        <= peaks["float16"]
        <= 2.5e15
    )
    assert peaks.get("bfloat16", peaks["float16"]) <= peaks["float16"]
    assert 190e9 <= row.bytes_per_s <= 8e12
    assert 6 <= row.gb <= 192
    assert 0.9 * row.gb <= row.total_bytes / GIB <= 1.02 * row.gb
    assert row.pcie in (3, 4, 5)
    assert ("bfloat16" in peaks) == architectures.look_up(card("", 8, row.architecture)).bf16


@pytest.mark.parametrize(("card", "gb_s"), [("RTX 4090", 3868), ("RTX 3090 Ti", 860)])
def test_16_mib_times_a_number_take_what_they_took_on_these_cards(card, gb_s):
    """As published: github.com/mli/transformers-benchmarks, micro_bench.ipynb and issue 4."""
    found = rates.card(described.from_words(card, 1, 64).gpus[0])
    moved_bytes = 8 << 22
    kernel = Operator("aten::mul", "other", "float32", bytes=(moved_bytes, 0, 0, 0), launches=1)
    pace = timing.speed_of(way(1, 1), found, None).pace
    cost_of = operators.cost_of(pace, 1, 0, 1.0)
    assert cost_of(kernel).device_s == pytest.approx(moved_bytes / (gb_s * 1e9), rel=0.15)


def test_no_two_rows_are_the_same_card_and_every_source_is_used():
    keys = [(row.parts, row.gb) for row in cards.table()]
    assert len(keys) == len({*keys})
    content = yaml.safe_load(cards.FILE.read_text(encoding="utf-8"))
    assert {line[-1] for line in content["cards"]} == content["sources"].keys()


def test_reading_the_table_takes_few_calls():
    """15,000; the YAML parser that is written in Python takes ten times as many."""
    cards.table.cache_clear()
    assert cost.count_calls(cards.table) < 50_000


@pytest.mark.parametrize(
    ("name", "gib", "architecture", "row", "tflops", "gb_s"),
    [  # as NVML, amdsmi and rocm-smi print them
        ("NVIDIA GeForce RTX 3080", 20.0, "8.6", "RTX 3080", 59.5, 760),
        ("NVIDIA GeForce RTX 3080", 9.8, "8.6", "RTX 3080", 59.5, 760),
        ("NVIDIA GeForce RTX 3080", 12.0, "8.6", "RTX 3080", 61.3, 912),
        ("NVIDIA GeForce RTX 3080 Ti", 12.0, "8.6", "RTX 3080 Ti", 68.2, 912),
        ("NVIDIA GeForce RTX 3060", 12.0, "8.6", "RTX 3060", 25.5, 360),
        ("NVIDIA GeForce RTX 3090", 24.0, "8.6", "RTX 3090", 71, 936),
        ("GeForce RTX 3090", 24.0, "8.6", "RTX 3090", 71, 936),  # drivers before 470
        ("NVIDIA GeForce RTX 4060 Ti", 16.0, "8.9", "RTX 4060 Ti", 44.1, 288),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", 16.0, "8.9", "RTX 4070 Ti SUPER", 88.2, 672),
        ("NVIDIA GeForce RTX 4090", 24.0, "8.9", "RTX 4090", 165.2, 1008),
        ("NVIDIA GeForce RTX 5070 Ti", 15.9, "12.0", "RTX 5070 Ti", 87.9, 896),
        ("NVIDIA GeForce RTX 5090", 31.8, "12.0", "RTX 5090", 209.5, 1792),
        ("NVIDIA RTX A2000 12GB", 12.0, "8.6", "RTX A2000", 31.9, 288),
        ("NVIDIA RTX A5000", 24.0, "8.6", "RTX A5000", 111.1, 768),
        ("NVIDIA RTX A5000 Laptop GPU", 16.0, "8.6", "RTX A5000 Laptop", 77.4, 448),
        ("NVIDIA GeForce RTX 3080 Laptop GPU", 8.0, "8.6", "RTX 3080 Laptop", 42, 448),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", 16.0, "8.6", "RTX 3080 Ti Laptop", 47.2, 512),
        ("NVIDIA GeForce RTX 4050 Laptop GPU", 6.0, "8.9", "RTX 4050 Laptop", 24.3, 192),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 16.0, "8.9", "RTX 4090 Laptop", 79.4, 576),
        ("NVIDIA GeForce RTX 5090 Laptop GPU", 23.9, "12.0", "RTX 5090 Laptop", 90.7, 896),
        ("NVIDIA RTX A6000", 48.0, "8.6", "RTX A6000", 154.8, 768),
        ("NVIDIA RTX 6000 Ada Generation", 48.0, "8.9", "RTX 6000 Ada", 364.2, 960),
        ("NVIDIA L4", 22.5, "8.9", "L4", 121, 300),
        ("NVIDIA L40S", 45.0, "8.9", "L40S", 362, 864),
        ("NVIDIA A10", 22.5, "8.6", "A10", 125, 600),
        ("NVIDIA A10G", 22.5, "8.6", "A10G", 70, 600),
        ("NVIDIA A100-SXM4-40GB", 39.4, "8.0", "A100 SXM4", 312, 1555),
        ("NVIDIA A100-SXM4-80GB", 80.0, "8.0", "A100 SXM4", 312, 2039),
        ("NVIDIA A100-PCIE-40GB", 40.0, "8.0", "A100", 312, 1555),
        ("NVIDIA A100 80GB PCIe", 80.0, "8.0", "A100", 312, 1935),
        ("NVIDIA H100 PCIe", 79.6, "9.0", "H100 PCIe", 756, 2039),
        ("NVIDIA H100 80GB HBM3", 79.6, "9.0", "H100 80GB HBM3", 989.4, 3350),
        ("NVIDIA H200", 139.8, "9.0", "H200", 989.4, 4800),
        ("AMD Radeon RX 7800 XT", 16.0, "gfx1101", "RX 7800 XT", 74.6, 624),
        ("Radeon RX 7900 XT", 20.0, "gfx1100", "RX 7900 XT", 103, 800),
        (
            "Navi 31 [Radeon RX 7900 XT/7900 XTX/7900 GRE/7900M]",
            24.0,
            "gfx1100",
            "RX 7900 XTX",
            122.8,
            960,
        ),
        ("NVIDIA A800-SXM4-80GB", 80.0, "8.0", "A800 SXM4", 312, 2039),
        ("NVIDIA GeForce RTX 4090 D", 24.0, "8.9", "RTX 4090 D", 147.1, 1008),
        ("NVIDIA H800", 79.6, "9.0", "H800", 989.4, 3350),
        ("NVIDIA H20", 95.6, "9.0", "H20", 148, 4000),
        ("AMD Radeon AI PRO R9700", 31.9, "gfx1201", "AI PRO R9700", 191.4, 640),
        ("Arcturus GL-XL [AMD Instinct MI100]", 32.0, "gfx908", "MI100", 92.3, 1229),
        ("AMD Instinct MI250X", 64.0, "gfx90a:sramecc+:xnack-", "MI250X", 191.5, 1638),
        ("AMD Instinct MI300X", 192.0, "gfx942", "MI300X", 1307.4, 5300),
    ],
)
def test_a_card_is_found_by_the_name_that_its_library_prints(
    name, gib, architecture, row, tflops, gb_s
):
    found = rates.card(card(name, gib, architecture))
    assert found.name == row
    assert (found.flops_per_s["bfloat16"], found.bytes_per_s) == pytest.approx(
        (tflops * 1e12, gb_s * 1e9)
    )


@pytest.mark.parametrize(
    ("name", "gib", "architecture", "row"),
    [
        ("Tesla T4", 15.0, "7.5", "T4"),
        ("Tesla V100-SXM2-32GB", 32.0, "7.0", "V100 SXM2"),
        ("Tesla V100-PCIE-16GB", 16.0, "7.0", "V100"),
        # all have 16 GiB: the slowest
        ("Navi 21 [Radeon RX 6800/6800 XT / 6900 XT]", 16.0, "gfx1030", "RX 6800"),
    ],
)
def test_a_card_without_bf16_is_found_too(name, gib, architecture, row):
    found = rates.card(card(name, gib, architecture))
    assert found.name == row
    assert "bfloat16" not in found.flops_per_s


@pytest.mark.parametrize(
    ("name", "gib", "architecture", "like"),
    [
        # another chip than a 3080
        ("NVIDIA GeForce RTX 3080 Max-Q", 8.0, "8.6", "RTX 3050"),
        ("NVIDIA GeForce RTX 5090 D", 32.0, "12.0", "RTX 5090"),
        ("NVIDIA H200 NVL", 139.8, "9.0", "H200"),
        ("AMD Radeon RX 7900M", 16.0, "gfx1100", "RX 7900 GRE"),
        ("GPU 0", 48.0, "8.6", "A40"),
    ],
)
def test_a_card_that_no_row_names_is_taken_for_the_nearest_of_its_architecture(
    name, gib, architecture, like
):
    found = rates.card(card(name, gib, architecture))
    assert found.name == name
    assert found.source.startswith(f"assumed: like {like}, ")


@pytest.mark.parametrize("architecture", ["", "6.1", "gfx803"])
def test_a_card_of_an_unknown_architecture_is_a_modest_one(architecture):
    found = rates.card(card("something", 8, architecture))
    assert found == replace(rates.UNKNOWN, name="something")
    assert found.source.startswith("assumed")


def test_the_cards_of_every_described_machine_are_in_the_table():
    for path in (CONFIGS / "machines").glob("*.yaml"):
        for each in yaml.safe_load(path.read_text())["gpus"]:
            found = rates.card(card(each["name"], each["total_gib"], each["architecture"]))
            assert found.name != each["name"], path


def test_the_slowest_card_of_those_used_decides():
    cards = (card("NVIDIA GeForce RTX 3090", 24, "8.6"), card("NVIDIA GeForce RTX 3060", 12, "8.6"))
    on = machine(cards=cards)
    assert rates.look_up(on, way()).name == "RTX 3090"
    assert rates.look_up(on, way(ranks=2)).name == "RTX 3060"
    assert rates.look_up(on, way(device="cpu", mode="cpu")).name == "8 core(s)"


def test_the_memory_of_the_host_is_as_fast_as_was_measured_here():
    both = rates.cores_of_rank((), 8, 1)
    on = replace(
        machine(cards=(card("NVIDIA GeForce RTX 3080", 10, "8.6"),)), cores=(both.single, both.rank)
    )
    found = rates.look_up(on, way(mode="deepspeed_zero2_offload"))
    assert found.host_bytes_per_s == both.rank.bytes_per_s["large"] != rates.HOST_BYTES_PER_S


# ---- what selfcheck measured of the card
# ---------------------------------------------------------------------------


def of_card(strategy: Strategy, link: Link | None = None, **figures: float) -> TimeEstimate:
    figures_of = CardFigures("NVIDIA GeForce RTX 3080", **figures)
    model, states = shape(500e6), whole(500e6)
    return timing.estimate(small(), strategy, model, states, RTX_3080, link, None, figures_of)


def test_measured_products_of_a_card_take_the_place_of_its_peak():
    peak = RTX_3080.flops_per_s["bfloat16"]
    slow, fast = (of_card(way(), flops_per_s=share * peak).compute_s for share in (0.3, 0.6))
    ramp = RAMP_S * 23 * 24
    steps = way().gradient_accumulation_steps
    assert (slow - steps * ramp) == pytest.approx(2 * (fast - steps * ramp))
    assert of_card(way()) == seconds(way())


def test_the_link_test_of_these_ranks_comes_before_selfcheck():
    link = measured(10e9, 4e13)
    found = of_card(way(ranks=2), link, flops_per_s=9e13)
    assert found == seconds(way(ranks=2), link=link)
    assert "products at 40 TFLOP/s, measured here by the link test" in found.reason


def test_measured_copies_decide_the_time_of_offloading():
    offloaded = way(mode="deepspeed_zero2_offload")
    assumed = seconds(offloaded)
    found = of_card(offloaded, host_device_bytes_per_s=timing.HOST_DEVICE_BYTES_PER_S / 2)
    assert found.offload_s == pytest.approx(2 * assumed.offload_s)
    assert "copies at 6.0 GB/s, measured here by selfcheck" in found.reason
    assert "copies" not in of_card(way(), host_device_bytes_per_s=6e9).reason
