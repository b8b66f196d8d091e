"""`python -m launch run`: read the facts, tokenise, plan, open the run folder, supervise attempts,
report."""

import itertools
import os
import re
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from launch.base import compile_caches, environment, leftovers
from launch.base.errors import ConfigError, DoesNotFit
from launch.base.text import columns, from_here, shown
from launch.base.workspace import Workspace
from launch.commands import ending, recipe_arguments, tune
from launch.commands.attempts import MAX_PLANS, Attempts, LaunchContext
from launch.commands.recipe_arguments import RecipeArguments
from launch.data.worker import WORKER
from launch.plan import facts as plan_facts
from launch.plan import planner, resolve
from launch.plan.planner import Choice
from launch.predict.facts import Facts
from launch.predict.oom_history import NO_OOM_HISTORY, OomHistory
from launch.probe import machine as probe_machine
from launch.probe import network
from launch.queue import admission, leases, starts
from launch.recipe.guides import gpt2_variables
from launch.recipe.strict_yaml import show
from launch.render import run_files
from launch.report import first_screen, plan_lines, run_end
from launch.run_folder import disk_space, layout, manifest
from launch.run_folder import resume as run_resume
from launch.run_folder.layout import RunDir
from launch.schema.result import RunResult
from launch.supervise import failures, oom_record, show_rows, stop_signals, tokenising
from launch.supervise.screen import Screen

FLAGS = {
    **recipe_arguments.RECIPE_FLAGS,
    **recipe_arguments.EXPLAIN,
    "--dry-run": {"action": "store_true", "help": "everything but the last call"},
    "--from-environment": {
        "action": "store_true",
        "help": f"{', '.join(gpt2_variables.NAMES)} set keys of the recipe",
    },
    "--resume": {
        "default": "auto",
        "help": "auto (default), never, or a run or checkpoint folder",
    },
}


def main(
    arguments: Namespace,
    unparsed: Sequence[str],
    check: Callable[[Facts], None] = lambda facts: None,
) -> int:
    """`check` gets the facts of the start, and raises a LaunchError to refuse it."""
    variables = gpt2_variables.translate(os.environ) if arguments.from_environment else []
    for override in variables:
        print(shown(f"{override.typed}: {override.removeprefix('--')}"))
    typed = recipe_arguments.read(arguments, unparsed, variables)
    compile_caches.settle()
    leftovers.sweep_socket_folders(Path(os.environ["TMPDIR"]))
    if typed.is_auto and not arguments.dry_run:
        tune.tune_recipe(typed, again=False)
    return run(typed, arguments.resume, arguments.dry_run, arguments.explain, check)


def run(
    typed: RecipeArguments,
    resume: str,
    dry_run: bool,
    explain: bool,
    check: Callable[[Facts], None],
) -> int:
    """Train a recipe; with `dry_run` write the files and show the line that would. The exit
    code."""
    began, screen = time.monotonic(), Screen()
    with stop_signals.signals() as signals, ExitStack() as locks:
        facts = resolve.read(
            typed.recipe,
            typed.overrides,
            wishes=typed.wishes,
            leased=admission.leased_now(screen.say),
            say=screen.say,
            test_link=True,
            download=typed.download,
        )
        check(facts)
        recipe, workspace = facts.recipe, Workspace.here()
        # Checked before rows are tokenised and planned; once more where the plan decides the ranks
        network.located(planner.rendezvous(recipe.launch))
        if (recipe.launch.num_processes or 1) > 1:
            environment.check_loopback(recipe.launch.nodes)
        end_s = _end_s(recipe.launch.time_limit_s, began, os.environ)
        start = LaunchContext(workspace, facts, screen, signals, locks, end_s)
        if start.is_first:
            lock = layout.dry_run_lock if dry_run else layout.output_lock
            locks.enter_context(lock(workspace, recipe))
        start.oom_history = _earlier_shortages(start, resume)
        continues_another, rows = _continues_another(start, resume), facts.rows
        history = replace(
            facts.history,
            continues_another=continues_another,
            began_with=run_resume.begun_levers(workspace.runs, recipe, resume),
        )
        assert rows.tokens is not None
        tokens = layout.as_begun(rows.tokens, workspace.runs, recipe, resume)
        if tokens is not rows.tokens:
            screen.say("the run goes on with its rows, which an earlier version has tokenised")
            rows = plan_facts.with_counts(replace(rows, tokens=tokens))
        start.facts = replace(facts, history=history, rows=rows)
        new_run = start.new_run(dry_run)
        try:
            choice = _choose(start, dry_run, new_run)
        except tokenising.Failed as failed:
            screen.log_to(*layout.log_files(workspace.root, new_run(), recipe))
            screen.say(*run_end.failure_lines(failed.result))
            return failed.result.exit_code
        except DoesNotFit as error:
            if not start.oom_history.ran_out:
                raise
            shortages = oom_record.sentence(start.oom_history, facts.machine)
            raise DoesNotFit(f"{error}. {shortages}") from error
        opened = _open(start, choice, resume, new_run)
        if recipe.launch.waits and not (dry_run or opened.complete):
            choice, opened = start.signals.interrupting(_wait)(
                start, choice, opened, resume, new_run
            )
        logs = layout.log_files(workspace.root, opened.run, recipe)
        _show_plan(start, choice, opened, None if dry_run or opened.complete else logs[0], explain)
        if opened.complete:
            return 0
        if dry_run:
            _finish_dry_run(start, choice, new_run(), resume)
            return 0
        choice, opened = _with_lease(start, choice, opened, resume, new_run)
        start.hold(opened.run)
        leftovers.sweep(opened.run.root)
        # the shortages of a run that this one takes over
        if start.oom_history.ran_out and not opened.run.evidence_file.exists():
            oom_record.write(opened.run, start.oom_history.ran_out)
        screen.log_to(*logs)
        choice, result = _train(start, choice, opened, resume, new_run)
        return ending.report(workspace, choice, result, screen)


def _train(
    start: LaunchContext,
    choice: Choice,
    opened: run_resume.ResumeChoice,
    resume: str,
    new_run: Callable[[], RunDir],
) -> tuple[Choice, RunResult]:
    """Run attempts to the end of the run; where it yields, wait for memory and go on."""
    while True:
        attempts = Attempts(start, choice, opened.run)
        result, run = attempts.until_end(), attempts.run
        if result.failure is None or result.failure.kind != failures.YIELDED:
            return attempts.choice, result
        start.screen.say(result.failure.cause)
        resumed_path = str(run.root) if run.last_step() else resume
        choice, opened = start.signals.interrupting(_wait)(
            start, attempts.choice, replace(opened, run=run), resumed_path, new_run
        )
        start.screen.say(*plan_lines.lines(plan_lines.planned_again(choice)), opened.line)
        start.hold(opened.run)


def _end_s(time_limit_s: float | None, began: float, environ: Mapping[str, str]) -> float | None:
    """The time on the monotonic clock at which the run must be over: the recipe's limit from
    `began`, or the end of Slurm's job."""
    ends = [] if time_limit_s is None else [began + time_limit_s]
    if slurm := environ.get("SLURM_JOB_END_TIME"):  # seconds since 1970
        if not re.fullmatch(r"\d{1,12}", slurm):
            raise ConfigError(
                f"SLURM_JOB_END_TIME: found {show(slurm)}, expected seconds since 1970, as Slurm"
                " sets it; unset it, and give launch.time_limit_s"
            )
        ends.append(time.monotonic() + int(slurm) - time.time())
    return min(ends, default=None)


def _earlier_shortages(start: LaunchContext, resume: str) -> OomHistory:
    """Shortages of memory in earlier starts of the run, as far as they still count on this
    machine."""
    recipe, machine = start.facts.recipe, start.facts.machine
    if resume == "never" or recipe.launch.assume_fits:
        return NO_OOM_HISTORY
    earlier = oom_record.of_unfinished(start.workspace.runs, recipe.name, recipe.output_dir)
    return oom_record.counting(earlier, machine)


def _continues_another(start: LaunchContext, resume: str) -> bool:
    """True if the run may begin with the rows that another run has left, in another order."""
    recipe = start.facts.recipe
    if resume == "never":
        return False
    if {"data", "effective_batch_size"} & set(recipe.resume.allow):
        return True
    earlier = oom_record.unfinished(start.workspace.runs, recipe.name, recipe.output_dir)
    return earlier is not None and earlier.continues_file.exists()


def _open(
    start: LaunchContext, choice: Choice, resume: str, new_run: Callable[[], RunDir]
) -> run_resume.ResumeChoice:
    """The run folder to go on in; nothing is written but a new folder."""
    recipe, tokens = choice.recipe, choice.facts.rows.tokens
    if not start.is_first:
        line = f"machine {recipe.launch.machine_rank}: joining machine 0, whose run this is"
        return run_resume.ResumeChoice(new_run(), line)
    assert tokens is not None
    return run_resume.decide(start.workspace.runs, recipe, choice.plan, tokens, resume, new_run)


def _choose(start: LaunchContext, dry_run: bool, new_run: Callable[[], RunDir]) -> Choice:
    """The first plan: for the memory that is free beside other runs, or, of a run that waits, for
    what will be free when they have ended. Raises DoesNotFit."""
    machines = [start.facts.machine]
    if start.facts.recipe.launch.waits:
        WORKER.close()  # its memory is free when the run begins
        probed = probe_machine.with_memory_of_now(start.facts.machine, start.workspace.root)
        machines = admission.machines_to_wait_for(probed, start.facts.recipe)
    for machine in machines:
        facts = replace(start.facts, machine=machine)
        try:
            planner.refuse_hopeless(facts)
            if dry_run and facts.rows.tokens:
                show_rows.check(facts.rows.tokens)
            return start.choose(facts) if dry_run else start.plan(new_run, machine)
        except DoesNotFit:
            if machine is machines[-1]:
                raise
    raise AssertionError("no machine")


def _wait(
    start: LaunchContext,
    choice: Choice,
    opened: run_resume.ResumeChoice,
    resume: str,
    new_run: Callable[[], RunDir],
) -> tuple[Choice, run_resume.ResumeChoice]:
    """Wait for the memory of the plan, and plan again with what is free then. Raises Interrupted at
    a stop."""
    planned, began = choice, time.monotonic()
    while True:
        waited_s = time.monotonic() - began
        is_granted = start.lease.wait(planned, opened.run, start.workspace, waited_s)
        start.read_memory_of_now()
        try:
            choice = start.plan(new_run)
        except DoesNotFit as error:
            if is_granted:  # other programs have just taken memory
                start.screen.say(f"waiting again: {error}")
            time.sleep(starts.POLL_S)
            continue
        start.end_s = _end_s(choice.recipe.launch.time_limit_s, time.monotonic(), os.environ)
        return choice, _open(start, choice, resume, new_run)


def _with_lease(
    start: LaunchContext,
    choice: Choice,
    opened: run_resume.ResumeChoice,
    resume: str,
    new_run: Callable[[], RunDir],
) -> tuple[Choice, run_resume.ResumeChoice]:
    """Lease the plan's memory; where others have leased it since the plan was made, wait again or
    plan again. Raises DoesNotFit."""
    waits, refusal = start.facts.recipe.launch.waits, ""
    for _ in itertools.count() if waits else range(MAX_PLANS):
        refusal = start.lease.take(choice, opened.run, start.facts.limits.beside)
        if not refusal:
            return choice, opened
        start.screen.say(f"{'waiting' if waits else 'planning'} again: {refusal}")
        if waits:
            choice, opened = start.signals.interrupting(_wait)(
                start, choice, opened, resume, new_run
            )
        else:
            start.read_memory_of_now()
            choice = start.plan(new_run)
            opened = _open(start, choice, resume, new_run)
        start.screen.say(*plan_lines.lines(plan_lines.planned_again(choice)))
    raise DoesNotFit(f"{choice.recipe.name}: {refusal}, each time that it was planned again")


def _show_plan(
    start: LaunchContext,
    choice: Choice,
    opened: run_resume.ResumeChoice,
    log_file: Path | None,
    explain: bool,
) -> None:
    """Show the plan, in short or in full, and write all of it to the log. Raises ResourceError
    where the checkpoints need more disk space than there is."""
    screen, recipe, machine, plan = start.screen, choice.recipe, choice.machine, choice.plan
    (screen.say if explain else screen.note)(
        *plan_lines.full_text(recipe, machine, plan),
        opened.line,
        *([f"log: {log_file}"] if log_file else []),
    )
    if not explain:
        below = [("run", opened.line), *([("log", from_here(log_file))] if log_file else [])]
        steps_done = 0 if opened.complete else opened.run.last_step()
        screen.say(
            *first_screen.lines(
                recipe, machine, plan, datetime.now(), steps_done, below, columns=columns()
            ),
            log=False,
        )
    if not start.is_first:
        return
    screen.say(*layout.kept_aside(Path(recipe.output_dir), opened.run.run_id))
    if opened.complete:
        screen.say(f"chat with it: {ending.chat_command(recipe.output_dir)}")
        return
    screen.say(*filter(None, (manifest.root_note(), manifest.key_note())))
    environment.check(os.environ, plan.strategy.backend)
    if plan.strategy.launch_mode.engine != "plain":
        environment.check_loopback(plan.strategy.num_machines)
    if names := environment.of_another_launcher(os.environ):
        screen.say(f"not passed to the ranks, they are of MPI's own: {', '.join(names)}")
    passed, trackers = recipe.launch.pass_env, recipe.training.report_to
    for whom, names in (
        ("the ranks, no library is known to read it", environment.unknown(os.environ, passed)),
        ("the trackers", environment.of_trackers(os.environ, trackers, passed)),
    ):
        if names:
            screen.say(
                f"not passed to {whom}: {', '.join(names)};"
                f" --launch.pass_env='[{', '.join([*passed, *names])}]' passes it"
            )
    leased_bytes = admission.untaken_disk_bytes(leases.granted(), opened.run.root.stat().st_dev)
    screen.say(*disk_space.check(opened.run, recipe, plan, leased_bytes))


def _finish_dry_run(start: LaunchContext, choice: Choice, folder: RunDir, resume: str) -> None:
    """Write the plan's files, and show the line that trains them in a run of their own."""
    recipe, machine, plan = choice.recipe, choice.machine, choice.plan
    attempt = run_files.write_run(folder, recipe, machine, plan, start.workspace, resume=resume)
    start.screen.say(
        "dry run: this line trains", str(start.command(choice, folder, attempt, resume))
    )
