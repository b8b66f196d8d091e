"""Save and stop at the end of a step, on all ranks, as the control word says. Rank 0 also has stop
conditions of its own."""

import os
import time
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from launch.base import files
from launch.run_folder import manifest
from launch.run_folder.layout import RunDir
from launch.schema.run_sections import END_S, FIRST_SAVE_S
from training.control.heartbeat import Heartbeat
from training.control.stop_word import Control, Halted, Word
from training.log import logger

_DISK_INTERVAL_S = 5.0
DISK_LOW = 1.35  # times the last checkpoint: the next checkpoint, which takes 1.1, is written now


class StopConditions:
    """Rank 0's own conditions: a request for a checkpoint, the end of its time, a disk that other
    programs fill."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        # latest end, on this machine's monotonic clock
        self._end_s = float(os.environ.get("LOWMEM_END_S") or "inf")
        self._save_s, self._save_bytes, self._free_bytes = FIRST_SAVE_S, 0, 0
        self._step_s = self._disk_checked_s = self._called_s = 0.0

    def __call__(self) -> Word:
        now_s = time.monotonic()
        self._step_s = max(now_s - (self._called_s or now_s), self._step_s / 2)
        self._called_s = now_s
        if now_s + 2 * (self._save_s + self._step_s) + END_S >= self._end_s:
            return Word.TIME_UP
        if self._save_bytes and now_s - self._disk_checked_s > _DISK_INTERVAL_S:
            self._disk_checked_s = now_s
            free = files.free_bytes(self._run.checkpoints)
            # not by rotation, which frees as much
            is_filled = free < self._free_bytes - self._save_bytes // 10
            if is_filled and free < DISK_LOW * self._save_bytes:
                return Word.DISK_LOW
        try:
            self._run.save_now_file.unlink()
        except OSError:  # not there, or no file
            return Word.NONE
        return Word.SAVE

    def saved(self, folder: Path, seconds: float) -> None:
        """Note the time and the size of a checkpoint."""
        self._save_s, self._free_bytes = seconds, files.free_bytes(self._run.checkpoints)
        self._save_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class StopCallback(TrainerCallback):
    """Comes after Trainer's own callback, which decides by the step when to evaluate and save."""

    def __init__(
        self, control: Control, heartbeat: Heartbeat, conditions: StopConditions | None
    ) -> None:
        self._control, self.heartbeat, self._conditions = control, heartbeat, conditions
        if conditions is not None:
            control.conditions = conditions
        self._save_began_s = 0.0
        self._is_requested = False  # a checkpoint

    def between_batches(self) -> None:
        """Raises Halted on all ranks if one of them was told to stop. Called between the batches of
        an evaluation. Collective."""
        self.heartbeat.beat("evaluation")
        self._halt()

    def _halt(self) -> None:
        if self._agree() > Word.SAVE:
            raise Halted(self._control.agreed)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.heartbeat.beat("first step", state.global_step, state.max_steps)
        self._halt()  # nothing is trained yet that could be lost

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self.heartbeat.beat("step", state.global_step, state.max_steps)
        self._apply_word(state, control)
        if control.should_evaluate:
            self.heartbeat.beat("evaluation")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._apply_word(state, control)

    def _apply_word(self, state: TrainerState, control: TrainerControl) -> None:
        word, step = self._agree(), state.global_step
        if word > Word.SAVE:
            self._stop(control, "%s: saving at step %d, then stopping", step)
        elif self._is_requested:
            logger.info("asked for a checkpoint: saving at step %d", step)
            control.should_save = True
        if control.should_save and not control.should_evaluate:
            self.begin_save()

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if self._conditions is not None:
            folder = Path(str(args.output_dir)) / manifest.name(state.global_step)
            self._conditions.saved(folder, time.monotonic() - self._save_began_s)
        self.heartbeat.beat("step")
        # a stop that came during the save
        if not self._control.agreed and self._agree() > Word.SAVE:
            control.should_training_stop = True
            logger.info(
                "%s: stopping after step %d, which is saved",
                *(self._control.agreed.cause, state.global_step),
            )
        self._is_requested = False

    def _agree(self) -> Word:
        word = self._control.agree()
        self._is_requested |= word == Word.SAVE
        return word

    def _stop(self, control: TrainerControl, message: str, step: int) -> None:
        """Save and stop at this step, without an evaluation."""
        logger.info(message, self._control.agreed.cause, step)
        control.should_training_stop = control.should_save = True
        control.should_evaluate = False

    def cut_evaluation(self, state: TrainerState, control: TrainerControl) -> None:
        """Save and stop instead of the rest of an evaluation."""
        self._stop(control, "%s: evaluation left out, saving at step %d", state.global_step)
        self.begin_save()

    def begin_save(self) -> None:
        """Note that a checkpoint is written from now on."""
        self._save_began_s = time.monotonic()
        self.heartbeat.beat("save")
