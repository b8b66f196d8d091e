"""`python -m launch run`: read the facts, tokenise, plan, open the run folder, supervise attempts,
report."""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launch.base import compile_caches, files
from launch.base.errors import CheckpointError, DoesNotFit, Interrupted
from launch.base.text import shown
from launch.base.workspace import FILES, Workspace
from launch.commands import recipe_arguments, tune
from launch.commands.recipe_arguments import RecipeArguments
from launch.plan import context as plan_context
from launch.plan import planner, resolve
from launch.plan.candidates import LaunchConstraints
from launch.plan.planner import Choice
from launch.predict import estimate
from launch.predict.estimate import PlanContext
from launch.predict.history import cache_keys, calibration
from launch.predict.history.calibration import Figures, Measurement
from launch.predict.history.ledger import Ledger
from launch.predict.oom_history import OomHistory
from launch.probe import network
from launch.recipe.guides import gpt2_variables
from launch.render import command, write
from launch.report import first_screen, html, text
from launch.run_folder import disk_space, layout, steps
from launch.run_folder import resume as run_resume
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.plan import Command
from launch.schema.recipe import Recipe
from launch.schema.result import Failure, RunResult, SecondStep, StepEvent
from launch.supervise import attempt as supervise_attempt
from launch.supervise import failures, oom_record, restarts, stop_signals, tokenising
from launch.supervise.screen import Screen
from launch.supervise.stop_signals import StopSignals

MAX_PLANS = 3  # of one start; each is made with more evidence than the one before


def add_parser(subparsers: Any) -> ArgumentParser:
    parser = recipe_arguments.add_parser(
        subparsers, "run", "train", "[BATCH] [--dry-run] [--explain] [--resume auto|never|PATH]"
    )
    recipe_arguments.add_explain(parser)
    parser.add_argument("--dry-run", action="store_true", help="everything but the last call")
    parser.add_argument(
        "--from-environment",
        action="store_true",
        help=f"{', '.join(gpt2_variables.NAMES)} set keys of the recipe",
    )
    parser.add_argument(
        "--resume", default="auto", help="auto (default), never, or a run or checkpoint folder"
    )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    variables = gpt2_variables.translate(os.environ) if arguments.from_environment else []
    for override in variables:
        print(shown(f"{override.typed}: {override.removeprefix('--')}"))
    typed = recipe_arguments.read(arguments, others, variables)
    compile_caches.settle()
    if typed.is_auto and not arguments.dry_run:
        tune.tune_recipe(typed, again=False)
    return run(typed, arguments.resume, arguments.dry_run, arguments.explain)


@dataclass(frozen=True)
class Start:
    """Everything that the plans and attempts of one start have in common."""

    workspace: Workspace
    context: PlanContext
    constraints: LaunchConstraints
    screen: Screen
    signals: StopSignals
    locks: ExitStack
    end_s: float | None  # when it must be over, on the monotonic clock

    @property
    def is_first(self) -> bool:
        """Whether this is machine 0, whose run the others join."""
        return self.context.recipe.launch.machine_rank == 0

    def choose(self, context: PlanContext, oom_history: OomHistory) -> Choice:
        """Plan with what was seen so far. A stop raises Interrupted."""
        constraints = replace(self.constraints, oom_history=oom_history)
        choice = self.signals.interrupting(planner.choose)(context, constraints)
        return replace(choice, plan=network.located(choice.plan))


@dataclass(frozen=True)
class Planned:
    """A choice for rows that are tokenised; `attempt`: the one that has just tokenised them."""

    start: Start
    choice: Choice
    attempt: AttemptDir | None = None


def run(typed: RecipeArguments, resume: str, dry_run: bool, explain: bool = False) -> int:
    """Train, and say how it ended; the exit code."""
    began, screen = time.monotonic(), Screen()
    with stop_signals.signals() as signals, ExitStack() as locks:
        facts = resolve.read(
            typed.recipe,
            typed.overrides,
            constraints=typed.constraints,
            say=screen.say,
            test_link=True,
        )
        recipe, workspace = facts.context.recipe, facts.workspace
        end_s = _end_s(recipe.launch.time_limit_s, began, os.environ)
        start = Start(workspace, facts.context, facts.constraints, screen, signals, locks, end_s)
        if start.is_first:
            locks.enter_context(layout.output_lock(workspace, recipe))
        oom_history = _earlier_shortages(start, resume)

        @cache  # one folder, whoever needs it first: tokenising or the run
        def new_run() -> RunDir:
            new_folder = _new_run(start, recipe, dry_run)
            locks.callback(new_folder.remove_if_unused)
            return new_folder

        try:
            planner.refuse_hopeless(start.context, start.constraints)
            if dry_run:
                planned = Planned(start, start.choose(start.context, oom_history))
            else:
                planned = _plan(start, oom_history, new_run)
        except DoesNotFit as error:
            if not oom_history.ran_out:
                raise
            seen = oom_record.words(oom_history, start.context.machine)
            raise DoesNotFit(f"{error}. {seen}") from error
        if isinstance(planned, RunResult):
            screen.log_to(*layout.log_files(workspace.root, new_run(), recipe))
            return _show_end(planned, text.failure_lines(planned), screen)
        opened = _open(planned, resume, new_run)
        logs = layout.log_files(workspace.root, opened.run, recipe)
        has_log = not dry_run and not opened.complete
        _show_plan(planned, opened, logs[0] if has_log else None, explain)
        if opened.complete:
            return 0
        if dry_run:
            return _finish_dry_run(planned, new_run(), resume)
        locks.enter_context(layout.run_lock(opened.run))
        # a run that takes another's over
        if oom_history.ran_out and not opened.run.evidence_file.exists():
            oom_record.write(opened.run, oom_history.ran_out)
        screen.log_to(*logs)
        if planned.attempt is not None and planned.attempt.root.parents[1] != opened.run.root:
            planned = replace(planned, attempt=None)
        choice, result = _attempts(planned, oom_history, opened.run)
        return _report(start, choice, result)


def _earlier_shortages(start: Start, resume: str) -> OomHistory:
    """What earlier starts of the run have shown, as far as it still counts on this machine."""
    recipe, machine = start.context.recipe, start.context.machine
    if resume == "never" or recipe.launch.assume_fits:
        return OomHistory()
    earlier = oom_record.of_unfinished(start.workspace.runs, recipe.name, recipe.output_dir)
    return oom_record.counting(earlier, machine)


def _new_run(start: Start, recipe: Recipe, dry_run: bool = False) -> RunDir:
    """A new folder. Machines other than number 0 keep their part of a run apart from the runs that
    can be continued."""
    runs, name = start.workspace.runs, recipe.name
    if not start.is_first:
        runs, name = runs / name, f"machine{recipe.launch.machine_rank}"
    return RunDir.dry_run(runs, name) if dry_run else RunDir.create(runs, name, datetime.now())


def _plan(
    start: Start, oom_history: OomHistory, new_run: Callable[[], RunDir]
) -> Planned | RunResult:
    """Tokenise the rows, unless they are there already, and choose a plan for them; the result of
    tokenising where that failed. Where `allow:` relaxes max_length, once more for shorter rows."""
    context, attempt = start.context, None
    while True:
        assert context.tokens is not None
        if not start.signals.interrupting(tokenising.are_there)(context.tokens):
            attempt, failed = tokenising.until_done(
                context, new_run(), start.screen.say, start.signals
            )
            start.screen.stop()
            if failed is not None:
                return failed
            context = plan_context.with_rows(context)
            if context.recipe == start.context.recipe:
                start = replace(start, context=context)
        choice = start.choose(context, oom_history)
        if choice.recipe.data == context.recipe.data:
            return Planned(start, choice, attempt)
        context = choice.context


def _open(planned: Planned, resume: str, new_run: Callable[[], RunDir]) -> run_resume.Start:
    """The run folder to go on in; nothing is written but a new folder."""
    start, choice = planned.start, planned.choice
    recipe, plan = choice.recipe, choice.plan
    if start.is_first:
        assert choice.context.tokens is not None
        opened = run_resume.decide(
            start.workspace.runs, recipe, plan, choice.context.tokens, resume, new_run
        )
    else:
        rank = recipe.launch.machine_rank
        line = f"machine {rank}: joining machine 0, whose run this is"
        opened = run_resume.Start(new_run(), line)
    return opened


def _show_plan(
    planned: Planned, opened: run_resume.Start, log_file: Path | None, explain: bool
) -> None:
    """The plan on the screen in short, or all of it, as in the log. Raises ResourceError where the
    disk has no room for its checkpoints."""
    choice, screen = planned.choice, planned.start.screen
    recipe, machine, plan = choice.recipe, choice.machine, choice.plan
    whole = [*text.plan_lines(recipe, machine, plan), opened.line]
    whole += [f"log: {log_file}"] if log_file else []
    if not explain:
        for line in whole:
            screen.note(line)
        below = [("run", opened.line), *([("log", _near(log_file))] if log_file else [])]
        steps_done = 0 if opened.complete else opened.run.last_step()
        whole = first_screen.lines(recipe, machine, plan, datetime.now(), steps_done, below)
    for line in whole:
        screen.say(line, log=explain)
    if not planned.start.is_first:
        return
    for line in layout.kept_aside(Path(recipe.output_dir), opened.run.run_id):
        screen.say(line)
    if opened.complete:
        screen.say(f"chat with it: {chat_command(recipe.output_dir)}")
        return
    for line in disk_space.check(opened.run, recipe, plan):
        screen.say(line)


def _near(path: Path) -> str:
    """The path as a command in this folder takes it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _finish_dry_run(planned: Planned, folder: RunDir, resume: str) -> int:
    """Write the plan's files, and show the line that trains them in a run of their own."""
    start, choice = planned.start, planned.choice
    attempt = write.write_run(
        folder, choice.recipe, choice.machine, choice.plan, start.workspace, resume=resume
    )
    start.screen.say("dry run: this line trains")
    start.screen.say(str(_command(start, choice, folder, attempt, resume)))
    return 0


def _report(start: Start, choice: Choice, result: RunResult) -> int:
    """Show and write down how a run ended."""
    screen, recipe, plan = start.screen, choice.recipe, choice.plan
    run = RunDir(Path(result.run_dir))
    attempts = run.attempts()
    events = [event for one in attempts for event in steps.events(one, screen.say)]
    _remember(start, choice, run, result, events)
    chat = chat_command(recipe.output_dir)
    _show_end(result, text.result_lines(recipe, choice.machine, plan, result, chat), screen)
    rows = [attempt_row(one, screen.say) for one in attempts]
    held_out = [evaluation for one in attempts for evaluation in steps.evaluations(one, screen.say)]
    page = html.html(recipe, choice.machine, plan, result, events, rows, held_out)
    files.write_atomic(run.report_file, page)
    return result.exit_code


def _show_end(result: RunResult, lines: Sequence[str], screen: Screen) -> int:
    for line in lines:
        screen.say(line)
    return result.exit_code


def _end_s(time_limit_s: float | None, began: float, environ: Mapping[str, str]) -> float | None:
    """When the run must be over, on the monotonic clock: the recipe's limit from `began`, or the
    end of Slurm's job."""
    ends = [] if time_limit_s is None else [began + time_limit_s]
    if slurm := environ.get("SLURM_JOB_END_TIME"):  # seconds since 1970
        ends.append(time.monotonic() + float(slurm) - time.time())
    return min(ends, default=None)


def _attempts(planned: Planned, oom_history: OomHistory, run: RunDir) -> tuple[Choice, RunResult]:
    """Attempts until one ends well, or fails in a way that no further one would mend.

    A plan that its second step refutes is made again, with what is known by then, and so is one
    that ran out of memory; a failure that may pass is followed by another attempt. Each goes on
    from the last checkpoint."""
    start, choice, screen = planned.start, planned.choice, planned.start.screen
    num_plans, history, attempt = 1, restarts.History(), planned.attempt
    while True:
        began = run.last_step()
        result, comparisons = _attempt(start, choice, run, attempt, is_last=num_plans == MAX_PLANS)
        attempt = None
        if result.plan_again:
            num_plans += 1
            comparison = comparisons[0]
            screen.say(f"stopped to plan again: {comparison.over}")
            oom_history = oom_record.add_refuted(
                oom_history, comparison, choice.plan, choice.machine, run
            )
            oom_history = oom_history.for_plan(is_last=num_plans == MAX_PLANS)
            try:
                choice = start.choose(start.context, oom_history)
            except Interrupted:
                return choice, _stopped(result, start.signals)
            except DoesNotFit as error:
                screen.say(f"no other plan: {error}")
                return choice, _refuted(result, comparison)
            for line in text.planned_lines(choice.plan):
                screen.say(line)
            continue
        if result.failure is None or result.unkillable:  # beside those no other attempt has room
            return choice, result
        launch = choice.recipe.launch
        reached, committed = result.last_step, run.last_step()
        shortage = None
        if result.failure.kind in restarts.MEMORY:
            shortage = oom_record.of_attempt(
                run, result.failure, choice.plan, choice.machine, result
            )
        following = restarts.decide(
            result.failure,
            history,
            began,
            reached,
            committed,
            launch.max_restarts,
            launch.on_oom == "replan",
            is_plans_fault=shortage is None or shortage.is_own,
        )
        if following.why:
            screen.say(following.why)
        if following.action == "stop" or not start.signals.wait(following.wait_s):
            return choice, result
        if shortage is None:
            continue
        oom_history = oom_record.add(oom_history, shortage, run, result.host_peak_bytes)
        if not shortage.is_own:
            screen.say(
                "the job kept to its plan, others took the memory: planned again for what is left"
            )
        num_plans += shortage.is_own
        oom_history = oom_history.for_plan(is_last=num_plans == MAX_PLANS)
        if num_plans > MAX_PLANS:
            screen.say(
                f"{MAX_PLANS} plans took more memory than there is: this start makes no further one"
            )
            oom_history = replace(oom_history, spent=(*oom_history.spent, choice.recipe))
        screen.say(
            f"out of memory at step {reached}: {result.failure.cause} ({result.failure.proof})"
        )
        new_run = cache(lambda: _new_run(start, start.context.recipe))
        try:
            again = _plan(start, oom_history, new_run)
        except Interrupted:
            return choice, _stopped(result, start.signals)
        except DoesNotFit as error:
            screen.say(f"no other plan: {error}")
            fix = 'see the line "no other plan" above: it says what would fit'
            if not shortage.is_own:
                fix = (
                    "others hold the memory: run the same line again to continue, when they have"
                    " ended"
                )
            return choice, replace(result, failure=replace(result.failure, fix=fix))
        if isinstance(again, RunResult):
            return choice, again
        _say_planned_again(choice, again.choice, committed, screen)
        if again.choice.recipe != choice.recipe:  # it trains something else now
            run, num_plans, attempt = new_run(), 1, again.attempt
            start.locks.enter_context(layout.run_lock(run))
            oom_record.write(run, oom_history.ran_out)
            screen.say(f"starting over in {run.run_id}: what was given up changes the result")
        choice = again.choice


def _say_planned_again(before: Choice, choice: Choice, committed: int, screen: Screen) -> None:
    source = f"from step {committed}" if committed else "from the beginning"
    screen.say(
        f"planned again, {source}: {choice.plan.strategy.mode} with"
        f" {choice.plan.strategy.num_processes} process(es)"
    )
    changes = [change for change in choice.plan.changes if change not in before.plan.changes]
    for line in (*text.change_lines(changes), *text.planned_lines(choice.plan)):
        screen.say(line)


def _stopped(result: RunResult, signals: StopSignals) -> RunResult:
    """The end of a start that was stopped while the plan after an attempt was made."""
    assert signals.stop is not None
    failure = failures.stopped(signals.stop, " while a plan was made again")
    return replace(result, exit_code=failure.exit_code, failure=failure, plan_again=False)


def _refuted(result: RunResult, comparison: calibration.Comparison) -> RunResult:
    """The end of a start whose plan needs more than there is, and that has no smaller one."""
    of_host = "host" in comparison.needs
    failure = Failure(
        "host_oom" if of_host else "device_oom",
        6 if of_host else 12,
        f"the plan needs more memory than there is: {comparison.over}",
        "what step 2 took",
        'see the line "no other plan" above: it says what would fit',
    )
    return replace(result, exit_code=failure.exit_code, failure=failure, plan_again=False)


def _attempt(
    start: Start, choice: Choice, run: RunDir, attempt: AttemptDir | None, is_last: bool
) -> tuple[RunResult, list[calibration.Comparison]]:
    """Write the plan's files, and run the ranks to their end."""
    recipe, machine, plan, screen = choice.recipe, choice.machine, choice.plan, start.screen
    attempt = write.write_run(run, recipe, machine, plan, start.workspace, attempt)
    assert choice.context.tokens is not None
    run.write_tokens(choice.context.tokens)
    comparisons: list[calibration.Comparison] = []

    def check(measured: SecondStep) -> bool:
        budget = estimate.host_budget_bytes(recipe, machine)
        comparisons.append(calibration.compare(plan, measured, budget))
        for line in comparisons[0].lines:
            screen.say(line)
        return is_last or not comparisons[0].over

    result = supervise_attempt.run(
        recipe,
        machine,
        run,
        attempt,
        _command(start, choice, run, attempt),
        screen,
        check,
        start.signals,
        start.end_s,
    )
    supervise_attempt.write_outcome(result, attempt)
    return result, comparisons


def _command(
    start: Start, choice: Choice, run: RunDir, attempt: AttemptDir, resume: str = "auto"
) -> Command:
    return command.command(
        choice.plan, choice.machine, run, attempt, start.workspace, os.environ, resume
    )


def attempt_row(attempt: AttemptDir, say: Callable[[str], None]) -> tuple[str, str]:
    """(what an attempt ran, how it ended) for the report; `say` gets a line for a file that cannot
    be read."""
    ran = ending = "not readable"
    try:
        is_planned = attempt.plan_file.exists()
        ran = estimate.describe(attempt.read_plan().strategy) if is_planned else "tokenising"
    except CheckpointError as error:
        say(f"{attempt.plan_file}: missing from the report, damaged ({str(error).splitlines()[0]})")
    try:
        ending = _ending(attempt)
    except CheckpointError:
        say(
            f"{attempt.root}: its end is missing from the report, supervisor.json or outcome.json"
            " is damaged"
        )
    return ran, ending


def _ending(attempt: AttemptDir) -> str:
    end, outcome = attempt.read_end(), attempt.read_outcome()
    if end and end.failure:
        return f"{end.failure.cause} ({end.failure.proof})"
    return (
        "complete"
        if outcome and outcome.complete
        else "ended to plan again"
        if end
        else "cut short"
    )


def _remember(
    start: Start, choice: Choice, run: RunDir, result: RunResult, events: Sequence[StepEvent]
) -> None:
    """The run's figures beside their predictions, in the ledger that later plans read."""
    plan, recipe, machine, screen = choice.plan, choice.recipe, choice.machine, start.screen
    strategy, memory, summary = plan.strategy, plan.estimate, result.summary
    if result.failure or memory.peak is None or not summary.get("complete"):
        return
    seconds = [event.seconds for event in events[steps.STEADY_FROM :]]
    on_gpu = strategy.device == "cuda"
    allocated, reserved = memory.allocated_bytes, memory.reserved_bytes
    # what is measured are the last attempt's peaks up to its last step: an evaluation after that is
    # not in them
    if not any(
        evaluation.step < summary["step"]
        for evaluation in steps.evaluations(run.attempts()[-1], screen.say)
    ):
        allocated, reserved = memory.step_allocated_bytes, memory.step_reserved_bytes
    Ledger(start.workspace.ledger_file, screen.say).record(
        Measurement(
            time=time.time(),
            run_id=run.run_id,
            machine_key=cache_keys.machine_key(machine),
            model_key=cache_keys.model_key(plan.shape),
            recipe_key=cache_keys.recipe_key(recipe),
            device=strategy.device,
            device_name=machine.gpus[0].name if on_gpu else f"{machine.cpu_count} CPUs",
            mode=strategy.mode,
            num_processes=strategy.num_processes,
            per_device_train_batch_size=strategy.per_device_train_batch_size,
            gradient_accumulation_steps=strategy.gradient_accumulation_steps,
            max_length=max(plan.lengths),
            mixed_precision=strategy.mixed_precision,
            gradient_checkpointing=strategy.activation_checkpointing,
            versions={
                package: version(package) for package in ("torch", "transformers", "accelerate")
            },
            predicted=Figures(
                allocated_bytes=allocated if on_gpu else None,
                reserved_bytes=reserved if on_gpu else None,
                host_pss_bytes=memory.host_bytes or None,
                step_s=plan.step_s,
            ),
            measured=Figures(
                allocated_bytes=summary["vram_allocated_bytes"] or None,
                reserved_bytes=summary["vram_reserved_bytes"] or None,
                host_pss_bytes=result.host_peak_bytes or None,
                step_s=statistics.median(seconds) if seconds else None,
            ),
        )
    )


def chat_command(model: str) -> str:
    """A line that can be pasted, to talk with a model."""
    return (
        f"{shlex.quote(sys.executable)} {shlex.quote(str(FILES / 'scripts' / 'chat.py'))}"
        f" {shlex.quote(model)}"
    )
