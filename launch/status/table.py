"""All runs of a workspace, a row for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from rich import box
from rich.table import Table
from rich.text import Text

from launch.base import files
from launch.base.text import shown, size
from launch.run_folder import cleanup
from launch.run_folder.layout import RunDir
from launch.schema.result import Outcome
from launch.status.runs import RunFiles
from launch.status.screen import STYLES

_FIGURES_COLUMNS = 64  # figures of a run of a million steps that was stopped early


@dataclass(frozen=True)
class _RunRow:
    """A run, how far it came, how it ended, and what it takes on the disk."""

    recipe: str
    run: str  # <recipe>/<time>
    started_at: str  # ISO 8601, local time; "" for a folder of another name
    state: str
    step: int
    max_steps: int
    loss: float | None
    eval_loss: float | None
    bytes: int
    checkpoint_bytes: int  # a part of `bytes`
    verdict: str  # cause of an end that is not complete
    folder: str


def rows(runs: Path) -> list[_RunRow]:
    """Every run, the newest first."""
    rows = [_row(run) for run in RunDir.all(runs)]
    return sorted(rows, key=lambda row: Path(row.folder).name, reverse=True)


def _row(run: RunDir) -> _RunRow:
    state = RunFiles(run).state()
    last = run.attempts()[-1:]
    outcome = files.read_or_none(last[0].outcome_file, Outcome) if last else None
    try:
        started_at = datetime.strptime(run.root.name[:15], "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        started_at = ""
    return _RunRow(
        recipe=run.root.parent.name,
        run=state.run,
        started_at=started_at,
        state=outcome.ended if outcome and outcome.complete else state.state,
        step=state.step,
        max_steps=state.max_steps,
        loss=state.loss,
        eval_loss=state.eval_loss,
        bytes=cleanup.size_bytes(run.root),
        checkpoint_bytes=cleanup.size_bytes(run.checkpoints),
        verdict="" if state.state == "complete" else state.verdict,
        folder=str(run.root),
    )


def table(rows: Sequence[_RunRow]) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    drawn.add_column("run", min_width=_widest(rows))  # a part of a name is no name
    drawn.add_column("state", no_wrap=True)
    for name in ("steps", "loss", "held out", "disk"):
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        style = "green" if row.state == "stopped early" else STYLES.get(row.state, "bold")
        run = Text(shown(row.run))
        if row.verdict:
            run.append(f"\n{shown(row.verdict)}", style="dim")
        drawn.add_row(
            run,
            Text(row.state, style=style),
            f"{row.step:,} of {row.max_steps:,}" if row.max_steps else "",
            *("" if value is None else f"{value:.4f}" for value in (row.loss, row.eval_loss)),
            size(row.bytes),
        )
    total = sum(row.bytes for row in rows)
    drawn.caption = f"{len(rows):,} run{'' if len(rows) == 1 else 's'}, {size(total)}"
    drawn.caption_justify = "left"
    return drawn


def least_columns(rows: Sequence[_RunRow]) -> int:
    """The columns of text that the table needs, for names and figures in one piece."""
    return _widest(rows) + _FIGURES_COLUMNS


def _widest(rows: Sequence[_RunRow]) -> int:
    return max((len(row.run) for row in rows), default=0)
