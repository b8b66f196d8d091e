"""Signals after the last line do not replace the exit code."""

from __future__ import annotations

import collections
import signal
import subprocess
import sys
import time

import pytest

from tests import builders

pytestmark = pytest.mark.process

STORM = (signal.SIGUSR2, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT, signal.SIGTERM)


# plan reads rows, for which pyarrow starts threads of its own
@pytest.mark.parametrize("command", ["keys", "plan"])
def test_a_storm_of_signals_after_the_last_line_leaves_a_documented_exit_code(tmp_path, command):
    environment = builders.environment(tmp_path / "workspace")
    machine = builders.CODE / "configs" / "machines" / "cpu.yaml"  # prints the same each time
    words = {"keys": ["training"], "plan": [builders.recipe(tmp_path), "--machine", machine]}
    argv = [sys.executable, "-m", "launch", command, *map(str, words[command])]
    whole = subprocess.run(argv, env=environment, capture_output=True, check=True)
    ends: collections.Counter[int] = collections.Counter()
    for wait_s in (0.0, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
        child = subprocess.Popen(
            argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert child.stdout is not None
        read = 0
        while read < len(whole.stdout):
            part = child.stdout.read1()
            assert part, f"{read} of {len(whole.stdout)} bytes"
            read += len(part)
        time.sleep(wait_s)  # what lies between the last line and the end
        while child.poll() is None:
            for number in STORM:
                child.send_signal(number)
        child.stdout.close()
        ends[child.returncode] += 1
    assert set(ends) <= {0, 75, 130}, ends
