"""A run that is out of memory is planned again with the effective batch held, and ends with the
model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.base import processes
from launch.run_folder.layout import RunDir
from tests import builders, stopping

TRAINING = {"num_train_epochs": 1, "save_steps": 2, "learning_rate": 1e-3}
CUDA = "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 19.60 GiB"
HIP = "HIP out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 15.98 GiB"
CUBLAS = "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"


def step_fault(when: str, words: str, rank: int | None) -> dict[str, Any]:
    """A micro-batch that does not fit; args[2] is the batch."""
    do = f"import torch\nraise torch.OutOfMemoryError({words!r})"
    return {
        "module": "training.loop.trainer",
        "attribute": "LowMemTrainer.training_step",
        "when": when,
        "rank": rank,
        "do": do,
    }


def long_rows(folder: Path, count: int) -> dict[str, Any]:
    """The data section of rows that are all longer than its max_length."""
    rows = [{"prompt": f"row {i}", "response": " ".join(builders.WORDS * 40)} for i in range(count)]
    return {
        "max_length": 256,
        "train_file": str(builders.write_parquet(folder / "long.parquet", rows)),
    }


def batches(run: RunDir) -> list[tuple[int, int, int]]:
    """(micro-batch, accumulation, evaluation batch) of each attempt."""
    plans = [json.loads(attempt.plan_file.read_text()) for attempt in run.attempts()]
    keys = (
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "per_device_eval_batch_size",
    )
    return [tuple(plan["strategy"][key] for key in keys) for plan in plans]


def losses(run: Path) -> dict[int, float]:
    return {event["step"]: event["loss"] for event in builders.events(run)}


@pytest.fixture
def uninterrupted(tmp_path: Path) -> dict[int, float]:
    """The losses of the same run where nothing is short."""
    with stopping.launched(
        tmp_path,
        workspace="whole",
        words=(f"--output_dir={tmp_path / 'whole_model'}",),
        training=TRAINING,
    ) as child:
        assert child.wait() == 0, child.said()
        return losses(child.run.root)


@pytest.mark.parametrize("words", [CUDA, HIP, CUBLAS])
def test_a_rank_that_alone_is_out_of_memory_hangs_nobody_and_smaller_pieces_train_the_same(
    tmp_path, uninterrupted, words
):
    """On one of two ranks, after the first checkpoint, as long as a micro-batch has more than two
    samples."""
    fault = step_fault(
        "args[2]['labels'].shape[0] > 2 and args[0].state.global_step >= 3", words, rank=1
    )
    with stopping.launched(tmp_path, faults={"oom": fault}, training=TRAINING) as child:
        assert child.wait(within_s=200) == 0, child.said()
        found = batches(child.run)
        assert found[0][:2] == (4, 1)
        assert found[-1][0] <= 2, "no smaller pieces"
        assert all(micro * accumulation == 4 for micro, accumulation, _ in found)
        assert stopping.fired(tmp_path, "oom") == len(found) - 1
        assert "planned again, from step 2" in child.said()
        assert "the effective batch stays 8" in child.said()
        assert losses(child.run.root) == pytest.approx(uninterrupted, rel=1e-5)
        assert child.left() == []


def test_by_tokens_a_smaller_budget_follows(tmp_path):
    """As long as a micro-batch has more than half of the padded tokens that were planned for."""
    too_many = "args[2] and args[2]['labels'].numel() > 2 * 16 and args[0].state.global_step >= 2"
    fault = step_fault(too_many, CUDA, rank=1)
    data = {"batch_by_tokens": True, "max_length": 16}
    training = {**TRAINING, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    with stopping.launched(tmp_path, faults={"oom": fault}, data=data, training=training) as child:
        assert child.wait(within_s=200) == 0, child.said()
        found = batches(child.run)
        assert found[0][:2] == (4, 2)
        assert found[-1][0] <= 2, "no smaller budget"
        assert all(micro * accumulation == 8 for micro, accumulation, _ in found)
        assert stopping.fired(tmp_path, "oom") == len(found) - 1
        assert (
            "has at most 64 tokens, padding included, as 4 of the longest rows (16) have"
            in child.said()
        )
        assert f"has at most {16 * found[-1][0]} tokens, padding included" in child.said()
        assert len(losses(child.run.root)) == 3  # of 45 rows, 16 a step


def test_out_of_memory_in_an_evaluation_lowers_that_and_not_training(tmp_path):
    do = f"import torch\nraise torch.OutOfMemoryError({CUDA!r})"
    fault = {
        "module": "training.loop.trainer",
        "attribute": "target_loss_sum",
        "when": "args[0].shape[0] > 3 and not args[0].requires_grad",
        "rank": 0,
        "do": do,
    }
    with stopping.launched(
        tmp_path,
        faults={"oom": fault},
        training={**TRAINING, "eval_steps": 3, "per_device_eval_batch_size": 5},
    ) as child:
        assert child.wait(within_s=200) == 0, child.said()
        found = batches(child.run)
        assert {(micro, accumulation) for micro, accumulation, _ in found} == {(4, 1)}
        assert [evaluated for _, _, evaluated in found] == [5, 2]
        assert stopping.fired(tmp_path, "oom") == 1


def test_out_of_memory_in_saving_does_not_touch_training(tmp_path):
    """No other cut of the batch would change what a save takes, and on CPUs nothing holds fewer
    states: it says so."""
    do = f"import torch\nraise torch.OutOfMemoryError({CUDA!r})"
    when = "args[0].state.global_step >= 4"
    fault = {
        "module": "training.loop.trainer",
        "attribute": "LowMemTrainer.save_checkpoint",
        "when": when,
        "rank": 1,
        "do": do,
    }
    with stopping.launched(tmp_path, faults={"oom": fault}, training=TRAINING) as child:
        assert child.wait(within_s=200) == 12, child.said()
        assert stopping.fired(tmp_path, "oom") == 1
        assert [found[:2] for found in batches(child.run)] == [(4, 1)]
        assert "ran out of memory in save" in child.said()
        assert child.committed()[-1:] == [2]
        assert child.left() == []


def test_where_nothing_smaller_is_left_the_run_ends_with_its_cause(tmp_path):
    fault = step_fault("True", CUDA, rank=None)
    with stopping.launched(tmp_path, ranks=1, faults={"oom": fault}, training=TRAINING) as child:
        assert child.wait(within_s=200) == 12, child.said()
        found = [attempt.plan_file.read_text() for attempt in child.run.attempts()]
        assert "no other plan" in child.said()
        assert 'fix    see the line "no other plan" above' in child.said()
        assert len(found) == len(set(found)) == 3, "a start makes three plans, each of them once"
        assert (
            "3 plans took more memory than there is: this start makes no further plan"
            in child.said()
        )
        assert child.left() == []


def test_on_oom_fail_stops_at_once(tmp_path):
    fault = step_fault("True", CUDA, rank=None)
    with stopping.launched(
        tmp_path, ranks=1, faults={"oom": fault}, training=TRAINING, launch={"on_oom": "fail"}
    ) as child:
        assert child.wait() == 12, child.said()
        assert len(child.run.attempts()) == 1


def test_what_changes_the_result_is_given_up_only_where_allowed_and_starts_over(tmp_path):
    """Out of memory as long as rows have more than 150 tokens: no cut of the batch helps."""
    fault = step_fault("args[2]['labels'].shape[1] > 150", CUDA, rank=None)
    sections = {
        "training": {**TRAINING, "eval_steps": 1000},
        "data": long_rows(tmp_path, 24),
        "allow": ["data.max_length"],
    }
    with stopping.launched(tmp_path, ranks=1, faults={"oom": fault}, **sections) as child:
        assert child.wait(within_s=250) == 0, child.said()
        assert "starting over in" in child.said()
        assert "data.max_length: asked 256, runs 128" in child.said()
        plans = sorted(child.workspace.glob("runs/*/*/plan.json"))
        assert len(plans) > 1, "the shorter rows were trained in the same run"
        assert RunDir(plans[-1].parent).read_recipe().data.max_length == 128


@pytest.fixture
def large(tmp_path: Path) -> tuple[str, RunDir, int]:
    """A batch that takes much of the host, trained with enough: its command line, that run, its
    predicted bytes."""
    recipe = builders.recipe(
        tmp_path,
        training={"num_train_epochs": 1, "save_steps": 2, "per_device_train_batch_size": 128},
        launch={"host_reserve_gib": 0.0, "host_stop_fraction": 0.0},
        data=long_rows(tmp_path, 500),
    )
    words = f'exec "{sys.executable}" -m launch run "{recipe}"'
    whole = within(tmp_path / "whole", f'{words} --output_dir="{tmp_path / "whole_model"}"')
    assert whole.returncode == 0, whole.stdout + whole.stderr
    run = RunDir(builders.only_run(tmp_path / "whole"))
    return words, run, sum(run.read_plan().estimate.host.values())


def within(workspace: Path, line: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", line],
        env=builders.environment(workspace),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.shows(
    "F11", "a batch forced on a cgroup of 0.8 of its prediction; the kernel's oom_kill counter grew"
)
def test_the_kernels_kill_in_a_cgroup_too_small_is_planned_again_within_it(tmp_path, cgroup, large):
    """The batch is forced on a cgroup that cannot hold it; without the guard, so that it is the
    kernel who says so."""
    words, whole, needed_bytes = large
    (cgroup / "memory.limit_in_bytes").write_text(str(int(needed_bytes * 0.8)))
    done = within(
        tmp_path / "workspace", f'echo $$ > "{cgroup}/cgroup.procs"; {words} --assume-fits'
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kills = dict(line.split() for line in (cgroup / "memory.oom_control").read_text().splitlines())
    assert int(kills["oom_kill"]) >= 1
    assert "the cgroup's oom_kill counter grew by" in done.stdout
    assert "the effective batch stays 128" in done.stdout
    assert losses(builders.only_run(tmp_path / "workspace")) == pytest.approx(
        losses(whole.root), rel=1e-5
    )


@pytest.mark.shows("F12", "ulimit -v below what a batch takes; the allocator's own words")
def test_an_allocator_that_an_rlimit_refuses_is_planned_again(tmp_path, large):
    """RLIMIT_AS: malloc itself fails, in the rank."""
    words, whole, needed_bytes = large
    done = within(
        tmp_path / "workspace",
        f"ulimit -v {(needed_bytes >> 10) + (1 << 20)}; {words} --assume-fits",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the host ran out of memory" in done.stdout
    assert "the effective batch stays 128" in done.stdout
    assert losses(builders.only_run(tmp_path / "workspace")) == pytest.approx(
        losses(whole.root), rel=1e-5
    )


@pytest.mark.parametrize("kill_mode", ["mixed", "control-group"])
def test_a_kill_for_memory_is_written_down_also_where_systemd_then_stops_the_unit(
    tmp_path, cgroup, kill_mode
):
    """systemd's OOMPolicy=stop: once the kernel has killed a process of the unit, SIGTERM to its
    main process, or to all."""
    (cgroup / "memory.limit_in_bytes").write_text(str(3 << 29))
    launch = {"num_processes": 1, "host_reserve_gib": 0.0, "host_stop_fraction": 0.0}
    recipe = builders.recipe(tmp_path, training=stopping.ENDLESS, launch=launch)
    fault = stopping.at_step("7", "bytearray(4 << 30)", rank=0)
    line = f'echo $$ > "{cgroup}/cgroup.procs"; exec "{sys.executable}" -m launch run "{recipe}"'
    with stopping.ended(
        stopping.Child(
            tmp_path,
            ("bash", "-c", line),
            tmp_path / "workspace",
            tmp_path / "out",
            **stopping.injecting(tmp_path, eater=fault),
        )
    ) as child:
        counters = cgroup / "memory.oom_control"
        child.until("a kill", lambda: "oom_kill 0" not in counters.read_text(), within_s=200)
        unit = map(int, (cgroup / "cgroup.procs").read_text().split())
        for pid in [child.process.pid] if kill_mode == "mixed" else unit:
            processes.send(pid, signal.SIGTERM)
        assert child.wait() == 6, child.said()
        assert "the cgroup's oom_kill counter grew by" in child.said()
        (seen,) = json.loads(child.run.evidence_file.read_text())
        assert (seen["of"], seen["limit_bytes"], seen["is_own"]) == ("host", 3 << 29, True)
        assert child.left() == []


# 8 processes
HOG = "import os, time; [os.fork() for _ in range(3)]; held = b'x' * (200 << 20); time.sleep(600)"


def until_others_take(child: stopping.Child, inside: str) -> None:
    """Take the memory of a run's cgroup until it ends for that. `inside`: a shell's words that
    start Python there."""
    with subprocess.Popen(["bash", "-c", f'{inside} -c "{HOG}"'], start_new_session=True) as hog:
        try:
            assert child.wait(within_s=300) == 6, child.said()
        finally:
            os.killpg(hog.pid, signal.SIGKILL)


def test_what_another_process_took_does_not_keep_the_run_from_going_on(tmp_path, cgroup):
    """Processes that are smaller than a rank, which the kernel therefore ends, take most of the
    cgroup, and end."""
    (cgroup / "memory.limit_in_bytes").write_text(str(2 << 30))
    launch = {"num_processes": 1, "host_reserve_gib": 0.0, "host_stop_fraction": 0.0}
    recipe = builders.recipe(tmp_path, training=stopping.ENDLESS, launch=launch)
    inside = f'echo $$ > "{cgroup}/cgroup.procs"; exec "{sys.executable}"'
    argv = ("bash", "-c", f'{inside} -m launch run "{recipe}"')
    with stopping.ended(
        stopping.Child(tmp_path, argv, tmp_path / "workspace", tmp_path / "out")
    ) as child:
        child.until("a checkpoint", child.committed, within_s=300)
        until_others_take(child, inside)
    assert "the cgroup's oom_kill counter grew by" in child.said()
    assert "other programs took the memory" in child.said()
    assert "fix    other programs hold the memory: when they have ended" in child.said()
    (seen,) = json.loads(child.run.evidence_file.read_text())
    assert not seen["is_own"]
    assert seen["limit_bytes"] == 2 << 30
    again = within(tmp_path / "workspace", f'{inside} -m launch run "{recipe}" --dry-run')
    assert again.returncode == 0, again.stderr
    assert "continuing tiny-" in again.stdout
    # as if it had been the job
    child.run.evidence_file.write_text(json.dumps([seen | {"is_own": True}]))
    flags = "--dry-run --allow=[lora.r]"  # there is none: no other recipe is planned, to be offered
    refused = within(tmp_path / "workspace", f'{inside} -m launch run "{recipe}" {flags}')
    assert refused.returncode == 3
    assert "ran out of host RAM in" in refused.stderr
    assert "--assume-fits starts all the same, from the last checkpoint" in refused.stderr
    assumed = within(
        tmp_path / "workspace", f'{inside} -m launch run "{recipe}" --dry-run --assume-fits'
    )
    assert assumed.returncode == 0, assumed.stderr
    assert "continuing tiny-" in assumed.stdout
