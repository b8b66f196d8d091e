"""`python -m launch selfcheck`: on your own card, compare predictions with measurements. The
results are kept as they come: selfcheck.json and selfcheck.html."""

import shutil
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from launch.base.errors import ConfigError, ResourceError
from launch.base.files import read_or_none, write_atomic, write_json
from launch.base.text import size
from launch.base.workspace import Workspace
from launch.commands.selfcheck.bench import Bench, CheckFailed, NotAvailable
from launch.commands.selfcheck.checks import Check, all_checks
from launch.probe import machine as probe_machine
from launch.probe import packages, torch_build
from launch.report import page
from launch.schema.machine import GIB, Machine

FREE_BYTES = 4 * GIB  # free VRAM that the checks need
_OTHERS_BYTES = 3 * GIB // 2  # more than a screen takes: a program computes there
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed")
JSON, HTML = "selfcheck.json", "selfcheck.html"  # files in the folder of the runs


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    part: int
    seconds: float
    time: float  # unix time, at its end
    figures: Mapping[str, Any] = field(default_factory=dict)
    failed: str = ""  # "": it did not
    not_available: str = ""  # the reason why it cannot run here


@dataclass(frozen=True)
class Results:
    """The findings for one card with one set of packages."""

    facts: Mapping[str, Any]  # card, driver, versions
    findings: tuple[Finding, ...] = ()

    def names(self) -> set[str]:
        """The checks that are done; one that failed or was not available is tried again."""
        return {
            finding.name
            for finding in self.findings
            if not finding.failed and not finding.not_available
        }

    def with_finding(self, finding: Finding) -> Self:
        other_findings = (other for other in self.findings if other.name != finding.name)
        return replace(self, findings=(*other_findings, finding))


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
    results = _read_results(bench.folder, _facts(machine))
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
        _write_results(bench.folder, results)
        print("\n".join(lines(finding)), flush=True)
    for folder in ("runs", "models", "logs"):  # gigabytes
        shutil.rmtree(bench.folder / folder, ignore_errors=True)
    tried = {finding.name for finding in results.findings}
    if undone := [check.name for check in checks if check.name not in tried]:
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
    return {
        "card": gpu.name,
        "cards": str(len(machine.gpus)),
        "memory": size(gpu.total_bytes),
        "architecture": gpu.architecture,
        "driver": gpu.driver,
        **{package: packages.version(package) or "not installed" for package in PACKAGES},
    }


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


def _read_results(folder: Path, facts: Mapping[str, Any]) -> Results:
    """The results so far; none if the card or the packages have changed since."""
    results = read_or_none(folder / JSON, Results)
    return results if results and dict(results.facts) == dict(facts) else Results(facts)


def _write_results(folder: Path, results: Results) -> None:
    write_json(folder / JSON, asdict(results))
    write_atomic(folder / HTML, html(results))


def lines(finding: Finding) -> list[str]:
    """The finding in text: a line, and one for each part of a run."""
    if finding.failed:
        return [f"{finding.name}: failed: {finding.failed}"]
    if finding.not_available:
        return [f"{finding.name}: not available: {finding.not_available}"]
    text = [
        f"{finding.name}: ok ({finding.seconds:.0f} s)",
        *(
            f"  {part:<11} {figure:<10}"
            f" predicted {size(planned)}, measured {size(measured)} ({measured / planned - 1:+.1%})"
            for part, figure, (planned, measured) in _memory(finding)
            if planned and measured
        ),
    ]
    if all(seconds := finding.figures.get("seconds_per_step") or [None]):
        text.append("  seconds a step: predicted {:.4f}, measured {:.4f}".format(*seconds))
    text += [f"  {name}: {number:.4g}" for name, number in finding.figures.get("rates", {}).items()]
    return text


def _memory(finding: Finding) -> Iterator[tuple[str, str, Sequence[int]]]:
    """Part of the run, figure, and [predicted, measured] bytes."""
    for phase, figures in finding.figures.get("memory", {}).items():
        for figure, pair in figures.items():
            yield phase.replace("_", " "), figure.removesuffix("_bytes"), pair
    for key, part, figure in (
        ("device_bytes", "second step", "whole card"),
        ("host_peak_bytes", "whole run", "host RAM"),
        ("context_bytes", "a product", "context"),
    ):
        if pair := finding.figures.get(key):
            yield part, figure, pair


def html(results: Results) -> str:
    """A self-contained page."""
    findings = results.findings
    speed = ((finding.name, finding.figures.get("seconds_per_step")) for finding in findings)
    return page.render(
        "selfcheck.html",
        title="Self-check",
        facts=results.facts,
        findings=findings,
        memory=[
            (finding.name, part, figure, *_pair(pair))
            for finding in findings
            for part, figure, pair in _memory(finding)
        ],
        speed=[
            (name, *(f"{number:.4f}" if number else "" for number in pair))
            for name, pair in speed
            if isinstance(pair, Sequence)
        ],
        rates=[each for finding in findings for each in finding.figures.get("rates", {}).items()],
    )


def _pair(pair: Sequence[int | None]) -> list[str]:
    planned, measured = pair
    text = [size(number) if number else "" for number in pair]
    return [*text, f"{measured / planned - 1:+.1%}" if planned and measured else ""]
