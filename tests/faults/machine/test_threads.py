"""A user who may start only a few processes and threads: one verdict, and nothing is left.

The limit (RLIMIT_NPROC) does not bind root, so the runs are another user's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests import builders

USER = 54321  # of whom nothing else runs
CAPABILITIES = "-all,+dac_read_search"  # to read this Python, wherever it is; it lifts no limit
pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None,
    reason="only root can start a run of another user (setpriv of util-linux)",
)


def of_user() -> list[psutil.Process]:
    return [one for one in psutil.process_iter() if one.uids().real == USER]


def run(folder: Path, limit: int, *argv: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """A command of that user, under `ulimit -u`."""
    env = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder),
        "XDG_STATE_HOME": str(folder / "state"),
        "LOWMEM_ROOT": str(folder / "workspace"),
        "LOWMEM_TRACES": str(folder / "traces"),
        "PYTHONPATH": str(builders.CODE),
        "HF_HUB_OFFLINE": "1",
        **extra,
    }
    as_user = (
        *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"),
        *(f"--{kind}={CAPABILITIES}" for kind in ("inh-caps", "ambient-caps", "bounding-set")),
    )
    line = f'ulimit -u {limit}; exec "$@"'
    return subprocess.run(
        [*as_user, "bash", "-c", line, "bash", *argv],
        **{"env": env, "cwd": folder, "capture_output": True, "text": True, "timeout": 200},
    )


@pytest.fixture
def folder(tmp_path) -> Path:
    """A recipe of two ranks, each with a worker, in a folder of that user."""
    made = tmp_path / "users"
    training = {"max_steps": 3, "save_steps": 2, "warmup_steps": 0, "dataloader_num_workers": 1}
    builders.recipe(made, training=training, launch={"num_processes": 2})
    (made / "home").mkdir()
    traces = Path(builders.TRACES["LOWMEM_TRACES"])
    if traces.is_dir():
        shutil.copytree(traces, made / "traces")
    for path in [made, *made.rglob("*")]:
        os.chown(path, USER, USER)
    for above in [*list(tmp_path.parents)[:2], tmp_path]:
        above.chmod(0o711)  # pytest's folders are root's alone
    return made


def test_the_limit_binds_that_user(folder):
    """Without this, the runs below would show nothing."""
    code = (
        "import threading, time;"
        " [threading.Thread(target=time.sleep, args=(2,)).start() for _ in range(9)]"
    )
    done = run(folder, 5, sys.executable, "-c", code)
    assert done.returncode != 0
    assert "can't start new thread" in done.stderr


@pytest.mark.shows("F55", "ulimit -u for a user who is not root; it binds a Python of theirs")
@pytest.mark.parametrize(
    ("limit", "words"),
    [
        (1, "may start only 0 threads, expected"),  # the launcher; OpenBLAS ended it with SIGINT
        (4, "may start only 3 threads, expected"),  # it took the data for damaged
        (8, "may start only "),  # tokenising; tokenizers panicked
        (10, "may start only "),  # tokenising; SIGSEGV
        (14, "may start only "),  # ranks; SIGABRT
        (18, "the system allows this user no more threads, processes or open files"),
        (22, "the system allows this user no more threads, processes or open files"),
    ],
)
def test_too_few_processes_end_the_run_with_3_and_name_the_limit(folder, limit, words):
    done = run(
        folder, limit, sys.executable, "-P", "-m", "launch", "run", str(folder / "tiny.yaml")
    )
    said = done.stdout + done.stderr
    assert done.returncode == 3, said
    assert words in said
    assert said.count("error: ") == 1
    assert "ulimit -u" in said
    assert "Traceback" not in said
    assert of_user() == []


def test_with_enough_of_them_the_same_run_ends_with_its_model(folder):
    done = run(folder, 100, sys.executable, "-P", "-m", "launch", "run", str(folder / "tiny.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "model/model.safetensors").exists()
    assert of_user() == []


@pytest.mark.parametrize("limit", [1, 3, 6, 9])
@pytest.mark.parametrize("verb", ["plan", "show"])
def test_other_commands_name_it_too(folder, verb, limit):
    words = [sys.executable, "-P", "-m", "launch", verb, str(folder / "tiny.yaml")]
    done = run(folder, limit, *words)
    assert done.returncode in ((0, 3) if limit == 9 else (3,)), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == 0 or "ulimit -u" in done.stderr
