"""Sections of a recipe that say how it runs: launch, numerics, resume, evaluation."""

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from launch.schema.machine import Device
from launch.schema.modes import LAUNCH_MODES, LaunchMode, Mode
from launch.schema.section import Section, affects, as_tuple

# seal: a checkpoint that was signed with another key; versions: another major.minor version of a
# library that writes its files.
Allowed = Literal["data", "model", "seed", "effective_batch_size", "schedule", "versions", "seal"]

# Times at the end of launch.time_limit_s: a checkpoint, before one was measured, and the ranks' end
FIRST_SAVE_S, END_S = 10.0, 5.0
RESERVED_S = 2 * FIRST_SAVE_S + END_S  # that are left at the first step at least


def start_time(text: str, now: datetime) -> datetime:
    """The local time of launch.not_before; of a time without a day the next. Raises ValueError."""
    with suppress(ValueError):  # such as 25:00
        if re.fullmatch(r"\d{1,2}:\d{2}", text):
            hour, minute = map(int, text.split(":"))
            today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
            return today if today > now else today + timedelta(days=1)
        if re.fullmatch(r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}(:\d{2})?", text):
            return datetime.fromisoformat(text)
    raise ValueError(f"{text} is no time; expected one such as 22:30 or 2026-12-31T22:30")


class LaunchSection(Section):
    """The way to run. Keys that are left out are planned."""

    mode: Annotated[Literal["auto", Mode], affects("plan", "planned")] = Field(
        default="auto", description="Launch mode; auto: planned."
    )
    num_processes: Annotated[int | None, affects("plan", "planned")] = Field(
        default=None, ge=1, le=1024, description="Ranks of all nodes together. null: planned."
    )
    nodes: Annotated[int, affects("plan")] = Field(
        default=1,
        ge=1,
        le=256,
        description="Machines; the same command runs on each, with its own machine_rank.",
    )
    machine_rank: Annotated[int, affects("machine")] = Field(
        default=0, ge=0, description="Number of this machine, from 0."
    )
    main_process_ip: Annotated[str | None, affects("name")] = Field(
        default=None,
        description="Address of the machine with machine_rank 0, as the others reach it.",
    )
    main_process_port: Annotated[int, affects("name")] = Field(
        default=29500,
        ge=1024,
        le=65_535,
        description="Port of that machine, used with several machines.",
    )
    network_interface: Annotated[str | None, affects("machine")] = Field(
        default=None,
        description="Interface between the machines, e.g. eth1. null: the one that leads to "
        "that address.",
    )
    join_timeout_s: Annotated[PositiveInt, affects("interruptions")] = Field(
        default=300, description="Seconds to wait until all machines have joined."
    )
    vram_fraction: Annotated[float, affects("plan")] = Field(
        default=0.95, gt=0, le=1, description="Share of the free VRAM that a plan may use."
    )
    assume_fits: Annotated[bool, affects("plan")] = Field(
        default=False,
        description="Start as asked, whatever memory is predicted; what runs out is planned again.",
    )
    on_oom: Annotated[Literal["replan", "fail"], affects("interruptions")] = Field(
        default="replan",
        description="After running out of memory: plan again with the effective batch held, or "
        "stop.",
    )
    exact_batch: Annotated[bool, affects("plan")] = Field(
        default=False, description="Refuse a micro-batch that does not fit instead of splitting it."
    )
    pass_env: Annotated[
        tuple[str, ...], BeforeValidator(as_tuple), affects("memory", "step_time")
    ] = Field(
        default=(),
        description="Names of environment variables that ranks get besides the usual ones.",
    )
    host_reserve_gib: Annotated[float, affects("plan")] = Field(
        default=2.0,
        ge=0,
        le=1e6,
        description="Host RAM that is left to other programs, in GiB.",
    )
    host_limit_gib: Annotated[float | None, affects("plan")] = Field(
        default=None,
        gt=0,
        le=1e6,
        description="Host RAM that a plan may take at most, in GiB. null: what is free, less the "
        "reserve.",
    )
    vram_limit_gib: Annotated[float | None, affects("plan")] = Field(
        default=None,
        gt=0,
        le=1e6,
        description="VRAM that a plan and its ranks may take at most of each card, in GiB. null: "
        "the share of what is free.",
    )
    wait: Annotated[bool | PositiveFloat, affects("interruptions")] = Field(
        default=False,
        description="Wait until the memory of the plan is free beside the leases of other runs, at "
        "most this many hours; true: without limit.",
    )
    priority: Annotated[int, affects("interruptions")] = Field(
        default=0, ge=-100, le=100, description="Of runs that wait, the highest starts first."
    )
    after: Annotated[str | None, affects("interruptions")] = Field(
        default=None,
        description="Wait until this run has ended, however: its number in `python -m launch "
        "queue`, or its folder.",
    )
    not_before: Annotated[str | None, affects("interruptions")] = Field(
        default=None,
        description="Wait until this local time, 22:30 or 2026-12-31T22:30.",
    )
    max_restarts: Annotated[int, affects("interruptions")] = Field(
        default=10,
        ge=0,
        description="Restarts after killed or hanging ranks, lost connections and crashes; 0: "
        "none.",
    )
    hang_floor_s: Annotated[float, affects("interruptions")] = Field(
        default=60,
        gt=0,
        allow_inf_nan=False,
        description="Seconds that any step may take before it counts as hanging.",
    )
    time_limit_s: Annotated[float | None, affects("interruptions")] = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Save and stop before this many seconds are over; the limit of a Slurm job "
        "counts too.",
    )
    host_stop_fraction: Annotated[float, affects("interruptions")] = Field(
        default=0.97,
        ge=0,
        le=1,
        description="Share of host RAM above which the run is saved and stopped; 0: never.",
    )

    @property
    def named_mode(self) -> LaunchMode | None:
        """The row of the mode that the recipe names; None: auto."""
        return None if self.mode == "auto" else LAUNCH_MODES[self.mode]

    @property
    def waits(self) -> bool:
        """True if the run may wait before it starts."""
        return bool(self.wait or self.after or self.not_before)

    @property
    def wait_s(self) -> float:
        """The longest wait for memory."""
        return math.inf if isinstance(self.wait, bool) else self.wait * 3600

    @field_validator("after", "not_before", mode="before")
    @classmethod
    def typed_without_quotes(cls, value: Any) -> Any:
        return str(value) if type(value) is int else value  # YAML reads 7 as a number

    @field_validator("not_before")
    @classmethod
    def is_time(cls, text: str | None) -> str | None:
        if text is not None:
            start_time(text, datetime.now())
        return text

    @property
    def device(self) -> Device | None:
        """The device that the mode's name fixes."""
        return self.named_mode.device if self.named_mode else None

    def _faults(self) -> Sequence[tuple[object, str]]:
        cluster_keys = ("machine_rank", "main_process_ip", "network_interface")
        superfluous = [key for key in cluster_keys if getattr(self, key)]
        return [
            (
                self.nodes > 1 and self.waits,
                "wait, after and not_before are for one machine: several would wait one by one; set"
                " nodes to 1 or leave them out",
            ),
            (
                self.nodes == 1 and superfluous,
                f"{', '.join(superfluous)}: only for several machines; set launch.nodes too",
            ),
            (
                self.machine_rank >= self.nodes > 1,
                f"machine_rank {self.machine_rank}, but nodes count from 0 to {self.nodes - 1}",
            ),
            (
                self.nodes > 1 and self.main_process_ip is None,
                f"nodes {self.nodes} needs main_process_ip, the address of the node with"
                " machine_rank 0",
            ),
        ]


class NumericsSection(Section):
    """Reactions to numbers that are finite but too large. NaN and infinity always end the run."""

    skip_spikes_above: Annotated[float | None, affects("weights")] = Field(
        default=None,
        gt=1,
        allow_inf_nan=False,
        description="Skip a step whose gradient norm is this many times the median. null: never.",
    )


class ResumeSection(Section):
    """Differences that are allowed in a continued run, although they change the result."""

    allow: Annotated[tuple[Allowed, ...], BeforeValidator(as_tuple), affects("interruptions")] = (
        Field(
            default=(),
            description="What may differ from the run that is continued, although it changes the "
            "result.",
        )
    )


class EvaluationSection(Section):
    """Measurements besides the loss on the validation file."""

    exact_match_rows: Annotated[int, affects("interruptions")] = Field(
        default=0,
        ge=0,
        description="Held-out rows that are answered before and after training; 0: none.",
    )
    sample_answers: Annotated[int | None, affects("interruptions")] = Field(
        default=None,
        ge=0,
        le=16,
        description="Held-out questions that are answered at each evaluation, for the report; 0:"
        " none. null: 3 with `exact_match_rows`, but none where ranks share the weights.",
    )
    max_new_tokens: Annotated[int, affects("interruptions")] = Field(
        default=64,
        ge=1,
        le=4096,
        description="Most tokens of an answer; of sample answers also no more than the longest row"
        " leaves beside their questions.",
    )
