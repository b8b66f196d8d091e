"""Real runs on a machine with memory for two: they wait for each other and for other programs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from launch.probe import machine as probe_machine
from launch.queue import leases
from launch.run_folder.layout import RunDir
from launch.schema.machine import GIB
from tests import builders
from tests.process.queue.holders import TAKE_MEMORY, holders, said

FOR_ONE = 0.9
FOR_TWO = 1.45  # GiB; a run needs 0.63
LIMIT_S = 300.0


def until(condition: Callable[[], object]) -> float:
    """Wait for a condition; the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < LIMIT_S
        time.sleep(0.1)
    return time.monotonic() - began


@contextmanager
def start(
    workspace: Path, name: str, epochs: int, *flags: str, **extra: str
) -> Iterator[subprocess.Popen[bytes]]:
    """`python -m launch run` of a recipe of its own, until the block ends."""
    training = {"num_train_epochs": epochs, "save_steps": 1000}
    recipe = builders.recipe(
        workspace / name, name=name, launch={"num_processes": 1}, training=training
    )
    with (workspace / f"{name}.txt").open("wb") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "launch", "run", str(recipe), *flags],
            env=builders.environment(workspace, **extra),
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def states(workspace: Path) -> dict[str, str]:
    live = leases.live(workspace / "leases")
    return {lease.record.recipe: lease.record.state for lease in live}


def output(workspace: Path, name: str) -> str:
    return (workspace / f"{name}.txt").read_text(encoding="utf-8")


def test_of_four_runs_two_run_and_two_wait_in_order_until_one_is_killed(tmp_path, record_property):
    flags = ("--launch.wait", f"--launch.host_limit_gib={FOR_TWO}")
    endless, short = 20_000, 2
    with (
        start(tmp_path, "first", endless, *flags) as first,
        start_after(tmp_path, "second", endless, *flags) as second,
        start_after(tmp_path, "third", short, *flags) as third,
        start_after(tmp_path, "fourth", short, *flags) as fourth,
    ):
        granted, waiting = "granted", "waiting"
        assert states(tmp_path) == {
            **{"first": granted, "second": granted, "third": waiting, "fourth": waiting}
        }
        for name in ("first", "second"):
            until(lambda name=name: steps(tmp_path, name))
        first.kill()
        freed_s = until(lambda: states(tmp_path).get("third") == granted)
        record_property("freed_s", freed_s)
        assert states(tmp_path)["fourth"] == waiting
        assert (third.wait(LIMIT_S), fourth.wait(LIMIT_S)) == (0, 0)
        assert second.poll() is None
        second.send_signal(signal.SIGTERM)
        assert second.wait(LIMIT_S) == 75
    assert states(tmp_path) == {}
    assert f"process {first.pid})" in output(tmp_path, "third")
    assert "; behind run 3 of " in output(tmp_path, "fourth")
    for name in ("third", "fourth"):  # nothing ran twice
        (run,) = RunDir.all(tmp_path / "runs", name)
        assert len(run.attempts()) == 1
        assert steps(tmp_path, name) == list(range(1, 13))


@contextmanager
def start_after(
    workspace: Path, name: str, epochs: int, *flags: str, **extra: str
) -> Iterator[subprocess.Popen[bytes]]:
    """start(), when those before it have their leases or wait; it has its own when the block
    begins."""
    until(lambda: states(workspace))
    with start(workspace, name, epochs, *flags, **extra) as child:
        until(lambda: name in states(workspace))
        yield child


def steps(workspace: Path, name: str) -> list[int]:
    (run,) = RunDir.all(workspace / "runs", name) or [None]
    if run is None:
        return []
    lines = (
        line for path in sorted(run.root.glob("attempts/*/events.jsonl")) for line in path.open()
    )
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def test_a_run_that_yields_waits_behind_the_others_and_ends_with_the_same_weights(tmp_path):
    flags = ("--launch.wait", f"--launch.host_limit_gib={FOR_ONE}")
    with (
        start(tmp_path, "first", 100, *flags) as first,
        start_after(tmp_path, "second", 2, *flags) as second,
    ):
        until(lambda: len(steps(tmp_path, "first")) > 8)
        asked = builders.launch(tmp_path, "queue", "yield", "1")
        assert asked.stdout == "run 1 saves a checkpoint and waits for memory again\n"
        assert second.wait(LIMIT_S) == 0
        assert first.wait(LIMIT_S) == 0
    assert states(tmp_path) == {}
    assert "waiting as run 1 for" in output(tmp_path, "first")
    assert steps(tmp_path, "first") == list(range(1, 601))
    (run,) = RunDir.all(tmp_path / "runs", "first")
    first_end, last_end = (attempt.read_end() for attempt in run.attempts())
    assert first_end.failure.kind == "yielded" and last_end.failure is None
    with start(tmp_path / "alone", "first", 100) as alone:
        assert alone.wait(LIMIT_S) == 0
    there = builders.weights(tmp_path / "first" / "model")
    for name, weight in builders.weights(tmp_path / "alone" / "first" / "model").items():
        assert torch.equal(weight, there[name]), name


@pytest.mark.shows("F23", "clock_gettime a day back or forward while a run waits, by LD_PRELOAD")
@pytest.mark.parametrize("by_s", [-86_400, 86_400], ids=["back", "forward"])
def test_a_clock_that_jumps_neither_ends_nor_prolongs_a_wait(tmp_path, jumping_clock, by_s):
    moved, extra = jumping_clock(by_s)
    flags = ("--launch.wait=2", f"--launch.host_limit_gib={FOR_ONE}")  # at most two hours
    with (
        start(tmp_path, "first", 20_000, *flags, **extra) as first,
        start_after(tmp_path, "second", 2, *flags, **extra) as second,
    ):
        until(lambda: steps(tmp_path, "first"))
        moved.touch()
        before = len(steps(tmp_path, "first"))
        until(lambda: len(steps(tmp_path, "first")) > before + 50)
        assert states(tmp_path) == {"first": "granted", "second": "waiting"}
        first.kill()
        assert second.wait(LIMIT_S) == 0, output(tmp_path, "second")
    assert steps(tmp_path, "second") == list(range(1, 13))
    assert states(tmp_path) == {}


def test_a_program_that_takes_the_memory_delays_a_run_and_does_not_end_it(tmp_path):
    (tmp_path / "leases").mkdir()
    reserve_gib = probe_machine.host_available()[0] / GIB - 2.2
    program = subprocess.Popen(
        [sys.executable, "-c", TAKE_MEMORY, str(3 * GIB)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert program.stdout is not None and program.stdout.readline() == "taken\n"
        flags = ("--launch.wait", f"--launch.host_reserve_gib={reserve_gib}")
        with start(tmp_path, "tiny", 2, *flags) as child:
            until(lambda: "waiting as run 1 for" in output(tmp_path, "tiny"))
            assert states(tmp_path) == {"tiny": "waiting"}
            assert "; other programs hold the rest" in output(tmp_path, "tiny")
            program.kill()
            assert child.wait(LIMIT_S) == 0
    finally:
        program.kill()
        program.wait()
    assert "run 1 starts: planning with the memory that is free now" in output(tmp_path, "tiny")


def test_a_start_whose_memory_is_leased_while_it_tokenises_plans_again_and_names_the_holder(
    tmp_path,
):
    """The start is stopped meanwhile, so that the other one certainly comes first."""
    (tmp_path / "leases").mkdir()
    with (
        start(tmp_path, "tiny", 2, "--launch.host_limit_gib=4.2") as child,
        holders(tmp_path / "leases") as hold,
    ):
        until(lambda: "tokenising train.parquet" in output(tmp_path, "tiny"))
        child.send_signal(signal.SIGSTOP)
        holder = hold("4")
        assert said(holder) == "holds 1"
        child.send_signal(signal.SIGCONT)
        assert child.wait(LIMIT_S) == 3
        text = output(tmp_path, "tiny")
        assert "planning again: the plan needs 0." in text
        assert "leased meanwhile by run 1 of " in text
        assert f"process {holder.pid}) 4.00 GiB of host RAM" in text.splitlines()[-1]
    assert RunDir.all(tmp_path / "runs", "tiny") == []


def test_a_run_whose_memory_is_leased_while_it_plans_waits_again(tmp_path):
    """It waits with its number, and is stopped so that the other one certainly comes first."""
    (tmp_path / "leases").mkdir()
    flags = ("--launch.wait", "--launch.host_limit_gib=4.2")
    with holders(tmp_path / "leases") as hold:
        before = hold("4")
        assert said(before) == "holds 1"
        with start(tmp_path, "tiny", 2, *flags) as child:
            until(lambda: "waiting as run 2 for" in output(tmp_path, "tiny"))
            before.kill()
            until(lambda: "run 2 starts: planning" in output(tmp_path, "tiny"))
            child.send_signal(signal.SIGSTOP)
            holder = hold("4")
            assert said(holder) == "holds 3"
            child.send_signal(signal.SIGCONT)
            until(lambda: "waiting again: the plan needs 0." in output(tmp_path, "tiny"))
            until(lambda: states(tmp_path).get("tiny") == "waiting")
            holder.kill()
            assert child.wait(LIMIT_S) == 0, output(tmp_path, "tiny")
    assert output(tmp_path, "tiny").count("run 2 starts: planning") == 2
