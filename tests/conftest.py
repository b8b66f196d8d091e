"""The folder of a test is its marker; tests on real data are deselected, visibly, where there is
none."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from launch.base import modules
from launch.data.worker import WORKER
from tests import builders, fault_log

# A traced step depends on no test's house: what one test has traced, the next one reads.
os.environ["LOWMEM_TRACES"] = str(
    Path(__file__).resolve().parent.parent / ".cache" / "traces-of-tests"
)
# Nor does the key that seals checkpoints; the user's own is left alone.
os.environ["XDG_STATE_HOME"] = str(
    Path(__file__).resolve().parent.parent / ".cache" / "state-of-tests"
)
# of tests in this process, whose LOWMEM_ROOT may be the checkout
os.environ["LOWMEM_KEY"] = os.environ["XDG_STATE_HOME"] + "/lowmem/checkpoint.key"
# Nor do the leases of starts: those of other programs of this machine are left alone too.
os.environ["LOWMEM_LEASES"] = str(
    Path(__file__).resolve().parent.parent / ".cache" / "leases-of-tests"
)
# No example has a deadline: a busy machine stops a process for longer than hypothesis' 200 ms.
settings.register_profile("busy machine", deadline=None)
settings.load_profile("busy machine")
# Threads that spin beside another worker double the time of the tests that compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# A shell's background job ignores SIGINT, and so would each program that a test stops with it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
FOLDERS = (
    "unit",
    "process",
    "train_cpu",
    "modes",
    "faults",
    "daemons",
    "gpu",
    "cuda_build",
    "install",
    "export_tools",
)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """The modules of the tests import torch; no later collection visits them."""
    with modules.uncollected():
        return (yield)


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that shows faults leaves its line where fault_log.FILE asks for them."""
    report = yield
    if report.when == "setup":
        builders.exit_codes.clear()
    mark, file = item.get_closest_marker("shows"), os.environ.get(fault_log.FILE)
    if mark and file and (report.when == "call" or report.outcome == "skipped"):
        fault_log.write(Path(file), item, mark, report)
    return report


@pytest.fixture(scope="session", autouse=True)
def worker() -> Iterator[None]:
    """One child with torch for all plans that tests make in their own process: its imports take
    longer than most of its answers."""
    with WORKER:
        yield


@pytest.fixture
def injected(record_property) -> Callable[[], None]:
    """To be called when the fault has just been done."""
    return lambda: record_property("injected", time.time())


@pytest.fixture
def real_data() -> Path:
    """The folder of real data that LOWMEM_REAL_DATA names."""
    return Path(os.environ["LOWMEM_REAL_DATA"])


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """(folder, what was printed) of one run of eight epochs, after which the model can answer
    something; its rows include two that teach nothing. Files of tests/train_cpu share it."""
    folder = tmp_path_factory.mktemp("finished")
    training = {"num_train_epochs": 8, "learning_rate": 0.01, "warmup_steps": 4}
    training |= {"eval_steps": 6, "save_steps": 7}  # an epoch has 6 steps
    evaluation = {"exact_match_rows": 10, "max_new_tokens": 12}
    recipe = builders.recipe(folder, training=training, evaluation=evaluation)
    useless = [{"prompt": "red blue " * 99, "response": "y"}, {"prompt": "empty", "response": ""}]
    builders.write_parquet(folder / "train.parquet", [*builders.rows(45), *useless])
    (folder / "tmp").mkdir()
    done = builders.launch(folder / "workspace", "run", str(recipe), TMPDIR=str(folder / "tmp"))
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, done.stdout
