"""Memory that earlier attempts of a run exceeded: later plans stay clearly below it."""

from dataclasses import dataclass, replace
from typing import Literal

from launch.base.text import size
from launch.schema.machine import Machine
from launch.schema.plan import MemoryEstimate, Strategy
from launch.schema.recipe import Recipe

CLEARLY_BELOW = 0.95  # most that another plan may take of the memory that ran out, as a share

MUCH_BELOW = 0.75  # the same for the last plan that a start makes

TRAINING = ("first step", "step")
Memory = Literal["device", "host", "pinned"]  # pinned: host RAM that could not be locked
MEMORIES = {"host": "host RAM", "pinned": "host RAM that can be locked"}

# a card then holds model states only: another micro-batch changes nothing
WRITING = ("save", "export")


@dataclass(frozen=True)
class OomEvent:
    """An attempt that ended for want of memory, or whose second step took more than the budget
    has."""

    of: Memory
    # part of the run in which it ended: load, step, evaluation, save...
    section: str
    candidate: Strategy
    # Prediction for that memory by the plan, before errors of past predictions are added. Where a
    # card ran out while it wrote model states, the prediction for these alone.
    predicted_bytes: int
    # need that a second step showed, which is more than the budget; 0: memory ran out
    measured_bytes: int = 0
    limit_bytes: int = 0  # size of that memory on this machine
    # memory for the job when it was planned or when it had ended, the more of both
    available_bytes: int = 0
    is_own: bool = True  # the job took it, not others

    def counts(self, machine: Machine) -> bool:
        """True if it limits plans of another start: not if there is clearly more memory than there
        was."""
        free_bytes = available_bytes(self.of, machine, self.candidate)
        return self.is_own and (
            not self.available_bytes or free_bytes * CLEARLY_BELOW <= self.available_bytes
        )

    def rules_out(
        self,
        candidate: Strategy,
        needed_bytes: int,
        is_traced: bool,
        states_bytes: int = 0,
        fewer_is_less: bool = False,
        is_last: bool = False,
        below: float = CLEARLY_BELOW,
    ) -> str | None:
        """The reason why a candidate that needs so much would end in the same way; None if it takes
        clearly less."""
        if self.of == "device" and self.section in WRITING:
            if states_bytes < CLEARLY_BELOW * self.predicted_bytes:
                return None
            return (
                f"model states of {size(states_bytes)}, and {size(self.predicted_bytes)} ran out of"
                f" memory in {self.section}"
            )
        if self.section == "evaluation" and self.candidate.per_device_eval_batch_size > 1:
            if candidate.per_device_eval_batch_size < self.candidate.per_device_eval_batch_size:
                return None
            return (
                f"evaluating {self.candidate.per_device_eval_batch_size} samples at once ran out of"
                " memory"
            )
        at_once = self.candidate.per_device_train_batch_size
        if (
            is_last
            and self.section in TRAINING
            and candidate.per_device_train_batch_size >= at_once > 1
        ):
            return (
                f"{size(needed_bytes)}, and the last plan of a start takes fewer samples than"
                f" {at_once}, which ran out"
            )
        saves_more = fewer_is_less and self._holds_more_samples(candidate)
        if not is_traced:  # states alone do not tell one cut from another
            saves_more = (
                candidate.per_device_train_batch_size < at_once
                or candidate.levers.checkpointed_share > self.candidate.levers.checkpointed_share
            )
        if saves_more or needed_bytes < below * self.predicted_bytes:
            return None
        where = MEMORIES.get(self.of, "memory")
        if self.measured_bytes:
            return (
                f"{size(needed_bytes)}, and a plan of {size(self.predicted_bytes)} took"
                f" {size(self.measured_bytes)} of {where}, which is too much"
            )
        return (
            f"{size(needed_bytes)}, and a plan of {size(self.predicted_bytes)} ran out of {where}"
            f" in {self.section}"
        )

    def _holds_more_samples(self, candidate: Strategy) -> bool:
        """Than the candidate does at once, which saves as much in other ways."""
        failed = self.candidate
        return (
            self.of == "device"  # samples are a small part of host RAM
            and candidate.mode == failed.mode
            and candidate.per_device_train_batch_size < failed.per_device_train_batch_size
            and candidate.levers.saves_as_much_as(failed.levers)
        )


@dataclass(frozen=True)
class OomHistory:
    """The memory failures of earlier attempts, which limit the next choice."""

    device: float = 0.0  # share by which a prediction was exceeded
    host: float = 0.0
    ran_out: tuple[OomEvent, ...] = ()
    # Fewer samples at once take less even where the sum says otherwise: what ran out was not
    # counted right, and it may be what grows with them. For when nothing else is left.
    fewer_is_less: bool = False
    is_last: bool = False  # the next plan is the last of a start: it takes fewer samples at once
    below: float = CLEARLY_BELOW  # share of what ran out that the next plan may take
    spent: tuple[Recipe, ...] = ()  # recipes whose plans are used up in this start

    @property
    def may_pin(self) -> bool:
        """False if the host did not lock what an attempt pinned."""
        return all(event.of != "pinned" for event in self.ran_out)

    def rules_out(
        self, of: str, candidate: Strategy, needed_bytes: int, memory: MemoryEstimate
    ) -> str | None:
        """The reason why these failures rule out a candidate that needs so much of that memory;
        None if they do not.

        All bytes are without what is added for errors of predictions: those of one start are
        alike."""
        is_traced, states_bytes = memory.peak is not None, memory.model_state_bytes
        refusals = (
            event.rules_out(
                candidate,
                needed_bytes,
                is_traced,
                states_bytes,
                self.fewer_is_less,
                self.is_last,
                self.below,
            )
            for event in self.ran_out
            if event.of == of
        )
        return next(filter(None, refusals), None)

    def for_plan(self, is_last: bool) -> "OomHistory":
        """The same for the next plan of a start; the last one takes much less."""
        return replace(self, is_last=is_last, below=MUCH_BELOW if is_last else CLEARLY_BELOW)


NO_OOM_HISTORY = OomHistory()


def available_bytes(of: str, machine: Machine, candidate: Strategy) -> int:
    """Bytes of a memory that a job could use, as the machine was probed: of the card with the
    least, or of host RAM."""
    if of == "device" and candidate.device == "cuda":
        return min(
            (gpu.free_bytes for gpu in machine.gpus[: candidate.processes_per_machine]), default=0
        )
    return machine.host_available_bytes
