"""The results of a self-check, kept as they come: selfcheck.json and selfcheck.html."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from launch.base.files import read_or_none, write_atomic, write_json
from launch.base.text import size
from launch.report import page

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

    def with_finding(self, finding: Finding) -> Results:
        other_findings = (other for other in self.findings if other.name != finding.name)
        return replace(self, findings=(*other_findings, finding))


def read_results(folder: Path, facts: Mapping[str, Any]) -> Results:
    """The results so far; none if the card or the packages have changed since."""
    results = read_or_none(folder / JSON, Results)
    return results if results and dict(results.facts) == dict(facts) else Results(facts)


def write_results(folder: Path, results: Results) -> None:
    write_json(folder / JSON, asdict(results))
    write_atomic(folder / HTML, html(results))


def lines(finding: Finding) -> list[str]:
    """The finding in text: a line, and one for each part of a run."""
    if finding.failed:
        return [f"{finding.name}: failed: {finding.failed}"]
    if finding.not_available:
        return [f"{finding.name}: not available: {finding.not_available}"]
    text = [f"{finding.name}: ok ({finding.seconds:.0f} s)"]
    text += [
        f"  {part:<11} {figure:<10}"
        f" predicted {size(planned)}, measured {size(measured)} ({measured / planned - 1:+.1%})"
        for part, figure, (planned, measured) in _memory(finding)
        if planned and measured
    ]
    if all(seconds := finding.figures.get("seconds_per_step") or [None]):
        text.append("  seconds a step: predicted {:.4f}, measured {:.4f}".format(*seconds))
    text += [f"  {name}: {number:.4g}" for name, number in rates(finding).items()]
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


def rates(finding: Finding) -> Mapping[str, float]:
    """Measurements that no prediction stands beside, by name and unit."""
    return finding.figures.get("rates", {})


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
        rates=[each for finding in findings for each in rates(finding).items()],
    )


def _pair(pair: Sequence[int | None]) -> list[str]:
    planned, measured = pair
    text = [size(number) if number else "" for number in pair]
    return [*text, f"{measured / planned - 1:+.1%}" if planned and measured else ""]
