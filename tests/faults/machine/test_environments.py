"""From cron, a closed terminal, another locale or a loose umask a run gives the same weights as by
hand, and its files are its user's alone."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import stat
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch

from tests import builders

BARE = {"PATH": "/usr/bin:/bin"}
POSIX = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
PLACES = {  # name -> (environment besides what names the folders, how bash starts it)
    "env -i, from /": ({}, "cd /; exec env -i {variables} {line}"),
    "cron: bare, no terminal, umask 000": (BARE, "cd /; umask 000; exec {line} </dev/null"),
    "stdin and stdout closed": (BARE, "exec {line} 0<&- 1>&-"),
    "stdin, stdout and stderr closed": (BARE, "exec {line} 0<&- 1>&- 2>&-"),
    "the POSIX locale": (BARE | POSIX, "exec {line}"),
    "Latin-1": (
        BARE | {"LC_ALL": "en_US.ISO-8859-1", "PYTHONIOENCODING": "latin-1"},
        "exec {line}",
    ),
    "a pipe that is closed": (BARE, "{line} | head -1 >/dev/null; exit ${PIPESTATUS[0]}"),
}


def run(folder: Path, extra: dict[str, str], start: str) -> subprocess.CompletedProcess[bytes]:
    recipe = builders.recipe(
        folder, training={"max_steps": 3, "save_steps": 3}, model={"shape": "llama-tiny"}
    )
    (folder / "workspace").mkdir()
    variables = {
        "LOWMEM_ROOT": str(folder / "workspace"),
        "PYTHONPATH": str(builders.CODE),
        **builders.TRACES,
    }
    words = [sys.executable, "-m", "launch", "run", str(recipe)]
    quoted = " ".join(f"'{word}'" for word in words)
    named = " ".join(f"'{key}={value}'" for key, value in variables.items())
    script = start.replace("{line}", quoted).replace("{variables}", named)
    return subprocess.run(
        ["bash", "-c", script], env={**variables, **extra}, capture_output=True, timeout=200
    )


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("by hand")
    done = run(folder, dict(os.environ), "exec {line}")
    assert done.returncode == 0, done.stderr
    return builders.weights(folder / "model")


@pytest.mark.shows(
    "F45", "F46", "env -i, cron, closed streams, umask 000, POSIX and Latin-1 locales"
)
@pytest.mark.parametrize("name", PLACES)
def test_the_same_weights_come_out_wherever_a_run_is_started(tmp_path, by_hand, name):
    folder = tmp_path / "données 日本"
    extra, start = PLACES[name]
    done = run(folder, extra, start)
    assert done.returncode == 0, done.stdout + done.stderr
    found = builders.weights(folder / "model")
    assert all(torch.equal(found[key], by_hand[key]) for key in by_hand)
    (log,) = (folder / "workspace/logs").glob("*.log")
    assert "données 日本" in log.read_text(encoding="utf-8")
    written = [
        path for place in (folder / "workspace", folder / "model") for path in place.rglob("*")
    ]
    assert [path for path in written if path.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)] == []


@pytest.mark.shows(
    "F45", "the terminal is closed while it trains: SIGHUP, or none where it is ignored"
)
@pytest.mark.parametrize(("start", "code"), [("exec", 75), ("trap '' HUP; exec", 0)])
def test_a_closed_terminal_ends_a_run_as_a_signal_does_or_not_at_all(tmp_path, start, code):
    training = {"max_steps": 400, "save_steps": 400, "logging_steps": 1}
    recipe = builders.recipe(tmp_path, training=training, model={"shape": "llama-tiny"})
    workspace = tmp_path / "workspace"
    script = f'{start} "{sys.executable}" -m launch run "{recipe}"'
    terminal, end = pty.openpty()
    process = subprocess.Popen(
        ["bash", "-c", script],
        env={
            **os.environ,
            "LOWMEM_ROOT": str(workspace),
            "PYTHONPATH": str(builders.CODE),
            **builders.TRACES,
        },
        stdin=end,
        stdout=end,
        stderr=end,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(end)
    seen = b""
    while b"training" not in seen.partition(b"trainable")[2]:  # the word of the bar
        seen += os.read(terminal, 1 << 16)
    os.close(terminal)
    assert process.wait(timeout=200) == code
    run = builders.only_run(workspace, "tiny")
    failure = json.loads((run / "attempts/01/supervisor.json").read_text())["failure"]
    assert (failure and failure["exit_code"]) == (code or None)
    assert (run / "report.html").exists()
    (log,) = (workspace / "logs").glob("*.log")
    assert ("stopped by SIGHUP" if code else "done: 400 steps") in log.read_text(encoding="utf-8")
