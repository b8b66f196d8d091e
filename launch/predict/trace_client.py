"""The child that traces steps, `python -m training.trace.server FOLDER`.

It is kept while a plan is made, because its imports take longer than a trace."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from launch.base import environment
from launch.base.processes import die_with_launcher
from launch.base.workspace import CODE

TIMEOUT_S = 300  # of one request


class TracingChild:
    """Started with the first request, ended by close(); a request after that starts another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._left_out: object = None
        self._place: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._says: BinaryIO | None = None

    def ask(self, request: Mapping[str, Any]) -> str | None:
        """Have the request's questions answered by files in the folder; why that could not be, or
        None."""
        # what is imported once cannot be left out any more
        if request["unused_packages"] != self._left_out:
            self.close()
        if self._process is None:
            self._start()
            self._left_out = request["unused_packages"]
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(request).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._failure()
        readable, _, _ = select.select([process.stdout], [], [], TIMEOUT_S)
        if not readable:
            self.close()
            return f"tracing took more than {TIMEOUT_S} s"
        return None if process.stdout.readline() else self._failure()

    def close(self) -> None:
        """End the child, if there is one."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None and self._says is not None
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, self._says):
            stream.close()
        assert self._place is not None
        self._place.cleanup()

    def _start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._place = tempfile.TemporaryDirectory(dir=self._folder)
        self._says = (Path(self._place.name) / "stderr").open("w+b")  # as long as the child lives
        inherited = environment.passed(os.environ)
        variables = {
            key: value for key, value in inherited.items() if not key.startswith("ACCELERATE_")
        }
        variables |= {"PYTHONPATH": str(CODE), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.trace.server", str(self._folder)],
            env=variables,
            cwd=self._place.name,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._says,
            preexec_fn=die_with_launcher,
        )

    def _failure(self) -> str:
        """The last line of a child that has ended by itself."""
        assert self._process is not None and self._says is not None
        code = self._process.wait()
        self._says.seek(0)
        words = self._says.read().decode(errors="replace").strip().splitlines()
        self.close()
        return words[-1] if words else f"the tracing child ended with {code}"
