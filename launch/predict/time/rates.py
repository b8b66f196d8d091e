"""Peak rates of devices, in operations and bytes per second: configs/rates.yaml for cards, one
assumption for CPUs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from launch.base.workspace import FILES
from launch.schema.machine import GIB, Gpu, Machine
from launch.schema.plan import Strategy

FILE = FILES / "configs" / "rates.yaml"
DTYPES = ("float32", "tfloat32", "bfloat16", "float16")

# After the parts of a row's name these make it another card's: a 3080 is no 3080 Ti.
OTHER_CARDS = frozenset({"ti", "super", "xt", "xtx", "gre", "d", "ada", "nvl"})
# anywhere in a name: fewer units at lower clocks
OTHER_CHIPS = frozenset({"laptop", "mobile", "max"})

# FLOP per clock and core, assumed of every CPU: two FMA units of AVX2, in float32 and bfloat16
# alike. Source: Intel 64 and IA-32 Architectures Optimization Reference Manual.
CPU_FLOP_PER_CLOCK = 32
CPU_HZ = 2.5e9  # assumed, of all cores under load
# Two channels of DDR4-3200, 25.6 GB/s each (JEDEC). AdamW moved 52 GB/s in
# benchmarks/results/offload_optimizer.md.
HOST_BYTES_PER_S = 51.2e9


@dataclass(frozen=True)
class Rates:
    """A device's peak. launch/predict/time/timing.py has the share of it that a step gets."""

    name: str
    flops_per_s: Mapping[str, float]  # by dtype; tfloat32 is float32 where training.tf32 allows it
    bytes_per_s: float  # of its memory; a CPU's is shared by all ranks of a machine
    link_bytes_per_s: float | None  # one direction of its own links to other cards; None: PCIe
    source: str
    is_assumed: bool


@dataclass(frozen=True)
class Row:
    """A line of configs/rates.yaml."""

    name_parts: tuple[str, ...]
    memory_gib: float
    architecture: str
    rates: Rates


UNKNOWN = Rates(
    name="unknown card",
    flops_per_s={"float32": 10e12, "tfloat32": 20e12, "bfloat16": 20e12, "float16": 20e12},
    bytes_per_s=300e9,
    link_bytes_per_s=None,
    source="assumed: no card of its architecture is known; a modest one",
    is_assumed=True,
)


def of(machine: Machine, strategy: Strategy) -> Rates:
    """The peak of the slowest device a rank of this strategy gets; of a machine's whole CPU where
    it trains there."""
    if strategy.device == "cpu":
        return cpu(machine.cpu_count)
    return min((card(gpu) for gpu in machine.gpus[: strategy.processes_per_machine]), key=_speed)


def card(gpu: Gpu) -> Rates:
    """The row of this card, else the one of its architecture with the nearest memory, else a modest
    guess."""
    named: list[Row] = []
    for name in _names(gpu.name):
        matches = [row for row in table() if _is(row.name_parts, name)]
        # those with the most parts: A100 SXM4 before A100
        length = max((len(row.name_parts) for row in matches), default=0)
        named += [row for row in matches if len(row.name_parts) == length]
    if named:
        return _nearest(named, gpu).rates
    kin = [row for row in table() if row.architecture == gpu.architecture.partition(":")[0]]
    if not kin:
        return replace(UNKNOWN, name=gpu.name)
    like = _nearest(kin, gpu).rates
    return replace(
        like, name=gpu.name, source=f"assumed: like {like.name}, {like.source}", is_assumed=True
    )


def cpu(cores: int) -> Rates:
    """The peak of this many cores of an assumed CPU."""
    flops_per_s = CPU_FLOP_PER_CLOCK * CPU_HZ * cores
    return Rates(
        name=f"{cores} core(s)",
        flops_per_s={"float32": flops_per_s, "bfloat16": flops_per_s},
        bytes_per_s=HOST_BYTES_PER_S,
        link_bytes_per_s=None,
        source=(
            f"assumed: {CPU_FLOP_PER_CLOCK} FLOP per clock and core at {CPU_HZ / 1e9} GHz, two"
            " channels of DDR4-3200"
        ),
        is_assumed=True,
    )


@cache
def table() -> tuple[Row, ...]:
    """The rows of configs/rates.yaml."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    content = yaml.load(FILE.read_text(encoding="utf-8"), loader)
    lines = [dict(zip(content["columns"], line, strict=True)) for line in content["cards"]]
    return tuple(_row(line, content["sources"][line["source"]]) for line in lines)


def _row(line: Mapping[str, object], source: str) -> Row:
    numbers = {key: float(value) for key, value in line.items() if isinstance(value, int | float)}
    link = numbers.get("link_gb_s")
    return Row(
        name_parts=_parts(str(line["name"])),
        memory_gib=numbers["memory_gib"],
        architecture=str(line["architecture"]),
        rates=Rates(
            name=str(line["name"]),
            flops_per_s={dtype: numbers[dtype] * 1e12 for dtype in DTYPES if dtype in numbers},
            bytes_per_s=numbers["gb_s"] * 1e9,
            link_bytes_per_s=None if link is None else link * 1e9,
            source=source,
            is_assumed=source.startswith("assumed"),
        ),
    )


def _parts(name: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[a-z0-9]+", name.lower()))


def _names(name: str) -> list[tuple[str, ...]]:
    """The parts of a name, or of each card in a name of several: Navi 31 [Radeon RX 7900 XT/7900
    XTX/7900M]."""
    first, *others = map(_parts, name.split("/"))
    return [
        first,
        *(name_parts if "rx" in name_parts else ("rx", *name_parts) for name_parts in others),
    ]


def _is(row: Sequence[str], name: Sequence[str]) -> bool:
    """True if the row's name stands in the other in one piece, and nothing there says another
    card."""
    spans = [
        start for start in range(len(name)) if tuple(name[start : start + len(row)]) == tuple(row)
    ]
    return not (OTHER_CHIPS & {*name}) - {*row} and any(
        not OTHER_CARDS & {*name[start + len(row) : start + len(row) + 1]} for start in spans
    )


def _nearest(rows: Sequence[Row], gpu: Gpu) -> Row:
    """By memory in whole GiB; the slower one where two are as near."""
    size = round(gpu.total_bytes / GIB)
    return min(rows, key=lambda row: (abs(row.memory_gib - size), _speed(row.rates)))


def _speed(rates: Rates) -> float:
    return max(rates.flops_per_s.values())
