"""What was learnt is kept and found again, says how far predictions are off, and never stops a run:
real files, real processes, damaged disks."""

from __future__ import annotations

import fcntl
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.base.workspace import Workspace
from launch.predict.history import cache_keys, calibration, ledger
from launch.predict.history.calibration import Figures, Measurement
from launch.predict.history.ledger import Ledger, Tuned
from launch.schema.machine import GIB
from launch.schema.plan import ModelSize, Strategy
from tests.builders import CODE, gpu, machine, plan, recipe_of

KEYS = {"machine_key": "machine-1", "model_key": "model-1", "recipe_key": "recipe-1"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where a house whose name needs quoting keeps its ledger; nothing is there yet."""
    return Workspace(tmp_path / "a house; it's #1 50%?").ledger_file


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def book(path: Path, said: list[str]) -> Ledger:
    return Ledger(path, said.append, busy_s=0.2)


@pytest.fixture(scope="module")
def strategy() -> Strategy:
    return plan().strategy


def measurement(
    run_id: str = "tiny-1", asked: int | None = 100, took: int | None = 100, **given: Any
) -> Measurement:
    """A run that was predicted to allocate `asked` bytes and took so many."""
    facts: dict[str, Any] = {
        "time": 1.0,
        "run_id": run_id,
        **KEYS,
        "device": "cuda",
        "device_name": "RTX 3080",
        "mode": "single_gpu",
        "num_processes": 1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_length": 128,
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "versions": {"torch": "2.9.0"},
        "predicted": Figures(allocated_bytes=asked),
        "measured": Figures(allocated_bytes=took),
    }
    return Measurement(**{**facts, **given})


def tuned(strategy: Strategy, **given: Any) -> Tuned:
    return Tuned(
        **{
            "time": 1.0,
            **KEYS,
            "strategy": strategy,
            "why": "fastest of 3",
            "step_s": 0.5,
            **given,
        }
    )


def residuals(book: Ledger, quantity: Any = "allocated_bytes", device: Any = "cuda") -> list[float]:
    """Oldest first."""
    return [error for _, error in calibration.residuals(book.measurements(), quantity, device)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """What another program reads from the file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def add(path: Path, text: str) -> None:
    """What another program does to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


# ---- keys
# ---------------------------------------------------------------------------


def test_a_machine_is_known_again_whatever_is_free_and_whatever_it_is_called():
    before = machine(2)
    cards = tuple(
        replace(card, free_bytes=GIB, reason="NVML", driver="550.54.14") for card in before.gpus
    )
    facts = {
        "name": "gpu-node-7",
        "host_available_bytes": GIB,
        "disk_free_bytes": 1,
        "shm_bytes": 0,
        "cpu_reason": "x",
    }
    # another kernel keeps some MiB more
    facts["host_limit_bytes"] = before.host_limit_bytes - (90 << 20)
    assert cache_keys.machine_key(machine(cards=cards, **facts)) == cache_keys.machine_key(before)


@pytest.mark.parametrize(
    "other",
    [
        machine(),
        machine(1),
        machine(2, host_limit_bytes=32 * GIB),
        machine(2, cpu_count=4),
        machine(cards=(gpu(0), replace(gpu(1), driver="560"))),
        machine(cards=(gpu(0), gpu(1, total_bytes=10 * GIB))),
        machine(cards=(gpu(0), replace(gpu(1), name="RTX 3090"))),
    ],
)
def test_another_machine_has_another_key(other):
    assert cache_keys.machine_key(other) != cache_keys.machine_key(machine(2))


def test_a_model_is_known_by_its_content_not_by_its_name():
    shape = ModelSize("mini", {"model_type": "llama", "hidden_size": 64}, 1000, 1000)
    moved = replace(
        shape, name="/models/mini", config={**shape.config, "_name_or_path": "/models/mini"}
    )
    assert cache_keys.model_key(moved) == cache_keys.model_key(shape)
    assert cache_keys.model_key(replace(shape, trainable_parameters=10)) == cache_keys.model_key(
        shape
    )  # the recipe's freeze
    assert cache_keys.model_key(
        replace(shape, config={**shape.config, "hidden_size": 65})
    ) != cache_keys.model_key(shape)
    assert cache_keys.model_key(replace(shape, parameters=1001)) != cache_keys.model_key(shape)


@pytest.mark.parametrize(
    "sections",
    [
        {"name": "other", "output_dir": "/elsewhere"},
        {"model": {"shape": "llama-mini"}},
        {"model": {"shape": None, "path": "/models/mini"}},
        {"tokenizer": {"path": "/tokenizer"}},
        {"data": {"train_file": "/data/other.parquet", "max_train_samples": 9, "text_column": "t"}},
        {"training": {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}},
        {
            "training": {
                "learning_rate": 1e-3,
                "seed": 1,
                "save_steps": 9,
                "max_steps": 7,
                "num_train_epochs": 1,
            }
        },
        {"launch": {"nodes": 1, "main_process_port": 3000}},
    ],
)
def test_a_recipe_is_known_again_when_an_optimizer_step_feels_no_difference(sections):
    assert cache_keys.recipe_key(recipe_of(**sections)) == cache_keys.recipe_key(recipe_of())


@pytest.mark.parametrize(
    "sections",
    [
        {"task": "pretrain"},
        {"model": {"dtype": "bfloat16"}},
        {"model": {"freeze": ["model.embed_tokens"]}},
        {"lora": {}},
        {"lora": {"r": 8}},
        {"tokenizer": {"vocab_size": 512}},
        {"data": {"max_length": 256}},
        {"training": {"gradient_accumulation_steps": 4}},
        {"training": {"bf16": True}},
        {"training": {"optim": "adafactor"}},
        {"training": {"activation_checkpointing": True}},
        {"training": {"torch_compile": True}},  # a field that only TrainingArguments knows
        {"launch": {"mode": "cpu"}},
        {"launch": {"vram_fraction": 0.7}},
    ],
)
def test_a_recipe_whose_steps_differ_has_another_key(sections):
    assert cache_keys.recipe_key(recipe_of(**sections)) != cache_keys.recipe_key(recipe_of())


def test_keys_are_the_same_in_every_process():
    code = (
        "from launch.predict.history import cache_keys as keys; from tests.builders import machine,"
        " recipe_of"
    )
    code += "; print(keys.machine_key(machine(2)))"
    code += "; print(keys.recipe_key(recipe_of()))"
    argv = [sys.executable, "-P", "-c", code]
    env = {"PYTHONPATH": str(CODE), "PYTHONHASHSEED": "7"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == [
        cache_keys.machine_key(machine(2)),
        cache_keys.recipe_key(recipe_of()),
    ]


# ---- what is kept and found again
# ---------------------------------------------------------------------------


def test_reading_where_nothing_is_yet_makes_no_file(book, said):
    assert book.recall(**KEYS) is None
    assert book.measurements() == said == []
    assert not book.path.parent.exists()


def test_every_field_of_a_measurement_is_in_its_line(book, said):
    figures = Figures(allocated_bytes=1, reserved_bytes=2, host_pss_bytes=1 << 40, step_s=0.5)
    kept = measurement(predicted=figures, measured=Figures(reserved_bytes=7))
    book.record(kept)
    (line,) = lines_of(book.path)
    assert line == asdict(kept)
    assert line["measured"]["allocated_bytes"] is None
    assert book.measurements() == [kept]
    assert said == []


def test_lines_with_fewer_or_more_figures_than_this_version_has_are_read(book, said):
    line = asdict(measurement(asked=100, took=110))
    del line["predicted"]["step_s"]
    line["measured"]["joules"] = 7
    add(book.path, json.dumps(line) + "\n")
    assert book.measurements() == [measurement(asked=100, took=110)]
    assert said == []


def test_tuning_again_replaces_what_was_remembered(book, strategy, said):
    better = replace(strategy, per_device_train_batch_size=32)
    book.remember(tuned(strategy))
    book.remember(tuned(better, time=2.0, step_s=0.25))
    book.remember(tuned(strategy, model_key="another"))
    assert book.recall(**KEYS) == tuned(better, time=2.0, step_s=0.25)
    assert said == []


def test_what_is_forgotten_is_gone_and_nothing_else_is(book, strategy):
    book.remember(tuned(strategy))
    book.remember(tuned(strategy, model_key="another"))
    assert book.forget(**KEYS)
    assert book.recall(**KEYS) is None
    assert book.recall(**{**KEYS, "model_key": "another"}) is not None
    assert not book.forget(**KEYS)
    book.remember(tuned(strategy))
    assert book.recall(**KEYS) == tuned(strategy)


def test_lines_that_this_version_does_not_know_are_passed_over_and_said_once(book, strategy, said):
    book.remember(tuned(strategy))
    line = asdict(tuned(strategy))
    add(book.path, json.dumps({**line, "kind": "dreamt\x1b[2J\n"}) + "\n")
    add(book.path, json.dumps({**line, "strategy": {}}) + "\n")
    book.record(measurement())
    assert book.recall(**KEYS) == tuned(strategy)
    assert book.measurements() == [measurement()]
    (text,) = said
    assert "2 line(s) not of this version are passed over, the first is line 2: " in text
    assert "'dreamt\\x1b[2J\\n'" in text


# ---- how far predictions are off
# ---------------------------------------------------------------------------


def test_residuals_are_of_the_runs_that_have_both_sides(book):
    for at, (predicted, measured) in enumerate(
        [(100, 110), (100, 95), (None, 5), (100, None), (0, 5), (200, 250)]
    ):
        book.record(measurement(f"run-{at}", predicted, measured, time=float(at)))
    book.record(measurement("cpu", 100, 300, device="cpu"))
    book.record(measurement("elsewhere", 100, 400, machine_key="machine-2", time=50.0))
    assert residuals(book) == pytest.approx([0.10, -0.05, 0.25, 3.0])
    assert residuals(book, device="cpu") == pytest.approx([2.0])
    assert residuals(book, "reserved_bytes") == []


def test_only_the_newest_residuals_count(book):
    lines = [json.dumps(asdict(measurement(took=100 + number))) for number in range(600)]
    add(book.path, "\n".join(lines) + "\n")
    margin = book.margin("allocated_bytes", "cuda", "machine-1", prior=0.0, level=0.001)
    assert margin.fraction == pytest.approx((600 - ledger.NEWEST) / 100)
    assert f" of {ledger.NEWEST} runs on this machine" in margin.reason


@pytest.mark.parametrize(
    ("count", "level", "rank"),
    [
        (18, 0.95, None),
        (19, 0.95, 19),
        (20, 0.95, 20),
        (39, 0.95, 38),
        (99, 0.95, 95),
        (9, 0.9, 9),
        (99, 0.07, 7),
    ],
)
def test_the_bound_is_the_residual_of_that_rank(count, level, rank):
    found = calibration.conformal_bound([float(value) for value in range(count, 0, -1)], level)
    assert found == rank


@given(
    st.lists(st.integers(-1000, 1000), min_size=2, max_size=60),
    st.sampled_from([0.5, 0.8, 0.9, 0.95]),
)
def test_the_bound_covers_at_least_its_level_of_runs_that_are_like_the_others(values, level):
    covered = 0
    for at, value in enumerate(values):  # each in turn is the next run, the others are known
        bound = calibration.conformal_bound(values[:at] + values[at + 1 :], level)
        covered += bound is None or value <= bound
    assert covered >= level * len(values) - 1e-9


def test_a_margin_is_of_this_machine_else_of_its_kind_of_device_else_the_prior(book):
    def margin(machine_key: str = "machine-1", device: Any = "cuda") -> calibration.Margin:
        # of 3 runs the largest
        return book.margin("allocated_bytes", device, machine_key, prior=0.5, level=0.75)

    assert margin().fraction == 0.5
    assert margin().reason == "assumed: 0 run(s) measured so far, a 75% bound needs 3"
    for measured in (104, 102):
        book.record(measurement(took=measured, machine_key="machine-2"))
    assert margin().reason == "assumed: 2 run(s) measured so far, a 75% bound needs 3"
    book.record(measurement(took=103, machine_key="machine-2"))
    assert margin().fraction == pytest.approx(0.04)
    assert margin().reason == "75% bound of 3 runs on every cuda machine in the ledger"
    for measured in (97, 98, 96):
        book.record(measurement(took=measured))
    assert margin().fraction == pytest.approx(-0.02)
    assert margin().reason == "75% bound of 3 runs on this machine"
    assert margin(device="cpu").fraction == 0.5


def test_the_calibration_report_says_when_there_is_nothing_yet(book):
    nothing = ["calibration: nothing to compare yet; each run that ends adds its figures"]
    assert book.calibration_lines() == nothing
    book.record(measurement(took=None))
    assert book.calibration_lines() == nothing


def test_the_calibration_report_counts_and_names_the_worst_runs(book):
    for at, measured in enumerate([100, 102, 99, 104, 80, 102, 112]):
        book.record(measurement(f"run-{at}", 100, measured))
    figures = {"predicted": Figures(step_s=1.0), "measured": Figures(step_s=2.0)}
    book.record(measurement("slow", device="cpu", **figures))
    lines = book.calibration_lines()
    assert lines[:9] == [
        (
            "allocated on cuda: 7 run(s), error median 2.0%, p95 20.0%, max 20.0%, bias -0.1%;"
            " 2 under-predicted by more than 3%"
        ),
        f"    below -10%     1 {'#' * 15}",
        "   -10% to -3%     0",
        f"    -3% to -1%     1 {'#' * 15}",
        f"    -1% to +1%     1 {'#' * 15}",
        f"    +1% to +3%     2 {'#' * 30}",
        f"   +3% to +10%     1 {'#' * 15}",
        f"    above +10%     1 {'#' * 15}",
        "  worst: run-4 -20.0%, run-6 +12.0%, run-3 +4.0%, run-1 +2.0%, run-5 +2.0%",
    ]
    assert lines[9].startswith("seconds per step on cpu: 1 run(s), error median 100.0%,")
    assert lines[-1] == "  worst: slow +100.0%"


# ---- several launchers
# ---------------------------------------------------------------------------

IMPORTS = """
import json, os, sys
from dataclasses import replace
from pathlib import Path
from pydantic import TypeAdapter
from launch.predict.history.calibration import Measurement
from launch.predict.history.ledger import Ledger

first = TypeAdapter(Measurement).validate_json(sys.argv[1])
"""
LAUNCHER = f"""{IMPORTS}
for line in sys.stdin:
    path, run_ids = json.loads(line)
    said, counts = [], []
    for run_id in run_ids:
        ledger = Ledger(Path(path), said.append)
        ledger.record(replace(first, run_id=run_id))
        counts.append(len(ledger.measurements()))
    print(json.dumps([said, counts]), flush=True)
"""


def started(code: str, *before: str, **env: str) -> subprocess.Popen[str]:
    """A process that runs the code with a measurement as its first argument."""
    argv = [*before, sys.executable, "-P", "-c", code, json.dumps(asdict(measurement()))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    return subprocess.Popen(argv, env={"PYTHONPATH": str(CODE), **env}, **pipes)


class Launcher:
    """A process that records what it is told to."""

    def __init__(self, *before: str, **env: str) -> None:
        self.child = started(LAUNCHER, *before, **env)

    def begin(self, path: Path, run_ids: list[str]) -> None:
        self.child.stdin.write(json.dumps([str(path), run_ids]) + "\n")
        self.child.stdin.flush()

    def end(self) -> tuple[list[str], list[int]]:
        """Lines that were said, and the number of measurements read after each of its writes."""
        said, counts = json.loads(self.child.stdout.readline())
        return said, counts

    def close(self) -> None:
        self.child.stdin.close()
        assert self.child.wait(timeout=60) == 0
        self.child.stdout.close()


@pytest.fixture(scope="module")
def launchers():
    both = Launcher(), Launcher()
    yield both
    for launcher in both:
        launcher.close()


WRITERS = f"""{IMPORTS}
def say(line):
    os.write(1, f"{{line}}\\n".encode())  # in one piece

book = Ledger(Path(sys.stdin.readline().strip()), say, busy_s=60)
gate, opens = os.pipe()
pids = []
for number in range(50):
    pids.append(os.fork())
    if not pids[-1]:
        os.close(opens)
        os.read(gate, 1)  # until all are there
        for turn in range(10):
            book.record(replace(first, run_id=f"{{number}}-{{turn}}"))
            say(f"{{number}}-{{turn}}")
        os._exit(0)
say(" ".join(map(str, pids)))
os.close(opens)
for pid in pids:
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("num_kills", [0, 10])
def test_fifty_writers_at_once_lose_no_line_even_if_some_of_them_are_killed(path, num_kills):
    writers = started(WRITERS)
    writers.stdin.write(f"{path}\n")
    writers.stdin.flush()
    pids = [int(pid) for pid in writers.stdout.readline().split()]
    written = []
    for pid in random.Random(1).sample(pids, num_kills):
        written.append(writers.stdout.readline().strip())
        os.kill(pid, signal.SIGKILL)
    written += writers.communicate(timeout=60)[0].splitlines()
    assert len(pids) == 50 and len(written) >= 400
    run_ids = [run.run_id for run in Ledger(path, print).measurements()]
    assert set(written) <= set(run_ids)  # a line that was said, or an error, would not be there
    assert len(run_ids) == len(set(run_ids)) <= len(written) + num_kills


HALF = f"""{IMPORTS}
path = Path(sys.stdin.readline().strip())
Ledger(path, print).record(replace(first, run_id="x" * 100_000_000))
"""


def killed_within_a_write(path: Path) -> None:
    """Leaves a part of a line at the end of the file, which ends with a whole one."""
    size = path.stat().st_size
    for _ in range(20):
        child = started(HALF)
        child.stdin.write(f"{path}\n")
        child.stdin.flush()
        while path.stat().st_size == size and child.poll() is None:
            pass
        child.kill()
        child.communicate(timeout=60)
        with path.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                return
            file.truncate(size)  # the kill came too late
    pytest.fail("no kill came within a write")


def test_a_kill_within_a_write_costs_that_line_only_and_is_said_once(book, said, launchers):
    book.record(measurement("before"))
    killed_within_a_write(book.path)
    assert [run.run_id for run in book.measurements()] == ["before"]
    launchers[0].begin(book.path, ["after", "later"])
    (line,), counts = launchers[0].end()
    assert counts == [2, 3]
    assert (
        "1 line(s) not of this version are passed over, the first is line 2: 'Invalid JSON" in line
    )
    assert len(book.measurements()) == 3
    assert said == [line]


def test_a_line_that_is_being_written_is_no_damage(book, said):
    book.record(measurement())
    add(book.path, '{"kind": "measu')
    assert book.measurements() == [measurement()]
    assert said == []


def test_a_reader_goes_on_while_another_writes_and_a_writer_that_waits_in_vain_says_so(book, said):
    book.record(measurement("first"))
    with book.path.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert book.measurements() == [measurement("first")]
        assert said == []
        began = time.monotonic()
        book.record(measurement("second"))
        assert time.monotonic() - began >= book.busy_s
    (line,) = said
    assert "another process has locked it for 0.2 s; nothing new is kept, the run goes on" in line
    assert book.measurements() == [measurement("first")]


# ---- the SQLite file of earlier versions
# ---------------------------------------------------------------------------


def old_file(path: Path, script: str = (CODE / "tests/data/ledger.sql").read_text("utf-8")) -> Path:
    """The file that an earlier version has written: three measurements, two results of tuning."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.with_suffix(".sqlite")
    with closing(sqlite3.connect(old)) as db:
        db.executescript(script)
    return old


def asides(path: Path) -> list[Path]:
    return sorted(path.parent.glob("ledger.sqlite.aside-*"))


def test_what_an_earlier_version_wrote_is_carried_over_once_and_its_file_is_kept(book, said):
    old = old_file(book.path)
    content = old.read_bytes()
    result = book.recall(**KEYS)
    assert result is not None
    assert (result.time, result.step_s, result.strategy.per_device_train_batch_size) == (
        2,
        0.25,
        32,
    )
    assert book.recall(**{**KEYS, "model_key": "another"}) is not None
    first, second, third = book.measurements()
    versions = {"torch": "2.9.0", "transformers": "5.0.0"}
    assert first == measurement("sft-1", 100, 110, time=1760000000.25, versions=versions)
    assert (second.device, second.gradient_checkpointing) == ("cpu", False)
    assert second.predicted == Figures(host_pss_bytes=1 << 40, step_s=0.5)
    assert second.measured == Figures(host_pss_bytes=(1 << 40) + 7, step_s=0.75)
    assert third.predicted == Figures()
    (aside,) = asides(book.path)
    assert aside.read_bytes() == content and not old.exists()
    (line,) = said
    assert line == (
        f"ledger: {old}: its 5 row(s) are in ledger.jsonl now; it is kept as {aside.name}"
    )
    assert len(lines_of(book.path)) == 5


def test_a_writer_carries_over_too_and_what_is_new_counts(book, strategy):
    old_file(book.path)
    book.remember(tuned(strategy, step_s=0.125))
    assert book.recall(**KEYS) == tuned(strategy, step_s=0.125)
    assert len(lines_of(book.path)) == 6


def test_what_a_start_had_carried_over_when_it_was_killed_is_not_there_twice(book, said):
    old_file(book.path)
    book.measurements()
    lines = book.path.read_bytes().splitlines(keepends=True)
    book.path.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    asides(book.path)[0].rename(book.path.with_suffix(".sqlite"))
    said.clear()
    assert [run.run_id for run in book.measurements()] == ["sft-1", "cpu-1", "sft-2"]
    assert len(book.path.read_bytes().splitlines()) == 6
    assert len(asides(book.path)) == 1
    assert "its 5 row(s) are in" in said[0] and "line 3: " in said[1]
    assert len(said) == 2


def test_of_starts_that_carry_over_at_once_one_does(tmp_path, launchers):
    for number in range(15):
        path = tmp_path / str(number) / "ledger.jsonl"
        old_file(path)
        for who, launcher in enumerate(launchers):
            launcher.begin(path, [f"{who}-{number}" for number in range(3)])
        said = [line for launcher in launchers for line in launcher.end()[0]]
        assert len(said) == len(asides(path)) == 1, said
        assert len(lines_of(path)) == 5 + 6


def garbage(old: Path) -> None:
    old.write_bytes(b"\x00\xffno database" * 500)


def truncated(old: Path) -> None:
    old.write_bytes(old.read_bytes()[: 4096 + 100])


def overwritten(old: Path) -> None:
    """A page of the tables turns into something else; the header still says that it is a
    database."""
    content = bytearray(old.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    old.write_bytes(content)


def foreign(old: Path) -> None:
    old.unlink()
    old_file(old, "CREATE TABLE recipes (cake TEXT)")


def empty(old: Path) -> None:
    old.write_bytes(b"")


def folder(old: Path) -> None:
    old.unlink()
    old.mkdir()


@pytest.mark.parametrize(
    "harm",
    [garbage, truncated, overwritten, foreign, empty, folder],
    ids=lambda harm: harm.__name__,
)
def test_a_damaged_file_of_an_earlier_version_is_said_and_renamed(book, said, harm):
    harm(old_file(book.path))
    assert book.measurements() == []
    book.record(measurement())
    assert book.measurements() == [measurement()]
    (aside,) = asides(book.path)
    (line,) = said
    assert "ledger.sqlite: it cannot be read (" in line
    assert line.endswith(f"it is kept as {aside.name}")


def test_a_row_that_this_version_cannot_read_costs_no_other(book, said):
    with closing(sqlite3.connect(old_file(book.path))) as db:
        db.execute("UPDATE measurements SET mode = 'sail' WHERE run_id = 'cpu-1'")
        db.commit()
    assert [run.run_id for run in book.measurements()] == ["sft-1", "sft-2"]
    assert len(said) == 2
    assert "ledger.sqlite: 1 line(s) not of this version are passed over" in said[0]
    assert "its 4 row(s) are in" in said[1]


# ---- files that cannot be used
# ---------------------------------------------------------------------------


def test_what_is_in_the_place_of_the_file_stays_and_new_lines_follow_it(book, said):
    book.path.parent.mkdir(parents=True)
    book.path.write_bytes(b"\x80\x04\n" + b"[" * 100_000)
    book.record(measurement())
    assert book.measurements() == [measurement()]
    (line,) = said
    assert "2 line(s) not of this version are passed over, the first is line 1: " in line


@pytest.mark.parametrize("place", ["pipe", "folder", "/dev/zero", "link"])
def test_a_place_where_no_file_can_be_stops_nothing(book, said, tmp_path, place):
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear all\n", encoding="utf-8")
    book.path.parent.mkdir(parents=True)
    if place == "pipe":
        os.mkfifo(book.path)
    elif place == "folder":
        book.path.mkdir()
    else:
        book.path.symlink_to(letter if place == "link" else place)
    book.record(measurement())
    assert book.measurements() == []
    writes, reads = said
    assert "nothing new is kept, the run goes on" in writes
    assert "nothing is recalled, the run goes on" in reads or place == "link"
    assert letter.read_text(encoding="utf-8") == "Dear all\n"


def test_a_file_in_the_place_of_the_folder_stops_nothing(tmp_path, said):
    (tmp_path / "file").touch()
    book = Ledger(tmp_path / "file" / "ledger.jsonl", said.append)
    book.record(measurement())
    assert book.measurements() == []
    (line,) = said
    assert "nothing new is kept, the run goes on" in line


def test_a_share_without_locks_is_one_line(path, tmp_path):
    source, library = tmp_path / "nolocks.c", tmp_path / "nolocks.so"
    source.write_text(
        "#include <errno.h>\nint flock(int file, int how) { errno = ENOLCK; return -1; }\n"
    )
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    launcher = Launcher(LD_PRELOAD=str(library))
    launcher.begin(path, ["first", "second"])
    (line,), counts = launcher.end()
    launcher.close()
    assert "its file system keeps no locks" in line
    assert line.endswith("nothing new is kept, the run goes on")
    assert counts == [0, 0]


def mounting(*command: str) -> list[str]:
    """argv that runs with file systems of its own."""
    return ["unshare", "--map-root-user", "--mount", *command]


NO_MOUNTS = "" if shutil.which("unshare") else "no unshare"
NO_MOUNTS = (
    NO_MOUNTS or subprocess.run(mounting("true"), capture_output=True, text=True).stderr.strip()
)
needs_mounts = pytest.mark.skipif(bool(NO_MOUNTS), reason=f"cannot mount here: {NO_MOUNTS}")


FULL = {
    "tmpfs": mounting("sh", "-c", 'mount -t tmpfs -o size=64k none "$0" && exec "$@"'),
    "limit": ["sh", "-c", 'ulimit -f 64 && exec "$@"'],
}


@pytest.mark.parametrize("limit", [pytest.param("tmpfs", marks=needs_mounts), "limit"])
def test_a_full_disk_loses_only_what_no_longer_fits(tmp_path, limit):
    launcher = Launcher(*FULL[limit], str(tmp_path))
    path = tmp_path / "ledger.jsonl"
    launcher.begin(path, [f"run-{number}" for number in range(400)])
    said, counts = launcher.end()
    count = counts[-1]
    assert 20 < count < 400
    assert counts == [*range(1, count + 1), *[count] * (400 - count)]
    assert len(said) == 1, said
    assert said[0].endswith("nothing new is kept, the run goes on")
    launcher.close()


@needs_mounts
@pytest.mark.parametrize("is_old", [False, True], ids=["new", "old"])
def test_a_read_only_file_system_can_be_read_and_says_that_nothing_is_kept(book, tmp_path, is_old):
    book.record(measurement("before"))
    if is_old:
        old_file(book.path)
    folder = tmp_path / "mounted"
    folder.mkdir()
    script = (
        f'mount -t tmpfs none "{folder}" && cp "{book.path.parent}"/* "{folder}/" && mount -o'
        f' remount,ro "{folder}"'
    )
    launcher = Launcher(*mounting("sh", "-c", f'{script} && exec "$@"', "sh"))
    launcher.begin(folder / book.path.name, ["after"])
    (line,), counts = launcher.end()
    launcher.close()
    assert counts == [1]
    assert "Read-only file system" in line
    assert line.endswith("nothing new is kept, the run goes on")
