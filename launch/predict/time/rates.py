"""Peak rates of devices, in operations and bytes per second: configs/cards.yaml for cards, what was
measured for CPUs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from launch.predict.time import cores
from launch.predict.time.cores import Cores
from launch.predict.time.operators import ASSUMED_HOST, HOSTS, HostPace
from launch.probe import cards
from launch.schema.machine import CoreFigures, Gpu, Machine
from launch.schema.plan import Strategy

# Two channels of DDR4-3200, 25.6 GB/s each (JEDEC). AdamW moved 52 GB/s in
# benchmarks/results/offload_optimizer.md.
HOST_BYTES_PER_S = 51.2e9
# AdamW on hosts of cards with links of their own, which stand in servers of two sockets: 65 to 83
# GB/s by 46 bytes an element (github.com/deepspeedai/DeepSpeed pull 735: 11.6e9 elements in 8.2 s;
# issue 6834: 18e9 in 10 s)
SERVER_BYTES_PER_S = 74e9
# Architecture -> the share of the rate that is left to products in 16 bits whose rows are divided
# by fewer than 8 elements. Sources: benchmarks/results/gpu_products.md; 8.0: a step of GPT-2 takes
# 8.8 ms longer with 50,257 tokens than with 50,304 (github.com/rasbt/LLMs-from-scratch
# ch05/10_llm-training-speed, 9), whose products take 7.6 ms. Others are not measured.
_UNALIGNED_SHARE = {"8.0": {"1": 0.46}, "9.0": {"4": 0.34, "2": 0.34, "1": 0.17}}
# Large float16 products get 0.69 of an A800, and 0.96 of an RTX 4090, whose clock is above the one
# of its peak: github.com/mli/transformers-benchmarks issue 4.
_PRODUCT_SHARE, _GEFORCE_SHARE = 0.8, 0.96
# by architecture, measured: an H200 (benchmarks/results/card_rates_h200.md, bfloat16 layers), an
# MI300X (AMD's ROCm blog, Measuring Max-Achievable FLOPs, part 2, table 1: 708 TFLOP/s in bfloat16)
_PRODUCT_SHARES = {"9.0": 0.72, "gfx942": 0.54}
# float32 units of a multiprocessor, each of 2 FLOP a clock. Source: CUDA C++ Programming Guide,
# arithmetic instructions.
_LANES = {
    **dict.fromkeys(("7.0", "7.5", "8.0"), 64),
    **dict.fromkeys(("8.6", "8.7", "8.9", "9.0", "10.0", "12.0"), 128),
}


@dataclass(frozen=True)
class Rates:
    """A device's peak. launch/predict/time/timing.py has the share of it that a step gets."""

    name: str
    # rates by dtype; tfloat32 is float32 where training.tf32 allows it. A product whose rows 8
    # elements do not divide has " by 4", " by 2" or " by 1" behind the dtype; without such a key it
    # is as fast as others.
    flops_per_s: Mapping[str, float]
    bytes_per_s: float  # bandwidth of its memory; all ranks of a machine share a CPU's
    link_bytes_per_s: float | None  # one direction of its own links to other cards; None: PCIe
    source: str
    is_assumed: bool
    multiprocessor_hz: float = math.inf  # clocks of all multiprocessors together; if known
    cache_bytes: int = 0  # of a cache that is much faster than its memory
    product_share: float = _PRODUCT_SHARE  # share of flops_per_s that large products reach
    host: HostPace = ASSUMED_HOST
    cores: Cores | None = None  # those of a rank, where it trains on a CPU
    host_bytes_per_s: float = HOST_BYTES_PER_S  # bandwidth of the memory of the cards' host


UNKNOWN = Rates(
    name="unknown card",
    flops_per_s={"float32": 10e12, "tfloat32": 20e12, "bfloat16": 20e12, "float16": 20e12},
    bytes_per_s=300e9,
    link_bytes_per_s=None,
    source="assumed: no card of its architecture is known; a modest one",
    is_assumed=True,
)


def look_up(machine: Machine, strategy: Strategy) -> Rates:
    """The peak of the slowest device a rank of this strategy gets; of a machine's whole CPU where
    it trains there."""
    if strategy.device == "cpu":
        return cpu(machine.cpu_count, strategy.processes_per_machine, machine.cores)
    slowest = min((card(gpu) for gpu in machine.gpus[: strategy.processes_per_machine]), key=_speed)
    if not machine.cores:
        return slowest
    return replace(slowest, host_bytes_per_s=machine.cores[-1].bytes_per_s["large"])


def card(gpu: Gpu) -> Rates:
    """The row of this card, else the one of its architecture with the nearest memory, else a modest
    guess."""
    row, is_named = cards.look_up(gpu)
    if row is None:
        return replace(UNKNOWN, name=gpu.name)
    rates = Rates(
        name=row.name,
        flops_per_s={**row.flops_per_s, **_unaligned(row)},
        bytes_per_s=row.bytes_per_s,
        link_bytes_per_s=row.link_bytes_per_s,
        source=row.source,
        is_assumed=row.source.startswith("assumed"),
        multiprocessor_hz=_multiprocessor_hz(row),
        cache_bytes=row.cache_bytes,
        product_share=(
            _GEFORCE_SHARE
            if row.is_geforce
            else _PRODUCT_SHARES.get(row.architecture, _PRODUCT_SHARE)
        ),
        host=HOSTS.get(row.architecture, ASSUMED_HOST),
        host_bytes_per_s=SERVER_BYTES_PER_S if row.link_bytes_per_s else HOST_BYTES_PER_S,
    )
    if is_named:
        return rates
    source = f"assumed: like {row.name}, {row.source}"
    return replace(rates, name=gpu.name, source=source, is_assumed=True)


def _multiprocessor_hz(row: cards.Card) -> float:
    lanes = _LANES.get(row.architecture)
    return row.flops_per_s["float32"] / (2 * lanes) if lanes else math.inf


def _unaligned(row: cards.Card) -> dict[str, float]:
    return {
        f"{dtype} by {divisor}": share * row.flops_per_s[dtype]
        for divisor, share in _UNALIGNED_SHARE.get(row.architecture, {}).items()
        for dtype in ("bfloat16", "float16")
    }


def cpu(num_cores: int, num_ranks: int = 1, measured: tuple[CoreFigures, ...] = ()) -> Rates:
    """The rates of a rank of so many that share a CPU. `measured`: with one thread and with all
    cores; (): a CPU like others is assumed."""
    of_rank = cores.of_rank(measured, num_cores, num_ranks)
    return Rates(
        name=f"{num_cores} core(s)",
        flops_per_s=of_rank.rank.flops_per_s,
        bytes_per_s=of_rank.rank.bytes_per_s["large"],
        link_bytes_per_s=None,
        source="measured here" if measured else f"assumed: like {cores.ASSUMED_CPU}",
        is_assumed=not measured,
        host=of_rank.host,
        cores=of_rank,
    )


def _speed(rates: Rates) -> float:
    return max(rates.flops_per_s.values())
