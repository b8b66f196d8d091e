"""Each part of a run takes more host RAM than its cgroup has, on one and on two ranks: the kernel
ends a process, the verdict names the part, and with more memory the same line goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import builders, stopping

SMALL, LARGE = 5 << 29, 6 << 30  # of the cgroup, before and after
TAKEN = 5 << 29  # by the rank, in that part; freed afterwards
TAKE = f"taken = b'x' * {TAKEN}; del taken"
STEP = ("training.loop.trainer", "LowMemTrainer.training_step")
# part -> where a rank takes that memory, when, the newest checkpoint then
PARTS: dict[str, tuple[tuple[str, str], str, int]] = {
    "load": (("training.run", "build_parts"), "True", 0),
    "first step": (STEP, "args[0].state.global_step == 0", 0),
    "step": (STEP, "args[0].state.global_step == 6", 4),
    "evaluation": (("training.control.stop_callback", "StopCallback.between_batches"), "True", 4),
    "save": (
        ("training.checkpoints.commit", "describe"),
        "os.path.exists(os.path.join(args[0], '..', '..', 'checkpoint-000004'))",
        4,
    ),
}
SECTIONS: dict[str, Any] = {
    "training": {
        **{"num_train_epochs": 3, "save_steps": 4, "eval_steps": 5, "learning_rate": 1e-3},
        "per_device_train_batch_size": 4,
    },
    # the kernel is to say so, not the guard
    "launch": {"host_reserve_gib": 0.0, "host_stop_fraction": 0.0},
}


def limit(group: Path, limit_bytes: int) -> None:
    (group / "memory.limit_in_bytes").write_text(str(limit_bytes))


def kills(group: Path) -> int:
    """Number of processes in it that the kernel has ended for want of memory."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(dict(line.split() for line in lines)["oom_kill"])


def started(folder: Path, group: Path, out: str, words: str = "", **extra: str) -> stopping.Child:
    """A run in the cgroup."""
    line = f'echo $$ > "{group}/cgroup.procs"; exec "$@" "{folder / "tiny.yaml"}" {words}'
    argv = ("bash", "-c", line, "bash", *stopping.RUN)
    return stopping.Child(folder, argv, folder / "workspace", folder / out, **extra)


@pytest.mark.shows(
    "F11", "2.5 GiB taken in one part of a run, in a cgroup of 2.5 GiB; its oom_kill counter grew"
)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("part", PARTS)
def test_the_kernels_kill_in_any_part_is_named_and_more_memory_goes_on(
    tmp_path, cgroup, part, ranks
):
    (module, attribute), when, saved = PARTS[part]
    fault = {
        **{"module": module, "attribute": attribute, "rank": ranks - 1},
        **{"when": when, "do": TAKE},
    }
    launch = {**SECTIONS["launch"], "num_processes": ranks}
    builders.recipe(tmp_path, **{**SECTIONS, "launch": launch})
    limit(cgroup, SMALL)
    faults = stopping.injecting(tmp_path, taken=fault)
    with stopping.ended(started(tmp_path, cgroup, "small.out", **faults)) as child:
        assert child.wait(within_s=250) == 6, child.said()
        assert stopping.fired(tmp_path, "taken")
        assert kills(cgroup)
        assert f"where  in {part} at step" in child.said()
        assert "the cgroup's oom_kill counter grew by" in child.said()
        assert "Traceback" not in child.said()
        assert child.committed()[-1:] == ([saved] if saved else [])
        seen = json.loads(child.run.evidence_file.read_text())
        assert {event["section"] for event in seen} == {part}
        assert child.left() == []
    before = (stopping.fired(tmp_path, "taken"), kills(cgroup))
    limit(cgroup, LARGE)
    with stopping.ended(started(tmp_path, cgroup, "large.out", **faults)) as child:
        assert child.wait(within_s=200) == 0, child.said()
        assert stopping.fired(tmp_path, "taken") > before[0], "that part did not take it again"
        assert kills(cgroup) == before[1]
        said = f"resuming from checkpoint-{saved:06d}" if saved else "starting a new run"
        assert said in child.said()
        assert (tmp_path / "model/model.safetensors").exists()


GIANT = {"prompt": " ".join(builders.WORDS) * 130_000, "response": "red"}  # 9 MB


@pytest.mark.shows(
    "F11", "a row of 9 MB tokenised in a cgroup of 448 MiB; its oom_kill counter grew"
)
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernels_kill_in_tokenising_is_named_and_more_memory_goes_on(tmp_path, cgroup, ranks):
    launch = {**SECTIONS["launch"], "num_processes": ranks}
    builders.recipe(tmp_path, **{**SECTIONS, "launch": launch})
    builders.write_parquet(tmp_path / "train.parquet", [*builders.rows(45), GIANT])
    limit(cgroup, 448 << 20)
    with stopping.ended(started(tmp_path, cgroup, "small.out", "--assume-fits")) as child:
        assert child.wait(within_s=250) == 6, child.said()
        assert kills(cgroup)
        assert "where  in tokenise" in child.said()
        assert "job at 0.00 GiB" not in child.said(), "nobody measured that"
        assert "it was tokenising, not training: give it more memory" in child.said()
        assert "Traceback" not in child.said()
        assert child.left() == []
    before = kills(cgroup)
    limit(cgroup, LARGE)
    with stopping.ended(started(tmp_path, cgroup, "large.out")) as child:
        assert child.wait(within_s=250) == 0, child.said()
        assert kills(cgroup) == before
        assert (tmp_path / "model/model.safetensors").exists()
