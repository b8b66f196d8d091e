"""The cards of configs/cards.yaml: their memory and peaks, by the name that a driver reports or
that people write."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from launch.base.errors import ConfigError
from launch.base.text import nearest
from launch.base.workspace import FILES
from launch.schema.machine import GIB, MIB, Gpu

FILE = FILES / "configs" / "cards.yaml"
DTYPES = ("float32", "tfloat32", "bfloat16", "float16")

# Words that name another card if they follow the parts of a row's name: a 3080 is no 3080 Ti.
_OTHER_CARDS = frozenset({"ti", "super", "xt", "xtx", "gre", "d", "ada", "nvl"})
# anywhere in a name: fewer units at lower clocks
_OTHER_CHIPS = frozenset({"laptop", "mobile", "max"})
# parts that a written name may have or leave out, in the order in which they are ignored
_MAKERS = frozenset(
    {"nvidia", "amd", "geforce", "radeon", "instinct", "tesla", "gpu", "generation"}
)
_SERIES = frozenset({"rtx", "rx", "ai", "pro"})
_BUS = frozenset({"pcie"})
MEMORY = re.compile(r"\b(\d+) ?(?:gb|gib|g)\b")
_NAMES_SHOWN = 4
GEFORCE = re.compile(r"(GTX|RTX) \d{4}( Ti| SUPER| D)*")


@dataclass(frozen=True)
class Card:
    """A row of configs/cards.yaml."""

    name: str
    gb: int  # memory as it is sold
    total_bytes: int  # memory as its driver reports it
    architecture: str
    pcie: int  # generation
    flops_per_s: Mapping[str, float]  # dtype -> rate
    bytes_per_s: float  # bandwidth of its memory
    link_bytes_per_s: float | None  # one direction of its own links to other cards; None: PCIe
    cache_bytes: int  # of a cache that is much faster than its memory
    source: str

    @property
    def parts(self) -> tuple[str, ...]:
        return parts(self.name)

    @property
    def vendor(self) -> Literal["nvidia", "amd"]:
        return "amd" if self.architecture.startswith("gfx") else "nvidia"

    @property
    def is_geforce(self) -> bool:
        """True of a card for games: RTX and a number, of no laptop."""
        return self.vendor == "nvidia" and GEFORCE.fullmatch(self.name) is not None

    @property
    def full_name(self) -> str:
        """The name with the memory, if there are cards of this name with other memory."""
        is_only = [row.name for row in table()].count(self.name) == 1
        return self.name if is_only else f"{self.name} {self.gb}GB"

    def described(self, index: int) -> Gpu:
        """This card as it would be in a machine, all of its memory free."""
        return Gpu(
            index=index,
            name=f"{self.vendor.upper()} {self.name}",
            vendor=self.vendor,
            total_bytes=self.total_bytes,
            free_bytes=self.total_bytes,
            architecture=self.architecture,
            driver="",
            reason=f"configs/cards.yaml: {self.full_name}, PCIe {self.pcie}.0",
        )


@cache
def table() -> tuple[Card, ...]:
    """The rows of configs/cards.yaml."""
    content = _content()
    lines = (dict(zip(content["columns"], line, strict=True)) for line in content["cards"])
    return tuple(_card(line, content["sources"][line["source"]]) for line in lines)


@cache
def _content() -> Mapping[str, Any]:
    import yaml

    return yaml.load(
        FILE.read_text(encoding="utf-8"), getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )


def _card(line: Mapping[str, Any], source: str) -> Card:
    link = line["link_gb_s"]
    return Card(
        name=str(line["name"]),
        gb=line["gb"],
        total_bytes=line["total_mib"] * MIB,
        architecture=str(line["architecture"]),
        pcie=line["pcie"],
        flops_per_s={dtype: line[dtype] * 1e12 for dtype in DTYPES if line[dtype] is not None},
        bytes_per_s=line["gb_s"] * 1e9,
        link_bytes_per_s=None if link is None else link * 1e9,
        cache_bytes=(line["cache_mib"] or 0) * MIB,
        source=source,
    )


def parts(name: str) -> tuple[str, ...]:
    """The parts of a name: letters and digits in lower case."""
    return tuple(re.findall(r"[a-z0-9]+", name.lower()))


# ---- the name that a driver reports
# ---------------------------------------------------------------------------


def look_up(gpu: Gpu) -> tuple[Card | None, bool]:
    """The row of a card and True; else the row of its architecture with the nearest memory and
    False; None if there is none."""
    named: list[Card] = []
    for name in _reported_names(gpu.name):
        matches = [row for row in table() if _is(row.parts, name)]
        # Names with the most parts win: A100 SXM4 before A100
        length = max((len(row.parts) for row in matches), default=0)
        named += [row for row in matches if len(row.parts) == length]
    if named:
        return _by_memory(named, gpu), True
    kin = [row for row in table() if row.architecture == gpu.architecture.partition(":")[0]]
    return (_by_memory(kin, gpu) if kin else None), False


def _reported_names(name: str) -> list[tuple[str, ...]]:
    """The parts of a name, or of each card in a name of several: Navi 31 [Radeon RX 7900 XT/7900
    XTX/7900M]."""
    first, *further = map(parts, name.split("/"))
    return [first, *(other if "rx" in other else ("rx", *other) for other in further)]


def _is(row: Sequence[str], name: Sequence[str]) -> bool:
    """True if the row's name stands in the other whole, and nothing there says another card."""
    spans = [
        start for start in range(len(name)) if tuple(name[start : start + len(row)]) == tuple(row)
    ]
    return not (_OTHER_CHIPS & {*name}) - {*row} and any(
        not _OTHER_CARDS & {*name[start + len(row) : start + len(row) + 1]} for start in spans
    )


def _by_memory(rows: Sequence[Card], gpu: Gpu) -> Card:
    """By memory in whole GB; the slower one where two are as near."""
    size = round(gpu.total_bytes / GIB)
    return min(rows, key=lambda row: (abs(row.gb - size), max(row.flops_per_s.values())))


# ---- the name that people write
# ---------------------------------------------------------------------------


def by_words(text: str, where: str = "--gpu") -> Card:
    """The card that these words name, such as "RTX 3090", "4060 Ti 16GB", "A100 SXM 80GB". Raises
    ConfigError, which begins with `where`, with the nearest names."""
    also = {parts(name): parts(other) for name, other in _content()["also"].items()}
    size = MEMORY.search(text.lower())
    spellings = [parts(text), parts(MEMORY.sub(" ", text.lower()))]
    for ignored in (_MAKERS, _MAKERS | _SERIES, _MAKERS | _SERIES | _BUS):
        for written in spellings:
            plain = _without(written, ignored)
            joined = "".join(also.get(plain, plain))  # RTX4090 as RTX 4090
            rows = [
                row for row in table() if "".join(_without(row.parts, ignored - _BUS)) == joined
            ]
            if size and not any(size[0].replace(" ", "") in row.parts for row in rows):
                rows = [row for row in rows if row.gb == int(size[1])]
            if len(rows) == 1:
                return rows[0]
            if rows:
                raise _several(rows, text, where)
    plain = _without(parts(text), _MAKERS)
    longer = [row for row in table() if plain and row.parts[: len(plain)] == plain]
    if 1 < len(longer) <= _NAMES_SHOWN:
        raise _several(longer, text, where)
    raise ConfigError(
        f"{where}: {text}: no such card in configs/cards.yaml; {_nearest_names(text)}; a machine"
        " file may describe it: name, vendor, total_gib, architecture"
    )


def _several(rows: Sequence[Card], text: str, where: str) -> ConfigError:
    names = ", ".join(row.full_name for row in rows)
    return ConfigError(f"{where}: {text}: there are several of that name: {names}")


def _without(name: Sequence[str], ignored: frozenset[str]) -> tuple[str, ...]:
    return tuple(part for part in name if part not in ignored)


def _nearest_names(text: str) -> str:
    """The names most like the text: those that share its longest part first."""
    written = _without(parts(text), _MAKERS)
    names = [row.full_name for row in table()]
    alike = [row.full_name for row in table() if {*row.parts} & {*written} - _SERIES - _BUS]
    near = nearest(" ".join(written), names, _NAMES_SHOWN, cutoff=0.5)
    shown = list(dict.fromkeys([*alike, *near]))[:_NAMES_SHOWN]
    return f"nearest: {', '.join(shown)}" if shown else f"it has {', '.join(names[:12])}, ..."
