"""Plans and attempts of one start: tokenise, plan, train, and plan again when memory runs out."""

import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache

from launch.base import files, locks
from launch.base.errors import DoesNotFit, Interrupted
from launch.base.workspace import Workspace
from launch.plan import facts as plan_facts
from launch.plan import planner, resolve
from launch.plan.planner import Choice
from launch.predict import budgets
from launch.predict.facts import Facts
from launch.predict.history import calibration
from launch.predict.history.calibration import Comparison
from launch.predict.oom_history import NO_OOM_HISTORY, OomEvent, OomHistory
from launch.probe import network
from launch.queue import admission
from launch.recipe import load
from launch.render import run_files
from launch.report import plan_lines
from launch.run_folder import layout
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema import levers
from launch.schema.machine import Machine
from launch.schema.plan import Command
from launch.schema.result import Failure, RunResult, SecondStep
from launch.schema.run_sections import RESERVED_S
from launch.supervise import attempt as supervise_attempt
from launch.supervise import failures, oom_record, restarts, tokenising
from launch.supervise.run_lease import RunLease
from launch.supervise.screen import Screen
from launch.supervise.stop_signals import StopSignals

MAX_PLANS = 3  # plans that a start makes at most, each with more evidence than the one before
_AGAIN_LATER = (
    "other programs hold the memory: when they have ended, run the same line again to continue"
)
_SEE_NO_OTHER_PLAN = 'see the line "no other plan" above: it says what would fit'


@dataclass
class LaunchContext:
    """Facts that the plans of one start share, and the memory that its attempts have exceeded."""

    workspace: Workspace
    facts: Facts
    screen: Screen
    signals: StopSignals
    locks: ExitStack
    end_s: float | None  # latest end of training, on the monotonic clock
    tokenising_s: float = 0.0  # of this start; the next one has the rows
    oom_history: OomHistory = NO_OOM_HISTORY
    lease: RunLease = field(init=False)
    _new_runs: list[RunDir] = field(init=False, default_factory=list)

    def __post_init__(self) -> None:
        self.lease = RunLease(self.workspace.root, self.screen.say, self.locks)

    @property
    def is_first(self) -> bool:
        """True on machine 0, whose run the other machines join."""
        return self.facts.recipe.launch.machine_rank == 0

    def new_run(self, dry_run: bool = False) -> Callable[[], RunDir]:
        """A function that makes one new run folder, when tokenising or the run first needs it.

        Machines other than number 0 keep their part of a run apart from the runs that can be
        continued."""

        @cache
        def make() -> RunDir:
            recipe = self.facts.recipe
            runs, name = self.workspace.runs, recipe.name
            if not self.is_first:
                runs, name = runs / name, f"machine{recipe.launch.machine_rank}"
            run = (
                RunDir.dry_run(runs, name) if dry_run else RunDir.create(runs, name, datetime.now())
            )
            self.hold(run)  # `runs` and `watch` see that it is in use
            self.locks.callback(run.remove_if_unused)
            self._new_runs.append(run)
            return run

        return make

    def hold(self, run: RunDir) -> None:
        """Lock the folder of the run that goes on, until the start ends. Another new one, in which
        rows were tokenised alone, is no run then."""
        if locks.holder_pid(run.lock_file) != os.getpid():
            self.locks.enter_context(layout.run_lock(run))
        for other in self._new_runs:
            if other.root != run.root and not other.plan_file.exists():
                shutil.rmtree(other.root / "attempts", ignore_errors=True)

    def choose(self, facts: Facts) -> Choice:
        """Choose a plan with what attempts have shown so far. Raises Interrupted at a stop."""
        facts = replace(facts, history=replace(facts.history, oom=self.oom_history))
        choice = self.signals.interrupting(planner.choose)(facts)
        meeting = network.located(choice.plan.rendezvous)
        return replace(choice, plan=replace(choice.plan, rendezvous=meeting))

    def plan(self, new_run: Callable[[], RunDir], machine: Machine | None = None) -> Choice:
        """Tokenise the rows, unless that is done, and choose a plan for them; once more for shorter
        rows where `allow:` relaxes max_length. Raises tokenising.Failed.

        `machine`: the one to plan for, in place of that with the memory of now."""
        facts = self.facts
        while True:
            assert facts.rows.tokens is not None
            if not self.signals.interrupting(tokenising.are_there)(facts.rows.tokens):
                run = new_run()
                files.write_atomic(run.recipe_yaml, load.dump(facts.recipe))
                began_s = time.monotonic()
                try:
                    tokenising.until_done(facts, run, self.screen.say, self.signals)
                finally:
                    self.screen.stop()
                self.tokenising_s += time.monotonic() - began_s
                facts = replace(facts, rows=plan_facts.with_counts(facts.rows))
                if facts.recipe == self.facts.recipe:
                    self.facts = facts
            choice = self.choose(replace(facts, machine=machine or facts.machine))
            if choice.recipe.data == facts.recipe.data:
                return choice
            facts = replace(choice.facts, machine=facts.machine)

    def read_memory_of_now(self) -> None:
        """Plan for the memory that is free now, from here on."""
        self.facts = resolve.with_memory_of_now(
            self.facts, admission.leased_now(self.screen.say), self.workspace.root
        )

    def command(
        self, choice: Choice, run: RunDir, attempt: AttemptDir, resume: str = "auto"
    ) -> Command:
        """The command line that starts the ranks of an attempt."""
        return run_files.command(
            choice.plan, choice.machine, run, attempt, self.workspace, os.environ, resume
        )


class Attempts:
    """Attempts at a run, each from the last checkpoint: a plan that its second step refutes, or
    that runs out of memory, is replaced; a failure that may pass is followed by another attempt."""

    def __init__(self, start: LaunchContext, choice: Choice, run: RunDir) -> None:
        self.start, self.choice, self.run = start, choice, run
        self._screen = start.screen
        self._num_plans, self._failures = 1, restarts.History()
        self._comparison: Comparison | None = None  # the attempt's second step beside its plan

    def until_end(self) -> RunResult:
        """Run attempts until one ends well, or fails in a way that no further one would mend."""
        end = None
        while end is None:
            first_step = self.run.last_step()
            result = self._attempt(first_step)
            if result.plan_again:
                end = self._after_refuted_plan(result)
            elif result.failure is None or result.unkillable:  # an unkillable rank keeps its memory
                end = result
            else:
                end = self._after_failure(result, result.failure, first_step)
        return end

    def _attempt(self, first_step: int) -> RunResult:
        """Write the plan's files, and run the ranks to their end."""
        start, choice, run = self.start, self.choice, self.run
        recipe, machine, plan = choice.recipe, choice.machine, choice.plan
        attempt = run_files.write_run(run, recipe, machine, plan, start.workspace)
        assert choice.facts.rows.tokens is not None
        run.write_tokens(choice.facts.rows.tokens)
        start.lease.hold_plan(choice, run)
        result = supervise_attempt.run(
            recipe,
            machine,
            run,
            attempt,
            start.command(choice, run, attempt),
            start.screen,
            self._check,
            lambda host_bytes: start.lease.hold_taken(choice, run, host_bytes),
            start.signals,
            start.end_s,
        )
        result = self._with_missing_time(result, first_step)
        supervise_attempt.write_outcome(result, attempt)
        start.lease.hold_plan(choice, run)  # nothing of it is taken now
        return result

    def _with_missing_time(self, result: RunResult, first_step: int) -> RunResult:
        """The result; where the time of the whole start was up before its first step, and would be
        again without tokenising, with what it takes."""
        failure, start, end_s = result.failure, self.start, self.start.end_s
        is_first = self._num_plans == 1 and not self._failures.ends
        if failure is None or end_s is None or not is_first or result.last_step > first_step:
            return result
        missing_s = time.monotonic() + RESERVED_S - end_s - start.tokenising_s
        if failure.kind != "stopped" or start.signals.stop is not None or missing_s <= 0:
            return result
        failure = failures.too_little_time(
            failure,
            missing_s,
            self.choice.recipe.launch.time_limit_s,
            is_of_slurm="SLURM_JOB_END_TIME" in os.environ,
        )
        return replace(result, failure=failure)

    def _check(self, measured: SecondStep) -> bool:
        """Compare a second step with its plan; False: stop and make another plan."""
        budget = budgets.host_budget_bytes(self.choice.recipe, self.choice.machine)
        self._comparison = calibration.compare(self.choice.plan, measured, budget)
        self.start.lease.hold_measured(self.choice, measured)
        self._screen.say(*self._comparison.lines)
        return self._num_plans == MAX_PLANS or not self._comparison.over

    def _after_refuted_plan(self, result: RunResult) -> RunResult | None:
        """Plan again with what the second step took; the end where no plan is left."""
        start, choice, comparison = self.start, self.choice, self._comparison
        assert comparison is not None
        self._screen.say(f"stopped to plan again: {comparison.over}")
        self._count_plan(
            oom_record.add_refuted(
                start.oom_history, comparison, choice.plan, choice.machine, self.run
            )
        )
        of_host = "host" in comparison.needs
        failure = Failure(
            "host_oom" if of_host else "device_oom",
            6 if of_host else 12,
            f"the plan needs more memory than there is: {comparison.over}",
            "what step 2 took",
            _SEE_NO_OTHER_PLAN,
        )
        if end := self._replan(lambda: start.choose(start.facts), result, failure):
            return end
        self._screen.say(*plan_lines.lines(plan_lines.planned_again(self.choice)))
        return None

    def _after_failure(
        self, result: RunResult, failure: Failure, first_step: int
    ) -> RunResult | None:
        """Restart, or plan again when memory ran out; the end where neither would help."""
        start, choice, launch = self.start, self.choice, self.choice.recipe.launch
        shortage = None
        if failure.kind in restarts.KERNELS and self._chose_kernels():
            return self._without_kernels(result, failure)
        if failure.kind == "pinned_oom" and not choice.plan.strategy.pin_memory:
            return result  # a plan has nothing more that it could leave unpinned
        if failure.kind in restarts.MEMORY:
            shortage = oom_record.of_attempt(self.run, failure, choice.plan, choice.machine, result)
        following = restarts.decide(
            failure,
            self._failures,
            first_step,
            result.last_step,
            self.run.last_step(),
            launch.max_restarts,
            launch.on_oom == "replan",
            is_plans_fault=shortage is None or shortage.is_own,
        )
        if following.why:
            self._screen.say(following.why)
        if following.action == "stop":
            return result
        if not start.signals.wait(following.wait_s):
            # systemd stops a unit of which the kernel killed a process: the next start knows why
            if shortage is not None:
                oom_record.add(start.oom_history, shortage, self.run, result.host_peak_bytes)
            return result
        if shortage is None:
            return None
        self._add_shortage(shortage, result)
        self._screen.say(
            f"out of memory at step {result.last_step}: {failure.cause} ({failure.proof})"
        )
        return self._plan_again(result, failure, shortage.is_own)

    def _chose_kernels(self) -> bool:
        """True if the plan chose kernels that are compiled here."""
        runs, recipe = self.choice.plan.strategy.levers, self.choice.recipe
        built = (levers.ROWS[name] for name in ("torch_compile", "use_liger_kernel"))
        return any(row.read(runs) and not row.requested(recipe) for row in built)

    def _without_kernels(self, result: RunResult, failure: Failure) -> RunResult | None:
        """Plan again without kernels that are compiled here."""
        facts, reason = self.start.facts, f"failed in this start: {failure.cause}"
        installed = replace(facts.installed, no_compiler=reason, no_liger=reason)
        self.start.facts = replace(facts, installed=installed)
        self._screen.say(
            f"{failure.cause} ({failure.proof}): planning again without the compiled kernels that"
            " the plan chose"
        )
        self._count_plan(self.start.oom_history)
        return self._plan_again(result, failure)

    def _count_plan(self, oom_history: OomHistory, is_own: bool = True) -> None:
        """Take the history for the next plan; a shortage that others caused costs none of ours."""
        self._num_plans += is_own
        if self.run.last_step():
            history = replace(self.start.facts.history, began_with=self.choice.plan.strategy.levers)
            self.start.facts = replace(self.start.facts, history=history)
        self.start.oom_history = oom_history.for_plan(is_last=self._num_plans == MAX_PLANS)

    def _add_shortage(self, shortage: OomEvent, result: RunResult) -> None:
        start = self.start
        if not shortage.is_own:
            self._screen.say(
                "the job kept to its plan, other programs took the memory: planning again for what"
                " is free"
            )
            start.read_memory_of_now()
        self._count_plan(
            oom_record.add(start.oom_history, shortage, self.run, result.host_peak_bytes),
            shortage.is_own,
        )
        if self._num_plans > MAX_PLANS:
            self._screen.say(
                f"{MAX_PLANS} plans took more memory than there is: this start makes no further"
                " plan"
            )
            spent = (*start.oom_history.spent, self.choice.recipe)
            start.oom_history = replace(start.oom_history, spent=spent)

    def _plan_again(
        self, result: RunResult, failure: Failure, is_own: bool = True
    ) -> RunResult | None:
        """Plan by what is known now, and start over where the recipe's relaxations change the
        result; the end where no plan is left."""
        start, before, committed = self.start, self.choice, self.run.last_step()
        new_run = start.new_run()
        fix = _SEE_NO_OTHER_PLAN if is_own else _AGAIN_LATER
        if end := self._replan(lambda: start.plan(new_run), result, replace(failure, fix=fix)):
            return end
        self._say_planned_again(before, committed)
        if self.choice.recipe != before.recipe:
            self.run, self._num_plans = new_run(), 1
            start.hold(self.run)
            oom_record.write(self.run, start.oom_history.ran_out)
            self._screen.say(
                f"starting over in {self.run.run_id}: the relaxed settings change the result"
            )
        return None

    def _say_planned_again(self, before: Choice, committed: int) -> None:
        plan = self.choice.plan
        source = f"from step {committed}" if committed else "from the beginning"
        changes = [change for change in plan.changes if change not in before.plan.changes]
        self._screen.say(
            f"planned again, {source}: {plan.strategy.mode} with {plan.strategy.num_processes}"
            " process(es)",
            *plan_lines.lines(plan_lines.change_facts(changes)),
            *plan_lines.lines(plan_lines.planned_again(self.choice)),
        )

    def _replan(
        self, plan: Callable[[], Choice], result: RunResult, failure: Failure
    ) -> RunResult | None:
        """Take another plan; the end where there is none, or where a stop came first."""
        try:
            self.choice = plan()
        except tokenising.Failed as failed:
            return failed.result
        except Interrupted:
            assert self.start.signals.stop is not None
            failure = failures.stopped(self.start.signals.stop, " while a plan was made again")
        except DoesNotFit as error:
            self._screen.say(f"no other plan: {error}")
        else:
            return None
        return replace(result, exit_code=failure.exit_code, failure=failure, plan_again=False)
