"""python -m launch plan | run | tune | report | compare | samples | merge | doctor; errors become
exit codes here."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from launch.base import interpreter

if __name__ == "__main__" and sys.argv[1:2] != ["doctor"]:  # which says what is missing
    interpreter.go_on_with_packages()

from launch.base import compile_caches, processes
from launch.base.errors import ConfigError, Interrupted, LaunchError, ResourceError, StorageError
from launch.base.text import shown
from launch.base.workspace import Workspace
from launch.commands import foreign_launcher
from launch.plan.candidates import LaunchConstraints
from launch.plan.resolve import Resolved, resolve
from launch.predict.oom_history import OomHistory
from launch.probe import network
from launch.recipe import load
from launch.recipe.guides import gpt2_variables
from launch.recipe.strict_yaml import show
from launch.report import text
from launch.run_folder import layout
from launch.supervise import stop_signals

FLAGS = {
    "--help",
    "--machine",
    "--dry-run",
    "--from-environment",
    "--resume",
    "--forget",
    "--calibration",
    "--anyway",
    "--out",
}  # the others set keys of the recipe
AUTO = "auto"
BATCH_KEY = "per_device_train_batch_size"
STORAGE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EACCES}
PATH_ERRORS = {errno.ENAMETOOLONG, errno.ENOTDIR, errno.ELOOP}
EPILOG = """any key of the recipe can be set:
            --training.learning_rate=3e-5 --model.shape=t5-tiny --lora.r=8
exit codes: 0 complete; 2 configuration; 3 resources; 4 data; 5 no usable checkpoint;
            6 out of host RAM; 7 hang; 8 numbers that are not finite; 9 run in use; 10 storage;
            11 network; 12 out of GPU memory; 75 and 130 (Ctrl-C) stopped: run again"""


SWITCHES = {
    "--assume-fits": "--launch.assume_fits=true",
    "--exact-batch": "--launch.exact_batch=true",
}


def main(argv: list[str]) -> int:
    processes.settle_process()
    try:
        return _dispatch(argv)
    except LaunchError as error:
        print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    except Interrupted as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno in PATH_ERRORS:
            name = show(shown(str(error.filename)))[1:-1]
            print(f"error: {name}: {error.strerror}; give another path", file=sys.stderr)
            return ResourceError.exit_code
        if error.errno not in STORAGE_ERRORS:
            raise
        print(
            f"error: {error.filename or 'a write'}: {error.strerror}; make room there",
            file=sys.stderr,
        )
        return StorageError.exit_code


def _say(line: str, flush: bool = False) -> None:
    print(shown(line), flush=flush)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as everything here does."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}; see {self.prog} --help")


def _dispatch(argv: list[str]) -> int:
    parser = _Parser(
        prog="python -m launch",
        description=__doc__,
        epilog=EPILOG,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    examine = commands.add_parser(
        "doctor",
        help="say what this machine offers, test the link between its GPUs, name what is wrong",
    )
    examine.add_argument(
        "--machine",
        type=Path,
        help="a described machine (configs/machines/*.yaml) instead of this one",
    )
    known = {
        "plan": "say what would run, and why",
        "run": "train",
        "tune": "find the fastest batch by short real trials",
    }
    for name, words in known.items():
        command = commands.add_parser(
            name,
            help=words,
            epilog=EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.add_argument("recipe", help="a name in configs/recipes/, or a file")
        if name == "tune":
            command.add_argument(
                "--forget", action="store_true", help="forget what was found, and do not tune"
            )
            continue
        command.add_argument(
            "batch",
            nargs="?",
            help="per_device_train_batch_size, or auto: tuned, at once if need be",
        )
        if name == "plan":
            command.add_argument(
                "--machine",
                type=Path,
                help="plan for a described machine (configs/machines/*.yaml)",
            )
        else:
            command.add_argument(
                "--dry-run", action="store_true", help="everything but the last call"
            )
            command.add_argument(
                "--from-environment",
                action="store_true",
                help=f"{', '.join(gpt2_variables.NAMES)} set keys of the recipe",
            )
            command.add_argument(
                "--resume",
                default="auto",
                help="auto (default), never, or a run or checkpoint folder",
            )
    merged = commands.add_parser(
        "merge", help="merge a LoRA adapter into its base: one ordinary model folder"
    )
    merged.add_argument("source", type=Path, help="an adapter's folder, or a run's")
    merged.add_argument("--out", type=Path, required=True, help="a new folder")
    said = commands.add_parser("report", help="what runs so far say about the predictions")
    said.add_argument(
        "--calibration",
        action="store_true",
        required=True,
        help="predicted beside measured, all runs",
    )
    compared = commands.add_parser(
        "compare", help="two runs side by side: speed, memory, losses; a table and a page"
    )
    compared.add_argument(
        "first", metavar="A", help="a recipe (its newest run), a run's name, or its folder"
    )
    compared.add_argument("second", metavar="B", help="likewise")
    compared.add_argument(
        "--anyway", action="store_true", help="also where model, data or effective batch differ"
    )
    seen = commands.add_parser("samples", help="show that a run has trained each row once an epoch")
    seen.add_argument("run", type=Path, help="a folder runs/<recipe>/<time>")
    argv = [SWITCHES.get(word, word) for word in argv]
    overrides = [
        word for word in argv if word.startswith("--") and word.partition("=")[0] not in FLAGS
    ]
    for word in overrides:
        if "=" not in word:
            raise ConfigError(
                f"{word}: no flag of its own; a key of the recipe is set as {word}=VALUE, see"
                " --help"
            )
    arguments = parser.parse_args([word for word in argv if word not in overrides])
    # the others start children that import torch
    if arguments.command not in ("compare", "samples", "report"):
        compile_caches.settle()
    if arguments.command == "doctor":
        if overrides:
            raise ConfigError(f"doctor: unknown flag {overrides[0]}")
        from launch.commands import doctor  # the link test: not needed to plan

        workspace = Workspace.here()
        return doctor.main(arguments.machine, workspace.cache, workspace.root)
    if arguments.command == "compare":
        if overrides:
            raise ConfigError(f"compare: unknown flag {overrides[0]}")
        from launch.report import compare  # rich's tables

        return compare.run(Workspace.here(), arguments.first, arguments.second, arguments.anyway)
    if arguments.command == "samples":
        if overrides:
            raise ConfigError(f"samples: unknown flag {overrides[0]}")
        from launch.run_folder import sample_audit

        print("\n".join(sample_audit.lines(layout.RunDir(arguments.run))))
        return 0
    if arguments.command == "merge":
        if overrides:
            raise ConfigError(f"merge: unknown flag {overrides[0]}")
        from launch.commands import merge

        return merge.run(arguments.source, arguments.out)
    if arguments.command == "report":
        return _calibration(overrides)
    if getattr(arguments, "from_environment", False):
        typed = gpt2_variables.translate(os.environ)
        for word in typed:
            _say(f"{word.typed}: {word.removeprefix('--')}")
        overrides = [*typed, *overrides]
    batch = getattr(arguments, "batch", None)
    named = [
        word for word in overrides if word.partition("=")[0].replace("-", "_").endswith(BATCH_KEY)
    ]
    if batch is not None and named:
        other = getattr(named[0], "typed", "") or f"--training.{BATCH_KEY}"
        raise ConfigError(f"batch {batch} and {other} are both given; keep one")
    constraints = LaunchConstraints(
        force_gloo=foreign_launcher.asks_for_gloo(os.environ), free_batch=batch == AUTO
    )
    if batch not in (None, AUTO):
        overrides.append(f"--training.{BATCH_KEY}={load.check_batch(batch)}")
    elif not named:
        constraints = replace(constraints, wants_tuned=True)
    if arguments.command == "plan":
        with stop_signals.signals():
            resolved = resolve(arguments.recipe, overrides, arguments.machine, constraints)
        print(shown("\n".join(text.plan_lines(resolved.recipe, resolved.machine, resolved.plan))))
        return 0
    if arguments.command == "tune":
        return _tune(
            arguments.recipe, overrides, replace(constraints, wants_tuned=False), arguments.forget
        )
    if batch == AUTO and not arguments.dry_run:
        _tune(
            arguments.recipe,
            overrides,
            replace(constraints, wants_tuned=False),
            forget=False,
            again=False,
        )

    def decide(test_link: bool, oom_history: OomHistory) -> Resolved:
        known = replace(constraints, oom_history=oom_history)
        resolved = resolve(
            arguments.recipe, overrides, constraints=known, say=_say, test_link=test_link
        )
        return replace(resolved, plan=network.located(resolved.plan))

    from launch.commands import run  # not needed to refuse a wrong flag

    return run.run(decide, arguments.resume, arguments.dry_run)


def _tune(
    recipe: str,
    overrides: list[str],
    constraints: LaunchConstraints,
    forget: bool,
    again: bool = True,
) -> int:
    """Tune, or forget; `again` False: not where it has been done before."""
    from launch.commands import tune
    from launch.predict.history import cache_keys
    from launch.predict.history.ledger import Ledger

    say = partial(_say, flush=True)  # into a file too, while it goes on
    # any cut may win, so all are traced by one child, and none of the asked one's own
    with stop_signals.signals():
        resolved = resolve(
            recipe,
            overrides,
            constraints=replace(constraints, free_batch=True),
            say=say,
            test_link=True,
        )
    of = (
        cache_keys.machine_key(resolved.machine),
        cache_keys.model_key(resolved.plan.shape),
        cache_keys.recipe_key(resolved.recipe),
    )
    ledger = Ledger(resolved.workspace.ledger_file, print)
    if forget:
        print(
            "forgotten"
            if ledger.forget(*of)
            else "nothing was tuned for this machine, model and recipe"
        )
    elif again or ledger.recall(*of) is None:
        with stop_signals.signals():  # between trials, which have their own
            tune.tune(resolved, constraints, say)
    return 0


def _calibration(overrides: list[str]) -> int:
    if overrides:
        raise ConfigError(f"report: unknown flag {overrides[0]}")
    from launch.predict.history.ledger import Ledger

    print("\n".join(Ledger(Workspace.here().ledger_file, print).calibration_lines()))
    return 0


if __name__ == "__main__":
    interpreter.go_on_in_utf8()
    sys.exit(main(sys.argv[1:]))
