"""The folder of a test is its marker; tests on real data are deselected, visibly, where there is none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# A traced step depends on no test's house: what one test has traced, the next one reads.
os.environ["LOWMEM_TRACES"] = str(Path(__file__).resolve().parent.parent / ".cache" / "traces-of-tests")
# Nor does the key that seals checkpoints; the user's own is left alone.
os.environ["XDG_STATE_HOME"] = str(Path(__file__).resolve().parent.parent / ".cache" / "state-of-tests")
FOLDERS = ("unit", "process", "train_cpu", "modes", "faults", "gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        folder = item.path.relative_to(here).parts[0]
        if folder in FOLDERS:
            item.add_marker(folder)
    if "LOWMEM_REAL_DATA" not in os.environ:
        without = [item for item in items if item.get_closest_marker("real_data")]
        if without:
            config.hook.pytest_deselected(items=without)
            items[:] = [item for item in items if item not in without]


@pytest.fixture
def real_data() -> Path:
    """The folder of real data that LOWMEM_REAL_DATA names."""
    return Path(os.environ["LOWMEM_REAL_DATA"])
