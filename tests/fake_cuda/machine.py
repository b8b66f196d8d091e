"""A described machine for processes of the CUDA build: its cards, variables and what was used."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.fake_cuda import build

LIBRARIES = build.HERE.parents[1] / ".cache" / "fake_cuda"
FOLDER, FAULT = (
    "NVIDIA_FAKE_CUDA",
    "NVIDIA_FAKE_NCCL",
)  # launch passes variables that start with NVIDIA
MAX_CARDS = 8
# of struct Process in fake.h: pid, used, peak, pinned, peak_pinned, has_context, failed, four
# counters
PROCESS = struct.Struct(f"@i{MAX_CARDS}N{MAX_CARDS}NNN{2 * MAX_CARDS}iNNNN")


@dataclass(frozen=True)
class Card:
    """A card as fake.h describes it."""

    name: str = "NVIDIA GeForce RTX 3080"
    memory_gib: float = 20
    capability: str = "8.6"
    multiprocessors: int = 68
    context_mib: float = 300
    other_gib: float = 0  # of processes that are not here
    hidden_limit_gib: float = 0  # an out of memory that no probe can see coming; 0: none
    fails_at_launch: int = 0  # the kernel whose launch ends the card; 0: never
    lost: int = 0  # it has fallen off the bus
    peer_access: int = 0
    mig: int = 0  # its MIG mode is on
    xid: int = 0  # that NVML reports its failure with; 79: it falls off the bus
    slowdown: int = 0  # bits of NVML's reasons for lower clocks

    def line(self) -> str:
        return ";".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Process:
    """What a process took of the cards, and how often it called them."""

    pid: int
    peak_bytes: tuple[int, ...]
    peak_pinned_bytes: int
    launches: int
    synchronizations: int
    copies_to_host: int
    collectives: int


class Machine:
    """Cards in a folder of their own. The variable NVIDIA_FAKE_DRIVER is the newest CUDA that the
    driver serves (12040 is 12.4)."""

    def __init__(self, folder: Path, cards: Sequence[Card]) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cards").write_text("".join(f"{card.line()}\n" for card in cards))

    def environment(self, fault: str = "") -> dict[str, str]:
        """Variables for a process of this machine; fault is one of nccl.c."""
        place = build.build(LIBRARIES)
        variables = {
            FOLDER: str(self.folder),
            "LD_PRELOAD": str(place / build.LIBRARY),
            "LD_LIBRARY_PATH": str(place),
        }
        return variables | ({FAULT: fault} if fault else {})

    def processes(self) -> list[Process]:
        return processes(self.folder)


def processes(folder: Path) -> list[Process]:
    """Every process that opened a card of the machine in this folder, in order."""
    opened = []
    for values in PROCESS.iter_unpack((folder / "processes").read_bytes()):
        if not values[0]:
            break
        peak = values[1 + MAX_CARDS : 1 + 2 * MAX_CARDS]
        peak_pinned = values[2 + 2 * MAX_CARDS]
        opened.append(Process(values[0], peak, peak_pinned, *values[-4:]))
    return opened


def has_cuda_build() -> bool:
    """Whether this interpreter's torch is a CUDA build (its file is read; it is not imported)."""
    version = build.packages() / "torch" / "version.py"
    return "cuda: Optional[str] = None" not in version.read_text()
