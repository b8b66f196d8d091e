"""A bar with the time left at the bottom of a terminal, below the lines that its console prints."""

import sys

from rich.console import Console, Group
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from launch.base.progress import eta

_PACE_S = 600.0  # the time left is estimated from the steps of the last so many seconds


class _TimeLeft(TimeRemainingColumn):
    """Time left, in days where there are some, as the log has it."""

    def render(self, task: Task) -> Text:
        remaining_s = task.time_remaining
        if task.total is None or remaining_s is None:
            return super().render(task)
        return Text(eta(remaining_s).removeprefix("ETA "), style="progress.remaining")


class ProgressBar:
    """A bar that is shown until stop() is called. Until then only its console may write to the
    terminal."""

    def __init__(self, console: Console, stays: bool) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            _TimeLeft(),
            console=console,
            speed_estimate_period=_PACE_S,
        )
        self._task = self._progress.add_task("starting", total=None)
        self._live = Live(
            self._progress,
            console=console,
            refresh_per_second=4,
            transient=not stays,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def show(self, work: str, completed: int, total: int | None, figures: str = "") -> None:
        """Show the progress. `figures` get a line of their own, which is shortened to fit."""
        self._progress.update(
            self._task, description=work, completed=completed or None, total=total or None
        )
        line = Text(figures, no_wrap=True, overflow="ellipsis")
        self._live.update(Group(self._progress, line) if figures else self._progress)

    def stop(self) -> None:
        self._live.stop()
