"""The state of runs and cards as text of a terminal."""

import math
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from launch.base.progress import eta
from launch.base.text import BARS, encodable, shown
from launch.schema.machine import GIB
from launch.status.cards import CardState
from launch.status.runs import RunState

_CURVE_COLUMNS = 24
STYLES = {
    "complete": "green",
    "stopped early": "green",
    "failed": "red",
    "lost": "red",
    "stopped": "yellow",
}
_SILENT_S = 60.0  # silence of a rank from which on it is shown


def page(
    runs: Sequence[RunState],
    cards: Sequence[CardState],
    waiting: Sequence[str],
    terminal: Console | None = None,
) -> Text:
    """One screen: runs, those that wait, cards. The runs that do not fit on `terminal` are
    counted."""
    below = [Text(shown(line)) for line in waiting] + [Text(card_line(card)) for card in cards]
    blocks = [[*_run_lines(run)] for run in runs] or [[Text("no runs here yet")]]
    if terminal:
        blocks = _fitting(blocks, terminal, terminal.height - _rows(below, terminal))
    return Text("\n").join([*(line for block in blocks for line in block), *below])


def in_encoding(page: Text, encoding: str) -> Text:
    """The page in signs that a terminal of that encoding can show."""
    page.plain = encodable(page.plain, encoding)
    return page


def _fitting(blocks: list[list[Text]], terminal: Console, rows: int) -> list[list[Text]]:
    """The first blocks that fit into so many rows; if not all do, a last line says how many are
    left out."""
    for number, block in enumerate(blocks):
        is_last = number + 1 == len(blocks)
        rows -= _rows(block, terminal)
        if rows < (0 if is_last else 1):
            note = f"{len(blocks) - number} more: python -m launch runs, or a higher terminal"
            return [*blocks[:number], [Text(note, style="dim")]]
    return blocks


def _rows(lines: Sequence[Text], terminal: Console) -> int:
    return sum(len(line.wrap(terminal, terminal.width)) for line in lines)


def _run_lines(run: RunState) -> Iterator[Text]:
    """One line for a run that has ended, three for one that has not; the verdict of its last
    failure, and what to do about its end."""
    silent_s, left_s = run.silent_s or 0.0, run.seconds_left
    yield Text.assemble(
        (shown(run.run), "bold"),
        "  ",
        (run.state, STYLES.get(run.state, "bold")),
        f"  step {run.step:,} of {run.max_steps:,}" if run.max_steps else "",
        "" if left_s is None else f"  {eta(left_s).removeprefix('ETA ')} left",
        f"  attempt {run.attempt}" if run.attempt > 1 else "",
        (f"  silent for {silent_s:.0f} s", "yellow") if silent_s >= _SILENT_S else "",
        _losses(run) if run.has_ended else "",
    )
    if not run.has_ended:
        if run.loss is not None:
            speed = f"  {run.tokens_per_s:,.0f} tokens/s" if run.tokens_per_s is not None else ""
            yield Text(f"{_losses(run)}  {curve(run.losses)}{speed}")
        if memory := "   ".join(_memory(run)):
            yield Text(f"  {memory}")
    if run.verdict and run.state != "complete":
        yield Text(f"  {shown(run.verdict)}", style="red" if run.has_ended else "yellow")
    for line in filter(None, (run.fix, run.again)):
        yield Text(f"  {shown(line)}", style="dim")


def _losses(run: RunState) -> str:
    named = {"loss": run.loss, "held out": run.eval_loss}
    return "".join(f"  {name} {value:.4g}" for name, value in named.items() if value is not None)


def _memory(run: RunState) -> Iterator[str]:
    """VRAM and host RAM: now, as predicted at most, and the limit."""
    for name, used_bytes, predicted, limit in (
        ("VRAM", run.vram_bytes, run.vram_predicted_bytes, run.vram_total_bytes),
        ("RAM", run.host_bytes, run.host_predicted_bytes, run.host_limit_bytes),
    ):
        if used_bytes or predicted:
            used = f"{used_bytes / GIB:.2f} GiB, " if used_bytes else ""
            of = f", {limit / GIB:.1f} in all" if limit else ""
            yield f"{name} {used}predicted {predicted / GIB:.2f} GiB{of}"


def curve(values: Sequence[float], columns: int = _CURVE_COLUMNS) -> str:
    """The course of a series in bars, oldest first; what is not finite is a blank."""
    size = max(1, math.ceil(len(values) / columns))
    means = [
        sum(part) / len(part)
        for part in (values[offset : offset + size] for offset in range(0, len(values), size))
    ]
    drawn = [value for value in means if math.isfinite(value)]
    low, high = min(drawn, default=0.0), max(drawn, default=0.0)
    span = high - low  # 0, or infinite: all bars are the lowest
    shares = [(value - low) / span if 0 < span < math.inf else 0.0 for value in means]
    return "".join(
        BARS[round((len(BARS) - 1) * share)] if math.isfinite(value) else " "
        for value, share in zip(means, shares, strict=True)
    )


def card_line(card: CardState) -> str:
    facts = [
        f"card {card.index} {shown(card.name)}",
        f"{card.used_bytes / GIB:.1f} of {card.total_bytes / GIB:.1f} GiB",
        "" if card.busy_percent is None else f"busy {card.busy_percent} %",
        "" if card.celsius is None else f"{card.celsius} °C",
    ]
    return "  ".join(filter(None, facts))
