"""Reads the command line, calls the verb's module in launch/commands/, and maps errors to exit
codes."""

import sys

from launch.base import interpreter

if __name__ == "__main__":
    interpreter.prepare(sys.argv[1:])

import argparse
import errno
import importlib
import os
import textwrap
import tomllib
from importlib.metadata import version
from pathlib import Path

from launch.base import processes
from launch.base.errors import (
    EXIT_CODES,
    ConfigError,
    Interrupted,
    LaunchError,
    ResourceError,
    StorageError,
)
from launch.base.text import did_you_mean, shown
from launch.base.workspace import CHECKOUT, CODE
from launch.commands import recipe_arguments
from launch.hub import names
from launch.supervise import stop_signals

# verbs in the order of --help: their modules in launch/commands/, and what they do
VERBS = {
    "run": ("run", "train"),
    "plan": ("previews", "show what would run, and why"),
    "fit": ("previews", "show which known models a machine trains, with which changes, how fast"),
    "show": ("previews", "show rows as they will be trained, and which tokens have a loss"),
    "queue": ("queue", "list the runs that have or wait for memory; change yours"),
    "submit": (
        "submit.verb",
        "train later or elsewhere: behind other runs, by cron, under Slurm, in a cloud",
    ),
    "tune": ("tune", "find the fastest batch by short real trials"),
    "doctor": (
        "doctor",
        "show what this machine offers, test the link between its GPUs, name what is wrong",
    ),
    "selfcheck": (
        "selfcheck.verb",
        "measure this card beside the predictions: memory, one out of memory, seconds a step",
    ),
    "watch": ("runs", "show the runs of this machine: state, step, time left, loss, memory"),
    "runs": (
        "runs",
        "list all runs of this checkout; clean: free disk space that finished runs still take",
    ),
    "report": (
        "runs",
        "show where the page of a run is, or how well predictions agreed with all runs",
    ),
    "compare": (
        "runs",
        "show two runs side by side: speed, memory, losses; a table and a page",
    ),
    "samples": ("runs", "show that a run has trained each row once an epoch"),
    "merge": ("model.finished", "merge a LoRA adapter into its base: one ordinary model folder"),
    "download": ("model.hub", "download a model or a data set, or its newest files"),
    "export": ("model.export", "write a model for other programs: merged, packed, GGUF, Ollama"),
    "evaluate": (
        "model.evaluate",
        "loss, exact match, BLEU and ROUGE-L of a finished model on the rows of a file",
    ),
    "keys": ("previews", "list the keys of a recipe: type, default, meaning"),
}
CLOSED = {errno.EROFS, errno.EACCES}  # errors of places that are closed to writes
_STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, *CLOSED}
_NO_THREAD = "can't start new thread"  # Python's words
_PATH_ERRORS = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP, errno.EEXIST}
_EXIT_CODES = textwrap.fill(
    f"exit codes: {'; '.join(f'{code} {meaning}' for code, meaning in EXIT_CODES.items())}"
    " (75, 130: the same line continues)",
    width=92,
    subsequent_indent=" " * 12,
)


def main(argv: list[str]) -> int:
    """Run one command line; the exit code."""
    processes.settle_process()
    try:
        processes.check_proc()
        processes.check_threads()
        with stop_signals.signals():
            return _dispatch(argv)
    except (LaunchError, Interrupted) as error:
        message = str(error)
        path = Path(message.partition(": ")[0])
        message = names.with_download(message, (path, *path.parents))
        return _refusal(shown(message), error.exit_code)
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
        if str(error) != _NO_THREAD:
            raise
        message = f"the system refuses another thread; {processes.limit_of_processes()}"
        return _refusal(message, ResourceError.exit_code)


def _refusal(message: str, exit_code: int) -> int:
    print(f"error: {message}", file=sys.stderr)
    return exit_code


def _dispatch(argv: list[str]) -> int:
    """Only the module of the verb that was typed is imported. Its main() returns an exit code, or
    None for 0."""
    verb = argv[0] if argv else ""
    if verb not in VERBS and verb not in ("-h", "--help", "-V", "--version"):
        raise ConfigError(
            f"{verb or 'nothing'}: expected one of {', '.join(VERBS)}{did_you_mean(verb, VERBS)}"
        )
    parser = recipe_arguments.Parser(
        prog="lowmem" if Path(sys.argv[0]).name == "lowmem" else "python -m launch",
        description="Trains language models inside the memory you have.",
        epilog=_EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=_version())
    subparsers = parser.add_subparsers(title="verbs", metavar="VERB", required=True)
    parsers = {
        name: recipe_arguments.add_parser(subparsers, name, VERBS[name][1])
        for name in ([verb] if verb in VERBS else VERBS)
    }
    if verb not in VERBS:  # --help or --version, which parse_args() shows
        parser.parse_args(argv)
    module = importlib.import_module(f"launch.commands.{VERBS[verb][0]}")
    parsers[verb].set_defaults(verb=verb)
    parsers[verb].epilog = getattr(module, "EPILOG", parsers[verb].epilog)
    # a module of several verbs has the flags of each
    recipe_arguments.add_flags(parsers[verb], module.FLAGS.get(verb, module.FLAGS))
    arguments, unparsed = parser.parse_known_args(argv)
    if verb in recipe_arguments.USAGES:
        return module.main(arguments, unparsed) or 0
    recipe_arguments.reject(arguments, unparsed)
    return module.main(arguments) or 0


def _version() -> str:
    """The version of this package, as installed or as in the checkout."""
    if CHECKOUT:
        return tomllib.loads((CODE / "pyproject.toml").read_text("utf-8"))["project"]["version"]
    return version("lowmem")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    finally:
        interpreter.ignore_stop_signals()
