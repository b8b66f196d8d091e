"""Each engine once, with one of four models: it trains, fits, agrees with one process, resumes and
exports. `make modes` has every mode with every model. And a data worker of a rank that steps on the
host holds no second copy of its states."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import modes
from benchmarks.modes import Case
from tests import builders, stopping
from tests.modes.test_added_tokens import base_folder

ENGINES = (
    ("deepspeed_zero2_offload", 2, "llama-tiny", True),
    ("deepspeed_zero3", 2, "t5-tiny", False),
    ("deepspeed_zero1", 2, "t5-tiny", False),
    ("fsdp2", 2, "t5-tiny", True),
)

STATES_BYTES = 124_439_808 * 4 * 4  # gpt2-small: float32 weights, gradients and two moments
OWN_BYTES = 100 << 20  # Python's objects, whose pages a worker writes to


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Rows, a model folder, and the runs of all engines."""
    made = tmp_path_factory.mktemp("engines")
    modes.write_rows(made)
    base_folder(made / "pretrained", tied=False)
    share_traces(made / "workspace")
    return made


@pytest.mark.parametrize(("mode", "ranks", "family", "lora"), ENGINES)
def test_an_engine_keeps_every_promise(folder: Path, mode, ranks, family, lora):
    row = modes.measure(folder, Case(mode, ranks, family, lora), one_process(folder, family, lora))
    assert all(modes.verdicts(row).values()), row


def share_traces(workspace: Path) -> None:
    """Share the traces of other tests: modes.launch() passes no LOWMEM_TRACES."""
    shared = Path(builders.TRACES["LOWMEM_TRACES"])
    shared.mkdir(parents=True, exist_ok=True)
    (workspace / ".cache").mkdir(parents=True)
    (workspace / ".cache/traces").symlink_to(shared)


@cache
def one_process(folder: Path, family: str, lora: bool) -> dict[str, Any]:
    """Figures of a plain process, with which modes.measure() compares. It fits as well."""
    case = Case("cpu", 1, family, lora)
    run, _ = modes.launch(folder, case)
    estimate = modes.read(run / "plan.json")["estimate"]
    outcome = modes.read(run / "attempts/01/outcome.json")
    for states in ("weights_bytes", "optimizer_bytes", "offloaded_bytes"):
        assert outcome[states] == pytest.approx(estimate[states], rel=modes.STATES_TOLERANCE)
    model = modes.read_model(folder / "models" / case.name)
    return {"events": modes.losses(run, 1), "model": model}


@pytest.mark.campaign
def test_a_worker_copies_no_states_of_a_rank_that_steps_on_the_host(tmp_path):
    model, training = {"shape": "gpt2-small"}, {"dataloader_num_workers": 1, "save_steps": 100_000}
    mode = ("--launch.mode=deepspeed_zero2_offload",)
    with stopping.launched(tmp_path, 1, mode, model=model, training=training) as child:
        (rank,) = child.ranks(1)
        child.until("the third step", lambda: _step(child) >= 3)
        forked = [each for each in rank.children() if each.cmdline() == rank.cmdline()]
        (worker,) = forked
        assert _private_bytes(rank) > STATES_BYTES
        assert _private_bytes(worker) < OWN_BYTES
        child.process.terminate()
        assert child.wait() == 75, child.said()


def _step(child: stopping.Child) -> int:
    return len(child.run.attempts()[-1].events_file.read_text().splitlines())


def _private_bytes(process: psutil.Process) -> int:
    """Bytes of the process that no other has."""
    return process.memory_full_info().uss
