"""A real Slurm of one node ends, stops and moves jobs of configs/slurm/train.sbatch: nothing is
lost, none circles."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.run_folder.layout import RunDir
from tests import builders, slurm, stopping
from tests.slurm import Node

SCRIPT = str(builders.CODE / "configs/slurm/train.sbatch")
LAST_STEP = 120  # 40 epochs of 45 rows in batches of 16
# what is saved before the last step, a signal has asked for
TRAINING = {"num_train_epochs": 40, "save_steps": 1000}
DONE = ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "PREEMPTED", "NODE_FAIL")
# in the place of the script's early signal one that changes nothing
NO_WARNING = "--signal=B:CONT@1"
SLOW = {  # from its fifth step on the first life would take four minutes
    "module": "training.control.stop_callback",
    "attribute": "StopCallback.on_step_end",
    "when": "'SLURM_RESTART_COUNT' not in os.environ and args[2].global_step >= 5",
    "rank": 0,
    "do": "import time; time.sleep(2)",
}
NAN = {
    "module": "training.loop.trainer",
    "attribute": "LowMemTrainer.training_step",
    "when": "args[0].state.global_step == 3",
    "rank": 0,
    "do": "next(args[1].parameters()).data.fill_(float('nan'))",
}


@pytest.fixture(scope="module")
def started(tmp_path_factory) -> Iterator[Node]:
    if why := slurm.missing():
        pytest.skip(why)  # Slurm is no part of the README's set-up; the reason names its packages
    with slurm.node(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def node(started) -> Iterator[Node]:
    """With an empty queue, whatever became of the test before."""
    yield started
    started.cancel_all()


@pytest.fixture(scope="module")
def unstopped(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of the same recipe where nothing stops it."""
    folder = tmp_path_factory.mktemp("unstopped")
    done = builders.launch(folder / "workspace", "run", str(recipe(folder)))
    assert done.returncode == 0, done.stdout + done.stderr
    return builders.weights(folder / "model")


def recipe(folder: Path, **training: float) -> Path:
    return builders.recipe(folder, launch={"num_processes": 2}, training={**TRAINING, **training})


class Job:
    """A job that trains the recipe of the test's folder, and its run."""

    def __init__(
        self,
        node: Node,
        folder: Path,
        *options: str,
        faults: dict[str, Any] | None = None,
        **training: float,
    ) -> None:
        line = (sys.executable, "-m", "launch", "run", str(recipe(folder, **training)))
        self.node, self.folder = node, folder
        # a pace is no fault of the test's
        self.marks = folder if faults else folder.with_name(f"{folder.name}-pace")
        self.marks.mkdir(exist_ok=True)
        inject = stopping.injecting(self.marks, **(faults or {"slow": SLOW}))
        environment = builders.environment(folder / "workspace", **inject)
        self.number = node.submit(environment, f"--chdir={folder}", *options, SCRIPT, *line)

    @property
    def run(self) -> RunDir:
        """The only one that there is."""
        return RunDir(builders.only_run(self.folder / "workspace"))

    def said(self) -> str:
        file = self.folder / f"lowmem-{self.number}.out"
        return file.read_text(encoding="utf-8") if file.exists() else ""  # it is Slurm who makes it

    def until(self, what: str, true: Callable[[], object], within_s: float = 180) -> None:
        assert slurm.waited(true, within_s), (
            f"never {what}: {self.node.job(self.number)}\n{self.said()}"
        )

    def trains(self) -> None:
        """Wait until its slow steps have begun."""
        self.until("slow", lambda: stopping.fired(self.marks, "slow") >= 2)

    def saved(self) -> list[int]:
        """Steps of the checkpoints that are there."""
        return sorted(
            int(path.parent.name[11:])
            for path in self.run.checkpoints.glob("checkpoint-*/manifest.json")
        )

    def ended(self) -> tuple[str, str, str]:
        """(state, exit code:signal, how often it was requeued), once Slurm is done with it."""
        end = self.node.until(self.number, *DONE, within_s=300)
        return end["JobState"], end["ExitCode"], end["Restarts"]

    def check_resumed(self, unstopped: dict[str, torch.Tensor]) -> None:
        """It came back once, into its run folder, and ended there with the weights of a run that
        was not stopped."""
        assert self.ended() == ("COMPLETED", "0:0", "1"), self.said()
        attempts = self.run.attempts()
        assert len(attempts) == 2
        assert json.loads(attempts[-1].outcome_file.read_text())["complete"]
        weights = builders.weights(self.folder / "model")
        assert weights.keys() == unstopped.keys()
        assert all(torch.equal(weights[name], unstopped[name]) for name in weights)

    def check_steps(self) -> None:
        """The first life saved its last step; none was trained twice, and none left out."""
        outcome = json.loads(self.run.attempts()[0].outcome_file.read_text())
        assert outcome["ended"] == "preempted"
        assert outcome["step"] in self.saved()
        steps = [event["step"] for event in builders.events(self.run.root)]
        assert steps == list(range(1, LAST_STEP + 1))


@pytest.mark.shows(
    "F50", "Slurm's early signal before a time limit of 3 minutes; the launcher names SIGUSR1"
)
def test_the_early_signal_saves_and_the_job_goes_on_in_its_next_life(
    node, tmp_path, injected, unstopped
):
    job = Job(node, tmp_path, "--time=3", "--signal=B:USR1@60")
    job.until("warned", lambda: "SIGUSR1: saving a checkpoint, then stopping" in job.said())
    injected()
    job.check_resumed(unstopped)
    job.check_steps()
    assert "error: stopped by SIGUSR1 at step" in job.said()
    assert "TIME LIMIT" not in job.said()


@pytest.mark.shows(
    "F50",
    "a time limit of 2 minutes without an early signal; the launcher says that the time is"
    " nearly up",
)
def test_without_an_early_signal_the_launcher_itself_stops_before_the_limit(
    node, tmp_path, injected, unstopped
):
    job = Job(node, tmp_path, "--time=2", NO_WARNING)
    job.until("nearly over", lambda: "the time is nearly up: saving" in job.said())
    injected()
    job.check_resumed(unstopped)
    job.check_steps()
    assert "error: stopped because the time is nearly up at step" in job.said()
    assert "TIME LIMIT" not in job.said()


@pytest.mark.shows(
    "F50", "an administrator's shorter time limit, which nobody was told of; Slurm says TIME LIMIT"
)
def test_at_a_limit_that_came_earlier_than_was_said_sigterm_saves(
    node, tmp_path, injected, unstopped
):
    job = Job(node, tmp_path, "--time=30", NO_WARNING)
    job.trains()
    node.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=1")
    job.until("at its limit", lambda: "DUE TO TIME LIMIT" in job.said())
    injected()
    job.until("in the queue", lambda: node.job(job.number)["JobState"] == "PENDING")
    node.ask("scontrol", "update", f"JobId={job.number}", "TimeLimit=30")
    job.check_resumed(unstopped)
    job.check_steps()
    assert "error: stopped by SIGTERM at step" in job.said()


HOW = {  # a job goes back into the queue -> (its partition, what its output says)
    "requeue": ("main", "DUE TO JOB REQUEUE"),
    "preemption": ("main", "DUE TO PREEMPTION"),
    "preemption with a warning": ("lent", "error: stopped by SIGUSR1 at step"),
}


@pytest.mark.shows(
    "F50",
    "scontrol requeue; a job of higher priority, with and without a grace time; Slurm says which",
)
@pytest.mark.parametrize("how", HOW)
def test_a_job_that_slurm_sends_back_into_the_queue_saves_and_comes_back_once(
    node, tmp_path, injected, how, unstopped
):
    partition, words = HOW[how]
    job = Job(node, tmp_path, "--time=30", f"--partition={partition}")
    job.trains()
    if how == "requeue":
        node.ask("scontrol", "requeue", job.number)
    else:
        urgent = ("--partition=urgent", "--exclusive", f"--chdir={tmp_path}", "--wrap=sleep 1")
        node.submit(builders.environment(tmp_path / "workspace"), *urgent)
    injected()
    job.check_resumed(unstopped)
    job.check_steps()
    assert words in job.said()


@pytest.mark.shows(
    "F50", "a node that goes down; Slurm says NODE FAILURE, and kills without a warning"
)
def test_after_a_node_failure_the_last_checkpoint_goes_on(node, tmp_path, unstopped):
    job = Job(node, tmp_path, "--time=30", save_steps=4)
    job.trains()
    node.ask("scontrol", "update", "NodeName=node", "State=DOWN", "Reason=test")
    job.until("killed", lambda: "DUE TO NODE FAILURE" in job.said())
    saved = job.saved()[-1]
    job.until("in the queue", lambda: node.job(job.number)["JobState"] == "PENDING")
    node.ask("scontrol", "update", "NodeName=node", "State=RESUME")
    job.check_resumed(unstopped)
    steps = [event["step"] for event in builders.events(job.run.root)]
    assert steps[saved - LAST_STEP :] == list(range(saved + 1, LAST_STEP + 1))
    assert steps[: saved - LAST_STEP] == list(range(1, len(steps) - LAST_STEP + saved + 1))


@pytest.mark.shows("F50", "scancel; Slurm's line in the job's output says CANCELLED")
def test_a_cancelled_job_saves_and_stays_cancelled(node, tmp_path, injected):
    job = Job(node, tmp_path, "--time=30")
    job.trains()
    node.ask("scancel", job.number)
    injected()
    job.until("out of the queue", lambda: not node.ask("squeue", "--noheader"))
    state, _, requeued = job.ended()
    assert (state, requeued) == ("CANCELLED", "0"), job.said()
    assert "CANCELLED AT" in job.said()
    outcome = json.loads(job.run.attempts()[-1].outcome_file.read_text())
    assert job.saved() == [outcome["step"]]


@pytest.mark.shows(
    "F50", "weights that are NaN from the fourth step on; the exit code is the job's"
)
def test_a_run_that_fails_is_a_failed_job_with_its_exit_code(node, tmp_path):
    job = Job(node, tmp_path, "--time=30", faults={"nan": NAN})
    assert job.ended() == ("FAILED", "8:0", "0"), job.said()
    assert stopping.fired(tmp_path, "nan") == 1


@pytest.mark.shows("F50", "a line that always ends with 75; the lives are counted", code=75)
def test_a_job_that_always_stops_ends_after_as_many_lives_as_were_asked_for(node, tmp_path):
    environment = builders.environment(tmp_path / "workspace", MAX_REQUEUES="2")
    number = node.submit(
        environment, f"--chdir={tmp_path}", SCRIPT, "bash", "-c", "echo a life; exit 75"
    )
    end = node.until(number, *DONE, within_s=120)
    assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "75:0", "2")
    said = (tmp_path / f"lowmem-{number}.out").read_text(encoding="utf-8")
    assert said.count("a life\n") == 3
    assert "requeued 2 times before" in said


@pytest.mark.shows(
    "F50", "one task of an array ends with 75; the lives of each are counted", code=75
)
def test_of_an_array_only_the_stopped_task_comes_back(node, tmp_path):
    """The job number of the last task that starts is that of the whole array."""
    code = "exit $((SLURM_JOB_ID == SLURM_ARRAY_JOB_ID && ${SLURM_RESTART_COUNT:-0} == 0 ? 75 : 0))"
    line = f"echo a life of $SLURM_ARRAY_TASK_ID; {code}"
    options = (
        "--array=0-1",
        "--cpus-per-task=1",
        "--gpus-per-node=1",
        f"--chdir={tmp_path}",
        "--output=%a.out",
    )
    node.submit(builders.environment(tmp_path / "workspace"), *options, SCRIPT, "bash", "-c", line)
    assert slurm.waited(lambda: not node.ask("squeue", "--noheader"), within_s=120), node.ask(
        "squeue"
    )
    lives = [(tmp_path / f"{task}.out").read_text().count(f"a life of {task}\n") for task in (0, 1)]
    assert sorted(lives) == [1, 2]
