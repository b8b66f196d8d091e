"""DeepSpeed's op, which only a user's own file asks for, is really compiled: past a killed build's
lock, and once."""

from __future__ import annotations

import subprocess
import sys

from tests import builders

BUILD = (
    "from training.engines import ops; ops.ensure_cpu_adam(lambda line: print(line, flush=True));"
    " print('built')"
)


def test_a_killed_builds_lock_does_not_stop_the_next_and_the_second_start_builds_nothing(tmp_path):
    folder = tmp_path / "extensions" / "cpu_adam"
    folder.mkdir(parents=True)
    (folder / "lock").touch()
    extra = {"TORCH_EXTENSIONS_DIR": str(folder.parent), "DS_ACCELERATOR": "cpu"}
    said = []
    for _ in range(2):
        env = builders.environment(tmp_path / "h", **extra)
        done = subprocess.run(
            [sys.executable, "-c", BUILD], env=env, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr
        said.append(
            [line for line in done.stdout.splitlines() if "cpu_adam" in line or line == "built"]
        )
    first, second = said
    assert f"compiling DeepSpeed's cpu_adam into {folder}: once, about a minute" in first
    assert f"removing {folder}/lock: the build that wrote it is gone" in first
    assert any(line.startswith("still compiling cpu_adam") for line in first)
    assert second == ["built"]
