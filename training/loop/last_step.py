"""The ends of training: after its last step, or early. A run that goes on from its end trains no
further step."""

from typing import Any

from transformers import (
    EarlyStoppingCallback,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)


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


class EarlyStopping(EarlyStoppingCallback):
    """training.early_stopping_patience: stop when the held-out loss has not fallen in so many
    evaluations. All ranks count the same losses. Each checkpoint holds their count in
    trainer_state.json, so that it outlives a kill."""

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
        counts = stored.setdefault(type(self).__name__, self.state())["attributes"]
        self.early_stopping_patience_counter = counts["early_stopping_patience_counter"]
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
