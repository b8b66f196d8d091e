"""A program for test_equivalence.py: trains a recipe's plan on however many ranks it finds, and
writes what each optimizer step did: gradient before clipping, all-reduces. argv: run folder, output
file, run folder, output file..."""

import sys
from pathlib import Path
from typing import Any

from launch.base import modules
from launch.base.workspace import Workspace
from launch.probe import packages
from launch.run_folder.layout import RankStart, RunDir

recipe = RunDir(Path(sys.argv[1])).read_recipe()
modules.leave_out(packages.unused(recipe, None))  # as ranks do
with modules.uncollected():
    import torch
    import torch.distributed as dist
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
    from transformers import TrainerCallback

    from train_low_mem import leave
    from training import run as training_run
    from training.loop.trainer import LowMemTrainer

steps: list[dict[str, Any]] = []
reduces = 0


def counted(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    global reduces
    reduces += bucket.is_last()  # a gradient is reduced in several buckets
    return default_hooks.allreduce_hook(state, bucket)


class Watch(TrainerCallback):
    def __init__(self, trainer: LowMemTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trainer.model_wrapped, torch.nn.parallel.DistributedDataParallel):
            self.trainer.model_wrapped.register_comm_hook(None, counted)

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        gradient = [p.grad.flatten() for p in self.trainer.model.parameters() if p.grad is not None]
        steps.append({"gradient": torch.cat(gradient).clone()})


def main(run: RunDir, output: Path) -> None:
    global reduces
    reduces = 0
    steps.clear()
    attempt = run.attempts()[-1]
    start = RankStart(
        Workspace.here(), run.read_recipe(), run.read_plan(), True, run=run, attempt=attempt
    )
    folders = str(run.root), str(attempt.root)
    training_run.train(
        start, lambda *_: folders, [], watch=lambda trainer: trainer.add_callback(Watch(trainer))
    )
    torch.save(
        {"gradients": torch.stack([step["gradient"] for step in steps]), "reduces": reduces}, output
    )


for folder, output in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    main(RunDir(Path(folder)), Path(output))
leave(0)
