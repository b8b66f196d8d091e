"""A start from its plan to its report: open the run, tokenise, plan again with what is known then,
supervise."""

from __future__ import annotations

import os
import shlex
import statistics
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from launch.base import compile_caches, files
from launch.base.errors import CheckpointError, DoesNotFit, Interrupted
from launch.base.text import shown
from launch.base.workspace import FILES
from launch.commands import recipe_arguments, tune
from launch.data import token_cache
from launch.plan.resolve import Resolved, resolve
from launch.predict import estimate
from launch.predict.history import cache_keys, calibration
from launch.predict.history.calibration import Figures, Measurement
from launch.predict.history.ledger import Ledger
from launch.predict.oom_history import OomHistory
from launch.probe import network
from launch.recipe.guides import gpt2_variables
from launch.render import command, write
from launch.report import first_screen, html, text
from launch.run_folder import disk_space, layout, resume, steps
from launch.run_folder.layout import AttemptDir
from launch.schema.plan import Command
from launch.schema.result import Failure, RunResult, SecondStep, StepEvent
from launch.supervise import attempt as supervise_attempt
from launch.supervise import failures, oom_record, restarts, stop_signals
from launch.supervise.screen import Screen
from launch.supervise.stop_signals import StopSignals

MAX_PLANS = 3  # of one start; each is made with more evidence than the one before
# (test the link, by how much predictions were exceeded) -> a plan
Decide = Callable[[bool, OomHistory], Resolved]


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

    def decide(test_link: bool, oom_history: OomHistory) -> Resolved:
        resolved = resolve(
            typed.recipe,
            typed.overrides,
            constraints=replace(typed.constraints, oom_history=oom_history),
            say=recipe_arguments.say,
            test_link=test_link,
        )
        return replace(resolved, plan=network.located(resolved.plan))

    return run(decide, arguments.resume, arguments.dry_run, arguments.explain)


def run(decide: Decide, wish: str, dry_run: bool, explain: bool = False) -> int:
    """Train, and say how it ended; the exit code."""
    began = time.monotonic()
    with stop_signals.signals() as heard, ExitStack() as held:
        resolved = decide(True, OomHistory())
        workspace, meeting = resolved.workspace, resolved.plan.rendezvous
        oom_history = OomHistory()
        # what earlier starts of the run have shown
        if wish != "never" and not resolved.recipe.launch.assume_fits:
            known = oom_record.of_unfinished(
                workspace.runs, resolved.recipe.name, resolved.recipe.output_dir
            )
            oom_history = oom_record.counting(known, resolved.machine)
        if oom_history.ran_out:
            try:
                resolved = decide(False, oom_history)
            except DoesNotFit as error:
                raise DoesNotFit(
                    f"{error}. {oom_record.words(oom_history, resolved.machine)}"
                ) from error
        recipe = resolved.recipe
        is_first = meeting is None or meeting.machine_rank == 0
        if meeting is not None and not is_first:
            start = resume.Start(
                layout.own_run(workspace.runs, recipe.name, meeting, datetime.now()),
                f"machine {meeting.machine_rank}: joining machine 0, whose run this is",
            )
        else:
            held.enter_context(layout.output_lock(workspace, recipe))
            tokens = token_cache.token_cache(
                workspace.cache, recipe, resolved.plan.shape, resolved.plan.data_format
            )
            start = resume.decide(
                workspace.runs, recipe, resolved.plan, tokens, wish, datetime.now()
            )
        if not start.complete:
            held.enter_context(layout.run_lock(start.run))
            # a run that takes another's over
            if oom_history.ran_out and not start.run.evidence_file.exists():
                oom_record.write(start.run, oom_history.ran_out)
        screen = Screen(*layout.log_files(workspace.root, start.run, recipe))
        log_file = layout.log_file(workspace.root, start.run)
        _show_plan(screen, resolved, start, log_file, explain)
        for line in (
            layout.kept_aside(Path(recipe.output_dir), start.run.run_id) if is_first else ()
        ):
            screen.say(line)
        if start.complete:
            screen.say(f"chat with it: {chat_command(recipe.output_dir)}")
            return 0
        for line in disk_space.check(start.run, recipe, resolved.plan) if is_first else ():
            screen.say(line)
        if dry_run:
            attempt = write.write_run(start.run, recipe, resolved.machine, resolved.plan, workspace)
            screen.say("dry run: this line trains")
            screen.say(str(_command(resolved, start.run, attempt)))
            return 0
        end_s = _end_s(recipe.launch.time_limit_s, began, os.environ)
        resolved, result = _attempts(
            resolved, heard.interrupting(decide), oom_history, start.run, held, screen, heard, end_s
        )
        run, recipe, plan = layout.RunDir(Path(result.run_dir)), resolved.recipe, resolved.plan
        events = [event for one in run.attempts() for event in steps.events(one, screen.say)]
        _remember(resolved, run, result, events, screen)
        for line in text.result_lines(
            recipe, resolved.machine, plan, result, chat_command(recipe.output_dir)
        ):
            screen.say(line)
        ended = [attempt_row(one, screen.say) for one in run.attempts()]
        held_out = [
            one for attempt in run.attempts() for one in steps.evaluations(attempt, screen.say)
        ]
        page = html.html(recipe, resolved.machine, plan, result, events, ended, held_out)
        files.write_atomic(run.report_file, page)
    return result.exit_code


def _show_plan(
    screen: Screen, resolved: Resolved, start: resume.Start, log_file: Path, explain: bool
) -> None:
    """The plan on the screen in short, or all of it, as in the log."""
    recipe, machine, plan = resolved.recipe, resolved.machine, resolved.plan
    whole = [*text.plan_lines(recipe, machine, plan), start.line, f"log: {log_file}"]
    if explain:
        for line in whole:
            screen.say(line)
        return
    for line in whole:
        screen.note(line)
    below = [("run", start.line), *([] if start.complete else [("log", _near(log_file))])]
    finished_steps = 0 if start.complete else start.run.last_step()
    for line in first_screen.lines(recipe, machine, plan, datetime.now(), finished_steps, below):
        screen.say(line, log=False)


def _near(path: Path) -> str:
    """The path as a command in this folder takes it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _end_s(time_limit_s: float | None, began: float, environ: Mapping[str, str]) -> float | None:
    """When the run must be over, on the monotonic clock: the recipe's limit from `began`, or the
    end of Slurm's job."""
    ends = [] if time_limit_s is None else [began + time_limit_s]
    if slurm := environ.get("SLURM_JOB_END_TIME"):  # seconds since 1970
        ends.append(time.monotonic() + float(slurm) - time.time())
    return min(ends, default=None)


def _attempts(
    resolved: Resolved,
    decide: Decide,
    oom_history: OomHistory,
    run: layout.RunDir,
    held: ExitStack,
    screen: Screen,
    heard: StopSignals,
    end_s: float | None,
) -> tuple[Resolved, RunResult]:
    """Attempts until one ends well, or fails in a way that no further one would mend.

    A plan that its second step refutes is made again, with what is known by then, and so is one
    that ran out of memory; a failure that may pass is followed by another attempt. Each goes on
    from the last checkpoint."""
    plans, history = 1, restarts.History()
    while True:
        began = run.last_step()
        resolved, result, compared = _attempt(
            resolved, decide, oom_history, run, screen, heard, end_s, is_last=plans == MAX_PLANS
        )
        if result.plan_again:
            plans += 1
            screen.say(f"stopped to plan again: {compared[0].over}")
            oom_history = oom_record.add_refuted(
                oom_history, compared[0], resolved.plan, resolved.machine, run
            )
            oom_history = oom_history.for_plan(is_last=plans == MAX_PLANS)
            try:
                resolved = decide(False, oom_history)
            except Interrupted:
                return resolved, _stopped(result, heard)
            except DoesNotFit as error:
                screen.say(f"no other plan: {error}")
                return resolved, _refuted(result, compared[0])
            for line in text.planned_lines(resolved.plan):
                screen.say(line)
            continue
        if result.failure is None or result.unkillable:  # beside those no other attempt has room
            return resolved, result
        launch = resolved.recipe.launch
        reached, committed = result.last_step, run.last_step()
        shortage = None
        if result.failure.kind in restarts.MEMORY:
            shortage = oom_record.of_attempt(
                run, result.failure, resolved.plan, resolved.machine, result
            )
        following = restarts.decide(
            result.failure,
            history,
            began,
            reached,
            committed,
            launch.max_restarts,
            launch.on_oom == "replan",
            is_plans_fault=shortage is None or shortage.rules,
        )
        if following.why:
            screen.say(following.why)
        if following.action == "stop" or not _waited(following.wait_s, heard):
            if shortage is not None and shortage.section == "tokenise":
                fix = (
                    "it was tokenising, not training: give it more memory; the same line again"
                    " keeps finished parts"
                )
                result = replace(result, failure=replace(result.failure, fix=fix))
            return resolved, result
        if shortage is not None:
            oom_history = oom_record.add(oom_history, shortage, run, result.host_peak_bytes)
            if shortage.section == "tokenise":  # which no plan changes
                continue
            if not shortage.is_own:
                screen.say(
                    "the job kept to its plan, others took the memory: planned again for what is"
                    " left"
                )
            plans += shortage.rules
            oom_history = oom_history.for_plan(is_last=plans == MAX_PLANS)
            if plans > MAX_PLANS:
                screen.say(
                    f"{MAX_PLANS} plans took more memory than there is: this start makes no"
                    " further one"
                )
                oom_history = replace(oom_history, spent=(*oom_history.spent, resolved.recipe))
            try:
                again = _planned_again(
                    resolved, decide, oom_history, result.failure, reached, committed, screen
                )
            except Interrupted:
                return resolved, _stopped(result, heard)
            if again is None:
                fix = 'see the line "no other plan" above: it says what would fit'
                if not shortage.is_own:
                    fix = (
                        "others hold the memory: run the same line again to continue, when they"
                        " have ended"
                    )
                return resolved, replace(result, failure=replace(result.failure, fix=fix))
            if again.recipe != resolved.recipe:  # it trains something else now
                run, plans = (
                    layout.RunDir.create(again.workspace.runs, again.recipe.name, datetime.now()),
                    1,
                )
                held.enter_context(layout.run_lock(run))
                oom_record.write(run, oom_history.ran_out)
                screen.say(f"starting over in {run.run_id}: what was given up changes the result")
            resolved = again


def _planned_again(
    resolved: Resolved,
    decide: Decide,
    oom_history: OomHistory,
    failure: Failure,
    reached: int,
    committed: int,
    screen: Screen,
) -> Resolved | None:
    """A plan that takes clearly less of what ran out, with the line that says so; None where there
    is none."""
    screen.say(f"out of memory at step {reached}: {failure.cause} ({failure.proof})")
    try:
        again = decide(False, oom_history)
    except DoesNotFit as error:
        screen.say(f"no other plan: {error}")
        return None
    source = f"from step {committed}" if committed else "from the beginning"
    screen.say(
        f"planned again, {source}: {again.plan.strategy.mode} with"
        f" {again.plan.strategy.num_processes} process(es)"
    )
    changes = [change for change in again.plan.changes if change not in resolved.plan.changes]
    for line in (*text.change_lines(changes), *text.planned_lines(again.plan)):
        screen.say(line)
    return again


def _stopped(result: RunResult, heard: StopSignals) -> RunResult:
    """The end of a start that was stopped while the plan after an attempt was made."""
    assert heard.stop is not None
    failure = failures.stopped(heard.stop, " while a plan was made again")
    return replace(result, exit_code=failure.exit_code, failure=failure, plan_again=False)


def _refuted(result: RunResult, compared: calibration.Comparison) -> RunResult:
    """The end of a start whose plan needs more than there is, and that has no smaller one."""
    of_host = "host" in compared.needs
    failure = Failure(
        "host_oom" if of_host else "device_oom",
        6 if of_host else 12,
        f"the plan needs more memory than there is: {compared.over}",
        "what step 2 took",
        'see the line "no other plan" above: it says what would fit',
    )
    return replace(result, exit_code=failure.exit_code, failure=failure, plan_again=False)


def _waited(seconds: float, heard: StopSignals) -> bool:
    """Whether nobody said stop meanwhile."""
    until = time.monotonic() + seconds
    while time.monotonic() < until and heard.stop is None:
        time.sleep(min(0.2, max(until - time.monotonic(), 0)))
    return heard.stop is None


def _attempt(
    resolved: Resolved,
    decide: Decide,
    oom_history: OomHistory,
    run: layout.RunDir,
    screen: Screen,
    heard: StopSignals,
    end_s: float | None,
    is_last: bool,
) -> tuple[Resolved, RunResult, list[calibration.Comparison]]:
    attempt = write.write_run(
        run, resolved.recipe, resolved.machine, resolved.plan, resolved.workspace
    )
    compared: list[calibration.Comparison] = []

    def ready() -> Command:
        """Once the rows are tokenised their lengths are known: what was planned for max_length is
        planned again."""
        nonlocal resolved
        # a run that goes on keeps its own
        again = decide(False, oom_history) if attempt.number == 1 else resolved
        if sum(again.plan.lengths) < sum(resolved.plan.lengths):
            resolved = again
            write.write_plan(run, again.recipe, again.machine, again.plan, again.workspace, attempt)
            screen.say("planned again for the rows that there are:")
            for line in text.planned_lines(again.plan):
                screen.say(line)
        elif resolved.plan.padding is None:
            for line in text.rows_lines(again.plan):
                screen.say(line)
        return _command(resolved, run, attempt)

    def check(measured: SecondStep) -> bool:
        budget = estimate.host_budget_bytes(resolved.recipe, resolved.machine)
        compared.append(calibration.compare(resolved.plan, measured, budget))
        for line in compared[0].lines:
            screen.say(line)
        return is_last or not compared[0].over

    result = supervise_attempt.run(resolved, run, attempt, ready, screen, check, heard, end_s)
    supervise_attempt.write_outcome(result, attempt)
    return resolved, result, compared


def _command(resolved: Resolved, run: layout.RunDir, attempt: AttemptDir) -> Command:
    return command.command(
        resolved.plan, resolved.machine, run, attempt, resolved.workspace, os.environ
    )


def attempt_row(attempt: AttemptDir, say: Callable[[str], None]) -> tuple[str, str]:
    """(what an attempt ran, how it ended) for the report; `say` gets a line for a file that cannot
    be read."""
    ran = ending = "not readable"
    try:
        ran = estimate.describe(attempt.read_plan().strategy)
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
    resolved: Resolved,
    run: layout.RunDir,
    result: RunResult,
    events: Sequence[StepEvent],
    screen: Screen,
) -> None:
    """The run's figures beside their predictions, in the ledger that later plans read."""
    plan, recipe, machine = resolved.plan, resolved.recipe, resolved.machine
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
    Ledger(resolved.workspace.ledger_file, screen.say).record(
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
