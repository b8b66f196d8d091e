"""The screen of a run that trains: a bar on a terminal, elsewhere a line per log interval."""

import io
import os
import re
import stat
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO, cast

from rich.console import Console

from launch.base import files
from launch.base.progress import RowProgress
from launch.base.progress_bar import ProgressBar
from launch.base.text import shown
from launch.run_folder.layout import AttemptDir
from launch.supervise import heartbeats

STEP_LINE = re.compile(r"  step \d+/\d+  epoch \S+  (ETA (?:\S| (?! ))+  )?")
_SECTION_WORDS = {
    "load": "loading the model",
    "first step": "the first step",
    "step": "training",
    "evaluation": "evaluating",
    "save": "saving",
    "export": "writing the model",
}


class _Output:
    """A stream that drops its output once its pipe or terminal is closed, or its disk is full.
    Training and its log go on."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            self._give_up()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._give_up()

    def _give_up(self) -> None:
        # its buffer would fail once more at the end of the process
        if self._stream is sys.__stdout__:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for number in _same_device(self._stream.fileno()):
                os.dup2(nowhere, number)
        self._stream = io.StringIO()


def _same_device(number: int) -> list[int]:
    """The stream, and stderr where both lead to the same terminal."""
    status = os.fstat(number)
    with suppress(OSError):  # stderr is closed
        if stat.S_ISCHR(status.st_mode) and os.fstat(2).st_rdev == status.st_rdev:
            return [number, 2]
    return [number]


class Screen:
    """Prints lines, and shows one attempt's progress between start() and stop()."""

    def __init__(self, *log_files: Path, stream: TextIO | None = None) -> None:
        output = _Output(stream or sys.stdout or io.StringIO())  # None: started with it closed
        self._console = Console(file=cast(TextIO, output), highlight=False, soft_wrap=True)
        self._logs: list[TextIO] = []
        self._unlogged: list[str] = []  # lines from before there was a log
        self._bar: ProgressBar | None = None
        self.log_to(*log_files)

    def log_to(self, *log_files: Path) -> None:
        """Write the lines to these files too, from the first one on."""
        for file in log_files:
            file.parent.mkdir(parents=True, exist_ok=True)
            files.check_regular(file)
            self._logs.append(file.open("a", encoding="utf-8"))
        lines, self._unlogged = self._unlogged, []
        self.note(*lines if log_files else ())

    def say(self, *lines: str, log: bool = True) -> None:
        """Show lines, above the bar if there is one, and write them to the log. On a terminal,
        counts of tokenised rows move the bar instead."""
        for line in lines:
            rows = RowProgress.read(line)
            if rows and self._console.is_terminal:
                self._bar = self._bar or ProgressBar(self._console, stays=False)
                self._bar.show(f"tokenising {rows.name}", rows.rows, rows.total)
            else:
                self._print(line)
        if log:
            self.note(*lines)

    def _print(self, line: str) -> None:
        self._console.print(shown(line), markup=False)

    def note(self, *lines: str) -> None:
        """Write lines to the log alone; those from before there is a log follow later."""
        if not self._logs:
            self._unlogged += lines
        for log in list(self._logs):
            try:
                log.writelines(shown(line) + "\n" for line in lines)
                log.flush()
            except OSError as error:  # the attempt's folder has the ranks' own lines
                self._logs.remove(log)
                self._print(
                    f"the log ends here, training goes on: {error.filename or 'log'}:"
                    f" {error.strerror}"
                )

    def start(self, attempt: AttemptDir) -> None:
        self.stop()
        self._attempt, self._lines, self._figures = attempt, Tail(attempt.train_log, 0), ""
        if self._console.is_terminal:
            self._bar = ProgressBar(self._console, stays=True)

    def update(self) -> None:
        """Read what the ranks have written since the last call."""
        for line in self._lines.new_lines():
            step = STEP_LINE.search(line)
            if step:
                self._figures = line[step.end() :]
            if not (step and self._bar):  # the bar shows the steps
                self._print(line)
            self.note(line)
        beat = heartbeats.read(self._attempt.heartbeat_file(0))
        if self._bar and beat:
            self._bar.show(
                _SECTION_WORDS.get(beat.section, beat.section),
                beat.step,
                beat.max_steps,
                self._figures,
            )

    def stop(self) -> None:
        """Remove the bar; lines go on."""
        if self._bar:
            self._bar.stop()
            self._bar = None


class Tail:
    """New complete lines of a file that another process appends to, and those in the last
    `old_bytes` of what is there already; the first of these may be cut."""

    def __init__(self, path: Path, old_bytes: int = sys.maxsize) -> None:
        self._path = path
        self.offset = max(path.stat().st_size - old_bytes, 0) if path.exists() else 0

    def new_lines(self) -> list[str]:
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self.offset)
            lines, newline, _ = file.read().rpartition(b"\n")
        self.offset += len(lines) + len(newline)
        return lines.decode("utf-8", "replace").splitlines() if newline else []
