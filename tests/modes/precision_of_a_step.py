"""A program for test_fsdp2.py: trains a rendered run on two ranks, by DDP or by FSDP2's
shim, and writes in which precision the layers and the gradients were. argv: run folder, mode,
output file."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from launch.base import modules
from launch.base.workspace import Workspace
from launch.run_folder.layout import RankStart, RunDir
from tests.modes.fsdp_on_cpu import engage_fsdp

modules.leave_out(modules.OPTIONAL)  # as ranks do
with modules.uncollected():
    import torch
    from transformers import TrainerCallback

    from train_low_mem import leave
    from training import run as training_run
    from training.loop.trainer import LowMemTrainer

seen: dict[str, set[Any]] = {
    "layer inputs": set(),
    "products": set(),
    "logits": set(),
    "gradients": set(),
}


def enter_layer(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    seen["layer inputs"].add(args[0].dtype)


def leave_product(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:
    seen["products"].add(output.dtype)


def leave_model(module: torch.nn.Module, args: Any, output: Any) -> None:
    seen["logits"].add(output.logits.dtype)


class Gradients(TrainerCallback):
    """Notes the precision of reduced gradients, and whether bf16 could have held their values."""

    def __init__(self, trainer: LowMemTrainer) -> None:
        self.trainer = trainer

    def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        gradients = [one.grad for one in self.trainer.model.parameters() if one.grad is not None]
        local = [one.to_local() if hasattr(one, "to_local") else one for one in gradients]
        finer = any((one != one.bfloat16().float()).any() for one in local)
        seen["gradients"] |= {
            ("finer than bf16" if finer else "bf16", str(one.dtype)) for one in local
        }


def watch(trainer: LowMemTrainer) -> None:
    for layer in trainer.model.model.layers:
        layer.register_forward_pre_hook(enter_layer)
        layer.mlp.down_proj.register_forward_hook(leave_product)
    trainer.model.register_forward_hook(leave_model)
    trainer.add_callback(Gradients(trainer))


def main(run: RunDir, mode: str, output: Path) -> None:
    if mode == "fsdp2":
        engage_fsdp()
    plan = run.read_plan()
    plan = replace(plan, strategy=replace(plan.strategy, mode=mode))
    attempt = run.attempts()[-1]
    start = RankStart(Workspace.here(), run.read_recipe(), plan, True, run=run, attempt=attempt)
    training_run.train(start, lambda *_: (str(run.root), str(attempt.root)), [], watch=watch)
    if os.environ["RANK"] == "0":
        torch.save({name: sorted(map(str, values)) for name, values in seen.items()}, output)


main(RunDir(Path(sys.argv[1])), sys.argv[2], Path(sys.argv[3]))
leave(0)
