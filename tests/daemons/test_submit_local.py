"""`submit local`: the run outlives the terminal that started it, and keeps its recipe and its code;
with systemd (its programs are stand-ins here) and with task-spooler."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.queue import leases
from launch.run_folder.layout import RunDir
from tests import builders
from tests.daemons import cron
from tests.slurm import waited

DOC = builders.CODE / "docs" / "submit.md"
# systemd-run starts its command and returns; where no user lingers it must not be asked
SYSTEMD = {
    "systemctl": '#!/bin/sh\ncase "$*" in *OOM*) echo $POLICY ;; *) echo active ;; esac\n',
    "loginctl": '#!/bin/sh\ncase "$*" in *Linger*) echo $LINGER ;; *) echo no ;; esac\n',
    "systemd-run": """#!/bin/bash
printf '%s\\n' "$@" >"$SAID"
for word in "$@"; do
    case "$word" in --property=StandardOutput=append:*) out="${word#*append:}" ;; esac
done
env -i setsid "${@: -1}" >>"$out" 2>&1 </dev/null &
""",
}


def recipe(folder: Path, **training: object) -> Path:
    return builders.recipe(folder, launch={"num_processes": 1}, training=training)


def exit_code(workspace: Path) -> int | None:
    """The exit code of the only job; None: it has not ended."""
    (file,) = workspace.glob("submitted/*/status.json")
    return json.loads(file.read_text())["exit_code"]


def output(workspace: Path) -> str:
    return "".join(path.read_text() for path in workspace.glob("submitted/*/output.txt"))


def test_a_run_outlives_its_terminal_and_keeps_the_recipe_and_the_code_of_its_submission(tmp_path):
    """The code is a copy, which is changed while the job waits for another run."""
    code, workspace = tmp_path / "code", tmp_path / "workspace"
    for name in ("launch", "training", "configs", "config", "scripts"):
        shutil.copytree(builders.CODE / name, code / name)
    for name in ("train_low_mem.py", "pyproject.toml"):
        shutil.copy(builders.CODE / name, code)
    path = recipe(tmp_path, num_train_epochs=2)
    words = [sys.executable, "-m", "launch", "submit", "local", str(path)]
    submitted = subprocess.Popen(
        [*words, "--launch.not_before=2099-01-01T00:00"],
        env={**builders.environment(workspace), "PYTHONPATH": str(code)},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    said, _ = submitted.communicate(timeout=120)
    assert submitted.returncode == 0 and "it waits as run 1, process " in said, said
    (lease,) = leases.live(workspace / "leases")
    assert os.getsid(lease.pid) != submitted.pid  # its terminal may go
    path.write_text("name: changed\n")
    shutil.rmtree(code)
    os.kill(lease.pid, signal.SIGKILL)
    assert waited(lambda: not leases.live(workspace / "leases"), 10)
    listed = builders.launch(workspace, "queue").stdout
    assert re.search(r"a job was killed: \S+/job.sh starts it again", listed), listed
    (job,) = workspace.glob("submitted/*/job.json")
    content = job.read_text().replace("--launch.not_before=2099-01-01T00:00", "--launch.priority=1")
    job.write_text(content)
    again = subprocess.run([job.with_name("job.sh")], env={}, capture_output=True, timeout=120)
    assert again.returncode == 0, again.stdout + again.stderr
    (run,) = RunDir.all(workspace / "runs", "tiny")
    assert run.outcome() is not None
    assert json.loads(job.with_name("status.json").read_text())["starts"] == 2


def test_a_job_that_fails_at_once_says_why_where_it_was_submitted(tmp_path):
    path = recipe(tmp_path)
    builders.write_parquet(tmp_path / "train.parquet", [{"prompt": "", "response": ""}] * 3)
    done = builders.launch(tmp_path / "workspace", "submit", "local", str(path))
    assert done.returncode == 4, done.stdout + done.stderr
    assert "error: " in done.stdout
    assert not list((tmp_path / "workspace").glob("submitted/*/job.json"))


def test_a_sweep_is_a_job_for_each_value_in_their_order(tmp_path):
    """They wait, so that none trains."""
    words = ("--sweep=training.seed=3,4", "--launch.not_before=2099-01-01T00:00")
    done = builders.launch(tmp_path / "workspace", "submit", "local", str(recipe(tmp_path)), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    live = leases.live(tmp_path / "workspace" / "leases")
    assert [lease.record.recipe for lease in live] == ["tiny-3", "tiny-4"]
    for lease in live:
        os.utime(lease.record.run, (0, 0))
    cleaned = builders.launch(tmp_path / "workspace", "runs", "clean")
    assert cleaned.returncode == 0, cleaned.stderr
    assert all(Path(lease.record.run).is_dir() for lease in live)
    for lease in live:
        os.kill(lease.pid, signal.SIGTERM)


@pytest.mark.parametrize(("lingers", "version"), [("yes", "243"), ("yes", "239"), ("no", "243")])
def test_systemd_keeps_it_where_its_user_lingers(tmp_path, lingers, version):
    """Rehearsed: no systemd runs here."""
    folder, workspace = tmp_path / "bin", tmp_path / "workspace"
    folder.mkdir()
    for name, text in SYSTEMD.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    extra = {"PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(tmp_path / "said")}
    done = builders.launch(
        *(workspace, "submit", "local", str(recipe(tmp_path))),
        **{"LINGER": lingers, "POLICY": "stop" if version == "243" else "", **extra},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert waited(lambda: exit_code(workspace) is not None, 120), output(workspace)
    assert exit_code(workspace) == 0, output(workspace)
    if lingers == "no":
        assert "would end it with your last login" in done.stdout
        assert not (tmp_path / "said").exists()
        return
    assert "systemctl --user status lowmem-tiny-" in done.stdout
    asked = (tmp_path / "said").read_text().splitlines()
    (job,) = workspace.glob("submitted/tiny-*")
    assert asked[:3] == ["--user", "--collect", "--quiet"]
    assert f"--unit=lowmem-{job.name}" in asked and "--property=KillMode=mixed" in asked
    assert asked[-1] == str(job / "job.sh")
    # systemd before 243 refuses it, and does not stop a unit after the kernel's kill either
    assert ("--property=OOMPolicy=continue" in asked) is (version == "243")


@pytest.fixture
def spooler(tmp_path, needs) -> Iterator[dict[str, str]]:
    """The variables of a task-spooler of its own."""
    there = shutil.which("tsp")
    needs("" if there else "no tsp: apt-get install --no-install-recommends task-spooler")
    variables = {"TS_SOCKET": str(tmp_path / "socket"), "TMPDIR": str(tmp_path)}
    yield variables
    subprocess.run(["tsp", "-K"], env={**os.environ, **variables}, check=True)


def test_task_spooler_runs_the_line_of_the_documentation(tmp_path, spooler):
    line = re.search(r"^tsp (.*)$", DOC.read_text(), re.MULTILINE)
    assert line is not None
    words = line[1].replace("python3", sys.executable).replace("sft_fast", str(recipe(tmp_path)))
    environment = {**builders.environment(tmp_path / "workspace"), **spooler}
    for _ in range(2):  # the second finds the run complete
        subprocess.run(["tsp", *words.split()], env=environment, check=True, capture_output=True)
    assert subprocess.run(["tsp", "-w", "1"], env=environment, timeout=120).returncode == 0
    said = subprocess.run(["tsp", "-c", "1"], env=environment, capture_output=True, text=True)
    assert "is complete; to start over: --resume never" in said.stdout


def test_a_cancelled_job_does_not_come_back_after_a_reboot(tmp_path, needs):
    needs(cron.missing())
    workspace = tmp_path / "workspace"
    environment = builders.environment(workspace)
    lowmem = [sys.executable, "-m", "launch"]
    with cron.daemon() as place:
        words = ("--reboot", "--launch.not_before=2099-01-01T00:00")
        done = place.run([*lowmem, "submit", "local", str(recipe(tmp_path)), *words], environment)
        assert done.returncode == 0, done.stdout + done.stderr
        assert place.run(["crontab", "-l"], environment).stdout.startswith("@reboot ")
        done = place.run([*lowmem, "queue", "cancel", "1"], environment)
        assert done.stdout == "run 1 stops waiting\n", done.stderr
        assert waited(lambda: exit_code(workspace) is not None, 30)
        assert exit_code(workspace) == 75
        assert place.run(["crontab", "-l"], environment).stdout == ""
