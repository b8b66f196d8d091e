"""`submit slurm` under a real Slurm: jobs ask for what their plan says, and lose nothing to three
preemptions."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from launch.run_folder.layout import RunDir
from launch.schema.machine import GIB
from launch.schema.plan import Plan
from tests import builders, slurm, stopping
from tests.slurm import Node

STEPS = 60  # 20 epochs of 45 rows in batches of 16
SLOW = {  # in each of its first three lives a run is slow from its fifth step on
    "module": "training.control.stop_callback",
    "attribute": "StopCallback.on_step_end",
    "when": "int(os.environ.get('SLURM_RESTART_COUNT', 0)) < 3"
    " and args[2].global_step >= 5 * (1 + int(os.environ.get('SLURM_RESTART_COUNT', 0)))",
    "rank": 0,
    "do": "import time; time.sleep(2)",
}
DONE = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")


@pytest.fixture(scope="module")
def started(tmp_path_factory, needs) -> Iterator[Node]:
    needs(slurm.missing())
    with slurm.node(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def node(started) -> Iterator[Node]:
    yield started
    started.cancel_all()


def recipe(folder: Path, **training: object) -> Path:
    training = {"num_train_epochs": 20, "save_steps": 1000, **training}
    return builders.recipe(folder, launch={"num_processes": 2}, training=training)


def submit(node: Node, folder: Path, *words: str, **extra: str) -> str:
    """The number of the job of `submit slurm` of the folder's recipe."""
    environment = {"SLURM_CONF": str(node.configuration), **extra}
    done = builders.launch(folder / "workspace", "submit", "slurm", *words, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"^Slurm job (\d+): ", done.stdout, re.MULTILINE)
    assert found, done.stdout
    return found[1]


def output(folder: Path) -> str:
    files = (folder / "workspace").glob("submitted/*/slurm-*.out")
    return "\n".join(file.read_text(errors="replace") for file in files)


def test_a_job_of_two_ranks_asks_for_its_plan_and_loses_nothing_to_three_preemptions(
    node, tmp_path
):
    alone = builders.launch(tmp_path / "alone", "run", str(recipe(tmp_path / "alone")))
    assert alone.returncode == 0, alone.stderr
    path = recipe(tmp_path)
    planned = builders.launch(tmp_path / "workspace", "plan", str(path), "--json").stdout
    plan = TypeAdapter(Plan).validate_json(planned)
    inject = stopping.injecting(tmp_path, slow=SLOW)
    number = submit(node, tmp_path, str(path), "--sbatch=--partition=main", **inject)
    asked = node.job(number)
    assert plan.strategy.num_processes == 2
    reserve_bytes = 2 * GIB  # launch.host_reserve_gib
    mib = math.ceil((plan.estimate.host_bytes * 1.1 + reserve_bytes) / (1 << 20))
    assert asked["MinMemoryNode"] == f"{mib}M"
    assert asked["MinCPUsNode"] == str(os.cpu_count())
    assert asked["TimeLimit"] == "00:16:00"  # a quarter of an hour to start, and the steps
    # it keeps to the recipe of its submission
    path.write_text("name: changed afterwards\n")
    for life in range(3):
        assert slurm.waited(lambda life=life: stopping.fired(tmp_path, "slow") > 2 * life, 120), (
            output(tmp_path)
        )
        urgent = ("--partition=urgent", "--exclusive", f"--chdir={tmp_path}", "--wrap=sleep 1")
        node.submit(builders.environment(tmp_path / "workspace"), *urgent)
        assert slurm.waited(lambda life=life: node.job(number)["Restarts"] == str(life + 1), 120), (
            output(tmp_path)
        )
    end = node.until(number, *DONE, within_s=120)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("COMPLETED", "0:0", "3"), output(
        tmp_path
    )
    (run,) = RunDir.all(tmp_path / "workspace" / "runs", "tiny")
    steps = [event["step"] for event in builders.events(run.root)]
    assert steps == list(range(1, STEPS + 1))
    weights = builders.weights(tmp_path / "model")
    for name, weight in builders.weights(tmp_path / "alone" / "model").items():
        assert torch.equal(weight, weights[name]), name


def test_a_sweep_is_an_array_whose_tasks_train_runs_of_their_own(node, tmp_path):
    path = recipe(tmp_path, num_train_epochs=1)
    sweep = "--sweep=training.learning_rate=1e-3,2e-3"
    submit(node, tmp_path, str(path), sweep, "--sbatch=--cpus-per-task=1")
    assert slurm.waited(lambda: not node.ask("squeue", "--noheader"), 120), node.ask("squeue")
    runs = RunDir.all(tmp_path / "workspace" / "runs")
    rates = {run.root.parent.name: run.read_recipe().training.learning_rate for run in runs}
    assert rates == {"tiny-1e_3": 1e-3, "tiny-2e_3": 2e-3}, output(tmp_path)
    for run in runs:
        assert run.outcome() is not None and Path(run.read_recipe().output_dir).is_dir()
    states = sorted((tmp_path / "workspace").glob("submitted/*/status-*.json"))
    assert [state.name for state in states] == ["status-0.json", "status-1.json"]


def test_a_job_of_two_nodes_stops_on_both_goes_on_and_trains_what_one_machine_does(node, tmp_path):
    slow = {**SLOW, "when": SLOW["when"].replace("< 3", "< 1")}
    extra = {"OMP_NUM_THREADS": "1", **stopping.injecting(tmp_path, slow=slow)}
    words = ("--launch.nodes=2", "--launch.num_processes=2", "--sbatch=--partition=both")
    path = recipe(tmp_path, num_train_epochs=4)
    number = submit(node, tmp_path, str(path), *words, **extra)
    assert slurm.waited(lambda: stopping.fired(tmp_path, "slow") > 1, 120), output(tmp_path)
    node.ask("scancel", "--batch", "--signal=USR1", number)  # as before the end of its time
    assert slurm.waited(lambda: node.job(number)["Restarts"] == "1", 60), output(tmp_path)
    end = node.until(number, *DONE, within_s=120)
    assert (end["JobState"], end["NumNodes"]) == ("COMPLETED", "2"), output(tmp_path)
    assert "machine_rank 1 of 2 machines" in output(tmp_path)
    alone = builders.launch(tmp_path / "alone", "run", str(path), OMP_NUM_THREADS="1")
    assert alone.returncode == 0, alone.stderr
    (run,), (other,) = (
        RunDir.all(tmp_path / workspace / "runs", "tiny") for workspace in ("workspace", "alone")
    )
    losses, expected = (
        [event["loss"] for event in builders.events(each.root)] for each in (run, other)
    )
    assert losses == expected
