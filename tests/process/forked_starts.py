"""`python -m launch`, scripts and lines of Python in forks of a process that has imported
what they need, for tests of what a start says: imports take most of a start's seconds.

Its command line, its environment and its files are a start's own; its process has the server's
command line. Started as a program, this file is the server."""

from __future__ import annotations

import atexit
import importlib
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from tests import builders

CHAT = "scripts/chat.py"
OF_CHAT = ("data.tokenizer", "loop.evaluate", "model.build", "model.finished")  # of training/


def launch(workspace: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    """`python -m launch WORDS` to its end, as builders.launch() starts it."""
    done = start(words, builders.environment(workspace, **extra))
    builders.exit_codes.append(done.returncode)
    return done


def start(
    words: tuple[str, ...],
    env: Mapping[str, str],
    program: str = "launch",
    text: str = "",
    folder: Path = builders.CODE,
) -> subprocess.CompletedProcess[str]:
    """A program to its end, with this environment, in a folder: "launch" or a script of this
    checkout with these words, or "code", the first of them. Its input is `text`."""
    # the linker reads this variable when a process begins
    server = _server(CHAT if program == CHAT else "", env.get("LD_LIBRARY_PATH", ""))
    assert server.stdin and server.stdout
    with tempfile.TemporaryDirectory() as pipes:
        files = {name: str(Path(pipes, name)) for name in ("stdin", "stdout", "stderr")}
        Path(files["stdin"]).write_text(text, encoding="utf-8")
        line = {"program": program, "words": words, "env": dict(env), "files": files}
        line["folder"] = str(folder)
        server.stdin.write(json.dumps(line) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        out, err = (Path(files[name]).read_text() for name in ("stdout", "stderr"))
        return subprocess.CompletedProcess(words, code, out, err)


@cache
def _server(program: str, libraries: str) -> subprocess.Popen[str]:
    """The server of a program that imports much of its own, or of all others."""
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.process.forked_starts", program],
        cwd=builders.CODE,
        env={**os.environ, "LD_LIBRARY_PATH": libraries},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.kill)
    return server


def _child(
    program: str, words: list[str], env: Mapping[str, str], files: Mapping[str, str], folder: str
) -> int:
    for fd, path in enumerate(files.values()):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), fd)
    sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115  a start has its own
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    before = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in before if path not in ("", str(builders.CODE))]
    importlib.invalidate_caches()
    try:
        code = _run(program, words)
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001  as an interpreter ends
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _run(program: str, words: list[str]) -> int:
    if program == "code":
        exec(words[0], {"__name__": "__main__"})
        return 0
    if program != "launch":
        sys.argv = [str(builders.CODE / program), *words]
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    from launch.__main__ import main
    from launch.base import interpreter

    interpreter.end_on_stop_signals()
    return main(words)


def _serve(program: str) -> None:
    from launch.__main__ import VERBS

    for module, _ in VERBS.values():
        importlib.import_module(f"launch.commands.{module}")
    for module in OF_CHAT if program == CHAT else ():
        importlib.import_module(f"training.{module}")
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
    _serve(sys.argv[1])
