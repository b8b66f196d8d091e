"""Seconds of an operator on its device and on its host. Pure."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from launch.predict.time.rates import NAMED, HostPace, Rates
from launch.predict.time.timeline import Cost
from launch.schema.recorded_step import Operator, Parts, Passes

# Seconds that a product takes beyond its work: 512^3 takes 8.5 us on an A800, 5.7 us on an RTX
# 4090, and at their rates 1 and 2 (github.com/mli/transformers-benchmarks issue 4)
RAMP_S = 7e-6
# The same for any other kernel behind others: 1.6 to 3.5 us (benchmarks/results/card_rates_h200.md)
KERNEL_S = 2e-6

# Bytes a clock of a multiprocessor, by the form or the name of a kernel, where it does not move
# them as fast as memory could: medians of large tensors on an H200, 132 multiprocessors of
# 1.98 GHz (benchmarks/results/card_rates_h200.md).
_CLOCK_BYTES = {
    "cast": 11.0,
    "broadcast": 8.1,
    "strided": 4.4,
    "softmax": 7.1,
    "norm": 7.0,
    "reduction": 14.0,
    "gather": 7.2,
    "list": 12.8,
    "8-bit update": 1.6,
}
# Bytes a clock of a multiprocessor from a card's cache: 16 MiB times a number take 8.7 us on an RTX
# 4090 (github.com/mli/transformers-benchmarks issue 4), less KERNEL_S. Tensors of a kernel that
# take less than this share of it are there, as the kernels before wrote them; weights that products
# read have the rest.
_CACHE_CLOCK_BYTES, _CACHED_SHARE = 15.6, 0.5
# FLOP a clock of a multiprocessor, of fused attention by a part of its name, in 16 bits: medians
# of the same card. Others, and those of a card whose clocks are not known: a share of products'.
_CLOCK_FLOPS = {"flash": 800, "varlen": 800, "efficient": 420, "cudnn": 1340}
# Share of its peak that fused attention gets. FlashAttention-2: 0.5 to 0.7 of an A100 (arXiv
# 2307.08691).
ATTENTION_SHARE = 0.5
# Bytes of kernels that read less than their tensors have: an embedding its rows of the table, a
# loss its targets' logits
_READ: Mapping[str, Callable[[float, float, float, float], Parts]] = {
    "aten::embedding": lambda fixed, sample, target, all_targets: (0, sample, target, all_targets),
    "aten::nll_loss_forward": lambda fixed, *_: (fixed, 0, 0, 0),
}
# operators that the host calls in the time of a call of one of Liger's functions: 192 us, by the
# profile of c1-lowmem-grouped-liger (benchmarks/results/gpu_speed.md), beside 32 us
TRITON, TRITON_OPERATORS = "triton::", 192 / 32
# views that the host makes in the time of a tensor in a list: of 300 tensors, AdamW on lists takes
# 15.3 us for each (8 lists), clipping 8.0 (3), fused AdamW 6.4 (2), beside views of 4 us
# (benchmarks/results/card_rates_h200.json, optimizer)
LIST_VIEWS = 0.5
# parts of names in runs that are not of decoder layers, which are not compiled
_UNCOMPILED = ("embedding", "nll_loss", "cross_entropy")


def cost_of(
    pace: Rates, rows: float, targets: float, least_share: float, bytes_share: float = 1.0
) -> Callable[[Operator], Cost]:
    """The cost of each operator in a micro-batch with so many targets in a part of the logits.
    `pace`: what a rank gets of its device; `least_share`: of the seconds beside products;
    `bytes_share`: of the bytes."""

    def cost(operator: Operator) -> Cost:
        host_s = least_share * _host_s(operator, pace.host)
        read = _READ.get(operator.name, lambda *parts: parts)
        flops, moved = (
            bytes_share * (fixed + rows * sample + targets * target)
            for fixed, sample, target, _ in (operator.flops, read(*operator.bytes))
        )
        is_product = operator.kind in ("product", "attention")
        device_s = 0.0
        if is_product or (operator.kind == "other" and operator.launches):
            if pace.cores:
                device_s = pace.cores.kernel_s(operator, flops, moved)
            elif is_product:
                device_s = RAMP_S + flops / _flops_per_s(operator, pace)
            else:
                ramp_s = KERNEL_S if operator.form != "list" else 0.0
                device_s = ramp_s + moved / _bytes_per_s(operator, pace, moved)
        if not is_product:
            device_s *= least_share
        waits = operator.kind == "wait" or pace.cores is not None
        return Cost(host_s, device_s, is_product, waits)

    return cost


def compiled(passes: Passes, rows: float, targets: float) -> Passes:
    """The passes of decoder layers that torch.compile compiles (training/levers/compile.py).

    Kernels between two products, whose sizes grow with the rows, are one: it moves what the largest
    of them does, since what one writes for the next stays in registers. Views and modules' calls
    are gone. Source: PyTorch 2 (ASPLOS 2024), section 4.3, loop-level fusion of Inductor."""
    operators, runs = [*passes.operators], []

    def size(parts: Parts) -> float:
        return parts[0] + rows * parts[1] + targets * parts[2]

    for run in passes.runs:
        if any(part in operators[number].name for number in run for part in _UNCOMPILED):
            runs.append(run)
            continue
        merged: list[int] = []
        group = -1  # number of the operator that its kernels are
        for number in run:
            operator = operators[number]
            if operator.kind in ("view", "module"):
                continue
            if not _fuses(operator):
                merged.append(number)
                group = group if operator.kind == "other" and _is_fixed(operator) else -1
                continue
            if group < 0:
                group = len(operators)
                merged.append(group)
                operators.append(replace(operator, name="compiled", form="", launches=1))
            largest = max(operators[group].bytes, operator.bytes, key=size)
            operators[group] = replace(operators[group], bytes=largest)
        runs.append(merged)
    return replace(passes, operators=operators, runs=runs)


def _fuses(operator: Operator) -> bool:
    return operator.kind == "other" and "aten::" in operator.name and not _is_fixed(operator)


def _is_fixed(operator: Operator) -> bool:
    return not any(operator.bytes[1:])


def _host_s(operator: Operator, host: HostPace) -> float:
    by_kind = {"view": host.view_s, "module": host.module_s, "product": host.product_s}
    if operator.kind in by_kind:
        return by_kind[operator.kind]
    if operator.form == "list":
        return LIST_VIEWS * operator.launches * host.view_s
    return host.operator_s * (TRITON_OPERATORS if operator.name.startswith(TRITON) else 1)


def _bytes_per_s(operator: Operator, pace: Rates, moved: float) -> float:
    named = (form for part, form in NAMED.items() if part in operator.name)
    clock_bytes = _CLOCK_BYTES.get(next(named, operator.form), math.inf)
    if moved < _CACHED_SHARE * pace.cache_bytes:
        return min(_CACHE_CLOCK_BYTES, clock_bytes) * pace.multiprocessor_hz
    return min(pace.bytes_per_s, clock_bytes * pace.multiprocessor_hz)


def _flops_per_s(operator: Operator, pace: Rates) -> float:
    rate = _rate(pace.flops_per_s, operator.dtype)
    if operator.kind == "product":
        return rate
    named = (flops for part, flops in _CLOCK_FLOPS.items() if part in operator.name)
    share = ATTENTION_SHARE / pace.product_share
    return min(share * rate, next(named, math.inf) * pace.multiprocessor_hz)


def _rate(of_dtypes: Mapping[str, float], dtype: str) -> float:
    """FLOP/s of a dtype, maybe of an alignment; what the hardware lacks is computed in float32."""
    aligned, _, _ = dtype.partition(" by ")
    return of_dtypes.get(dtype) or of_dtypes.get(aligned) or of_dtypes["float32"]
