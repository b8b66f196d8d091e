"""Results of a run: steps, evaluations, failures. Frozen."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from launch.schema.machine import GIB


@dataclass(frozen=True)
class StepEvent:
    """One optimizer step as rank 0 writes it to events.jsonl; counts are of all ranks, `tokens`
    those that are not padding."""

    step: int
    max_steps: int
    epoch: float
    samples_seen: int
    tokens: float
    samples: float
    loss: float
    learning_rate: float
    grad_norm: float | None
    seconds: float
    vram_allocated_bytes: int  # peak over ranks since the start
    vram_reserved_bytes: int
    vram_total_bytes: int  # 0: no GPU
    host_pss_bytes: int  # of the whole job, now
    time: float  # unix time
    computed_tokens: int | None = None  # padding included; None: an older version's step
    # of `seconds`: until rank 0 had its batches, and all ranks knew of theirs
    data_seconds: float | None = None

    def line(self, time_left: str = "") -> str:
        """The line in every log; loss, tokens, samples and seconds may be means over the steps
        since the last one."""
        parts = (f"step {self.step}/{self.max_steps}", f"epoch {self.epoch:.2f}", time_left)
        return "  ".join([*filter(None, parts), self.metrics()])

    def metrics(self) -> str:
        """The words every screen and log uses for a step's figures."""
        rate = 1 / self.seconds if self.seconds > 0 else math.inf
        vram = ""
        if self.vram_total_bytes:
            vram = (
                f"  VRAM {self.vram_allocated_bytes / GIB:.2f} GiB (reserved"
                f" {self.vram_reserved_bytes / GIB:.2f} of {self.vram_total_bytes / GIB:.1f})"
            )
        return (
            f"loss {self.loss:.4f}  lr {self.learning_rate:.3e}  {self.seconds:.3f} s/step"
            f"  {self.samples * rate:,.1f} samples/s  {self.tokens * rate:,.0f} tokens/s"
            f"{vram}  RAM {self.host_pss_bytes / GIB:.2f} GiB"
        )


@dataclass(frozen=True)
class HeldOut:
    """One evaluation as rank 0 writes it to held_out.jsonl."""

    step: int
    samples_seen: int
    loss: float
    seconds: float
    time: float  # unix time, at its end


@dataclass(frozen=True)
class Evidence:
    """What an ended attempt left behind; classify() reads nothing else."""

    returncode: int  # of the launcher; negative: the signal that killed it
    rank_errors: tuple[Mapping[str, Any], ...]  # ranks/<r>/error.json, earliest first
    log_tail: str
    oom_kills: int  # growth of the cgroup's oom_kill counter during the attempt
    host_limit_bytes: int
    host_peak_bytes: int
    completed: bool  # rank 0 wrote its outcome and reached the last step
    stopped_by: int | None = None  # signal number that the user sent to the supervisor
    preempted: Mapping[str, Any] | None = None  # rank 0's outcome, where the ranks agreed to stop
    hang: str = ""  # which rank was silent, where and how long
    # why the host's RAM was about to run out, where the ranks were stopped for it
    pressure: str = ""
    # pids of ranks that the supervisor ended, since another had ended before them
    ended_ranks: tuple[int, ...] = ()
    vram_reserved_bytes: int = 0  # of the fullest rank, by the last step that was logged
    vram_total_bytes: int = 0  # 0: no GPU, or no step


@dataclass(frozen=True)
class Failure:
    """Why an attempt ended without a model: cause, the line that proves it, one fix."""

    kind: str
    exit_code: int
    cause: str
    proof: str
    fix: str
    # the heartbeat's, in which the rank was that failed first: load, step, evaluation, ...
    section: str = ""


@dataclass(frozen=True)
class RunResult:
    """The end of a run, as the report shows it."""

    run_dir: str
    exit_code: int
    failure: Failure | None
    seconds: float
    host_peak_bytes: int
    summary: Mapping[str, Any] = field(default_factory=dict)  # rank 0's outcome.json
    plan_again: bool = False  # stopped because its second step took more than was predicted
    note: str = ""  # what else a reader should know
    last_step: int = 0  # that a rank reached
    # least that the job and what was free took together while it was watched; 0: not watched
    host_left_bytes: int = 0
    unkillable: tuple[int, ...] = ()  # processes of the run that are still there
