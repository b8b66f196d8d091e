"""Reads the command line, calls the verb's module in launch/commands/, and maps errors to exit
codes."""

from __future__ import annotations

import sys

from launch.base import interpreter

if __name__ == "__main__":
    interpreter.prepare(sys.argv[1:])

import argparse
import errno
import importlib
import os
import tomllib
from importlib.metadata import version
from pathlib import Path

from launch.base import processes
from launch.base.errors import ConfigError, Interrupted, LaunchError, ResourceError, StorageError
from launch.base.text import nearest, shown
from launch.base.workspace import CHECKOUT, CODE
from launch.commands.recipe_arguments import Parser
from launch.supervise import stop_signals

# verbs in the order of --help, and their modules in launch/commands/
VERBS = {
    "run": "run",
    "plan": "plan",
    "fit": "fit",
    "show": "show",
    "queue": "queue",
    "submit": "submit.verb",
    "tune": "tune",
    "doctor": "doctor",
    "selfcheck": "selfcheck.verb",
    "watch": "runs",
    "runs": "runs",
    "report": "runs",
    "compare": "runs",
    "samples": "runs",
    "merge": "model.merge",
    "download": "model.download",
    "export": "model.export",
    "evaluate": "model.evaluate",
    "keys": "recipe_keys",
}
CLOSED = {errno.EROFS, errno.EACCES}  # errors of places that are closed to writes
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *CLOSED}
NO_THREAD = "can't start new thread"  # Python's words
_PATH_ERRORS = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EEXIST}
_EXIT_CODES = """
exit codes: 0 complete; 1 a fault of lowmem; 2 configuration; 3 resources; 4 data; 5 no usable
            checkpoint; 6 out of host RAM; 7 hang; 8 numbers that are not finite; 9 run in use;
            10 storage; 11 network; 12 out of GPU memory; 13 the exported model differs; 75 and
            130 (Ctrl-C) stopped: run again"""


def main(argv: list[str]) -> int:
    """Run one command line; the exit code."""
    processes.settle_process()
    try:
        processes.check_proc()
        processes.check_threads()
        with stop_signals.signals():
            return _dispatch(argv)
    except (LaunchError, Interrupted) as error:
        return _refusal(shown(str(error)), error.exit_code)
    except BrokenPipeError:  # `| head` has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        root = os.environ.get("LOWMEM_ROOT") or "the folder of this program"
        path = shown(str(error.filename or f"a write (runs and caches are in {root})"))
        if error.errno in _PATH_ERRORS:
            return _refusal(f"{path}: {error.strerror}; give another path", ResourceError.exit_code)
        if error.errno in _STORAGE_ERRORS:
            fix = "make it writable for you" if error.errno in CLOSED else "make room there"
            return _refusal(f"{path}: {error.strerror}; {fix}", StorageError.exit_code)
        if error.errno == errno.EAGAIN:  # fork(2)
            message = f"the system refuses another process; {processes.limit_of_processes()}"
            return _refusal(message, ResourceError.exit_code)
        raise
    except RuntimeError as error:
        if str(error) != NO_THREAD:
            raise
        message = f"the system refuses another thread; {processes.limit_of_processes()}"
        return _refusal(message, ResourceError.exit_code)


def _refusal(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


def _dispatch(argv: list[str]) -> int:
    """Only the module of the verb that was typed is imported; all of them for --help."""
    verb = argv[0] if argv else ""
    if verb not in VERBS and verb not in ("-h", "--help", "-V", "--version"):
        near = "".join(f"; did you mean {name}?" for name in nearest(verb, VERBS))
        raise ConfigError(f"{verb or 'nothing'}: expected one of {', '.join(VERBS)}{near}")
    parser = Parser(
        prog="lowmem" if Path(sys.argv[0]).name == "lowmem" else "python -m launch",
        description="Trains language models inside the memory you have.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    for name in [verb] if verb in VERBS else VERBS:
        module = importlib.import_module(f"launch.commands.{VERBS[name]}")
        module.add_parser(subparsers, name).set_defaults(main=module.main, verb=name)
    arguments, unparsed = parser.parse_known_args(argv)
    return arguments.main(arguments, unparsed)


def _version() -> str:
    """The version of this package, as installed or as in the checkout."""
    if CHECKOUT:
        return tomllib.loads((CODE / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    return version("lowmem")


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    interpreter.ignore_stop_signals()
    sys.exit(exit_code)
