"""All runs of a workspace, a row for each."""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.padding import Padding
from rich.text import Text

from launch.base import files
from launch.base.text import shown, size
from launch.run_folder import disk_space
from launch.run_folder.layout import RunDir
from launch.schema.result import Outcome
from launch.status.runs import RunFiles, RunState, newest_of_recipes, waiting_folders
from launch.status.watch import STYLES

_HEAD = ("run", "state", "steps", "loss", "held out", "disk")
_GAP = "  "  # between two columns


@dataclass(frozen=True)
class _RunRow:
    """A run, how far it came, how it ended, and what it takes on the disk."""

    run: RunState
    started_at: str  # ISO 8601, local time; "" for a folder of another name
    ended: str  # its state, or how it is complete
    bytes: int
    checkpoint_bytes: int  # a part of `bytes`

    def as_json(self) -> dict[str, Any]:
        """The row as `runs --json` prints it."""
        run = self.run
        return {
            "recipe": Path(run.folder).parent.name,
            "run": run.run,
            "started_at": self.started_at,
            "state": self.ended,
            "step": run.step,
            "max_steps": run.max_steps,
            "loss": run.loss,
            "eval_loss": run.eval_loss,
            "bytes": self.bytes,
            "checkpoint_bytes": self.checkpoint_bytes,
            "verdict": run.verdict,
            "fix": run.fix,
            "again": run.again,
            "folder": run.folder,
        }


def rows(runs: Path) -> list[_RunRow]:
    """Every run, the newest first; what to do about an end is said of the newest of a recipe."""
    listed, waiting = RunDir.listed(runs), waiting_folders()
    # starts that wait with rows that another one has tokenised
    roots = {Path(folder) for folder in waiting} - {run.root for run in listed}
    listed += [RunDir(root) for root in roots if root.parent.parent == runs and root.is_dir()]
    newest = newest_of_recipes(run.root for run in listed)
    listed.sort(key=lambda run: run.root.name, reverse=True)
    return [_row(run, waiting, run.root in newest) for run in listed]


def _row(run: RunDir, waiting: Collection[str], is_newest: bool) -> _RunRow:
    state = RunFiles(run).state(waiting, is_newest)
    last = run.attempts()[-1:]
    outcome = files.read_or_none(last[0].outcome_file, Outcome) if last else None
    try:
        started_at = datetime.strptime(run.root.name[:15], "%Y%m%d-%H%M%S").isoformat()
    except ValueError:
        started_at = ""
    return _RunRow(
        replace(state, verdict="") if state.state == "complete" else state,
        started_at=started_at,
        ended=outcome.ended if outcome and outcome.complete else state.state,
        bytes=disk_space.size_bytes(run.root),
        checkpoint_bytes=disk_space.size_bytes(run.checkpoints),
    )


def lines(rows: Sequence[_RunRow], columns: int) -> Iterator[Text | Padding]:
    """A line for each run, and below it over the whole width why it ended and what to do. A name
    that leaves no room for the figures has a line of its own; a column without a value is left
    out."""
    cells = zip(_HEAD, *map(_cells, rows), strict=True)
    names, states, *figures = (column for column in cells if any(column[1:]))
    states = _aligned(states, str.ljust)
    aligned = (_aligned(column, str.rjust) for column in figures)
    figures = [_GAP.join(line) for line in zip(*aligned, strict=True)]
    free = columns - len(states[0]) - len(figures[0]) - 2 * len(_GAP)
    width = max((cell_len(name) for name in names if cell_len(name) <= free), default=0)
    for row, name, state, line in zip((None, *rows), names, states, figures, strict=True):
        if cell_len(name) > width:
            yield Text(name, no_wrap=True, overflow="ignore")
            name = ""
        style = STYLES.get(row.ended, "bold") if row else "bold"
        name = set_cell_size(name, width)
        yield Text.assemble(name, _GAP, (state, style), _GAP, line, no_wrap=True, overflow="ignore")
        for text in filter(None, (row.run.verdict, row.run.fix) if row else ()):
            yield Padding.indent(Text(shown(text), style="dim"), len(_GAP))
    total = sum(row.bytes for row in rows)
    yield Text(f"{len(rows):,} run{'' if len(rows) == 1 else 's'}, {size(total)}", style="dim")


def _cells(row: _RunRow) -> tuple[str, ...]:
    run = row.run
    steps = f"{run.step:,} of {run.max_steps:,}" if run.max_steps else ""
    losses = ("" if loss is None else f"{loss:.4f}" for loss in (run.loss, run.eval_loss))
    return shown(run.run), row.ended, steps, *losses, size(row.bytes)


def _aligned(column: Sequence[str], align: Callable[[str, int], str]) -> list[str]:
    width = max(map(len, column))
    return [align(cell, width) for cell in column]


def next_lines(rows: Sequence[_RunRow]) -> list[str]:
    """The line that goes on with the newest run of each recipe, unless that is complete."""
    return [shown(f"{row.run.run} goes on: {row.run.again}") for row in rows if row.run.again]
