"""What was learnt is kept and found again, says how far predictions are off, and never stops a run:
real files, real processes, damaged disks."""

from __future__ import annotations

import fcntl
import json
import re
import shutil
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


def asides(path: Path) -> list[Path]:
    return sorted(
        found
        for found in path.parent.glob(f"{path.name}.aside-*")
        if not found.name.endswith("-journal")
    )


def select(path: Path, query: str) -> list[tuple[Any, ...]]:
    """What another program reads from the file."""
    with closing(sqlite3.connect(path)) as db:
        return db.execute(query).fetchall()


def change(path: Path, *statements: str) -> None:
    """What another program does to the file."""
    with closing(sqlite3.connect(path)) as db:
        for statement in statements:
            db.execute(statement)
        db.commit()


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
        {"training": {"gradient_checkpointing": True}},
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
    assert book.residuals("allocated_bytes", "cuda") == said == []
    assert not book.path.parent.exists()


def test_every_field_of_a_measurement_is_in_its_row(book, said):
    figures = Figures(allocated_bytes=1, reserved_bytes=2, host_pss_bytes=1 << 40, step_s=0.5)
    kept = measurement(predicted=figures, measured=Figures(reserved_bytes=7))
    book.record(kept)
    with closing(sqlite3.connect(book.path)) as db:
        db.row_factory = sqlite3.Row
        (row,) = map(dict, db.execute("SELECT * FROM measurements"))
    expected = {f"predicted_{name}": value for name, value in asdict(figures).items()}
    expected |= {f"measured_{name}": value for name, value in asdict(kept.measured).items()}
    expected |= {
        name: value for name, value in vars(kept).items() if name not in ("predicted", "measured")
    }
    expected["versions"] = '{"torch": "2.9.0"}'
    assert row == expected
    assert row["measured_allocated_bytes"] is None
    assert said == []


def test_tuning_again_replaces_what_was_remembered(book, strategy, said):
    better = replace(strategy, per_device_train_batch_size=32)
    book.remember(tuned(strategy))
    book.remember(tuned(strategy, model_key="another"))
    book.remember(tuned(better, time=2.0, step_s=0.25))
    assert book.recall(**KEYS) == tuned(better, time=2.0, step_s=0.25)
    assert select(book.path, "SELECT count(*) FROM tuned") == [(2,)]
    assert said == []


def test_what_is_forgotten_is_gone_and_nothing_else_is(book, strategy):
    book.remember(tuned(strategy))
    book.remember(tuned(strategy, model_key="another"))
    assert book.forget(**KEYS)
    assert book.recall(**KEYS) is None
    assert book.recall(**{**KEYS, "model_key": "another"}) is not None
    assert not book.forget(**KEYS)


def test_a_strategy_that_this_version_does_not_know_is_passed_over_and_said(book, strategy, said):
    book.remember(tuned(strategy))
    change(book.path, "UPDATE tuned SET strategy = '{}'")
    assert book.recall(**KEYS) is None
    change(book.path, "UPDATE tuned SET strategy = 'no JSON'")
    assert book.recall(**KEYS) is None
    assert len(said) == 2
    assert all("1 row(s) not of this version are passed over" in line for line in said)


def test_a_value_of_a_wrong_type_is_refused_and_said(book, said):
    book.record(measurement(predicted=Figures(allocated_bytes="many")))  # type: ignore[arg-type]
    (line,) = said
    assert (
        "cannot store TEXT value in INTEGER column measurements.predicted_allocated_bytes" in line
    )
    assert "nothing new is kept, the run goes on" in line


# ---- how far predictions are off
# ---------------------------------------------------------------------------


def test_residuals_are_of_the_runs_that_have_both_sides_newest_first(book):
    for at, (predicted, measured) in enumerate(
        [(100, 110), (100, 95), (None, 5), (100, None), (0, 5), (200, 250)]
    ):
        book.record(measurement(f"run-{at}", predicted, measured, time=float(at)))
    book.record(measurement("cpu", 100, 300, device="cpu"))
    book.record(measurement("elsewhere", 100, 400, machine_key="machine-2", time=50.0))
    here = book.residuals("allocated_bytes", "cuda", "machine-1")
    assert here == pytest.approx([0.25, -0.05, 0.10])
    assert book.residuals("allocated_bytes", "cuda") == pytest.approx([3.0, *here])
    assert book.residuals("allocated_bytes", "cpu") == pytest.approx([2.0])
    assert book.residuals("reserved_bytes", "cuda") == []


def test_only_the_newest_residuals_count(book):
    book.record(measurement())
    change(
        book.path,
        "WITH RECURSIVE more(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM more WHERE n < 600)"
        " INSERT INTO measurements SELECT measurements.* FROM measurements, more",
        "UPDATE measurements SET time = rowid, measured_allocated_bytes = 100 + rowid",
    )
    found = book.residuals("allocated_bytes", "cuda")
    assert len(found) == ledger.NEWEST < 601
    assert found[:2] == pytest.approx([6.01, 6.00])


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

LAUNCHER = """
import json, sys
from dataclasses import replace
from pathlib import Path
from pydantic import TypeAdapter
from launch.predict.history.calibration import Measurement
from launch.predict.history.ledger import Ledger

first = TypeAdapter(Measurement).validate_json(sys.argv[1])
for line in sys.stdin:
    path, run_ids = json.loads(line)
    said, counts = [], []
    for run_id in run_ids:
        ledger = Ledger(Path(path), said.append)
        ledger.record(replace(first, run_id=run_id))
        counts.append(len(ledger.residuals("allocated_bytes", "cuda")))
    print(json.dumps([said, counts]), flush=True)
"""


class Launcher:
    """A process that records what it is told to."""

    def __init__(self, *before: str) -> None:
        argv = [*before, sys.executable, "-P", "-c", LAUNCHER, json.dumps(asdict(measurement()))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.child = subprocess.Popen(argv, env={"PYTHONPATH": str(CODE)}, **pipes)

    def begin(self, path: Path, run_ids: list[str]) -> None:
        self.child.stdin.write(json.dumps([str(path), run_ids]) + "\n")
        self.child.stdin.flush()

    def end(self) -> tuple[list[str], list[int]]:
        """What was said, and how many residuals it read after each of its writes."""
        said, counts = json.loads(self.child.stdout.readline())
        return said, counts

    def close(self) -> None:
        self.child.stdin.close()
        assert self.child.wait(timeout=60) == 0
        self.child.stdout.close()


@pytest.fixture
def launchers():
    both = Launcher(), Launcher()
    yield both
    for launcher in both:
        launcher.close()


def test_launchers_that_write_and_read_at_once_lose_nothing_and_are_never_refused(path, launchers):
    wanted = [[f"{who}-{number}" for number in range(40)] for who in range(2)]
    for launcher, run_ids in zip(launchers, wanted, strict=True):
        launcher.begin(path, run_ids)
    for launcher in launchers:
        said, counts = launcher.end()
        assert said == []
        assert counts == sorted(counts)
        assert all(count > number for number, count in enumerate(counts))
    assert sorted(
        run_id for (run_id,) in select(path, "SELECT run_id FROM measurements")
    ) == sorted([*wanted[0], *wanted[1]])
    assert select(path, "PRAGMA journal_mode") == [("delete",)]


def test_of_launchers_that_meet_a_damaged_file_at_once_one_sets_it_aside_and_both_are_kept(
    tmp_path, launchers
):
    for number in range(25):
        path = tmp_path / str(number) / "ledger.sqlite"
        path.parent.mkdir()
        path.write_bytes(b"no database " * 1000)
        for who, launcher in enumerate(launchers):
            launcher.begin(path, [f"{who}-{number}" for number in range(3)])
        said = [line for launcher in launchers for line in launcher.end()[0]]
        assert len(asides(path)) == 1
        assert len(said) == 1, said
        assert select(path, "SELECT count(*) FROM measurements") == [(6,)]


HALF = """
import sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
db.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
db.execute("BEGIN IMMEDIATE")
for _ in range(2000):
    db.execute("INSERT INTO measurements SELECT * FROM measurements WHERE rowid = 1")
print("half", flush=True)
sys.stdin.read()
"""


def killed_within_a_write(path: Path) -> None:
    """Leaves half of a transaction in the file, and the journal that undoes it."""
    size = path.stat().st_size
    child = subprocess.Popen(
        [sys.executable, "-c", HALF, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdout.readline() == b"half\n"
    child.kill()
    child.communicate(timeout=60)
    assert path.stat().st_size > size
    assert path.with_name(f"{path.name}-journal").exists()


def is_blocked(pid: int) -> bool:
    """Whether that process waits for a lock on a whole file, as flock(2) gives them."""
    return any(
        re.search(rf"-> FLOCK .* {pid} ", line)
        for line in Path("/proc/locks").read_text().splitlines()
    )


def test_a_launcher_that_comes_late_leaves_the_fresh_file_in_its_place(
    book, launchers, said, tmp_path
):
    fresh = Ledger(tmp_path / "fresh.sqlite", said.append)
    fresh.record(measurement("fresh"))
    book.path.parent.mkdir(parents=True)
    garbage(book.path)
    with book.lock_file.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # as a launcher that has the damaged file open
        launchers[0].begin(book.path, ["late"])
        deadline = time.monotonic() + 60
        while not is_blocked(launchers[0].child.pid):  # it has seen the damage
            assert time.monotonic() < deadline
            time.sleep(0.01)
        fresh.path.replace(book.path)
    assert launchers[0].end() == ([], [2])
    assert asides(book.path) == said == []


def test_a_damaged_file_is_not_set_aside_while_another_has_it_open(book, launchers):
    """That one would take the journal of the fresh file for its own, and remove it."""
    book.path.parent.mkdir(parents=True)
    garbage(book.path)
    with book.lock_file.open("a") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        launchers[0].begin(book.path, ["waits"])
        deadline = time.monotonic() + 60
        while not is_blocked(launchers[0].child.pid):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert asides(book.path) == []
    (line,), _ = launchers[0].end()
    assert len(asides(book.path)) == 1
    assert "it is kept as" in line


def test_a_reader_of_a_file_whose_tables_another_is_about_to_make_finds_nothing(book, said):
    book.path.parent.mkdir(parents=True)
    with closing(sqlite3.connect(book.path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        assert book.path.stat().st_size == 0
        assert book.residuals("allocated_bytes", "cuda") == []
    assert said == []
    assert book.path.stat().st_size == 0


def test_a_launcher_killed_within_a_write_leaves_nothing_of_it(book, said):
    book.record(measurement("whole"))
    killed_within_a_write(book.path)
    assert book.residuals("allocated_bytes", "cuda") == [0.0]
    book.record(measurement("after"))
    assert select(book.path, "SELECT run_id FROM measurements") == [("whole",), ("after",)]
    assert said == []


def test_a_reader_goes_on_while_another_writes_and_a_writer_that_waits_in_vain_says_so(book, said):
    book.record(measurement("first"))
    with closing(sqlite3.connect(book.path, isolation_level=None)) as db:
        db.execute("BEGIN IMMEDIATE")
        db.execute("DELETE FROM measurements")
        assert book.residuals("allocated_bytes", "cuda") == [0.0]
        assert said == []
        began = time.monotonic()
        book.record(measurement("second"))
        assert time.monotonic() - began >= book.busy_s
    (line,) = said
    assert "database is locked; nothing new is kept, the run goes on" in line
    assert select(book.path, "SELECT run_id FROM measurements") == [("first",)]


# ---- files that cannot be used
# ---------------------------------------------------------------------------


def garbage(path: Path) -> None:
    path.write_bytes(b"\x00\xffno database" * 500)


def truncated(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: 4096 + 100])


def overwritten(path: Path) -> None:
    """A page of the tables turns into something else; the header still says that it is a
    database."""
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    path.write_bytes(content)


def foreign(path: Path) -> None:
    path.unlink()
    change(path, "CREATE TABLE recipes (cake TEXT)", "PRAGMA user_version = 1")


def older(path: Path) -> None:
    change(path, "PRAGMA user_version = 0")


@pytest.mark.parametrize(
    "harm", [garbage, truncated, overwritten, foreign, older], ids=lambda harm: harm.__name__
)
@pytest.mark.parametrize("writes", [True, False], ids=["writer", "reader"])
def test_a_file_that_holds_no_ledger_is_set_aside_whole_and_said(book, said, harm, writes):
    book.record(measurement("before"))
    harm(book.path)
    content = book.path.read_bytes()
    if not writes:
        assert book.residuals("allocated_bytes", "cuda") == []
    book.record(measurement("after", took=110))
    (aside,) = asides(book.path)
    assert aside.read_bytes() == content
    (line,) = said
    assert str(book.path) in line
    assert line.endswith(f"it is kept as {aside.name}, a new one begins")
    assert book.residuals("allocated_bytes", "cuda") == pytest.approx([0.1])
    assert len(said) == 1


def test_an_empty_file_is_a_new_ledger(book, said):
    book.path.parent.mkdir(parents=True)
    book.path.touch()
    assert book.residuals("allocated_bytes", "cuda") == []
    book.record(measurement())
    assert len(book.residuals("allocated_bytes", "cuda")) == 1
    assert said == []


@pytest.mark.parametrize(
    ("statements", "words"),
    [
        (["PRAGMA user_version = 99"], "a newer version wrote it (schema 99, here 1)"),
        (
            # as an SQLite reads it that is too old for STRICT
            [
                "PRAGMA writable_schema = ON",
                (
                    "UPDATE sqlite_master SET sql = 'CREATE TABLE tuned (time REAL) STRICT STRICT'"
                    " WHERE name = 'tuned'"
                ),
            ],
            'malformed database schema (tuned) - near "STRICT"',
        ),
    ],
)
def test_a_ledger_of_a_newer_version_is_left_as_it_is(book, said, strategy, statements, words):
    book.remember(tuned(strategy))
    change(book.path, *statements)
    content = book.path.read_bytes()
    assert book.recall(**KEYS) is None
    book.record(measurement())
    assert book.path.read_bytes() == content
    assert asides(book.path) == []
    assert len(said) == 2
    assert all(words in line for line in said)
    assert "nothing is recalled" in said[0]
    assert "nothing new is kept" in said[1]


def test_a_place_where_no_file_can_be_stops_nothing(tmp_path, said):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "ledger.sqlite", tmp_path / "folder"):
        Ledger(path, said.append).record(measurement())
    assert len(said) == 2
    assert all("nothing new is kept, the run goes on" in line for line in said)


def mounting(*command: str) -> list[str]:
    """argv that runs with file systems of its own."""
    return ["unshare", "--map-root-user", "--mount", *command]


NO_MOUNTS = "" if shutil.which("unshare") else "no unshare"
NO_MOUNTS = (
    NO_MOUNTS or subprocess.run(mounting("true"), capture_output=True, text=True).stderr.strip()
)
needs_mounts = pytest.mark.skipif(bool(NO_MOUNTS), reason=f"cannot mount here: {NO_MOUNTS}")


@needs_mounts
def test_a_full_disk_loses_only_what_no_longer_fits(tmp_path):
    script = f'mount -t tmpfs -o size=64k none "{tmp_path}" && exec "$@"'
    launcher = Launcher(*mounting("sh", "-c", script, "sh"))
    launcher.begin(tmp_path / "ledger.sqlite", [f"run-{number}" for number in range(400)])
    said, counts = launcher.end()
    launcher.close()
    count = counts[-1]
    assert 20 < count < 400
    assert len(said) == 400 - count
    assert "database or disk is full; nothing new is kept, the run goes on" in said[0]


@needs_mounts
def test_a_read_only_file_system_can_be_read_and_says_that_nothing_is_kept(book, tmp_path):
    book.record(measurement("before"))
    folder = tmp_path / "mounted"
    folder.mkdir()
    script = (
        f'mount -t tmpfs none "{folder}" && cp "{book.path}" "{folder}/" && mount -o remount,ro'
        f' "{folder}"'
    )
    launcher = Launcher(*mounting("sh", "-c", f'{script} && exec "$@"', "sh"))
    launcher.begin(folder / book.path.name, ["after"])
    said, counts = launcher.end()
    launcher.close()
    assert counts == [1]
    (line,) = said
    assert "attempt to write a readonly database; nothing new is kept, the run goes on" in line
