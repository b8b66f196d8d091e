"""Memory that data workers do not share: weights and optimizer states of their rank.

A forked worker shares the pages of its rank until one of the two writes to a page; then the kernel
copies it. A rank that steps on the host writes every state at every step, so that its workers
would hold the states a second time: 8 to 12 bytes a parameter.
"""

import ctypes
import mmap
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from training.compat import deepspeed_private
from training.log import logger

_LEAST_BYTES = 1 << 20  # least size of a tensor; smaller ones share pages with other objects


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
            error = os.strerror(ctypes.get_errno())
            logger.warning("data workers may copy weights and states in host RAM: %s", error)
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
