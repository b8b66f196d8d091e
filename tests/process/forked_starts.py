"""`python -m launch` in forks of one process that has imported it, for tests of what a start says:
imports take most of a start's seconds.

Its command line, its environment and its files are a start's own; its process has the server's
command line. Started as a program, this file is the server."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

CODE = Path(__file__).resolve().parents[2]


def start(words: tuple[str, ...], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """`python -m launch WORDS` to its end, with this environment."""
    server = _server()
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        line = {"words": words, "env": dict(env), "out": str(out), "err": str(err)}
        server.stdin.write(json.dumps(line) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(words, code, out.read_text(), err.read_text())


@cache
def _server() -> subprocess.Popen[str]:
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.process.forked_starts"],
        cwd=CODE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def _child(words: list[str], env: Mapping[str, str], out: str, err: str) -> int:
    from launch.__main__ import main
    from launch.base import interpreter

    for fd, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT),
        (2, err, os.O_WRONLY | os.O_CREAT),
    ):
        os.dup2(os.open(path, flags, 0o600), fd)
    os.environ.clear()
    os.environ.update(env)
    interpreter.end_on_stop_signals()
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _serve() -> None:
    from launch.__main__ import VERBS

    for module, _ in VERBS.values():
        importlib.import_module(f"launch.commands.{module}")
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            code = 1
            try:
                code = _child(**json.loads(line))
            finally:
                os._exit(code)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
