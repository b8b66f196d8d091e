"""The lease of a run: taken before its ranks start, and changed with what they take."""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from launch.base import files
from launch.base.errors import ConfigError
from launch.base.workspace import Workspace
from launch.plan.planner import Choice
from launch.probe import machine as probe_machine
from launch.queue import admission, leases, starts
from launch.queue.leases import Lease, NoLeases, OwnLease, Record, Taken
from launch.run_folder import disk_space
from launch.run_folder.layout import RunDir
from launch.schema.result import SecondStep
from launch.schema.run_sections import LaunchSection, start_time

_STORED_INTERVAL_S = 10.0  # pause between two counts of the checkpoints that are there


class RunLease:
    """The lease of a start, none before take(). Without a folder for leases there is none, and a
    line says so."""

    def __init__(self, root: Path, say: Callable[[str], None], locks: ExitStack) -> None:
        self._root, self._say, self._locks = root, say, locks
        self._own: OwnLease | None = None
        self._stored_bytes, self._stored_at = 0, 0.0

    def take(self, choice: Choice, run: RunDir, planned_beside: Sequence[int]) -> str:
        """Lease the memory of a plan; "" or the reason why it cannot be had any more.

        Raises DoesNotFit if a run that waits is before the start."""
        try:
            lease = starts.take(
                leases.folder(),
                self._record(choice, run),
                lambda granted: self._supply(choice, run, granted),
                planned_beside,
                choice.recipe.launch.assume_fits,
                self._own,
            )
        except NoLeases as error:
            self._say(f"this run has no lease, other starts may plan with its memory: {error}")
            return ""
        if isinstance(lease, str):
            return lease
        self._keep(lease)
        return ""

    def wait(self, choice: Choice, run: RunDir, workspace: Workspace, waited_s: float) -> bool:
        """Wait for the memory of a plan, in the order of all runs that wait; `waited_s`: the wait
        so far. False: a plan for what is free may start sooner.

        Raises ResourceError when the recipe's hours are over, or without a folder for leases."""
        launch, place = choice.recipe.launch, leases.folder()
        lease, is_granted = starts.wait(
            place,
            self._record(choice, run),
            lambda granted: self._supply(choice, run, granted),
            Blocked(launch, place, workspace).reason,
            self._say,
            self._own,
            launch.wait_s,
            waited_s,
        )
        self._keep(lease)
        return is_granted

    def _keep(self, lease: OwnLease) -> None:
        if self._own is None:
            self._locks.callback(lease.release)
        self._own = lease

    def hold_plan(self, choice: Choice, run: RunDir) -> None:
        """Hold all that the plan of an attempt needs, while it has not begun or has ended."""
        if self._own is not None:
            record = self._record(choice, run)
            self._own.write(needs=record.needs, taken=record.taken, cards=record.cards)

    def hold_taken(self, choice: Choice, run: RunDir, host_bytes: int) -> bool:
        """Write what the ranks take of host RAM and the disk. True: the run is to yield."""
        if self._own is None:
            return False
        now_s = time.monotonic()
        if now_s - self._stored_at > _STORED_INTERVAL_S:
            self._stored_at = now_s
            self._stored_bytes = disk_space.stored_bytes(run, choice.recipe, choice.plan)
        card_bytes = self._own.record.taken.card_bytes
        self._own.write(taken=Taken(host_bytes, card_bytes, self._stored_bytes))
        if not self._own.is_yielded():
            return False
        if choice.recipe.launch.nodes > 1:
            self._say("queue yield: a run of several machines cannot wait; it goes on")
            self._own.settle_yield()
            return False
        return True

    def hold_measured(self, choice: Choice, measured: SecondStep) -> None:
        """Hold what the second step took, and what is predicted of evaluation and saving, instead
        of all that was predicted."""
        if self._own is None:
            return
        plan, record = choice.plan, self._own.record
        on_cards = plan.strategy.device == "cuda"
        taken = Taken(
            measured.host_pss_bytes,
            measured.reserved_bytes + plan.estimate.outside_bytes if on_cards else 0,
            record.taken.disk_bytes,
        )
        self._own.write(needs=admission.later_needs(record.needs, plan, taken), taken=taken)

    def _record(self, choice: Choice, run: RunDir) -> Record:
        """The most that a plan takes, with all checkpoints that are there at once."""
        recipe, plan = choice.recipe, choice.plan
        disk_bytes = (disk_space.num_kept(recipe) + 1) * plan.checkpoint_bytes
        disk = run.checkpoints.stat().st_dev, disk_bytes
        needs = admission.needs_of(plan, choice.machine, recipe, disk)
        self._stored_bytes = disk_space.stored_bytes(run, recipe, plan)
        return leases.boot_record(
            state="granted",
            needs=needs,
            taken=Taken(disk_bytes=self._stored_bytes),
            cards=tuple(gpu.key for gpu in choice.machine.gpus[: needs.num_cards]),
            priority=recipe.launch.priority,
            recipe=recipe.name[:100],
            run=str(run.root),
        )

    def _supply(self, choice: Choice, run: RunDir, granted: Sequence[Lease]) -> admission.Supply:
        """The memory that is free now, and the disk space for checkpoints."""
        machine = probe_machine.with_memory_of_now(choice.machine, self._root)
        device = run.checkpoints.stat().st_dev
        return admission.Supply(machine, granted, {device: files.free_bytes(run.checkpoints)})


class Blocked:
    """The reasons why a run may not start yet, whatever memory is free."""

    def __init__(self, launch: LaunchSection, place: Path, workspace: Workspace) -> None:
        self._place, self._after = place, launch.after
        self._not_before = (
            start_time(launch.not_before, datetime.now()) if launch.not_before else None
        )
        if launch.after is None:
            return
        if launch.after.isascii() and launch.after.isdigit():
            if int(launch.after) > (last := leases.last_number(place)):
                raise ConfigError(
                    f"launch.after {launch.after}: there was no such run, the last is number"
                    f" {last}; python -m launch queue lists those that run and wait"
                )
            return
        folder = (workspace.root / launch.after).resolve()
        leased = [lease.record.run for lease in leases.live(place) if lease.is_own]
        if not (RunDir(folder).attempts() or str(folder) in leased):
            raise ConfigError(
                f"launch.after {launch.after}: no run has that folder; give runs/<recipe>/<time>,"
                " or a number of python -m launch queue"
            )
        self._after = str(folder)

    def reason(self, own: OwnLease) -> str:
        """The reason of now; "" if there is none."""
        if self._not_before and datetime.now() < self._not_before:
            return f"launch.not_before: {self._not_before:%Y-%m-%d %H:%M}"
        if self._after:
            for lease in leases.live(self._place):
                if self._after in (str(lease.number), lease.record.run if lease.is_own else ""):
                    return f"launch.after: the end of {lease.name}"
        return ""
