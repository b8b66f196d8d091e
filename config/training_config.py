"""The A6000 guide's import: `from config.training_config import get_medium_config`. The values are
those of the recipes minigpt_medium and minigpt_large in configs/recipes; change them there, or on a
command line."""

from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path

# for a program that is started elsewhere
sys.path.append(str(Path(__file__).resolve().parent.parent))

from launch.base import interpreter

# the guide's line; a program of the user's decides for itself which Python runs it
if sys.argv[:1] == ["-c"]:
    interpreter.go_on_with_packages()

from launch.base.workspace import CODE
from launch.plan.facts import model_size
from launch.predict.models import model_config
from launch.recipe import load


@dataclass(frozen=True)
class TrainingConfig:
    """What scripts/train.py --mode pretrain asks for; what runs on a machine is printed when it
    starts."""

    name: str
    model: str
    parameters: int
    max_length: int
    batch_size: int
    gradient_accumulation_steps: int
    effective_batch_size: int
    mixed_precision: bool
    learning_rate: float
    warmup_steps: float
    num_workers: int | None
    prefetch_factor: int | None
    pin_memory: bool
    persistent_workers: bool

    def __str__(self) -> str:
        return "\n".join(f"{field.name:28}{getattr(self, field.name)}" for field in fields(self))


def get_medium_config() -> TrainingConfig:
    """The configuration of --config medium, printed."""
    return _shown("minigpt_medium")


def get_large_config() -> TrainingConfig:
    """The configuration of --config large, printed."""
    return _shown("minigpt_large")


def _shown(name: str) -> TrainingConfig:
    recipe, _ = load.load(name)
    training, extras = recipe.training, recipe.training.extras
    batch, steps = training.per_device_train_batch_size, training.gradient_accumulation_steps
    read = model_config.read(recipe.model, root=CODE, cache=CODE / ".cache")
    config = TrainingConfig(
        name=name,
        model=str(recipe.model.shape),
        parameters=model_size(recipe, *read).parameters,
        max_length=recipe.data.max_length,
        batch_size=batch,
        gradient_accumulation_steps=steps,
        effective_batch_size=batch * steps,
        mixed_precision=training.bf16 or training.fp16,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        num_workers=training.dataloader_num_workers,
        prefetch_factor=extras.get("dataloader_prefetch_factor"),
        pin_memory=extras.get("dataloader_pin_memory", True),
        persistent_workers=extras.get("dataloader_persistent_workers", True),
    )
    print(config)
    return config
