"""From cron, a closed terminal, another locale or a loose umask a run gives the same weights as by hand, and its files
are its user's alone."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
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
    "Latin-1": (BARE | {"LC_ALL": "en_US.ISO-8859-1", "PYTHONIOENCODING": "latin-1"}, "exec {line}"),
    "a pipe that is closed": (BARE, "{line} | head -1 >/dev/null; exit ${PIPESTATUS[0]}"),
}


def run(folder: Path, extra: dict[str, str], start: str) -> subprocess.CompletedProcess[bytes]:
    recipe = builders.recipe(folder, training={"max_steps": 3, "save_steps": 3}, model={"shape": "llama-tiny"})
    (folder / "house").mkdir()
    variables = {"LOWMEM_ROOT": str(folder / "house"), "PYTHONPATH": str(builders.CODE), **builders.TRACES}
    words = [sys.executable, "-m", "launch", "run", str(recipe)]
    quoted = " ".join(f"'{word}'" for word in words)
    named = " ".join(f"'{key}={value}'" for key, value in variables.items())
    script = start.replace("{line}", quoted).replace("{variables}", named)
    return subprocess.run(["bash", "-c", script], env={**variables, **extra}, capture_output=True, timeout=200)


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory) -> dict[str, torch.Tensor]:
    folder = tmp_path_factory.mktemp("by hand")
    done = run(folder, dict(os.environ), "exec {line}")
    assert done.returncode == 0, done.stderr
    return builders.weights(folder / "model")


@pytest.mark.shows("F45", "F46", "env -i, cron, closed streams, umask 000, POSIX and Latin-1 locales")
@pytest.mark.parametrize("name", PLACES)
def test_the_same_weights_come_out_wherever_a_run_is_started(tmp_path, by_hand, name):
    folder = tmp_path / "données 日本"
    extra, start = PLACES[name]
    done = run(folder, extra, start)
    assert done.returncode == 0, done.stdout + done.stderr
    found = builders.weights(folder / "model")
    assert all(torch.equal(found[key], by_hand[key]) for key in by_hand)
    (log,) = (folder / "house/logs").glob("*.log")
    assert "données 日本" in log.read_text(encoding="utf-8")
    written = [path for place in (folder / "house", folder / "model") for path in place.rglob("*")]
    assert [path for path in written if path.lstat().st_mode & (stat.S_IRWXG | stat.S_IRWXO)] == []
