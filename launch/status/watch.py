"""The screen of `watch`: the runs of a workspace, this user's others that hold a lease, and the
cards of this machine, as text of a terminal."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from launch.base.errors import ConfigError
from launch.base.progress import eta
from launch.base.text import BARS, encodable, shown, suggestion
from launch.base.workspace import Workspace
from launch.probe.gpu_signs import ask
from launch.queue import leases
from launch.run_folder.layout import RunDir
from launch.schema.machine import GIB
from launch.status.runs import RunFiles, RunState, newest_of_recipes, waiting_folders

_ENDED_SHOWN = 8  # newest runs that have ended
_CURVE_COLUMNS = 24
STYLES = {
    "complete": "green",
    "stopped early": "green",
    "failed": "red",
    "lost": "red",
    "stopped": "yellow",
}
_SILENT_S = 60.0  # silence of a rank from which on it is shown


# ---- runs and cards
# ---------------------------------------------------------------------------


class Watcher:
    """The runs of a workspace, and those of this user that hold a lease of this machine."""

    def __init__(self, workspace: Workspace, named: str | None) -> None:
        self._workspace = workspace
        self._files: dict[Path, RunFiles] = {}
        self._named = self._root_of(named) if named else None

    def page(self, terminal: Console | None = None) -> Text:
        return page(self.runs(), cards(), self.waiting(), terminal)

    def runs(self) -> list[RunState]:
        """Those that run or wait, then the newest that have ended; or the one that was named."""
        waiting, roots = waiting_folders(), [self._named] if self._named else [*self._roots()]
        living, ended = list[RunFiles](), list[RunFiles]()
        for run in (self._files.setdefault(root, RunFiles(RunDir(root))) for root in roots):
            (living if run.is_in_use(waiting) else ended).append(run)
        ended.sort(key=lambda run: run.run.root.name, reverse=True)
        newest = newest_of_recipes(roots)
        return [
            run.state(waiting, run.run.root in newest) for run in (*living, *ended[:_ENDED_SHOWN])
        ]

    def waiting(self) -> list[str]:
        """A line for each start of any user that waits."""
        return [
            f"{lease.name} waits since {datetime.fromtimestamp(lease.record.since_s):%m-%d %H:%M};"
            " python -m launch queue says what for"
            for lease in leases.of_this_machine()
            if lease.record.state != "granted"
        ]

    def _roots(self) -> Iterator[Path]:
        of_leases = (
            Path(lease.record.run)
            for lease in leases.of_this_machine()
            if lease.is_own and lease.record.run
        )
        of_workspace = [run.root for run in RunDir.listed(self._workspace.runs)]
        yield from dict.fromkeys(root for root in (*of_leases, *of_workspace) if root.is_dir())

    def _root_of(self, name: str) -> Path:
        """The folder of a run that was named. Raises ConfigError."""
        for path in (Path(name), self._workspace.runs / name):
            run = RunDir(path.resolve())
            if run.attempts() and not run.is_dry_run:
                return run.root
        roots = [*self._roots()]
        named = [root for root in roots if name in (root.parent.name, RunDir(root).run_id)]
        if not named:
            recipes = sorted({root.parent.name for root in roots})
            there = f"; {suggestion(name, recipes)}" if recipes else ""
            raise ConfigError(
                f"{shown(name)}: expected a recipe that has run in {self._workspace.runs}, a run's"
                f" name (<recipe>/<time>) or its folder{there}"
            )
        return max(named, key=lambda root: root.name)


@dataclass(frozen=True)
class CardState:
    """A card now; None where its driver does not say."""

    index: int
    name: str
    used_bytes: int
    total_bytes: int
    busy_percent: int | None
    celsius: int | None


def cards() -> list[CardState]:
    """The cards of this machine; [] without NVML. NVML stays open for the next look."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
        return [_card(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:  # no driver, or a card fell off the bus
        return []


def _card(pynvml: Any, index: int) -> CardState:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory, name = pynvml.nvmlDeviceGetMemoryInfo(handle), pynvml.nvmlDeviceGetName(handle)
    rates = ask(pynvml, "nvmlDeviceGetUtilizationRates", handle)
    return CardState(
        index=index,
        name=name.decode() if isinstance(name, bytes) else name,
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        busy_percent=None if rates is None else int(rates.gpu),
        celsius=ask(pynvml, "nvmlDeviceGetTemperature", handle, pynvml.NVML_TEMPERATURE_GPU),
    )


# ---- the screen
# ---------------------------------------------------------------------------


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
    yield from (Text(f"  {shown(line)}", style="dim") for line in (run.fix, run.again) if line)


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
