"""Confirm the fastest candidates by short real trials, each a fresh `accelerate launch`, and
remember the fastest.

A trial takes steps of effective batches in which every micro-batch is as long as the longest row,
then evaluates. The share of that time that the recipe's own rows take is predicted for each split
of the batch, because small micro-batches have less padding. At most _MAX_TRIALS run, and at most
one of them may run out of memory: after it only candidates with much lower predictions are tried.
Without a prediction the batch is found by bisection.
"""

import io
import math
import os
import re
import shutil
import subprocess
import sys
import time
from argparse import Namespace
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Literal

import psutil

from launch.base import compile_caches, environment, files
from launch.base.errors import DoesNotFit, ResourceError, Stopped
from launch.base.text import size
from launch.base.workspace import CODE, Workspace
from launch.commands import recipe_arguments
from launch.commands.recipe_arguments import RecipeArguments, say
from launch.plan import facts as plan_facts
from launch.plan import planner, resolve, search
from launch.plan.planner import Choice
from launch.predict import estimate
from launch.predict.estimate import describe
from launch.predict.facts import Facts
from launch.predict.history import cache_keys
from launch.predict.history.ledger import Ledger, Tuned
from launch.queue.admission import leased_now
from launch.render import run_files
from launch.run_folder import steps
from launch.run_folder.layout import RunDir
from launch.schema.plan import MemoryEstimate, Strategy
from launch.schema.result import Failure, UsedTokens
from launch.supervise import attempt as supervise_attempt
from launch.supervise import stop_signals, tokenising
from launch.supervise.run_lease import RunLease
from launch.supervise.screen import Screen

_MAX_TRIALS = 3
_TRIALS = re.compile(r"\d{8}-\d{6}-(\d+)")  # the folder of a tuning, with its process
STEPS = 3  # optimizer steps of a trial; the first finds no optimizer states
_MUCH_LESS = 0.8  # share of a failed trial's predicted bytes that another trial may have
AS_FAST = 1.1  # trials whose seconds differ by less count as equally fast
OUT_OF_MEMORY = (6, 12)  # exit codes: host RAM, VRAM


@dataclass(frozen=True)
class Outcome:
    """The end of a trial."""

    ended: Literal["fits", "oom", "failed"]
    step_s: float | None = None
    peak_bytes: int | None = None  # peak of the device, or of the job's host RAM on CPUs
    why: str = ""


FLAGS = {
    **recipe_arguments.RECIPE_FLAGS,
    "--forget": {"action": "store_true", "help": "forget the tuned batch, and do not tune"},
}


def main(arguments: Namespace, unparsed: Sequence[str]) -> None:
    tune_recipe(recipe_arguments.read(arguments, unparsed), forget=arguments.forget)


def tune_recipe(typed: RecipeArguments, forget: bool = False, again: bool = True) -> None:
    """Tune, or forget the tuned batch; `again` False: only a recipe that was not tuned before."""
    compile_caches.settle()
    # any split of the batch may win, so all are traced by one child
    wishes, leased = replace(typed.wishes, wants_tuned=False, free_batch=True), leased_now(say)
    facts = resolve.read(
        *(typed.recipe, typed.overrides, None, wishes, leased, say),
        test_link=True,
        download=typed.download,
    )
    # a recipe that `allow:` has relaxed is tuned under the key of the relaxed recipe
    relaxed = [relaxed for relaxed, _ in planner.relaxed_contexts(facts)]
    ledger_keys = [_ledger_keys(of_recipe) for of_recipe in (facts, *relaxed)]
    ledger = Ledger(Workspace.here().ledger_file, print)
    if forget:
        num_forgotten = sum(ledger.forget(**recipe_keys) for recipe_keys in ledger_keys)
        print(
            "forgotten" if num_forgotten else "nothing was tuned for this machine, model and recipe"
        )
    elif again or not any(ledger.recall(**recipe_keys) for recipe_keys in ledger_keys):
        planner.refuse_hopeless(facts)
        _tune(facts)


def _ledger_keys(facts: Facts) -> dict[str, str]:
    """The ledger's keys of the machine, the model and the recipe."""
    return {
        "machine_key": cache_keys.machine_key(facts.machine),
        "model_key": cache_keys.model_key(facts.model.size),
        "recipe_key": cache_keys.recipe_key(facts.recipe),
    }


def _tune(facts: Facts) -> None:
    """Run the trials and keep the fastest that fits. Raises DoesNotFit when none does."""
    workspace = Workspace.here()
    ledger = Ledger(workspace.ledger_file, say)
    place = workspace.cache / "trials" / f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    _sweep(place.parent)
    try:
        choice = planner.choose(_with_tokenised_rows(facts, place))
        facts = choice.facts
        rows = _longest_rows(facts, place, choice.plan.strategy.effective_batch_size)
        trials = _Trials(workspace, choice, rows, place)
        if candidates := search.ranked(facts):
            _confirm([(judged.candidate, judged.memory) for judged in candidates], trials)
        else:
            say("no prediction: the batch is found by bisection")
            _bisect(choice.plan.strategy, trials)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    fits = [(strategy, outcome) for strategy, outcome in trials.done if outcome.ended == "fits"]
    if not fits:
        raise DoesNotFit(
            "none of the trials fits: "
            + "; ".join(f"{describe(s)}: {o.why}" for s, o in trials.done)
        )
    fastest_s = min(outcome.step_s or math.inf for _, outcome in fits)
    # Ties go by prediction: a few steps on a busy machine cannot tell similar speeds apart
    best, step_s = next(
        (strategy, outcome.step_s)
        for strategy, outcome in fits
        if outcome.step_s and outcome.step_s <= fastest_s * AS_FAST
    )
    tuned = Tuned(
        kind="tuned",
        time=time.time(),
        **_ledger_keys(facts),
        strategy=best,
        why=f"fastest of {len(trials.done)} trial(s): {step_s:.3g} s a step",
        step_s=step_s,
    )
    ledger.record(tuned)
    say(f"tuned: {describe(best)}, {tuned.why}; kept for later runs of this recipe here")


def _sweep(trials: Path) -> None:
    """Remove the folders of tunings that were killed."""
    for folder in trials.glob("*-*-*"):
        maker = _TRIALS.fullmatch(folder.name)
        if maker and not psutil.pid_exists(int(maker[1])):
            shutil.rmtree(folder, ignore_errors=True)


class _Trials:
    """Runs trials one after another, each with a lease of its memory, and keeps how each ended."""

    def __init__(self, workspace: Workspace, choice: Choice, rows: Path, place: Path) -> None:
        self._workspace, self._choice, self._rows, self._place = workspace, choice, rows, place
        self.done: list[tuple[Strategy, Outcome]] = []

    def run(self, strategy: Strategy, memory: MemoryEstimate | None = None) -> Outcome:
        """Try a split of the batch. `memory`: its prediction; None: there is none.

        Raises DoesNotFit if other starts have leased the memory."""
        number = len(self.done) + 1
        say(f"trial {number}: {describe(strategy)}")
        outcome = self._outcome(strategy, memory or self._choice.plan.estimate, number)
        seconds = ""
        if outcome.step_s:
            seconds = f", {outcome.step_s:.3g} s a step"
            share = estimate.share_of_longest(self._choice.facts, strategy)
            if share < 1:
                outcome = replace(outcome, step_s=share * outcome.step_s)
                seconds += f" of the longest rows: {outcome.step_s:.3g} s of the recipe's own"
        self.done.append((strategy, outcome))
        peak = f", peak {size(outcome.peak_bytes)}" if outcome.peak_bytes else ""
        say(f"         {outcome.ended}{seconds}{peak}{f': {outcome.why}' if outcome.why else ''}")
        return outcome

    def _outcome(self, strategy: Strategy, memory: MemoryEstimate, number: int) -> Outcome:
        recipe, machine = self._choice.recipe, self._choice.machine
        trial = recipe.model_copy(
            update={
                "name": f"trial{number}",
                "training": recipe.training.model_copy(
                    update={
                        "max_steps": STEPS,
                        "save_steps": STEPS + 1,
                        "eval_steps": STEPS,
                        "logging_steps": 1,
                        "warmup_steps": 0,
                    }
                ),
                "output_dir": str(self._place / f"model{number}"),
                "evaluation": recipe.evaluation.model_copy(update={"exact_match_rows": 0}),
            }
        )
        plan = replace(
            self._choice.plan, strategy=strategy, estimate=memory, recipe_name=trial.name
        )
        run = RunDir.create(self._place / "runs", trial.name, datetime.now())
        attempt = run_files.write_run(run, trial, machine, plan, self._workspace)
        files.write_json(run.tokens_file, UsedTokens(self._rows))
        command = run_files.command(plan, machine, run, attempt, self._workspace, os.environ)
        screen = Screen(stream=io.StringIO())
        with ExitStack() as locks:
            lease = RunLease(self._workspace.root, say, locks)
            leased = replace(self._choice, plan=plan)
            if refusal := lease.take(leased, run, self._choice.facts.limits.beside):
                raise DoesNotFit(f"trial {number}: {refusal}; tune again when they have ended")

            def hold(host_bytes: int) -> bool:
                lease.hold_taken(leased, run, host_bytes)
                return False  # it is over soon: nothing to yield

            result = supervise_attempt.run(trial, machine, run, attempt, command, screen, hold=hold)
        if result.failure is not None:
            ended = "oom" if result.exit_code in OUT_OF_MEMORY else "failed"
            _raise_if_stopped(result.failure)
            return Outcome(ended, why=result.failure.cause)
        events = steps.events(attempt)
        peak = max(event.vram_reserved_bytes for event in events) or result.host_peak_bytes
        # other programs only ever make a step slower
        return Outcome("fits", min(event.seconds for event in events[1:]), peak)


def _confirm(candidates: Sequence[tuple[Strategy, MemoryEstimate]], trials: _Trials) -> None:
    """Try the fastest by prediction, then others; after a failure only those with a much lower
    prediction."""
    limit_bytes = 0.0
    for strategy, memory in islice(_different(candidates), _MAX_TRIALS):
        if trials.run(strategy, memory).ended != "fits":
            limit_bytes = _MUCH_LESS * memory.device_bytes
            break
    tried = {strategy for strategy, _ in trials.done}
    smaller = [
        (strategy, memory)
        for strategy, memory in candidates
        if memory.device_bytes <= limit_bytes and strategy not in tried
    ]
    for strategy, memory in smaller[: _MAX_TRIALS - len(trials.done)]:
        if trials.run(strategy, memory).ended == "oom":  # a second one is not risked
            break


def _different(
    candidates: Sequence[tuple[Strategy, MemoryEstimate]],
) -> Iterator[tuple[Strategy, MemoryEstimate]]:
    """The fastest; the fastest with at most half its micro-batch; the others in order."""
    best, *others = candidates
    half = best[0].per_device_train_batch_size / 2
    smaller = [row for row in others if row[0].per_device_train_batch_size <= half][:1]
    yield from (best, *smaller, *(row for row in others if row not in smaller))


def _bisect(requested: Strategy, trials: _Trials) -> None:
    """Find the largest micro-batch that fits, of the divisors of a rank's samples per step, in
    ceil(log2 n) + 1 trials."""
    per_rank = requested.per_device_train_batch_size * requested.gradient_accumulation_steps
    sizes = [size for size in range(1, per_rank + 1) if per_rank % size == 0]

    def is_too_large(size: int) -> bool:
        split = replace(
            requested,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=per_rank // size,
        )
        return trials.run(split).ended != "fits"

    bisect_left(sizes, True, key=is_too_large)  # each call is a trial, which `trials` keeps


def _with_tokenised_rows(facts: Facts, place: Path) -> Facts:
    """The facts with the lengths of the recipe's rows, which are tokenised if they are not yet."""
    assert facts.rows.tokens is not None
    if tokenising.are_there(facts.rows.tokens):
        return facts
    run = RunDir.create(place / "runs", "tokens", datetime.now())
    try:
        with stop_signals.signals() as signals:
            tokenising.until_done(facts, run, say, signals)
    except tokenising.Failed as failed:
        _raise_if_stopped(failed.failure)
        raise ResourceError(failed.failure.cause) from failed
    return replace(facts, rows=plan_facts.with_counts(facts.rows))


def _raise_if_stopped(failure: Failure) -> None:
    if failure.kind == "stopped":
        raise Stopped(f"tuning was {failure.cause}; nothing is kept", failure.exit_code)


def _longest_rows(facts: Facts, place: Path, effective_batch_size: int) -> Path:
    """A token cache of the longest rows alone, as many as a trial takes."""
    assert facts.rows.tokens is not None
    argv = [
        sys.executable,
        "-P",
        "-m",
        "training.children.trial_rows",
        str(facts.rows.tokens.folder),
        str(place / "rows"),
        str(effective_batch_size * STEPS),
    ]
    done = subprocess.run(
        argv,
        env={**environment.passed(os.environ), "PYTHONPATH": str(CODE)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ResourceError(
            f"the longest rows cannot be read: {done.stderr.strip().splitlines()[-1]}"
        )
    return place / "rows"
