"""The end of a run: lines on the screen, the HTML report, and figures in the ledger."""

import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from launch.base import files
from launch.base.errors import CheckpointError
from launch.base.workspace import FILES, Workspace
from launch.plan.planner import Choice
from launch.predict import estimate
from launch.predict.history import cache_keys, calibration
from launch.predict.history.calibration import Figures, Measurement
from launch.predict.history.ledger import Ledger
from launch.report import run_end, run_figures
from launch.run_folder import steps
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.result import AttemptEnd, Outcome, Questions, RunResult, StepEvent, TokenisingEnd
from launch.supervise.screen import Screen

# share of held-out answers that are exact; the quick start has 0.98 without a GPU
_MOSTLY_RIGHT = 0.9
_VERSIONED = ("torch", "transformers", "accelerate")  # packages named beside a measurement


def report(workspace: Workspace, choice: Choice, result: RunResult, screen: Screen) -> int:
    """Show and write down how a run ended; the exit code."""
    recipe, machine, plan = choice.recipe, choice.machine, choice.plan
    run = RunDir(Path(result.run_dir))
    attempts = run.attempts()
    parts = {
        part.attempt.root: part
        for part in steps.stretches(run, say=screen.say, with_continued=False)
    }
    events = [event for part in parts.values() for event in part.counted]
    has_measured = bool(
        attempts and attempts[-1].root in parts
    )  # not one that only wrote the model
    is_complete = not result.failure and result.summary.get("complete")
    if choice.plan.estimate.peak and is_complete and has_measured:
        steady = parts[attempts[-1].root].steady  # an earlier attempt may have had another plan
        Ledger(workspace.ledger_file, screen.say).record(
            _measurement(choice, run, result, steady, screen)
        )
    # an earlier attempt trained the last step, and the last one exported alone
    if is_complete and events and events[-1].step == result.summary["step"]:
        result = replace(result, summary={**result.summary, "loss": events[-1].loss})
    score = result.summary.get("exact_match_after")
    chat = [chat_command(recipe.output_dir), *sample_lines(recipe.data.sources[0].path, score)]
    screen.say(*run_end.result_lines(recipe, machine, plan, result, chat))
    questions = files.read_or_none(run.questions_file, Questions)
    page = run_end.html(
        recipe,
        machine,
        plan,
        result,
        events=events,
        evaluations=[score for part in parts.values() for score in part.evaluations],
        attempts=[attempt_row(attempt, screen.say) for attempt in attempts],
        spent=run_figures.spent([_time(attempt, parts.get(attempt.root)) for attempt in attempts]),
        summary=run.read_rows(),
        questions=questions.questions if questions else (),
        answers=steps.answers(run, screen.say),
        repeat=_repeat_lines(run, sys.argv),
    )
    files.write_atomic(run.report_file, page)
    return result.exit_code


def _time(attempt: AttemptDir, part: steps.Stretch | None) -> dict[str, float]:
    """Seconds of an attempt by their use; attempt_row() names records that are damaged."""
    tokenised = files.read_or_none(attempt.tokenised_file, TokenisingEnd)
    return run_figures.uses_of_attempt(
        end=files.read_or_none(attempt.supervisor_file, AttemptEnd),
        outcome=files.read_or_none(attempt.outcome_file, Outcome),
        part=part,
        tokenising_s=tokenised.seconds if tokenised else 0.0,
    )


def _repeat_lines(run: RunDir, argv: Sequence[str]) -> list[tuple[str, str]]:
    """(what it does, command line) of the ways to start the run again."""
    launch = [sys.executable, "-m", "launch"]
    origin, typed = "The line that was typed", [*launch, *argv[1:]]
    if argv[1:3] == ["submit", "start"]:
        origin, typed = "The job that was submitted", [str(Path(argv[3]) / "job.sh")]
    versions = ", ".join(f"{package} {version(package)}" for package in _VERSIONED)
    return [
        (f"{origin}; while the run is not complete, it continues it:", shlex.join(typed)),
        (
            "All settings as they were, defaults among them, in a new run from the first step"
            f" ({versions}):",
            shlex.join([*launch, "run", str(run.recipe_yaml), "--resume=never"]),
        ),
    ]


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
    if outcome and outcome.complete:
        return outcome.ended
    return "ended to plan again" if end else "cut short"


def _measurement(
    choice: Choice, run: RunDir, result: RunResult, steady: Sequence[StepEvent], screen: Screen
) -> Measurement:
    """The run's figures beside their predictions, which later plans learn from."""
    plan, machine, summary = choice.plan, choice.machine, result.summary
    strategy, memory = plan.strategy, plan.estimate
    seconds = [event.seconds for event in steady]
    on_gpu = strategy.device == "cuda"
    allocated, reserved = memory.allocated_bytes, memory.reserved_bytes
    # Measured peaks are those of the last attempt up to its last step: an evaluation after that is
    # not in them.
    if not any(
        evaluation.step < summary["step"]
        for evaluation in steps.evaluations(run.attempts()[-1], screen.say)
    ):
        allocated, reserved = memory.step_allocated_bytes, memory.step_reserved_bytes
    if memory.gives_cache_back:  # the allocator reserves as much as there is room for
        reserved = None
    return Measurement(
        time=time.time(),
        run_id=run.run_id,
        machine_key=cache_keys.machine_key(machine),
        model_key=cache_keys.model_key(plan.shape),
        recipe_key=cache_keys.recipe_key(choice.recipe),
        device=strategy.device,
        device_name=machine.gpus[0].name if on_gpu else f"{machine.cpu_count} CPUs",
        mode=strategy.mode,
        num_processes=strategy.num_processes,
        per_device_train_batch_size=strategy.per_device_train_batch_size,
        gradient_accumulation_steps=strategy.gradient_accumulation_steps,
        max_length=max(plan.lengths),
        mixed_precision=strategy.mixed_precision,
        gradient_checkpointing=strategy.levers.every_n_layers > 0,
        versions={package: version(package) for package in _VERSIONED},
        predicted=Figures(
            allocated_bytes=allocated if on_gpu else None,
            reserved_bytes=reserved if on_gpu else None,
            host_pss_bytes=memory.host_bytes or None,
            step_s=plan.seconds_per_step,
        ),
        measured=Figures(
            allocated_bytes=summary["vram_allocated_bytes"] or None,
            reserved_bytes=summary["vram_reserved_bytes"] or None,
            host_pss_bytes=result.host_peak_bytes or None,
            step_s=statistics.median(seconds) if seconds else None,
        ),
        time_model=calibration.time_model(),
        correction=plan.seconds_correction.factor,
        waits_share=plan.waits_share,
        core_share=summary.get("core_share", 1.0),
    )


def chat_command(model: str) -> str:
    """A line that can be pasted, to talk with a model."""
    in_checkout = Workspace.here().root / "scripts" / "chat.py"
    # a submitted job runs a copy of the code, which is removed one day
    script = in_checkout if in_checkout.is_file() else FILES / "scripts" / "chat.py"
    return shlex.join([sys.executable, str(script), model])


def sample_lines(train_file: str, score: float | None) -> list[str]:
    """Lines on questions for a model of the sample data, whose file names some that no row has.
    `score` is the share of held-out answers that are right."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        metadata = pq.read_schema(train_file).metadata or {}
    except (pa.ArrowException, OSError):  # no parquet file, or it is no longer there
        return []
    questions = metadata.get(b"lowmem_questions", b"").decode(errors="replace").splitlines()
    if not questions or (score is not None and score < _MOSTLY_RIGHT):
        return []
    if score is None:
        return ["its answers were not scored; --evaluation.exact_match_rows=500 scores them"]
    return ["then ask it, for example (these are in no row of its data):", *questions]
