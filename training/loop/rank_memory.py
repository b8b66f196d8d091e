"""The memory of a rank: the peaks of its allocator in each part of a run, and the weights and
optimizer states that its data workers do not share.

A forked worker shares the pages of its rank until one of the two writes to a page; then the kernel
copies it. A rank that steps on the host writes every state at every step, so that its workers
would hold the states a second time: 8 to 12 bytes a parameter.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch

from launch.schema.phases import Phase
from launch.schema.result import PhasePeaks
from training.compat import deepspeed_private
from training.log import logger

Part = Phase | Literal["generation"]  # generation: answers to held-out questions
PARTS: tuple[Part, ...] = (*get_args(Phase), "generation")
_LEAST_BYTES = 1 << 20  # least size of a tensor; smaller ones share pages with other objects


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
        return {
            part: PhasePeaks(*values)
            for part, values in zip(PARTS, peaks, strict=True)
            if values[1]
        }

    def _read(self) -> None:
        if self.device.type != "cuda":
            return
        newest = (
            torch.cuda.max_memory_allocated(self.device),
            torch.cuda.max_memory_reserved(self.device),
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        self._highest[self._part] = list(map(max, self._highest[self._part], newest))


# ---- data workers


def exclude_from_forks(tensors: Iterable[torch.Tensor]) -> None:
    """Exclude tensors in host RAM from processes that are forked later, and return malloc's free
    memory to the kernel.

    Only whole pages inside a tensor are excluded. A child that reads them ends with SIGSEGV; data
    workers have rows alone. Source: madvise(2), MADV_DONTFORK, which ibv_fork_init(3) uses too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    for start, size_bytes in {(each.data_ptr(), each.nbytes()) for each in storages}:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if size_bytes >= _LEAST_BYTES and libc.madvise(first, end - first, mmap.MADV_DONTFORK):
            logger.warning(
                "data workers may copy weights and states in host RAM: %s",
                os.strerror(ctypes.get_errno()),
            )
            break
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def state_tensors(trainer: Any) -> Iterator[torch.Tensor]:
    """The weights and optimizer states that this rank holds, and the buffers of its engine."""
    for parameter in trainer.model.parameters():
        yield from _tensors(deepspeed_private.local_part(parameter))
    optimizer = trainer.optimizer
    if trainer.is_deepspeed_enabled:
        zero = deepspeed_private.optimizer(trainer)
        optimizer = zero.optimizer
        yield from _tensors(vars(zero))
    yield from _tensors(optimizer.state)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensor, or those in a list or dict; of each the part on this rank."""
    if torch.is_tensor(value):
        yield getattr(value, "to_local", lambda: value)().detach()
    elif isinstance(value, (dict, list)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _tensors(each)
