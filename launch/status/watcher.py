"""The runs that `watch` shows: those of a workspace, and this user's others that hold a lease."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rich.text import Text

from launch.base.errors import ConfigError, LaunchError
from launch.base.workspace import Workspace
from launch.queue import leases
from launch.run_folder.layout import RunDir
from launch.status import screen
from launch.status.cards import cards
from launch.status.runs import RunFiles, RunState

ENDED_SHOWN = 8  # of the runs that have ended, the newest


class Watcher:
    """The runs of a workspace, and those of this user that hold a lease of this machine."""

    def __init__(self, workspace: Workspace, named: str | None) -> None:
        self._workspace = workspace
        self._named = _named(workspace, named) if named else None
        self._files: dict[Path, RunFiles] = {}

    def page(self) -> Text:
        return screen.page(self.runs(), cards(), self.waiting())

    def runs(self) -> list[RunState]:
        """Those that run, then the newest that have ended; or the one that was named."""
        if self._named:
            return [self._state(self._named)]
        states = [self._state(root) for root in self._roots()]
        ended = [state for state in states if state.has_ended]
        newest = sorted(ended, key=lambda state: Path(state.folder).name, reverse=True)
        return [
            *(state for state in states if not state.has_ended),
            *newest[:ENDED_SHOWN],
        ]

    def waiting(self) -> list[str]:
        """A line for each start that waits for memory."""
        return [
            f"{lease.name} waits since {time.ctime(lease.record.since_s)}"
            for lease in self._leases()
            if lease.record.state != "granted"
        ]

    def _state(self, root: Path) -> RunState:
        if root not in self._files:
            self._files[root] = RunFiles(RunDir(root))
        return self._files[root].state()

    def _roots(self) -> Iterator[Path]:
        of_leases = [
            Path(lease.record.run) for lease in self._leases() if lease.is_own and lease.record.run
        ]
        of_workspace = [run.root for run in RunDir.all(self._workspace.runs)]
        yield from dict.fromkeys(root for root in (*of_leases, *of_workspace) if root.is_dir())

    def _leases(self) -> list[leases.Lease]:
        with suppress(LaunchError):  # a machine without a folder of leases
            return leases.live(leases.folder())
        return []


def _named(workspace: Workspace, name: str) -> Path:
    if (Path(name) / "plan.json").is_file() or (Path(name) / "attempts").is_dir():
        return Path(name).resolve()
    newest = max(RunDir.all(workspace.runs, name), key=lambda run: run.root.name, default=None)
    if newest is None:
        raise ConfigError(
            f"{name}: expected a recipe that has run in {workspace.runs}, or the folder of a run"
        )
    return newest.root
