"""Progress of a rank while it trains: events, log lines, and a bar if no launcher draws it."""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from launch.base import files, processes
from launch.base.progress import eta
from launch.run_folder.layout import AttemptDir
from launch.schema.result import HeldOut, PhasePeaks, SecondStep, StepEvent
from training.engines.setup import local_bytes
from training.log import logger
from training.loop.rank_memory import MemoryPeaks, Part

_STEADY_STEP = 2  # the first step has no optimizer states yet
LONG_WAIT_S = 60.0  # wait until a log line: the remaining time is logged before
COUNTED = ("tokens", "computed_tokens", "samples")
_HOST_INTERVAL_S = 2.0  # finding the job's processes takes a millisecond


class HostMemory:
    """Host RAM of the job (launcher, ranks, data workers), read at most every _HOST_INTERVAL_S
    seconds."""

    def __init__(self) -> None:
        root = os.environ.get("LOWMEM_ROOT_PID") or (
            os.getppid() if "WORLD_SIZE" in os.environ else os.getpid()
        )
        self._job = processes.JobMemory(int(root))
        self._read_at = -_HOST_INTERVAL_S
        self._in_training = False

    def begin_training(self) -> None:
        """Forget the peak of loading, in which pages of files are mapped."""
        processes.forget_peak()
        self._in_training = True

    def end_training(self) -> None:
        self.highest()
        self._in_training = False

    def read(self) -> int:
        if time.monotonic() - self._read_at >= _HOST_INTERVAL_S:
            self._read_at = time.monotonic()
            self._job.read(self._in_training)
        return self._job.bytes

    def highest(self) -> int:
        """The highest that the job can have had at the reads so far, and now."""
        self._job.read(self._in_training, is_exact=True)
        return self._job.peak_bytes


class StepMeter:
    """Collector of a rank's losses, token counts and rows. They are summed over ranks when they are
    written, not at each step.

    The rows are written to `samples_file` of this rank: step, count, rows, as int32."""

    def __init__(self, samples_file: Path | None = None) -> None:
        self._file = samples_file.open("ab") if samples_file else None
        self._rows: list[np.ndarray] = []
        self._loss: torch.Tensor | None = None
        self._counts = np.zeros(len(COUNTED), dtype=np.int64)
        self.waited_s = 0.0
        self.steps: list[dict[str, Any]] = []

    def add(
        self,
        loss: torch.Tensor,
        tokens: int,
        computed_tokens: int,
        num_samples: int,
        rows: np.ndarray | None = None,
    ) -> None:
        """Add a micro-batch. `loss` is its share of the step's mean loss, times the number of
        ranks."""
        if rows is not None:
            self._rows.append(rows)
        self._loss = loss if self._loss is None else self._loss + loss
        self._counts += (tokens, computed_tokens, num_samples)

    def close_step(self, **facts: Any) -> None:
        assert self._loss is not None, "an optimizer step without a micro-batch"
        self.steps.append(
            {
                "loss": self._loss,
                "counts": self._counts.tolist(),
                "data_seconds": self.waited_s,
                **facts,
            }
        )
        self._loss, self.waited_s = None, 0.0
        self._counts[:] = 0
        if self._file:
            rows = np.concatenate([np.empty(0, dtype="<i4"), *self._rows])
            self._file.write(
                np.concatenate([[facts["step"], len(rows)], rows]).astype("<i4").tobytes()
            )
            self._rows = []

    def keep_rows(self, synced: bool) -> None:
        """Write the rows of the steps so far to the kernel, or to the disk before a checkpoint,
        which must not contain more steps."""
        if self._file:
            self._file.flush()
            if synced:
                os.fsync(self._file.fileno())

    def drain(self, device: torch.device) -> list[dict[str, Any]]:
        """The steps since the last call, summed over ranks. All ranks call this at the same
        step."""
        steps, self.steps = self.steps, []
        if not steps:
            return []
        counts = [step.pop("counts") for step in steps]
        losses = torch.stack([step["loss"].float() for step in steps]).double().to(device)
        table = torch.cat(
            [losses[:, None], torch.tensor(counts, dtype=torch.float64, device=device)], dim=1
        )
        world_size = 1
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(table)
            world_size = torch.distributed.get_world_size()
        for step, (loss, *summed) in zip(steps, table.tolist(), strict=True):
            step.update(zip(COUNTED, map(int, summed), strict=True), loss=loss / world_size)
        return steps


class Reporter(TrainerCallback):
    """Callback that writes events.jsonl and the log on rank 0."""

    def __init__(
        self,
        attempt: AttemptDir,
        rank: int,
        meter: StepMeter,
        order: Any,
        peaks: MemoryPeaks,
        draw: bool,
        check_loss: Callable[[int, float], None],
    ) -> None:
        self._check_loss, self._peaks = check_loss, peaks
        self._rank, self._meter, self._order, self._device = rank, meter, order, peaks.device
        paths = (attempt.events_file, attempt.held_out_file) if rank == 0 else ()
        self._events, self._held_out = [path.open("a", encoding="utf-8") for path in paths] or (
            None,
            None,
        )
        self.host = HostMemory()
        self._bar = _bar() if draw and rank == 0 else None
        self._figures = ""
        self._second_step_at: float | None = None  # the first step is slower than the others
        self._scheduled: Mapping[str, tuple[int, int]] = {}  # processes.scheduled() at that step
        self.core_share = 1.0  # share from that step to the end
        # seconds of evaluations and saves since then, and the steps from one to the next
        self._between: dict[str, list[float]] = {"evaluation": [], "save": []}
        self._every: dict[str, int] = {}
        self._step_began = 0.0
        self._learning_rate = 0.0
        self.gradients_bytes = 0
        self.phases: Mapping[Part, PhasePeaks] = {}  # measured until the last log
        self.last_event: StepEvent | None = None
        self._steps = 0
        self._attempt = attempt
        self._is_refused = False

    def _write_second_step(self) -> None:
        """Write the memory of the second step, which the launcher compares with the plan.
        Collective."""
        peaks = self._peaks.of_all_ranks()
        highest = PhasePeaks.highest(
            [peaks[part] for part in ("first_step", "step") if part in peaks]
        )
        if self._rank == 0:
            free = torch.cuda.mem_get_info(self._device)[0] if self._device.type == "cuda" else 0
            second_step = SecondStep(
                highest.allocated_bytes, highest.reserved_bytes, self.host.highest(), free
            )
            files.write_json(self._attempt.second_step_file, second_step)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._steps:
            self.host.begin_training()
        self._step_began = time.monotonic()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._count("evaluation", state.eval_steps)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._count("save", state.save_steps)

    def _count(self, kind: str, every: float) -> None:
        """Count the time of an evaluation or a save, which is not the next step's."""
        now_s = time.monotonic()
        if self._second_step_at is not None:
            self._between[kind].append(now_s - self._step_began)
        self._every[kind] = max(int(every), 1)
        self._step_began = now_s

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._steps:  # time before an attempt's first step belongs to its start
            if self._device.type == "cuda":  # a step cannot use the cached blocks of loading
                torch.cuda.empty_cache()
            self._peaks.begin("first_step")
            self._step_began, self._meter.waited_s = time.monotonic(), 0.0

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._learning_rate = float(kwargs["optimizer"].param_groups[0]["lr"])
        if not self.gradients_bytes:
            gradients = (
                parameter.grad
                for parameter in kwargs["model"].parameters()
                if parameter.grad is not None
            )
            self.gradients_bytes = sum(map(local_bytes, gradients))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        now_s = time.monotonic()
        self._meter.close_step(
            step=state.global_step,
            epoch=state.epoch,
            seconds=now_s - self._step_began,
            learning_rate=self._learning_rate,
            time=time.time(),
        )
        self._steps += 1
        self._peaks.begin("step")
        if self._steps == _STEADY_STEP:
            self._write_second_step()
            now_s = self._second_step_at = time.monotonic()
            self._scheduled = processes.scheduled()
        self._step_began = now_s
        if self._steps == _STEADY_STEP + 1:
            self._say_time_left_early(state.global_step, state.max_steps, int(args.logging_steps))
        if self._bar:
            self._bar.show("training", state.global_step, state.max_steps, self._figures)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        logs: dict[str, Any],
        **kwargs: Any,
    ) -> None:
        if "loss" in logs:
            self.flush(state.max_steps, logs.get("grad_norm"))
            # the time of a log does not count for the next step
            self._step_began = time.monotonic()
        elif "eval_loss" in logs and self._rank == 0:
            logger.info(
                "step %d/%d  held-out loss %.4f  perplexity %.2f  (%.1f s)",
                state.global_step,
                state.max_steps,
                logs["eval_loss"],
                logs["eval_perplexity"],
                logs["eval_runtime"],
            )
            self._write(
                self._held_out,
                HeldOut(
                    step=state.global_step,
                    samples_seen=self._order.samples_seen(state.global_step),
                    loss=logs["eval_loss"],
                    seconds=logs["eval_runtime"],
                    time=time.time(),
                ),
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.flush(state.max_steps, None)
        if self._second_step_at is not None:
            self.core_share = processes.core_share(self._scheduled)
        if self._rank == 0:
            self.host.end_training()
        if self._bar:
            self._bar.stop()

    def flush(self, max_steps: int, grad_norm: float | None) -> None:
        """Write the steps since the last flush. Every rank calls this at the same step."""
        self._meter.keep_rows(synced=False)
        steps = self._meter.drain(self._device)
        self.phases = self._peaks.of_all_ranks()
        highest = PhasePeaks.highest(self.phases.values())
        if self._events is None or not steps:
            return
        events = [
            StepEvent(
                max_steps=max_steps,
                samples_seen=self._order.samples_seen(step["step"]),
                grad_norm=float(grad_norm) if grad_norm is not None and step is steps[-1] else None,
                vram_allocated_bytes=highest.allocated_bytes,
                vram_reserved_bytes=highest.reserved_bytes,
                vram_total_bytes=self._peaks.total_bytes,
                host_pss_bytes=self.host.read(),
                **step,
            )
            for step in steps
        ]
        self._write(self._events, *events)
        for event in events:
            self._check_loss(event.step, event.loss)
        self.last_event = events[-1]
        means = {
            key: sum(step[key] for step in steps) / len(steps)
            for key in ("loss", "seconds", "tokens", "samples")
        }
        mean = replace(self.last_event, **means)
        self._figures = mean.metrics()
        logger.info("%s", mean.line(self._time_left(mean.step, mean.max_steps)))

    def _pace_s(self) -> float | None:
        """Seconds of a step of this attempt, without evaluations and saves; None before its third
        step."""
        past = self._steps - _STEADY_STEP
        if self._second_step_at is None or past < 1:
            return None
        between_s = sum(map(sum, self._between.values()))
        return (time.monotonic() - self._second_step_at - between_s) / past

    def _time_left(self, step: int, max_steps: int) -> str:
        """The remaining time of steps, evaluations and saves, as far as this attempt had some; ""
        before the third step and after the last."""
        pace_s = self._pace_s()
        if pace_s is None or step >= max_steps:
            return ""
        left_s = (max_steps - step) * pace_s
        for kind, seconds in self._between.items():
            if seconds:
                every = self._every[kind]
                left_s += statistics.median(seconds) * (max_steps // every - step // every)
        return eta(left_s)

    def _say_time_left_early(self, step: int, max_steps: int, logging_steps: int) -> None:
        """Log the remaining time at the third step, where the next log line is a minute away."""
        pace_s = self._pace_s() or 0.0
        next_log_s = (-step % logging_steps) * pace_s
        if self._rank == 0 and next_log_s > LONG_WAIT_S and step < max_steps:
            logger.info(
                "step %d/%d  %s at %.3g s a step",
                *(step, max_steps, self._time_left(step, max_steps), pace_s),
            )

    def _write(self, file: IO[str] | None, *figures: StepEvent | HeldOut) -> None:
        """Write figures. If the disk refuses them they are lost, a warning says so once, and the
        training continues."""
        try:
            file.write("".join(files.to_json(asdict(figure)) + "\n" for figure in figures))
            file.flush()
        except OSError as error:
            if not self._is_refused:
                logger.warning("%s: %s; figures are lost", Path(file.name).name, error.strerror)
            self._is_refused = True


def _bar() -> Any:
    """The bar on the terminal of a start without a launcher. Otherwise the launcher draws it."""
    from rich.console import Console

    from launch.base.progress_bar import ProgressBar

    return ProgressBar(Console(highlight=False, soft_wrap=True), stays=True)
