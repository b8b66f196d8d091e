"""Real trackers beside a run: each has the losses, across a kill too, and one that fails does not
stop it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tests import builders
from tests.train_cpu.test_resume import kill_after

pytestmark = pytest.mark.modes

PINS = Path(__file__).with_name("trackers.txt")
# a file of wandb is a log of LevelDB's format: blocks of 32 KiB, records of checksum, length, kind
READ_WANDB = """
import json, struct, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record
content, at, record = Path(sys.argv[1]).read_bytes(), 7, b""
while at + 7 <= len(content):
    left = -at % 32768
    if 0 < left < 7:
        at += left
        continue
    length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
    record += content[at + 7 : at + 7 + length]
    at += 7 + length
    if kind in (1, 4):  # whole, or its last part
        items = Record.FromString(record).history.item
        record = b""
        values = {"/".join(each.nested_key) or each.key: each.value_json for each in items}
        if "train/loss" in values:
            print(json.dumps([int(values["train/global_step"]), float(values["train/loss"])]))
"""
ALL = "[wandb, mlflow, trackio, swanlab]"
LOCAL = {
    "WANDB_MODE": "offline",
    "SWANLAB_MODE": "offline",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # mlflow-skinny has no other
}


@pytest.fixture(scope="module")
def packages() -> Path:
    """A folder with the trackers, made once for all versions of the pins."""
    digest = hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]
    folder = builders.CODE / ".cache" / f"trackers-{digest}"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / "trackers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            argv = ["pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", str(folder)]
            subprocess.run([sys.executable, "-m", *argv, "-r", str(PINS)], check=True)
            (folder / "complete").touch()
    return folder


def variables(tmp_path: Path, packages: Path, **more: str) -> dict[str, str]:
    """Those of a run, all of which its ranks get; trackers that write to the home write here."""
    return {
        "PYTHONPATH": f"{builders.CODE}{os.pathsep}{packages}",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "HOME": str(tmp_path),
        **more,
    }


def words(recipe: Path, report_to: str, passed: dict[str, str]) -> list[str]:
    names = ", ".join(sorted({*passed} - {"HOME"}))
    return [
        *("run", str(recipe), f"--training.report_to={report_to}"),
        f"--launch.pass_env=[{names}]",
    ]


def losses(run: Path) -> dict[int, float]:
    """By step; the last of a step that was trained twice."""
    events = [
        json.loads(line)
        for file in sorted(run.glob("attempts/*/events.jsonl"))
        for line in file.read_text("utf-8").splitlines()
    ]
    return {event["step"]: event["loss"] for event in events if "loss" in event}


def of_wandb(run: Path, packages: Path) -> dict[int, float]:
    files = sorted(run.glob("wandb/offline-run-*/run-*.wandb"))
    found: dict[int, float] = {}
    for file in files:
        done = subprocess.run(
            [sys.executable, "-c", READ_WANDB, str(file)],
            env={**os.environ, "PYTHONPATH": str(packages)},
            capture_output=True,
            text=True,
            check=True,
        )
        found |= dict(map(json.loads, done.stdout.splitlines()))
    return found


def of_mlflow(store: Path, mlflow_id: str) -> dict[int, float]:
    (file,) = store.glob(f"*/{mlflow_id}/metrics/loss")
    rows = [line.split() for line in file.read_text("utf-8").splitlines()]
    return {int(step): float(value) for _, value, step in rows}


def of_trackio(folder: Path) -> dict[int, float]:
    (file,) = folder.glob("*.db")
    with sqlite3.connect(file) as database:
        rows = [json.loads(row[0]) for row in database.execute("SELECT metrics FROM metrics")]
    return {row["train/global_step"]: row["train/loss"] for row in rows if "train/loss" in row}


def test_each_tracker_has_the_losses_of_a_run_that_was_killed_and_started_again(tmp_path, packages):
    store = tmp_path / "a store"
    passed = variables(tmp_path, packages, **LOCAL, MLFLOW_TRACKING_URI=store.as_uri())
    recipe = builders.recipe(
        tmp_path, training={"max_steps": 16, "save_steps": 5, "logging_steps": 1}
    )
    workspace = tmp_path / "h"
    # behind the evaluation of step 6: mlflow cannot read a file of metrics that was just created
    kill_after(workspace, words(recipe, ALL, passed), step=7, **passed)
    done = builders.launch(workspace, *words(recipe, ALL, passed), **passed)
    assert done.returncode == 0, done.stderr
    assert "training.report_to" not in done.stdout
    run = builders.only_run(workspace)
    expected = losses(run)
    assert sorted(expected) == [*range(1, 17)]
    found = {
        "wandb": of_wandb(run, packages),
        "mlflow": of_mlflow(store, (run / "mlflow_run_id").read_text("utf-8")),
        "trackio": of_trackio(tmp_path / "trackio"),
    }
    for name, steps in found.items():
        assert steps == pytest.approx({step: expected[step] for step in steps}, rel=1e-3), name
        # what a tracker had not written is lost with it
        assert {*range(6, 17)} <= steps.keys(), name
    assert len(list(store.glob("*/*/metrics/loss"))) == 1, "a start made a run of its own"
    kept = [file.read_bytes() for file in run.glob("swanlog/run-*/backup.swanlab")]
    assert len(kept) == 2
    assert all(content.count(b"train/loss") >= 2 for content in kept)


@pytest.mark.campaign
def test_a_tracker_that_fails_is_a_line_and_the_run_ends_as_without_it(tmp_path, packages):
    nowhere = "http://127.0.0.1:9"
    passed = variables(
        tmp_path,
        packages,
        WANDB_API_KEY="0" * 40,
        WANDB_BASE_URL=nowhere,
        WANDB_INIT_TIMEOUT="3",
        MLFLOW_TRACKING_URI=nowhere,
    )
    training = {"max_steps": 6, "save_steps": 4, "logging_steps": 1}
    ended = {}
    for report_to in ("[wandb, mlflow, swanlab]", "none"):
        folder = tmp_path / re.sub(r"\W", "", report_to)
        done = builders.launch(
            folder / "h",
            *words(builders.recipe(folder, training=training), report_to, passed),
            **passed,
        )
        assert done.returncode == 0, done.stderr
        ended[report_to] = (done, losses(builders.only_run(folder / "h")))
    (failing, measured), (plain, expected) = ended.values()
    lines = [line for line in failing.stdout.splitlines() if "training.report_to: " in line]
    assert len(lines) == 3, failing.stdout
    assert "wandb works offline (CommError" in lines[0]
    assert f"later: {Path(sys.executable).parent}/wandb sync " in lines[0]
    assert "mlflow fails and is left out of the rest of this start: MlflowException" in lines[1]
    assert "swanlab works offline (KeyFileError" in lines[2]
    assert "0" * 40 not in failing.stdout
    assert "training.report_to: " not in plain.stdout
    assert measured == expected
    run = builders.only_run(tmp_path / "wandbmlflowswanlab" / "h")
    assert len(of_wandb(run, packages)) == 6
    (kept,) = run.glob("swanlog/run-*/backup.swanlab")
    assert kept.read_bytes().count(b"train/loss") >= 2
    assert "tensorboard" not in failing.stdout.splitlines()[-1]


def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(tmp_path):
    done = builders.launch(
        tmp_path / "h", "run", str(builders.recipe(tmp_path)), "--training.report_to=wandb"
    )
    assert done.returncode == 3
    assert done.stderr == (
        "error: training.report_to: wandb is not installed;"
        f" {sys.executable} -m pip install wandb\n"
    )
