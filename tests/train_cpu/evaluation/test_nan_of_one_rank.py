"""A number that is not finite on one rank is seen by all ranks."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from launch.base.errors import NonFinite
from training.data.sample_order import SampleOrder
from training.loop import nan_guard


def check_checkpoint(folder: Path, rank: int, tell: Callable[[Any], None]) -> None:
    """Check the weights of a rank, of which rank 1 alone has one that is not finite; tell rank and
    message."""
    torch.set_num_threads(1)
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    network = torch.nn.Linear(2, 2)
    if rank == 1:
        network.bias.data[0] = float("nan")
    guard = nan_guard.NanGuard(SampleOrder(53, 3, 2, 2, rank, seed=7), folder, None, False, 1e-4)
    guard.trainer = SimpleNamespace(
        state=SimpleNamespace(global_step=7),
        args=SimpleNamespace(process_index=rank, device="cpu"),
        model=network,
        optimizer=torch.optim.SGD(network.parameters()),
        is_deepspeed_enabled=False,
    )  # pyright: ignore[reportAttributeAccessIssue]
    try:
        guard.check_checkpoint()
        tell((rank, "a checkpoint is written"))
    except NonFinite as error:
        tell((rank, str(error)))


def test_no_rank_writes_a_checkpoint_with_a_weight_of_one_rank_that_is_not_finite(tmp_path):
    forked = multiprocessing.get_context("fork")  # torch is imported already
    messages = forked.SimpleQueue()
    ranks = [
        forked.Process(target=check_checkpoint, args=(tmp_path, rank, messages.put), daemon=True)
        for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(120)
    assert [rank.exitcode for rank in ranks] == [0, 0]
    message = "step 7: not finite, so no checkpoint is written: bias"
    assert dict(messages.get() for _ in ranks) == {0: message, 1: message}
