#!/usr/bin/env python3
"""Run training on a rank: with --run-dir under the lowmem launcher, with `train` and the guides'
flags under accelerate or torchrun."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from launch.base import compile_caches, modules
from launch.base.errors import LaunchError, Stopped
from launch.base.files import write_json
from launch.base.processes import (
    check_proc,
    check_threads,
    die_with_launcher,
    settle_process,
    settle_threads,
)
from launch.base.text import shown
from launch.commands import attach
from launch.predict.memory import onednn
from launch.probe import packages
from launch.recipe.guides import chatlm_flags
from launch.recipe.guides.chatlm_flags import Request
from launch.run_folder.layout import AttemptDir, RunDir
from training.compat.python_private import remove_socket_folder, shorten_socket_folder
from training.control.heartbeat import Heartbeat
from training.control.stop_word import Control, Halted

RANK_0_SPEAKS_S = 10.0  # other ranks wait so long before they print their error


def main(argv: list[str], request: Callable[[], Request] | None = None) -> int:
    """Run one rank to its end and return its exit code.

    `request` translates the flags of an entry point other than `train`."""
    rank = int(os.environ.get("RANK", "0"))
    settle_process()
    shorten_socket_folder()
    control = Control()
    control.listen()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded
    settle_threads()
    os.environ.update(onednn.settings(os.environ))
    if {"WORLD_SIZE", "LOWMEM_SUPERVISED", "ACCELERATE_MIXED_PRECISION"} & os.environ.keys():
        # torchrun passes signals on before it ends. accelerate's launcher of one process ends
        # without passing them on, and so do both for signals that they do not know: this rank saves
        # first.
        passes_on = {"WORLD_SIZE", "LOWMEM_SUPERVISED"} <= os.environ.keys()
        die_with_launcher(signal.SIGKILL if passes_on else signal.SIGTERM)
    opened: list[AttemptDir] = []  # filled as soon as there is an attempt to write the error to
    try:
        check_proc()
        compile_caches.settle()
        if request is not None or argv[:1] == ["train"]:
            guide_request = request() if request else chatlm_flags.translate(argv[1:])
            start = attach.from_request(guide_request)
            if guide_request.dry_run:
                return 0
        else:
            parser = argparse.ArgumentParser(description=__doc__)
            parser.add_argument("--run-dir", type=Path, required=True)
            parser.add_argument("--attempt", type=int, required=True)
            parser.add_argument("--resume", default="auto")
            arguments = parser.parse_args(argv)
            run_dir = RunDir(arguments.run_dir)
            start = attach.from_run_dir(run_dir, arguments.attempt, arguments.resume)
            if start.run and start.run.outcome():
                print(
                    f"{start.run.root} is complete: nothing to train; the recipe's line with"
                    " --resume never starts over"
                )
                return 0
            if start.attempt:  # a dry run has none
                opened.append(start.attempt)
                Heartbeat(start.attempt.heartbeat_file(rank)).beat("load")
                stacks = start.attempt.stacks_file(rank).open("a", encoding="utf-8")
                # the supervisor asks when it hangs
                faulthandler.register(signal.SIGQUIT, file=stacks, all_threads=True)
        check_threads()
        modules.leave_out(packages.unused(start.recipe, start.plan.strategy))
        with modules.uncollected():
            from training import run  # imports torch: a wrong flag has been refused by now

        run.train(start, attach.open_run, opened, control=control)
    except Halted as halted:
        code = halted.word.exit_code
        if rank == 0:
            print(f"{halted}: run the same line again to continue", file=sys.stderr)
        for attempt in opened:
            attempt.leave_word(rank, Stopped(str(halted), code))
            if rank == 0 and not attempt.outcome_file.exists():
                write_json(
                    attempt.outcome_file,
                    {"complete": False, "ended": "preempted", "checkpoint": None},
                )
        return code
    except LaunchError as error:
        for attempt in opened:
            attempt.leave_word(rank, error)
        # The first rank that ends takes all others with it; an error that every rank finds is left
        # to rank 0, which may be slower.
        if rank == 0 or (
            "LOWMEM_SUPERVISED" not in os.environ and control.is_undisturbed(RANK_0_SPEAKS_S)
        ):
            print(f"error: {shown(str(error))}", file=sys.stderr)
        return error.exit_code
    except BaseException as error:
        for attempt in opened:
            attempt.leave_word(rank, error)
        raise
    return 0


def leave(code: int) -> None:
    """End this rank now, when all work is done.

    The interpreter's own exit sometimes ends in SIGABRT while a thread of a library still runs
    ("terminate called without an active exception")."""
    for child in multiprocessing.active_children():  # data loaders' workers
        child.terminate()
        child.join(timeout=1)
    remove_socket_folder()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the disk is full
            continue
    os._exit(code)


def run_and_leave(argv: list[str], request: Callable[[], Request] | None = None) -> None:
    """Run main() and end this process with its exit code."""
    try:
        exit_code = main(argv, request)
    except SystemExit as error:  # argparse's
        exit_code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001  leave() below is the only exit
        traceback.print_exc()
        exit_code = 1
    leave(exit_code)


if __name__ == "__main__":
    run_and_leave(sys.argv[1:])
