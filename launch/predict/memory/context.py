"""Bytes that a process takes on a card outside torch's allocator, without communicators: the CUDA
context and the kernels that are loaded. Pure.

A context reserves stack memory for every thread that the card can hold at once, so it grows with
the card: 0.08 GiB with 28 multiprocessors, 0.74 with 132. Source of the table: messages of
torch.OutOfMemoryError, which name the process's memory and the allocator's
(tests/data/gpu/measured.json, outside_the_allocator_gib). Each row has the median of its figures.
"""

import re
from collections.abc import Sequence
from statistics import median

from launch.schema.machine import GIB, MIB, CardFigures, Gpu

# Words of a card's name, and the measured GiB. H200 and GH200 have H100's chip, A800 A100's, A10
# A10G's.
NAMED: tuple[tuple[str, tuple[float, ...]], ...] = (
    (r"G?H[12]00|H800", (0.736,)),
    (r"A[18]00", (0.41, 0.518, 0.51, 0.51)),
    (r"V100", (0.37,)),
    (r"A10G?", (0.257,)),
    (r"(Tesla )?T4", (0.13, 0.094, 0.125, 0.14)),
    (r"RTX 5090", (0.487,)),
)
# Cards of which a message gives only the memory: from, below (GiB of the whole card), measured GiB.
SIZED: tuple[tuple[float, float, tuple[float, ...]], ...] = (
    (11.5, 12.5, (0.087, 0.081, 0.116)),
    (23.0, 24.5, (0.336, 0.353)),
)
# Default for other cards: NVIDIA's as an A100; AMD's assumed, unmeasured.
DEFAULT_BYTES = {"nvidia": 512 * MIB, "amd": 768 * MIB}


def context_bytes(gpu: Gpu, measured: CardFigures) -> tuple[int, str]:
    """The bytes, and their source: this machine's measurement, the table, or the default."""
    if measured.context_bytes > 0 and measured.name == gpu.name:
        return measured.context_bytes, f"measured here by {measured.context_source}"
    if gpu.vendor == "nvidia":
        for card_name, figures in NAMED:
            if matched := re.search(rf"\b({card_name})\b", gpu.name):
                return _median(figures, matched[0])
        gib = gpu.total_bytes / GIB
        for least, limit, figures in SIZED:
            if least <= gib < limit:
                return _median(figures, f"cards of {round(gib)} GB")
    return DEFAULT_BYTES[gpu.vendor], "assumed; doctor measures it"


def _median(figures: Sequence[float], card: str) -> tuple[int, str]:
    source = f"median of {len(figures)}" if len(figures) > 1 else "measured once"
    return int(median(figures) * GIB), f"{source} on {card}"
