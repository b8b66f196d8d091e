"""The child that traces steps, `python -m training.trace.server FOLDER`.

It runs as long as a plan is made, because its imports take longer than a trace."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO

from launch.base import environment, leftovers
from launch.base.errors import ResourceError
from launch.base.processes import die_with_launcher
from launch.base.workspace import CODE

TIMEOUT_S = 300  # of one request


class TracingChild:
    """Started with the first request, ended by close(); a request after that starts another."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unused_packages: object = None
        self._process: subprocess.Popen[bytes] | None = None
        self._stderr: BinaryIO | None = None
        self._resources = ExitStack()  # of the child

    def ask(self, request: Mapping[str, Any]) -> str | None:
        """Have the request's questions answered by files in the folder; the reason of a failure, or
        None."""
        # what is imported once cannot be left out any more
        if request["unused_packages"] != self._unused_packages:
            self.close()
        process = self._process or self._start()
        self._unused_packages = request["unused_packages"]
        assert process.stdin is not None and process.stdout is not None
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
        if self._process is not None:
            self._process.kill()
        self._process = None
        self._resources.close()

    def _start(self) -> subprocess.Popen[bytes]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            leftovers.sweep(self._folder)
            own = tempfile.TemporaryDirectory(dir=self._folder, prefix=f"tmp-{os.getpid()}-")
            cwd = self._resources.enter_context(own)
        except OSError as error:
            raise ResourceError(
                f"{self._folder}: cannot keep traces there ({error.strerror}); make it writable, or"
                " name another folder with LOWMEM_TRACES"
            ) from error
        # SIM115: the stack closes the file with the child, not a `with` in this function
        self._stderr = self._resources.enter_context(Path(cwd, "stderr").open("w+b"))  # noqa: SIM115
        inherited = environment.passed(os.environ)
        variables = {
            key: value for key, value in inherited.items() if not key.startswith("ACCELERATE_")
        }
        variables |= {"PYTHONPATH": str(CODE), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
        self._process = self._resources.enter_context(
            subprocess.Popen(
                [sys.executable, "-P", "-m", "training.trace.server", str(self._folder)],
                env=variables,
                cwd=cwd,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
                preexec_fn=die_with_launcher,
            )
        )
        return self._process

    def _failure(self) -> str:
        """The last line of a child that has ended by itself."""
        assert self._process is not None and self._stderr is not None
        code = self._process.wait()
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        self.close()
        return lines[-1] if lines else f"the tracing child ended with {code}"
