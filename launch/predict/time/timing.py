"""Seconds per optimizer step, predicted: good enough to rank ways to run a recipe, not to promise
an end.

Passes and update are replayed operator by operator (launch/predict/time/timeline.py); a
kernel takes the longer of what its products and its bytes take (a roofline: Williams et al., CACM
52/4, 2009). Communication, copies and an update on the host are sums, of which computing hides a
part. Pure.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from launch.predict.time import operators, timeline
from launch.predict.time.padding import StepSplit
from launch.predict.time.rates import Rates
from launch.schema.levers import SLOTS
from launch.schema.machine import NOT_MEASURED, CardFigures, Link
from launch.schema.plan import (
    NOT_CORRECTED,
    MemoryEstimate,
    ModelSize,
    SecondsCorrection,
    Strategy,
)
from launch.schema.recorded_step import Passes

# Share of the peak. Streaming gets 0.89 of an A800's memory: github.com/mli/
# transformers-benchmarks issue 4.
_MEMORY_SHARE = 0.8

_BACKWARD_SHARE = 2 / 3  # share of a micro-step; a reduction in this time costs nothing
BUCKET_BYTES = 25 << 20  # the last of DDP's buckets is reduced when nothing is left to compute
_RING_SHARE = 0.82  # NCCL gets 370 of NVLink's 450 GB/s: github.com/NVIDIA/nccl-tests issue 212
# assumed: bus bandwidth through host memory, without peer-to-peer, over that of copies to the host
_PCIE_SHARE = 2 / 3
_GLOO_BYTES_PER_S = 1e9  # assumed: TCP on one machine, copies to and from the host included
_NETWORK_BYTES_PER_S = 1.1e9  # assumed: 10 Gbit Ethernet between machines
# assumed: one direction of PCIe 4.0 x8 or 3.0 x16 (16 GB/s) from pinned memory
HOST_DEVICE_BYTES_PER_S = 12e9
# Rate of a thread that copies between pageable memory and the driver's pinned buffer, beside the
# copy to or from the card: with an H200, 7.5 GB/s both ways in all, where pinned copies have 53.6
# (benchmarks/results/card_rates_h200.md).
PAGEABLE_BYTES_PER_S = 8.7e9

# Bytes of host RAM that an update moves per element, besides the optimizer's states: master and
# gradient, norm, clipping, the cast to 16 bit.
_UPDATE_BYTES = 12 + 4 + 8 + 6  # source: DeepSpeed 0.19 stage_1_and_2.py, step()
# ZeRO stage or engine -> operators that the host calls in the time of its hooks: for each tensor in
# a pass over the layers, for each gradient, and in the update (benchmarks/results/engine_hooks.md)
_HOOK_OPERATORS = {1: (0, 2, 10), 2: (0, 8, 10), 3: (30, 0, 11), "fsdp2": (7, 5, 0)}
MASTER_BYTES = 4  # DeepSpeed's states are float32 whatever the model's dtype


@dataclass(frozen=True)
class TimeEstimate:
    """The seconds of one optimizer step and their parts, which sum to step_s."""

    step_s: float
    compute_s: float  # matrix products and attention
    memory_s: float  # all other kernels
    launch_s: float  # the device waits for the host's launches
    optimizer_s: float  # the update, on the device or on the host
    communication_s: float  # communication that no computation hides
    offload_s: float  # copies between host and device that no computation hides
    reason: str
    correction: SecondsCorrection = NOT_CORRECTED  # correction in the seconds

    def corrected(self, correction: SecondsCorrection) -> "TimeEstimate":
        """The same by this machine's own runs: each part times their factor."""
        seconds = (field.name for field in fields(self) if field.name.endswith("_s"))
        parts = {name: correction.factor * getattr(self, name) for name in seconds}
        return replace(self, **parts, correction=correction)

    @property
    def waits_share(self) -> float:
        return self.launch_s / self.step_s


@dataclass(frozen=True)
class _Traffic:
    """Bytes that each rank sends in one optimizer step."""

    micro_step_bytes: float  # bytes in every micro-step
    last_bytes: float  # besides, in the last one
    after_bytes: float  # after the update: the new weights


@dataclass(frozen=True)
class Speed:
    """The share of a rank in its device, its links and its host."""

    pace: Rates  # with the rates of large products, and of memory, that a step gets
    bus_bytes_per_s: float
    host_device_bytes_per_s: float
    reason: str


@dataclass(frozen=True)
class StepWork:
    """The work of a rank that holds the whole model."""

    passes: Passes
    # share of the passes' seconds beside products that the step takes at least
    least_share: float = 1.0
    streamed: tuple[int, ...] = ()  # bytes of each layer that comes from the host


def estimate(
    work: StepWork,
    strategy: Strategy,
    model: ModelSize,
    full_copy: MemoryEstimate,
    rates: Rates,
    link: Link | None = None,
    split: StepSplit | None = None,
    card: CardFigures = NOT_MEASURED,
    targets: float = 0.0,
) -> TimeEstimate:
    """Seconds of one optimizer step. `full_copy` are the states of a full copy, as
    optimizers.model_state() gives them; `split` is the mean split of a step whose rows vary; `card`
    are measurements of the cards; `targets` those of a part of the logits of a micro-batch."""
    speed = speed_of(strategy, rates, link, card)
    batch, steps = split or StepSplit(
        strategy.per_device_train_batch_size, strategy.gradient_accumulation_steps
    )
    cost_of = operators.cost_of(speed.pace, batch, targets, work.least_share)
    passes = work.passes
    if strategy.levers.torch_compile:
        passes = operators.compiled(passes, batch, targets)
    hooks_s, update_hooks_s = _hooks_s(strategy, model, speed.pace)
    if strategy.launch_mode.offloads:
        passes = replace(passes, update=())
    # a rank's slice; of a recorded model that is cast to 16 bits it is in float32
    share = 1.0
    if not strategy.launch_mode.is_whole:
        is_cast = strategy.mixed_precision != "no" and work.least_share == 1.0
        share = (MASTER_BYTES / 2 if is_cast else 1.0) / strategy.num_processes
    update_cost_of = operators.cost_of(speed.pace, 1.0, 0.0, 1.0, share)
    count = max(round(steps), 1)
    seconds = timeline.replayed(passes, cost_of, count, hooks_s, update_cost_of, update_hooks_s)
    compute_s, memory_s, launch_s = (steps / count * part for part in seconds[:3])
    busy_s = (compute_s + memory_s + launch_s) / steps
    communication_s = _exposed_s(
        traffic(strategy, model, full_copy), busy_s, steps, strategy, speed
    )
    activations = sum(
        fixed + batch * sample + targets * target
        for fixed, sample, target, _ in work.passes.offloaded
    )
    moved = _offloaded_bytes(strategy, model, full_copy, steps)
    offload_s = (
        moved / speed.host_device_bytes_per_s
        + steps * _exposed_copies_s(activations / speed.host_device_bytes_per_s, busy_s, strategy)
        + steps * _exposed_layers_s(work.streamed, busy_s, strategy, speed)
    )
    optimizer_s = seconds.update_s + _host_update_s(strategy, model, full_copy, speed)
    parts = (compute_s, memory_s, launch_s, optimizer_s, communication_s, offload_s)
    return TimeEstimate(sum(parts), *parts, speed.reason)


def _hooks_s(strategy: Strategy, model: ModelSize, pace: Rates) -> tuple[float, float]:
    """Seconds that an engine's hooks, and on a CPU the Trainer, take of the host in a micro-step,
    and in an update. FSDP2 calls none where a checkpointed layer computes again."""
    mode = strategy.launch_mode
    each_pass, gradient, update = _HOOK_OPERATORS.get(mode.zero_stage or mode.engine, (0, 0, 0))
    again = 0.0 if mode.engine == "fsdp2" else strategy.levers.checkpointed_share
    micro_step = (2 + again) * each_pass * model.tensors + gradient * model.trained_tensors
    trainer_micro_step_s, trainer_step_s = pace.cores.trainer_s if pace.cores else (0.0, 0.0)
    operator_s = pace.host.operator_s
    return (
        operator_s * micro_step + trainer_micro_step_s,
        operator_s * update * model.trained_tensors + trainer_step_s,
    )


def speed_of(
    strategy: Strategy, rates: Rates, link: Link | None, card: CardFigures = NOT_MEASURED
) -> Speed:
    """A rank's share of what its device and its machine can do. A measured product scales every
    dtype's rate."""
    share, source = rates.product_share, rates.source
    measured, test = card.flops_per_s, "selfcheck"
    if link is not None and link.flops_per_s and not rates.cores:
        measured, test = link.flops_per_s, "the link test"
    if measured:
        half = (
            rates.flops_per_s.get("bfloat16")
            or rates.flops_per_s.get("float16")
            or rates.flops_per_s["float32"]
        )
        share = measured / half
        source = f"products at {measured / 1e12:.3g} TFLOP/s, measured here by {test}"
    peaks = dict(rates.flops_per_s)
    copies = card.host_device_bytes_per_s or HOST_DEVICE_BYTES_PER_S
    bus, bus_from = _bus(strategy, rates, link, copies)
    if not strategy.pin_memory:
        copies = 1 / (1 / copies + 1 / PAGEABLE_BYTES_PER_S)
    if (
        strategy.launch_mode.offloads
        or strategy.levers.activation_offloading
        or strategy.levers.streamed_layers
    ) and card.host_device_bytes_per_s:
        source += f"; copies at {copies / 1e9:.1f} GB/s, measured here by selfcheck"
    if strategy.tf32:
        peaks["float32"] = peaks.get("tfloat32", peaks["float32"])
    pace = replace(
        rates,
        flops_per_s={dtype: share * peak for dtype, peak in peaks.items()},
        bytes_per_s=(1.0 if rates.cores else _MEMORY_SHARE) * rates.bytes_per_s,
    )
    return Speed(
        pace,
        bus_bytes_per_s=bus,
        host_device_bytes_per_s=(
            math.inf
            if rates.cores
            else min(copies, rates.host_bytes_per_s / strategy.processes_per_machine)
        ),
        reason=f"{rates.name}: {source}" + (f"; {bus_from}" if bus_from else ""),
    )


def _bus(
    strategy: Strategy, rates: Rates, link: Link | None, copies_bytes_per_s: float
) -> tuple[float, str]:
    """Bus bandwidth as nccl-tests defines it, and where it is from; between machines the
    network's. `copies_bytes_per_s`: of copies between host and card."""
    if strategy.num_processes == 1:
        return math.inf, ""
    if link is not None and link.bytes_per_s and strategy.device == "cuda":
        bus, reason = link.bytes_per_s, "as tested"
    elif strategy.backend == "gloo":
        bus, reason = _GLOO_BYTES_PER_S, "assumed of Gloo"
    elif rates.link_bytes_per_s:
        bus, reason = _RING_SHARE * rates.link_bytes_per_s, "of the cards' own links"
    else:
        bus, reason = _PCIE_SHARE * copies_bytes_per_s, "assumed of PCIe without peer-to-peer"
    if strategy.num_machines > 1 and (
        bus > _NETWORK_BYTES_PER_S or strategy.processes_per_machine == 1
    ):
        bus, reason = _NETWORK_BYTES_PER_S, "assumed of 10 Gbit Ethernet"
    return bus, f"link {bus / 1e9:.1f} GB/s {reason}"


def traffic(strategy: Strategy, model: ModelSize, full_copy: MemoryEstimate) -> _Traffic:
    """Bytes that a ring moves: an all-reduce 2(N-1)/N of its bytes, a reduce-scatter or an
    all-gather (N-1)/N.

    Source: nccl-tests doc/PERFORMANCE.md. DDP and FSDP2 reduce in the last micro-step (accelerate
    1.15 no_sync). DeepSpeed 0.19: stage 1 at the accumulation boundary, 2 and 3 in every
    micro-step; 1 and 2 all-reduce their buckets (use_multi_rank_bucket_allreduce), 3
    reduce-scatters. 3 and FSDP2 gather weights before forward and before backward.
    """
    once = (strategy.num_processes - 1) / strategy.num_processes
    gradients, trained, weights = _wire_bytes(strategy, model, full_copy)
    stage = strategy.launch_mode.zero_stage
    if strategy.launch_mode.engine == "fsdp2":
        return _Traffic(2 * once * weights, once * gradients, 0)
    if stage == 3:
        return _Traffic(2 * once * weights + once * gradients, 0, 0)
    if stage == 2:
        return _Traffic(2 * once * gradients, 0, once * trained)
    return _Traffic(0, 2 * once * gradients, once * trained if stage == 1 else 0)


def _wire_bytes(
    strategy: Strategy, model: ModelSize, full_copy: MemoryEstimate
) -> tuple[int, int, int]:
    """(gradients, trained weights, all weights) as this engine sends them: sharded ones in the
    computing precision, but FSDP2's gradients in float32."""
    if strategy.launch_mode.is_whole or strategy.mixed_precision == "no":
        return full_copy.gradients_bytes, full_copy.gradients_bytes, full_copy.weights_bytes
    trained = 2 * model.trainable_parameters
    gradients = 2 * trained if strategy.launch_mode.engine == "fsdp2" else trained
    # those of 4 bits are sent as they are
    weights = min(2 * (model.parameters + model.lora_parameters), full_copy.weights_bytes)
    return gradients, trained, weights


def _exposed_s(
    moved: _Traffic, micro_step_s: float, steps: float, strategy: Strategy, speed: Speed
) -> float:
    """Seconds of communication that no computing hides.

    Over Gloo it takes the host's cores and hides nothing. Gathering the weights goes on through
    forward and backward, but between cards without links nothing hides it: two RTX 3090 take 3.7 to
    4.6 s more for 13.5 GB beside 0.4 to 10 s of computing (AnswerDotAI/fsdp_qlora,
    benchmarks_03_2024.md, FSDP beside DDP)."""
    hidden_s = 0.0
    if strategy.backend == "nccl":
        hidden_s = micro_step_s * _BACKWARD_SHARE
        if strategy.launch_mode.shards_parameters:
            hidden_s = 0.0 if speed.pace.link_bytes_per_s is None else micro_step_s

    def exposed_s(size: float) -> float:
        return max(
            size / speed.bus_bytes_per_s - hidden_s, min(size, BUCKET_BYTES) / speed.bus_bytes_per_s
        )

    return (
        (steps - 1) * exposed_s(moved.micro_step_bytes)
        + exposed_s(moved.micro_step_bytes + moved.last_bytes)
        + moved.after_bytes / speed.bus_bytes_per_s
    )


def _offloaded_bytes(
    strategy: Strategy, model: ModelSize, full_copy: MemoryEstimate, steps: float
) -> float:
    """Bytes that a rank moves between host and device in one optimizer step, its slice of the
    states each time.

    Gradients go out in each micro-step, come back from the second on to be added to, and go out
    once more for the update; stage 2 gets new weights, stage 3 fetches them twice a micro-step.
    Source: DeepSpeed 0.19 stage_1_and_2.py async_accumulate_grad_in_cpu_via_gpu, stage3.py
    partition_grads.
    """
    if not strategy.launch_mode.offloads:
        return 0
    gradients, trained, weights = (
        size / strategy.num_processes for size in _wire_bytes(strategy, model, full_copy)
    )
    if strategy.launch_mode.shards_parameters:
        return 2 * steps * weights + 2 * steps * gradients
    return gradients * (2 * steps if steps > 1 else 1) + trained


def _exposed_copies_s(copy_s: float, micro_step_s: float, strategy: Strategy) -> float:
    """Seconds of a micro-step that wait for layers' inputs: forward sends each to the host while a
    layer computes, backward fetches it while another does (training/levers/offloading.py). The
    layers are alike, so that what is true of one is true of their sum. For a copy to or from memory
    that is not pinned the host waits.

    Backward computes twice what forward does, and the checkpointed layers again."""
    if not strategy.pin_memory:
        return 2 * copy_s
    forward_s = micro_step_s / (3 + strategy.levers.checkpointed_share)
    return max(copy_s - forward_s, 0.0) + max(copy_s - (micro_step_s - forward_s), 0.0)


def _exposed_layers_s(
    streamed: Sequence[int], micro_step_s: float, strategy: Strategy, speed: Speed
) -> float:
    """Seconds of a micro-step that wait for layers which come from the host, forward and backward,
    but for those that are in the slots when the direction turns (training/levers/streaming.py). A
    copy begins with the streamed layer before it, and so takes the longer of its own seconds and
    those of computing up to its layer. For memory that is not pinned the host waits.

    Beside frozen weights backward makes gradients of inputs alone: as much work as forward, and
    once more where layers are computed again."""
    copies_s = [size_bytes / speed.host_device_bytes_per_s for size_bytes in streamed[SLOTS:]]
    if not strategy.pin_memory:
        return 2 * sum(copies_s)
    forward_s = micro_step_s / 3 / max(len(streamed), 1)
    return sum(
        max(copy_s - share_s, 0.0) for share_s in (forward_s, 2 * forward_s) for copy_s in copies_s
    )


def _host_update_s(
    strategy: Strategy, model: ModelSize, full_copy: MemoryEstimate, speed: Speed
) -> float:
    """The update of offloaded states, by the memory of the host; 0 on devices."""
    if not strategy.launch_mode.offloads:
        return 0.0
    # per element, read and written
    states = MASTER_BYTES * full_copy.optimizer_bytes / max(full_copy.gradients_bytes, 1)
    on_machine = model.trainable_parameters / strategy.num_machines
    return on_machine * (_UPDATE_BYTES + 2 * states) / speed.pace.host_bytes_per_s
