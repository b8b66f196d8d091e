"""The runs that `watch` shows: those of a workspace, and this user's others that hold a lease."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.text import Text

from launch.base.errors import ConfigError
from launch.base.text import shown, suggestion
from launch.base.workspace import Workspace
from launch.queue import leases
from launch.run_folder.layout import RunDir
from launch.status import screen
from launch.status.cards import cards
from launch.status.runs import RunFiles, RunState, newest_of_recipes, waiting_folders

_ENDED_SHOWN = 8  # newest runs that have ended


class Watcher:
    """The runs of a workspace, and those of this user that hold a lease of this machine."""

    def __init__(self, workspace: Workspace, named: str | None) -> None:
        self._workspace = workspace
        self._files: dict[Path, RunFiles] = {}
        self._named = self._root_of(named) if named else None

    def page(self, terminal: Console | None = None) -> Text:
        return screen.page(self.runs(), cards(), self.waiting(), terminal)

    def runs(self) -> list[RunState]:
        """Those that run or wait, then the newest that have ended; or the one that was named."""
        waiting, roots = waiting_folders(), [self._named] if self._named else [*self._roots()]
        living, ended = list[RunFiles](), list[RunFiles]()
        for run in (self._files.setdefault(root, RunFiles(RunDir(root))) for root in roots):
            (living if run.is_in_use(waiting) else ended).append(run)
        ended.sort(key=lambda run: run.run.root.name, reverse=True)
        newest = newest_of_recipes(roots)
        states = (run.state(waiting) for run in (*living, *ended[:_ENDED_SHOWN]))
        return [
            state if Path(state.folder) in newest else replace(state, fix="", again="")
            for state in states
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
        own = (lease.record.run for lease in leases.of_this_machine() if lease.is_own)
        of_leases = map(Path, filter(None, own))
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
