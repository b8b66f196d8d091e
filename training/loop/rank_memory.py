"""The peaks of the ranks' allocators in each part of a run."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, get_args

import torch

from launch.schema.phases import Phase
from launch.schema.result import PhasePeaks

Part = Phase | Literal["generation"]  # generation: answers to held-out questions
PARTS: tuple[Part, ...] = (*get_args(Phase), "generation")


class MemoryPeaks:
    """Peaks of this rank's allocator, for each part apart. On a CPU there are none."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._part: Part = "load"
        self._highest = {part: [0, 0] for part in PARTS}
        self.total_bytes = 0  # VRAM of the largest card, once it is asked for

    def begin(self, part: Part) -> None:
        """End the part that runs, and begin another."""
        self._read()
        self._part = part

    @contextmanager
    def within(self, part: Part) -> Iterator[None]:
        """Run another part for a while."""
        before = self._part
        self.begin(part)
        try:
            yield
        finally:
            self.begin(before)

    def of_all_ranks(self) -> Mapping[Part, PhasePeaks]:
        """The peaks of each part that has happened, as the highest of all ranks; {} without a GPU.
        Collective."""
        if self.device.type != "cuda":
            return {}
        self._read()
        total_bytes = torch.cuda.get_device_properties(self.device).total_memory
        table = torch.tensor([*self._highest.values(), [total_bytes, 0]], device=self.device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(table, op=torch.distributed.ReduceOp.MAX)
        *peaks, (self.total_bytes, _) = table.tolist()
        by_part = zip(PARTS, peaks, strict=True)
        return {part: PhasePeaks(*values) for part, values in by_part if values[1]}

    def _read(self) -> None:
        if self.device.type != "cuda":
            return
        newest = (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        self._highest[self._part] = list(map(max, self._highest[self._part], newest))
