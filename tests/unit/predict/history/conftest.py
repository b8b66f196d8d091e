"""A ledger in a folder of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.base.workspace import Workspace
from launch.predict.history.ledger import Ledger
from launch.schema.plan import Strategy
from tests.builders import plan
from tests.unit.predict.history.launchers import Launcher


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The place of a ledger, not made yet, below a folder whose name needs quoting."""
    return Workspace(tmp_path / "a house; it's #1 50%?").ledger_file


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def book(path: Path, said: list[str]) -> Ledger:
    return Ledger(path, said.append, busy_s=0.2)


@pytest.fixture(scope="module")
def strategy() -> Strategy:
    return plan().strategy


@pytest.fixture(scope="module")
def launchers():
    both = Launcher(), Launcher()
    yield both
    for launcher in both:
        launcher.close()
