"""The child with torch, `python -m training.worker`, and the requests that it answers. All that a
plan asks shares one child, because its imports take longer than an answer."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.base import environment, files
from launch.base.errors import ConfigError, DataError, LaunchError, ResourceError
from launch.base.processes import die_with_launcher
from launch.base.text import shown
from launch.base.workspace import CODE
from launch.data.token_cache import TokenCache
from launch.schema.plan import ModelSize
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import Question
from launch.schema.rows import Division

REFUSALS = {error.exit_code: error for error in (ConfigError, DataError, ResourceError)}


@dataclass(frozen=True)
class ReadParts:
    """A ModelParts is asked for: of the model that transformers builds from a config."""

    config: dict[str, Any]


@dataclass(frozen=True)
class AddTokens:
    """A NewTokens is asked for: of tokens that a folder's tokenizer gets, in memory."""

    folder: Path
    template: str | None  # a value of tokenizer.chat_template
    tokens: tuple[str, ...]


@dataclass(frozen=True)
class FindLargest:
    """A list of LargestMicroBatches is asked for: one of each division of tokenised rows."""

    folder: Path  # a token cache
    divisions: tuple[Division, ...]


@dataclass(frozen=True)
class EncodeRows:
    """A ShownRows is asked for: of the first rows of files, or of the row at a line."""

    tokens: TokenCache
    num_rows: int
    line: int | None
    num_read: int  # rows of each file that are counted
    files: tuple[Path, ...]


@dataclass(frozen=True)
class RecordSteps:
    """Records of steps are asked for, each a file of the folder."""

    folder: Path
    recipe: Recipe
    model_size: ModelSize
    lora_targets: tuple[str, ...]
    steps: Mapping[str, Question]  # file name -> step


@dataclass(frozen=True)
class MeasureCores:
    """A list of CoreFigures is asked for: of each number of threads."""

    threads: tuple[int, ...]


Request = ReadParts | AddTokens | FindLargest | EncodeRows | RecordSteps | MeasureCores


class WorkerEnded(Exception):
    """The child has ended, or gave no answer in time. Its text is the last line that it wrote."""

    def __init__(self, stderr: str, code: int = 0) -> None:
        lines = (
            [f"the child with torch was ended by {signal.Signals(-code).name}"]
            if code < 0  # it could not say why: its last line is of something else
            else stderr.strip().splitlines()
        )
        super().__init__(lines[-1] if lines else f"the child with torch ended with {code}")
        self.stderr, self.code = stderr, code


class Worker:
    """A child that is started with the first request, and ended by close() or with the outermost
    `with`. A request after that starts another."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._variables: dict[str, str] = {}
        self._hides_torch = False
        self._num_plans = 0

    def __enter__(self) -> None:
        self._num_plans += 1

    def __exit__(self, *_: object) -> None:
        self._num_plans -= 1
        if not self._num_plans:
            self.close()

    def reply(self, request: Request, task: str) -> bytes:
        """The JSON that answers a request; `task` says in errors what the child does.

        Raises ConfigError, DataError and ResourceError as the child does, and LaunchError where it
        ended."""
        try:
            return self.ask(request)
        except WorkerEnded as ended:
            sys.stderr.write(shown(ended.stderr))
            if ended.code >= 0:
                raise LaunchError(
                    f"the process that {task} ended with {ended.code}, see above"
                ) from None
            raise ResourceError(
                f"the process that {task} was ended by {signal.Signals(-ended.code).name}, see"
                " above: it took all memory, or a file that it reads is damaged"
            ) from None

    def kept_reply(
        self, file: Path, noun: type[files.Noun], request: Request, task: str
    ) -> files.Noun:
        """The reply that an earlier start kept in `file` of the cache, else a new one, which is
        kept there. Raises as reply() does."""
        if (stored := files.read_or_none(file, noun)) is not None:
            return stored
        reply = self.reply(request, task)
        file.parent.mkdir(parents=True, exist_ok=True)
        files.write_atomic(file, reply.decode())
        return files.adapter(noun).validate_json(reply)

    def ask(self, request: Request, timeout_s: float | None = None) -> bytes:
        """The JSON that answers a request. Raises LaunchError as the child does, and
        WorkerEnded."""
        try:
            return self._ask(request, timeout_s)
        except BaseException:  # the answer may still come, or its tokenizer run on
            self.close()
            raise

    def _ask(self, request: Request, timeout_s: float | None) -> bytes:
        variables = {
            **{
                key: value
                for key, value in environment.passed(os.environ).items()
                if not key.startswith("ACCELERATE_")
            },
            **{"PYTHONPATH": str(CODE), "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        }
        hides_torch = isinstance(request, EncodeRows)
        # Torch cannot be imported any more in a process that hides it.
        if variables != self._variables or (self._hides_torch and not hides_torch):
            self.close()
        process = self._process or self._start(variables, hides_torch)
        assert process.stdin is not None and process.stdout is not None
        self._stderr.seek(0)
        self._stderr.truncate()
        fields = TypeAdapter(type(request)).dump_python(request, mode="json")
        line = b""
        with suppress(BrokenPipeError):
            process.stdin.write(f"{type(request).__name__} {json.dumps(fields)}\n".encode())
            process.stdin.flush()
            if not select.select([process.stdout], [], [], timeout_s)[0]:
                raise WorkerEnded(f"the child with torch took more than {timeout_s} s")
            line = process.stdout.readline()
        if not line.endswith(b"\n"):
            ended_with = process.wait()
            self._stderr.seek(0)
            raise WorkerEnded(self._stderr.read().decode(errors="replace"), ended_with)
        code, _, reply = line.rstrip(b"\n").partition(b" ")
        if code != b"0":
            raise REFUSALS.get(int(code), LaunchError)(json.loads(reply))
        return reply

    def close(self) -> None:
        """End the child, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._stderr.close()
        self._process = None

    def _start(self, variables: dict[str, str], hides_torch: bool) -> subprocess.Popen[bytes]:
        self._variables, self._hides_torch = variables, hides_torch
        self._stderr = FileIO(os.memfd_create("stderr"), "r+")
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "training.worker", *["--without-torch"] * hides_torch],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            preexec_fn=die_with_launcher,
        )
        return self._process


WORKER = Worker()  # the only worker of this launcher
