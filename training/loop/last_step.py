"""The end of training: a run that goes on from its last step trains no further one."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class NothingLeft(Exception):
    """The checkpoint to go on from is that of the run's last step; the text says why it is."""


class LastStep(TrainerCallback):
    """Trainer looks whether it is done only after a step, and so would train one too many."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Raises NothingLeft."""
        if state.global_step >= state.max_steps:
            raise NothingLeft(f"all {state.max_steps:,} steps had been trained")
