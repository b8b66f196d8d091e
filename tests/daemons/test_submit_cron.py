"""`submit cron` and `submit local --reboot` with a real cron daemon."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.run_folder.layout import RunDir
from tests import builders
from tests.daemons import cron
from tests.daemons.cron import Cron
from tests.slurm import waited

NEXT_MINUTE_S = 120.0
# cron's own environment, and no more
BARE = {"PATH": "/usr/bin:/bin", "HOME": "/root", "SHELL": "/bin/sh"}
OTHERS_LINE = "17 3 * * 0 echo somebody else's line % with a percent sign"


@pytest.fixture
def place(needs) -> Iterator[Cron]:
    needs(cron.missing())
    with cron.daemon() as found:
        yield found


def submit(place: Cron, workspace: Path, *words: str) -> str:
    """The output of `python -m launch submit ...`."""
    environment = builders.environment(workspace)
    done = place.run([sys.executable, "-m", "launch", "submit", *words], environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def table(place: Cron) -> list[str]:
    return place.run(["crontab", "-l"], BARE).stdout.splitlines()


def status(workspace: Path) -> dict[str, Any]:
    (file,) = workspace.glob("submitted/*/status.json")
    return json.loads(file.read_text())


def test_cron_starts_a_run_in_its_bare_environment_and_its_end_is_listed(place, tmp_path):
    workspace, path = tmp_path / "a 100% workspace", builders.recipe(tmp_path)
    place.run(["sh", "-c", f'echo "{OTHERS_LINE}" | crontab -'], BARE)
    words = ("cron", "* * * * *", str(path), "--launch.num_processes=1")
    assert "cron starts job tiny-cron at * * * * *" in submit(place, workspace, *words)
    assert "cron already starts job tiny-cron" in submit(place, workspace, *words)
    assert table(place)[0] == OTHERS_LINE and len(table(place)) == 2
    assert "not started yet" in submit(place, workspace, "cron", "list")
    lines = table(place)
    refused = (sys.executable, "-m", "launch", "submit", "cron", "0 2 * * fry", *words[2:])
    done = place.run(refused, builders.environment(workspace))
    assert done.returncode == 2 and "refuses the times '0 2 * * fry': " in done.stderr
    assert table(place) == lines
    assert "tiny-cron: * * * * *\n" in submit(place, workspace, "cron", "list")
    place.boot()

    def ended() -> bool:
        files = list(workspace.glob("submitted/*/status.json"))
        return bool(files) and status(workspace)["exit_code"] is not None

    said = workspace / "submitted" / "tiny-cron" / "output.txt"
    assert waited(ended, NEXT_MINUTE_S), said.exists() and said.read_text()
    assert status(workspace)["exit_code"] == 0, said.read_text()
    (run,) = RunDir.all(workspace / "runs", "tiny")
    assert run.outcome() is not None
    assert "with exit code 0" in submit(place, workspace, "cron", "list")
    assert "cron no longer starts tiny-cron" in submit(
        place, workspace, "cron", "remove", "tiny-cron"
    )
    assert table(place) == [OTHERS_LINE]
    assert list(workspace.glob("submitted/*/job.json")) == []


def test_a_job_that_is_killed_goes_on_after_a_reboot_and_is_forgotten_when_complete(
    place, tmp_path
):
    training = {"num_train_epochs": 40, "save_steps": 5}
    path = builders.recipe(tmp_path, launch={"num_processes": 1}, training=training)
    said = submit(place, tmp_path / "workspace", "local", str(path), "--reboot")
    assert "cron starts it again after each reboot" in said
    assert len(table(place)) == 1 and table(place)[0].startswith("@reboot ")
    (run,) = RunDir.all(tmp_path / "workspace" / "runs", "tiny")
    assert waited(lambda: run.last_step() >= 5, 120)
    os.kill(status(tmp_path / "workspace")["pid"], signal.SIGKILL)
    place.boot()
    assert waited(lambda: status(tmp_path / "workspace")["exit_code"] == 0, 120)
    assert status(tmp_path / "workspace")["starts"] == 2
    assert len(run.attempts()) == 2 and run.outcome() is not None
    assert waited(lambda: table(place) == [], 10)
