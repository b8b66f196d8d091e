"""The runs that `watch` shows: those of a workspace, and this user's others that hold a lease."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.text import Text

from launch.base.errors import ConfigError, LaunchError
from launch.base.text import shown
from launch.base.workspace import Workspace
from launch.queue import leases
from launch.run_folder.layout import RunDir
from launch.status import screen
from launch.status.cards import cards
from launch.status.runs import RunFiles, RunState

_ENDED_SHOWN = 8  # newest runs that have ended


class Watcher:
    """The runs of a workspace, and those of this user that hold a lease of this machine."""

    def __init__(self, workspace: Workspace, named: str | None) -> None:
        self._workspace = workspace
        self._files: dict[Path, RunFiles] = {}
        self._named = self._root_of(named) if named else None

    def page(self, terminal: tuple[int, int] | None = None) -> Text:
        return screen.page(self.runs(), cards(), self.waiting(), terminal)

    def runs(self) -> list[RunState]:
        """Those that run or wait, then the newest that have ended; or the one that was named."""
        waiting = {lease.record.run for lease in self._waiting() if lease.is_own}
        roots = [self._named] if self._named else self._roots()
        states = [
            replace(state, state="waiting") if state.folder in waiting else state
            for state in map(self._state, roots)
        ]
        ended = [state for state in states if state.has_ended]
        newest = sorted(ended, key=lambda state: Path(state.folder).name, reverse=True)
        return [
            *(state for state in states if not state.has_ended),
            *newest[:_ENDED_SHOWN],
        ]

    def waiting(self) -> list[str]:
        """A line for each start of any user that waits."""
        return [
            f"{lease.name} waits since {datetime.fromtimestamp(lease.record.since_s):%m-%d %H:%M};"
            " python -m launch queue says what for"
            for lease in self._waiting()
        ]

    def _state(self, root: Path) -> RunState:
        if root not in self._files:
            self._files[root] = RunFiles(RunDir(root))
        return self._files[root].state()

    def _roots(self) -> Iterator[Path]:
        of_leases = [
            Path(lease.record.run) for lease in _leases() if lease.is_own and lease.record.run
        ]
        of_workspace = [run.root for run in RunDir.all(self._workspace.runs)]
        yield from dict.fromkeys(root for root in (*of_leases, *of_workspace) if root.is_dir())

    def _waiting(self) -> list[leases.Lease]:
        return [lease for lease in _leases() if lease.record.state != "granted"]

    def _root_of(self, name: str) -> Path:
        """The folder of a run that was named. Raises ConfigError."""
        run = RunDir(Path(name).resolve())
        if run.attempts() and not run.is_dry_run:
            return run.root
        of_recipe = [root for root in self._roots() if root.parent.name == name]
        if not of_recipe:
            raise ConfigError(
                f"{shown(name)}: expected a recipe that has run in {self._workspace.runs}, or the"
                " folder of a run, runs/<recipe>/<time>"
            )
        return max(of_recipe, key=lambda root: root.name)


def _leases() -> list[leases.Lease]:
    with suppress(LaunchError):  # a machine without a folder of leases
        return leases.live(leases.folder())
    return []
