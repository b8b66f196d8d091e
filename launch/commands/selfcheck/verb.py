"""`python -m launch selfcheck`: on your own card, compare predictions with measurements."""

import shutil
import time
from argparse import Namespace
from importlib.util import find_spec

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import size
from launch.base.workspace import Workspace
from launch.commands.selfcheck.bench import Bench, CheckFailed, NotAvailable
from launch.commands.selfcheck.checks import Check, all_checks
from launch.commands.selfcheck.results import (
    HTML,
    JSON,
    Finding,
    lines,
    read_results,
    write_results,
)
from launch.probe import machine as probe_machine
from launch.probe import packages, torch_build
from launch.schema.machine import GIB, Machine

FREE_BYTES = 4 * GIB  # free VRAM that the checks need
_OTHERS_BYTES = 3 * GIB // 2  # more than a screen takes: a program computes there
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")


FLAGS = {
    "--minutes": {
        "type": float,
        "default": 9.0,
        "help": "end after this time (default 9)",
    },
    "--part": {"type": int, "choices": (1, 2, 3), "help": "only this part of the checks"},
    "--again": {"action": "store_true", "help": "forget the results so far"},
}


def main(arguments: Namespace) -> int:
    """The exit code is 3 if a check failed, or this machine has no card for it."""
    if arguments.minutes <= 0:
        raise ConfigError(f"--minutes={arguments.minutes:g}: expected more than 0")
    packages.refuse_old()
    machine = probe_machine.machine()
    _refuse(machine)
    for gpu in machine.gpus:
        if gpu.slowdown:
            print(f"note: GPU {gpu.index} ({gpu.name}) is slower now: {gpu.slowdown}")
    workspace = Workspace.here()
    deadline = time.monotonic() + 60 * arguments.minutes
    bench = Bench(workspace.root / "selfcheck", workspace.cache, deadline)
    bench.prepare()
    if arguments.again:
        (bench.folder / JSON).unlink(missing_ok=True)
    results = read_results(bench.folder, _facts(machine))
    checks = [check for check in all_checks() if arguments.part in (None, check.part)]
    waiting = [check for check in checks if check.name not in results.names()]
    print(
        f"{len(waiting)} of {len(checks)} checks to do, results in {bench.folder / JSON}",
        flush=True,
    )
    for check in waiting:
        if deadline - time.monotonic() < check.least_s and not lacks(check, machine):
            break
        finding = _find(bench, check, machine)
        if finding is None:
            break
        results = results.with_finding(finding)
        write_results(bench.folder, results)
        print("\n".join(lines(finding)), flush=True)
    for folder in ("runs", "models", "logs"):  # gigabytes
        shutil.rmtree(bench.folder / folder, ignore_errors=True)
    tried = {finding.name for finding in results.findings}
    undone = [check.name for check in checks if check.name not in tried]
    if undone:
        print(f"not done yet: {', '.join(undone)}; the same line goes on")
    failed = [finding.name for finding in results.findings if finding.failed]
    print(f"page: {bench.folder / HTML}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return 3 if failed else 0


def lacks(check: Check, machine: Machine) -> str:
    """The reason if the check needs more cards than there are, or a package that is not
    installed; "" if nothing is missing."""
    if check.package and find_spec(check.package) is None:
        return f"the package {check.package} is not installed"
    count = len(machine.gpus)
    return f"it needs {check.cards} cards, and there is {count}" if check.cards > count else ""


def _refuse(machine: Machine) -> None:
    """Raises ResourceError if there is no card, if torch cannot use it, or if others use it."""
    if not machine.gpus:
        raise ResourceError(f"selfcheck needs a GPU: {machine.gpus_reason}")
    torch_build.refuse(machine, machine.gpus)
    for gpu in machine.gpus[:1]:
        used = gpu.total_bytes - gpu.free_bytes
        if used > _OTHERS_BYTES or gpu.free_bytes < FREE_BYTES:
            raise ResourceError(
                f"GPU {gpu.index} ({gpu.name}) has {size(used)} of {size(gpu.total_bytes)} in use;"
                f" selfcheck needs a card that no other program uses, with {size(FREE_BYTES)} free:"
                " end the programs that nvidia-smi lists, or name another card in"
                " CUDA_VISIBLE_DEVICES"
            )


def _facts(machine: Machine) -> dict[str, str]:
    """The card, its driver and the packages; with others the results begin anew."""
    gpu = machine.gpus[0]
    facts = {
        "card": gpu.name,
        "cards": str(len(machine.gpus)),
        "memory": size(gpu.total_bytes),
        "architecture": gpu.architecture,
        "driver": gpu.driver,
    }
    versions = {package: packages.version(package) or "not installed" for package in PACKAGES}
    return facts | versions


def _find(bench: Bench, check: Check, machine: Machine) -> Finding | None:
    """The result of a check; None if its time is over."""
    began = time.monotonic()
    figures, failed, reason = {}, "", lacks(check, machine)
    try:
        figures = check.run(bench) if not reason else {}
    except TimeoutError:
        return None
    except CheckFailed as error:
        failed = str(error)
    except NotAvailable as error:
        reason = str(error)
    took_s = round(time.monotonic() - began, 1)
    return Finding(check.name, check.part, took_s, time.time(), figures, failed, reason)
