"""`python -m launch compare A B`: two runs side by side, as a table and as an HTML page."""

import shutil
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from launch.base import files
from launch.base.errors import ConfigError
from launch.base.text import columns, shown, size
from launch.base.workspace import Workspace
from launch.report import comparable, curves, page
from launch.report.comparable import Difference, Side
from launch.run_folder import steps
from launch.schema.result import StepEvent

_LAST_PART = 0.1  # last share of the samples, whose mean is the training loss
_MOST_MEANS = 100  # points of a curve
_SHARE, _LOSS = "{:.1%}".format, "{:.4f}".format
COLORS = ("#f59e0b", "#1d4ed8")  # line of A, line of B
WIDTHS = (4.5, 1.5)  # B is drawn over A: where they agree both are seen
_RULES = (
    f"speed: of all steps that count but the first {steps.STEADY_FROM} of each start",
    "seconds of a step: with its wait for data; without logs, evaluations and saves",
    "wall time: from the first of those steps to the last step or evaluation of each start",
)


def run(workspace: Workspace, first: str, second: str, anyway: bool) -> None:
    """Print both runs, their differences and the table, and write the page. Raises
    ConfigError where they cannot be compared, ResourceError where there is no such run."""
    runs = [comparable.find(workspace, name) for name in (first, second)]
    if runs[0].root == runs[1].root:
        raise ConfigError(f"{first} and {second} are the same run, {runs[0].root}; give two")
    a, b = (comparable.read(run, lambda line: print(shown(line))) for run in runs)
    differs = comparable.differences(a, b)
    lines = [*heading(a, b, differs), *(f"differs: {item.text}" for item in differs)]
    print(shown("\n".join(lines)))
    if (blocking := [item.text for item in differs if item.blocks]) and not anyway:
        raise ConfigError(
            f"these runs cannot be compared: {'; '.join(blocking)}. Make them alike, or add"
            " --anyway to see all figures"
        )
    table = figures(a, b)
    print(shown(as_text(table)))
    print(*_RULES, sep="\n")
    file = workspace.runs / f"compare-{a.run.run_id}-{b.run.run_id}.html"
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_atomic(file, html(a, b, differs, table))
    print(shown(f"page: {file}"))


def heading(a: Side, b: Side, differs: Sequence[Difference]) -> Iterator[str]:
    """Lines that name the runs and their common settings."""
    for name, side in (("A", a), ("B", b)):
        tokens = sum(step.tokens for step in side.steps)
        yield (
            f"{name}  {side.run.run_id}: {side.ending}; {len(side.steps):,} steps,"
            f" {side.steps[-1].samples_seen:,}"
            f" {'packed sequences' if side.is_packed else 'samples'}, {tokens:,.0f} non-padding"
            " tokens"
        )
    if not any(difference.blocks for difference in differs):
        trained = f"{a.plan.shape.name} ({a.plan.shape.trainable_parameters:,} parameters trained)"
        yield f"same: model {trained}, data" + (
            ", effective batch" if a.is_packed == b.is_packed else ""
        )


# ---- the figures
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class _Figure:
    """A quantity of A and B; `missing` is shown for None."""

    name: str
    values: tuple[float | None, float | None]
    text: Callable[[float], str]
    has_ratio: bool = True
    missing: str = "not recorded"

    def cells(self) -> tuple[str, str, str]:
        """A, B, B/A."""
        a, b = self.values
        ratio = f"{b / a:.3f}" if self.has_ratio and a and b is not None else ""
        of_a, of_b = (self.missing if value is None else self.text(value) for value in self.values)
        return of_a, of_b, ratio


def figures(a: Side, b: Side) -> list[_Figure]:
    """The rows of the table."""
    return [*_of_speed(a, b), *_of_memory(a, b), *_of_losses(a, b)]


def _of_speed(a: Side, b: Side) -> list[_Figure]:
    speeds = steps.speed(a.last_parts), steps.speed(b.last_parts)

    def figure(
        name: str, take: Callable[[steps.Speed], float | None], text: Callable[[float], str]
    ) -> _Figure:
        first, second = (None if speed is None else take(speed) for speed in speeds)
        # an attempt's first do not count
        missing = "too few steps" if None in speeds else _Figure.missing
        return _Figure(name, (first, second), text, has_ratio=text is not _SHARE, missing=missing)

    return [
        figure("non-padding tokens/s", lambda speed: speed.tokens_per_s, _number),
        figure("padding, of the tokens computed", lambda speed: speed.padding, _SHARE),
        figure("seconds per step, median", lambda speed: speed.step_s, "{:.4g}".format),
        figure("wall time: busy with steps", lambda speed: speed.busy, _SHARE),
        figure("  waiting for data", lambda speed: speed.waiting, _SHARE),
        figure("  evaluations", lambda speed: speed.evaluating, _SHARE),
        figure("  saves, logs, steps that were lost", lambda speed: speed.rest, _SHARE),
    ]


def _of_memory(a: Side, b: Side) -> Iterator[_Figure]:
    def figure(name: str, take: Callable[[Side], int], missing: str = "-") -> _Figure:
        return _Figure(
            name,
            (take(a) or None, take(b) or None),
            lambda count: size(int(count)),
            missing=missing,
        )

    for kind in ("allocated", "reserved"):
        measured = partial(_vram_peak, quantity=f"vram_{kind}_bytes")
        yield figure(f"VRAM {kind}, peak", measured, "no GPU")
        if "cuda" in (a.plan.strategy.device, b.plan.strategy.device):
            yield figure("  predicted", partial(_predicted, quantity=f"{kind}_bytes"))
    yield figure("host RAM of the job, peak", lambda side: side.host_peak_bytes)
    yield figure("  predicted", lambda side: side.plan.estimate.host_bytes)


def _vram_peak(side: Side, quantity: str) -> int:
    return max(getattr(step, quantity) for part in side.last_parts for step in part.counted)


def _predicted(side: Side, quantity: str) -> int:
    is_predicted = side.plan.estimate.peak and side.plan.strategy.device == "cuda"
    return getattr(side.plan.estimate, quantity) if is_predicted else 0


def _of_losses(a: Side, b: Side) -> Iterator[_Figure]:
    unit = _unit(a, b)
    common = min(_seen(side, unit)[-1] for side in (a, b))
    first, second = (_last_loss(side, unit, common) for side in (a, b))
    since = (1 - _LAST_PART) * common
    yield _Figure(
        f"training loss, {since:,.0f}-{common:,.0f} {unit}",
        (first, second),
        _LOSS,
        missing="no step there",
    )
    near = 1.0 if unit == "samples" else max(step.tokens for side in (a, b) for step in side.steps)
    pairs = [(x, y) for x in _scores(a, unit) for y in _scores(b, unit) if abs(x[0] - y[0]) < near]
    if pairs:
        x, y = max(
            pairs, key=lambda pair: (min(pair[0][0], pair[1][0]), -abs(pair[0][0] - pair[1][0]))
        )
        counts = " and ".join(dict.fromkeys(f"{point[0]:,.0f}" for point in (x, y)))
        yield _Figure(f"held-out loss at {counts} {unit}", (x[1], y[1]), _LOSS)
    else:
        yield _Figure(f"held-out loss at equal {unit}", (None, None), _LOSS, missing="none")
    if unit == "samples":
        first, second = (
            sum(step.tokens for step in side.steps if step.samples_seen <= common) or None
            for side in (a, b)
        )
        yield _Figure(
            f"non-padding tokens of {common:,.0f} samples",
            (first, second),
            _number,
            missing="no step there",
        )


def _unit(a: Side, b: Side) -> str:
    """The unit of progress by which losses are compared: tokens where a sample is a row in A and a
    packed sequence in B, or the other way round."""
    return "samples" if a.is_packed == b.is_packed else "tokens"


def _seen(side: Side, unit: str) -> list[float]:
    """Samples, or non-padding tokens, after each step."""
    return (
        [step.samples_seen for step in side.steps]
        if unit == "samples"
        else [*accumulate(s.tokens for s in side.steps)]
    )


def _last_loss(side: Side, unit: str, common: float) -> float | None:
    """Mean over the samples of the last part up to `common`, and over one step at least."""
    pairs = zip(side.steps, _seen(side, unit), strict=True)
    up_to = [(step, count) for step, count in pairs if count <= common]
    last = [step for step, count in up_to if count > (1 - _LAST_PART) * common]
    last = last or [step for step, _ in up_to[-1:]]
    num_samples = sum(step.samples for step in last)
    return sum(step.loss * step.samples for step in last) / num_samples if last else None


def _scores(side: Side, unit: str) -> list[tuple[float, float]]:
    """(samples or tokens, held-out loss) of each evaluation."""
    points, before = [], 0.0
    for part in side.parts:
        numbers = [step.step for step in part.counted]
        tokens = [0.0, *accumulate(step.tokens for step in part.counted)]
        for evaluation in part.evaluations:
            trained = tokens[bisect_right(numbers, evaluation.step)]
            count = evaluation.samples_seen if unit == "samples" else before + trained
            points.append((count, evaluation.loss))
        before += tokens[-1]
    return points


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


# ---- the table and the page
# ---------------------------------------------------------------------------


def as_text(table: Sequence[_Figure]) -> str:
    """The table, at most as wide as this terminal."""
    drawn = Table(box=box.SIMPLE_HEAD)
    drawn.add_column("")
    for name in ("A", "B", "B/A"):
        drawn.add_column(name, justify="right")
    for figure in table:
        drawn.add_row(*(Text(cell) for cell in (figure.name, *figure.cells())))
    console = Console(width=columns(shutil.get_terminal_size().columns))
    with console.capture() as captured:
        console.print(drawn)
    return "\n".join(line.rstrip() for line in captured.get().strip("\n").splitlines())


def html(a: Side, b: Side, differs: Sequence[Difference], table: Sequence[_Figure]) -> str:
    """The comparison as one self-contained page."""
    return page.render(
        "compare.html",
        title=f"{a.run.run_id} and {b.run.run_id}",
        heading=list(heading(a, b, differs)),
        colors=COLORS,
        differs=differs,
        figures=table,
        rules=_RULES,
        curves=_curves(a, b),
    )


def _curves(a: Side, b: Side) -> str:
    unit = _unit(a, b)
    every = [max(1, len(side.steps) // _MOST_MEANS) for side in (a, b)]
    means = "" if every == [1, 1] else f", means over {every[0]} steps of A and {every[1]} of B"

    def drawn(
        title: str, points: Sequence[list[tuple[float, float]]], from_zero: bool = False
    ) -> str:
        lines = [curves.Line(*line) for line in zip(points, "AB", COLORS, WIDTHS, strict=True)]
        return curves.figure(title, lines, unit, from_zero)

    losses = [
        _means(side, unit, count, lambda some: sum(step.loss for step in some) / len(some))
        for side, count in zip((a, b), every, strict=True)
    ]
    rates = [
        _means(
            side,
            unit,
            count,
            lambda some: sum(step.tokens for step in some) / sum(step.seconds for step in some),
        )
        for side, count in zip((a, b), every, strict=True)
    ]
    return (
        drawn(f"training loss{means}", losses)
        + drawn("held-out loss", [_scores(side, unit) for side in (a, b)])
        + drawn(f"non-padding tokens/s{means}", rates, from_zero=True)
    )


def _means(
    side: Side, unit: str, count: int, mean: Callable[[Sequence[StepEvent]], float]
) -> list[tuple[float, float]]:
    """(samples or tokens after them, mean) of each `count` steps."""
    counts = _seen(side, unit)
    groups = [slice(start, start + count) for start in range(0, len(counts), count)]
    return [(counts[group][-1], mean(side.steps[group])) for group in groups]
