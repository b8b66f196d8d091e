"""DeepSpeed's compiled ops, where a DeepSpeed file insists on one: built once, with progress, no
stale lock waited for.

None of our own modes needs one: the optimizer of offloaded states is the recipe's
(benchmarks/offload_optimizer.py)."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from launch.base.errors import ResourceError

PROGRESS_S = 10.0
POLL_S = 0.5


def ensure_cpu_adam(say: Callable[[str], None]) -> None:
    """Build DeepSpeed's cpu_adam, or load it when it is there. Ranks take turns. Raises
    ResourceError."""
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    builder = get_accelerator().create_op_builder("CPUAdamBuilder")
    folder = Path(_get_build_directory(builder.name, verbose=False))
    with _turn(folder.parent / ".lowmem.lock"):
        if not (folder / f"{builder.name}.so").exists():
            check_compiler(builder.name)
            say(f"compiling DeepSpeed's {builder.name} into {folder}: once, about a minute")
        unlock(folder, say)
        try:
            with _progress(builder.name, say):
                builder.load(verbose=False)
        except RuntimeError as error:
            raise ResourceError(
                f"DeepSpeed's {builder.name} cannot be compiled ({str(error).splitlines()[0]}); set"
                " zero_force_ds_cpu_optimizer: false in the DeepSpeed file: the recipe's optimizer"
                " is as fast"
            ) from error


def check_compiler(name: str) -> None:
    """Raises ResourceError when a program that a build needs is missing."""
    missing = [
        program
        for program in (os.environ.get("CXX", "c++"), "ninja")
        if shutil.which(program) is None
    ]
    if missing:
        raise ResourceError(
            f"DeepSpeed's {name} has to be compiled and there is no {' and no '.join(missing)};"
            " install them, or set zero_force_ds_cpu_optimizer: false in the DeepSpeed file: the"
            " recipe's optimizer is as fast"
        )


def unlock(folder: Path, say: Callable[[str], None]) -> None:
    """Remove the lock that a killed build has left; a build that still runs is waited for."""
    # torch.utils.file_baton: its mere existence makes every later start wait, for ever
    lock = folder / "lock"
    told = False
    while lock.exists():
        if not _is_building(folder):
            say(f"removing {lock}: the build that wrote it is gone")
            lock.unlink(missing_ok=True)
            return
        if not told:
            say(f"waiting for another build in {folder}")
            told = True
        time.sleep(POLL_S)


def _is_building(folder: Path) -> bool:
    """Whether a process works in the folder, as ninja and the compilers do."""
    for process in psutil.process_iter():
        try:
            if Path(process.cwd()) == folder:
                return True
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile, or another user's
    return False


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _progress(name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Say every PROGRESS_S seconds that a build goes on."""
    done, began = threading.Event(), time.monotonic()

    def tell() -> None:
        while not done.wait(PROGRESS_S):
            say(f"still compiling {name} ({time.monotonic() - began:.0f} s)")

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
