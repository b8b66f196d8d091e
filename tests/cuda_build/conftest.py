"""Machines of described cards for tests with the CUDA build of torch (make test-cuda-build)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import builders
from tests.fake_cuda.machine import Card, Machine, has_cuda_build

TWO = (Card(), Card())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With another build of torch these tests are deselected, visibly."""
    here = Path(__file__).parent
    if not has_cuda_build():
        without = [item for item in items if item.path.is_relative_to(here)]
        config.hook.pytest_deselected(items=without)
        items[:] = [item for item in items if item not in without]


class Workplace:
    """A workspace on a described machine."""

    def __init__(self, folder: Path, *cards: Card) -> None:
        self.folder, self.machine = folder, Machine(folder / "cards", cards)

    def environment(self, fault: str = "", **extra: str) -> dict[str, str]:
        variables = builders.environment(self.folder / "workspace", **extra)
        return variables | self.machine.environment(fault)

    def python(
        self, *words: str, fault: str = "", timeout: float = 240, **extra: str
    ) -> subprocess.CompletedProcess[str]:
        """A Python process of the machine, to its end."""
        return subprocess.run(
            [sys.executable, *words],
            env=self.environment(fault, **extra),
            capture_output=True,
            text=True,
            timeout=timeout,
        )

    def launch(
        self, *words: str, fault: str = "", **extra: str
    ) -> subprocess.CompletedProcess[str]:
        return self.python("-m", "launch", *words, fault=fault, **extra)


@pytest.fixture
def one_card(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path, Card())


@pytest.fixture
def two_cards(tmp_path: Path) -> Workplace:
    return Workplace(tmp_path, *TWO)


@pytest.fixture(autouse=True)
def _no_visible_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("CUDA_", "NCCL_"))]:
        monkeypatch.delenv(name)
