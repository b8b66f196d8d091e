"""Tokenise the rows of a recipe in a child process, before a plan is made for them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from launch.base import environment, files, processes
from launch.base.interpreter import STOPS
from launch.base.text import shown
from launch.base.workspace import CODE
from launch.data import token_cache
from launch.plan import facts as plan_facts
from launch.predict.facts import Facts
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.result import Ended, Failure, RunResult, TokenisingEnd
from launch.supervise import attempt as supervise_attempt
from launch.supervise import heartbeats, restarts
from launch.supervise.screen import Tail
from launch.supervise.stop_signals import StopSignals

GRACE_S = 5.0  # time for the child to remove half-written files


class Failed(Exception):
    """Tokenising has failed, in a way that no further attempt would mend."""

    def __init__(self, result: RunResult, failure: Failure) -> None:
        super().__init__(failure.cause)
        self.result, self.failure = result, failure


def are_there(tokens: token_cache.TokenCache) -> bool:
    """True if the rows are tokenised, and undamaged."""
    return tokens.folder.exists() and not token_cache.fault(tokens.folder)


def until_done(facts: Facts, run: RunDir, say: Callable[[str], None], signals: StopSignals) -> None:
    """Tokenise the context's rows in attempts of the run. Raises Failed after an attempt that no
    further attempt would mend."""
    assert facts.rows.tokens is not None
    history, launch = restarts.History(), facts.recipe.launch
    say(
        f"tokenising {shown(facts.recipe.data.train_names)}, once: the plan needs the lengths of"
        " its rows"
    )
    signals.collect()
    processes.adopt()
    while True:
        attempt = run.new_attempt()
        files.write_json(attempt.tokenising_file, facts.rows.tokens)
        beginning = supervise_attempt.Beginning()
        ended = _child(facts, run, attempt, say, signals)
        if ended.returncode == 0:
            seconds = time.monotonic() - beginning.monotonic_s
            files.write_json(attempt.tokenised_file, TokenisingEnd(seconds))
            return
        # a stop signal to the child alone is a stop too
        of_child = -ended.returncode if -ended.returncode in STOPS else None
        result = supervise_attempt.result_of(
            *(beginning, ended, run, attempt, signals.stop or of_child),
            facts.machine.host_limit_bytes,
        )
        failure = result.failure
        assert failure is not None
        following = restarts.decide(
            *(failure, history, 0, 0, 0, launch.max_restarts, launch.on_oom == "replan"),
            is_plans_fault=False,
        )
        if following.why:
            say(following.why)
        is_last = following.action == "stop" or not signals.wait(following.wait_s)
        if is_last and failure.kind in restarts.MEMORY:
            failure = replace(
                failure,
                fix="it was tokenising, not training: give it more memory; the same line again"
                " keeps finished parts",
            )
            result = replace(result, failure=failure)
        supervise_attempt.write_outcome(result, attempt)
        if is_last:
            raise Failed(result, failure)


def _child(
    facts: Facts,
    run: RunDir,
    attempt: AttemptDir,
    say: Callable[[str], None],
    signals: StopSignals,
) -> Ended:
    """Run the child to its end; end it at a stop, and when it hangs."""
    launch = facts.recipe.launch
    number = plan_facts.tokenising_processes(facts.recipe, facts.machine, facts.installed)
    # Output of libraries goes where the ranks' output goes
    with attempt.tokenising_log.open("wb") as lines_file, attempt.log_file.open("ab") as log:
        child = subprocess.Popen(
            [
                *(sys.executable, "-P", "-m", "training.children.tokenise"),
                *("rows", str(attempt.root), str(number)),
            ],
            env=environment.passed(os.environ, launch.pass_env)
            | {"PYTHONPATH": str(CODE), "HF_HUB_OFFLINE": "1", "LOWMEM_RUN": run.tag}
            # it ends the process with SIGINT where it may start no thread, and is not used here
            | {"OPENBLAS_NUM_THREADS": "1"},
            stdout=lines_file,
            stderr=log,
            start_new_session=True,
            preexec_fn=processes.settle_child,
        )
    lines = Tail(attempt.tokenising_log)
    until_s, hang, progress = None, "", heartbeats.Progress()
    while True:
        with suppress(subprocess.TimeoutExpired):
            child.wait(timeout=processes.POLL_S)
        for line in lines.new_lines():
            say(line)
        if child.returncode is not None:
            return Ended(child.returncode, hang=hang)
        beats = heartbeats.read_all(attempt)
        if not hang and (
            hang := progress.silent(beats, time.monotonic(), launch.hang_floor_s) or ""
        ):
            say(hang)
            child.kill()
        if signals.stop is None:
            continue
        if until_s is None:
            child.terminate()
            until_s = time.monotonic() + GRACE_S
        elif signals.at_once or time.monotonic() > until_s:
            child.kill()
