"""A rank's weights and optimizer states, kept out of its data workers.

A forked worker shares the pages of its rank until one of the two writes to a page; then the kernel
copies it. A rank that steps on the host writes every state at every step, so that its workers
would hold the states a second time: 8 to 12 bytes a parameter.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from training.compat import deepspeed_private

logger = logging.getLogger("lowmem")
LEAST_BYTES = 1 << 20  # of a tensor; smaller ones share pages with other objects


def keep(tensors: Iterable[torch.Tensor]) -> None:
    """Leave the tensors in host RAM out of processes that are forked from now on, and what malloc
    has kept of freed ones.

    Only whole pages inside a tensor are left out. A child that reads them ends with SIGSEGV; data
    workers have rows alone. Source: madvise(2), MADV_DONTFORK, which ibv_fork_init(3) uses too.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu")
    for start, size_bytes in {(each.data_ptr(), each.nbytes()) for each in storages}:
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (start + size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if size_bytes >= LEAST_BYTES and libc.madvise(first, end - first, mmap.MADV_DONTFORK):
            error = os.strerror(ctypes.get_errno())
            logger.warning("data workers may copy weights and states in host RAM: %s", error)
            break
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)


def states(trainer: Any) -> Iterator[torch.Tensor]:
    """The weights and optimizer states that this rank holds, and the buffers of its engine."""
    for parameter in trainer.model.parameters():
        yield _local(deepspeed_private.local_part(parameter))
    optimizer = trainer.optimizer
    if trainer.is_deepspeed_enabled:
        zero = deepspeed_private.optimizer(trainer)
        optimizer = zero.optimizer
        for flat in deepspeed_private.master_slices(zero):
            yield from _tensors([flat, flat.grad])
        for buffers in vars(zero).values():
            yield from _tensors(buffers)
    for state in optimizer.state.values():
        yield from _tensors(state)


def _tensors(held: Any) -> Iterator[torch.Tensor]:
    """The tensor, or those of a list or dict; of each the part on this rank."""
    if isinstance(held, dict):
        held = [*held.values()]
    several = held if isinstance(held, list) else [held]
    yield from (_local(each) for each in several if torch.is_tensor(each))


def _local(tensor: Any) -> torch.Tensor:
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
