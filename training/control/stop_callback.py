"""Ranks obey the control word at the end of a step: all save, and stop if told to. Rank 0 has words
of its own."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from launch.base import files
from launch.run_folder import manifest
from launch.run_folder.layout import RunDir
from training.control.heartbeat import Heartbeat
from training.control.stop_word import Control, Halted, Word

logger = logging.getLogger("lowmem")

DISK_INTERVAL_S = 5.0
DISK_LOW = 1.35  # times the last checkpoint: the next one takes 1.1, and had better be written now
FIRST_SAVE_S = 10.0  # allowed for a checkpoint when none was written yet
MARGIN_S = 5.0  # for the ranks to end after it


class StopConditions:
    """What rank 0 sees without being told: a wish for a checkpoint, the end of its time, a disk
    that others fill."""

    def __init__(self, run: RunDir) -> None:
        self._run = run
        end_s = os.environ.get("LOWMEM_END_S")  # on this machine's monotonic clock
        self._end_s = float(end_s) if end_s else None
        self._save_s, self._save_bytes, self._free_bytes = FIRST_SAVE_S, 0, 0
        self._step_s, self._disk_at = 0.0, 0.0
        self._asked_at: float | None = None

    def __call__(self) -> Word:
        now = time.monotonic()
        self._step_s = max(now - (self._asked_at or now), self._step_s / 2)
        self._asked_at = now
        if (
            self._end_s is not None
            and now + 2 * (self._save_s + self._step_s) + MARGIN_S >= self._end_s
        ):
            return Word.TIME_UP
        if self._save_bytes and now - self._disk_at > DISK_INTERVAL_S:
            self._disk_at = now
            free = files.free_bytes(self._run.checkpoints)
            # not by rotation, which frees as much
            is_filled = free < self._free_bytes - self._save_bytes // 10
            if is_filled and free < DISK_LOW * self._save_bytes:
                return Word.DISK_LOW
        try:
            self._run.save_now_file.unlink()
        except FileNotFoundError:
            return Word.NONE
        return Word.SAVE

    def saved(self, folder: Path, seconds: float) -> None:
        """What a checkpoint took."""
        self._save_s, self._free_bytes = seconds, files.free_bytes(self._run.checkpoints)
        self._save_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


class StopCallback(TrainerCallback):
    """Stands behind Trainer's own callback, which says by the step when to evaluate and save."""

    def __init__(
        self, control: Control, heartbeat: Heartbeat, watch: StopConditions | None
    ) -> None:
        self._control, self._heartbeat, self._watch = control, heartbeat, watch
        if watch is not None:
            control.watch = watch
        self._saving_since = 0.0
        self._is_asked = False  # for a checkpoint

    def micro_batch(self) -> None:
        self._heartbeat.again()

    def between_batches(self) -> None:
        """Of an evaluation. Raises Halted on all ranks where one was told to stop. Collective."""
        self._heartbeat.beat("evaluation")
        if self._agree() > Word.SAVE:
            raise Halted(self._control.agreed)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._heartbeat.beat("first step", state.global_step, state.max_steps)
        if self._agree() > Word.SAVE:  # nothing is trained yet that could be lost
            raise Halted(self._control.agreed)

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._heartbeat.beat("step", state.global_step, state.max_steps)
        self._obey(state, control)
        if control.should_evaluate:
            self._heartbeat.beat("evaluation")

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._obey(state, control)

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        if self._watch is not None:
            folder = Path(str(args.output_dir)) / manifest.name(state.global_step)
            self._watch.saved(folder, time.monotonic() - self._saving_since)
        self._heartbeat.beat("step")
        # told meanwhile: what was saved is the last step
        if not self._control.agreed and self._agree() > Word.SAVE:
            control.should_training_stop = True
            logger.info(
                "%s: stopping after step %d, which is saved",
                self._control.agreed.cause,
                state.global_step,
            )
        self._is_asked = False

    def _agree(self) -> Word:
        word = self._control.agree()
        self._is_asked |= word == Word.SAVE
        return word

    def _obey(self, state: TrainerState, control: TrainerControl) -> None:
        word = self._agree()
        if word > Word.SAVE:
            logger.info("%s: saving at step %d, then stopping", word.cause, state.global_step)
            control.should_training_stop, control.should_evaluate = True, False
        elif self._is_asked:
            logger.info("asked for a checkpoint: saving at step %d", state.global_step)
        control.should_save |= word > Word.SAVE or self._is_asked
        if control.should_save and not control.should_evaluate:
            self.begin_save()

    def cut_evaluation(self, state: TrainerState, control: TrainerControl) -> None:
        """Instead of its score: what is trained is saved, and training stops."""
        logger.info(
            "%s: evaluation left out, saving at step %d",
            self._control.agreed.cause,
            state.global_step,
        )
        control.should_training_stop, control.should_evaluate, control.should_save = (
            True,
            False,
            True,
        )
        self.begin_save()

    def begin_save(self) -> None:
        """From now on a checkpoint is written."""
        self._saving_since = time.monotonic()
        self._heartbeat.beat("save")
