"""training.early_stopping_patience: transformers' own callback, whose count of evaluations outlives
a kill. Each checkpoint holds it in trainer_state.json."""

from __future__ import annotations

from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from training.loop.last_step import NothingLeft

_COUNTER = "early_stopping_patience_counter"


class EarlyStopping(EarlyStoppingCallback):
    """Stop when the held-out loss has not fallen in so many evaluations. All ranks count the same
    losses."""

    def __init__(self, early_stopping_patience: int) -> None:
        super().__init__(early_stopping_patience)
        self._first_step = 0  # step at which this attempt begins

    @property
    def has_stopped(self) -> bool:
        return self.early_stopping_patience_counter >= self.early_stopping_patience

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Go on counting where the checkpoint has stopped. Raises NothingLeft."""
        stored = state.stateful_callbacks
        assert isinstance(stored, dict)
        # a checkpoint from before the key was set has no count, and Trainer expects one
        of_checkpoint = stored.setdefault(type(self).__name__, self.state())
        self.early_stopping_patience_counter = of_checkpoint["attributes"][_COUNTER]
        self._first_step = state.global_step
        if self.has_stopped:
            raise NothingLeft(f"training had stopped early at step {state.global_step:,}")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float],
        **kwargs: Any,
    ) -> None:
        # training.eval_on_start: in a resumed run this evaluation is no further one
        if state.global_step > self._first_step:
            super().on_evaluate(args, state, control, metrics, **kwargs)
        if control.should_training_stop:
            control.should_save = True  # as at the last of all steps
