"""training.early_stopping_patience: a run stops where the held-out loss no longer falls, is
complete then, and stops at the same step if it was killed before or just then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from tests import builders
from tests.train_cpu.test_resume import kill_after

PATIENCE = 2
TRAINING = {
    "num_train_epochs": 30,
    "learning_rate": 0.03,  # learns the few rows by heart, so that the held-out loss rises again
    "eval_steps": 2,
    "save_steps": 5,
    "early_stopping_patience": PATIENCE,
}


def losses(run: Path) -> dict[int, float]:
    """Step -> held-out loss."""
    files = sorted(run.glob("attempts/*/held_out.jsonl"))
    records = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return {record["step"]: record["loss"] for record in records}


def stop_step(scored: dict[int, float]) -> int | None:
    """The step at which a reader of these losses would stop."""
    lowest, since = float("inf"), 0
    for step, loss in sorted(scored.items()):
        lowest, since = (loss, 0) if loss < lowest else (lowest, since + 1)
        if since == PATIENCE:
            return step
    return None


def outcome(run: Path) -> dict[str, object]:
    (*_, last) = sorted(run.glob("attempts/*/outcome.json"))
    return json.loads(last.read_text())


def trained(folder: Path, words: Sequence[str]) -> Path:
    done = builders.launch(folder, *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "end        Stopped early at step" in done.stdout
    return builders.only_run(folder)


def assert_equal(expected: Path, found: Path) -> None:
    tensors = builders.weights(found)
    for name, tensor in builders.weights(expected).items():
        assert torch.equal(tensor, tensors[name]), name


@pytest.mark.modes
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.campaign), 2])
def test_a_run_stops_early_at_the_same_step_whether_or_not_it_was_killed(tmp_path, ranks):
    batch = {"per_device_train_batch_size": 8 // ranks}
    recipe = builders.recipe(tmp_path, count=16, training={**TRAINING, **batch})
    words = ["run", str(recipe), f"--launch.num_processes={ranks}"]
    run = trained(tmp_path / "whole", [*words, f"--output_dir={tmp_path / 'whole_model'}"])
    stopped_at = stop_step(losses(run))
    assert stopped_at is not None and stopped_at == max(losses(run)) < 60
    assert (outcome(run)["ended"], outcome(run)["step"]) == ("stopped early", stopped_at)
    assert stopped_at % 5 and (run / "checkpoints" / f"checkpoint-{stopped_at:06d}").is_dir()
    assert f"Stopped early at step {stopped_at} of 60" in (run / "report.html").read_text()
    again = builders.launch(tmp_path / "whole", *words, f"--output_dir={tmp_path / 'whole_model'}")
    assert again.returncode == 0 and "complete" in again.stdout
    (row,) = json.loads(builders.launch(tmp_path / "whole", "runs", "--json").stdout)
    assert (row["state"], row["step"]) == ("stopped early", stopped_at)
    # after the last evaluation but one, which did not count for the checkpoint before it
    kill_after(tmp_path / "killed", words, step=stopped_at - 1)
    resumed = trained(tmp_path / "killed", words)
    assert outcome(resumed)["step"] == stopped_at
    assert outcome(resumed)["resumed_from"]
    assert_equal(tmp_path / "whole_model", tmp_path / "model")


@pytest.mark.campaign
@pytest.mark.modes
def test_a_run_that_is_killed_between_its_last_checkpoint_and_its_model_trains_no_further_step(
    tmp_path,
):
    training = {**TRAINING, "save_steps": 2}
    recipe = builders.recipe(tmp_path, count=16, training=training)
    words = ["run", str(recipe)]
    run = trained(tmp_path / "workspace", words)
    stopped_at, steps = outcome(run)["step"], len(builders.events(run))
    (tmp_path / "model").rename(tmp_path / "first_model")
    for name in ("outcome.json", "supervisor.json"):  # as a kill -9 before the export leaves it
        (run / "attempts/01" / name).unlink()
    done = builders.launch(tmp_path / "workspace", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert f"training had stopped early at step {stopped_at}" in done.stdout
    assert len(builders.events(run)) == steps
    assert outcome(run).items() >= {"ended": "stopped early", "step": stopped_at}.items()
    assert_equal(tmp_path / "first_model", tmp_path / "model")
    shutil.rmtree(tmp_path / "model")
    # with more patience it goes on, if it may
    more = ["--training.early_stopping_patience=50", "--resume.allow=[schedule]"]
    longer = builders.launch(tmp_path / "workspace", *words, *more)
    assert longer.returncode == 0, longer.stderr + longer.stdout
    assert f"resuming from checkpoint-{stopped_at:06d}" in longer.stdout
    (continuing,) = set((tmp_path / "workspace/runs/tiny").glob("2*")) - {run}
    assert (outcome(continuing)["ended"], outcome(continuing)["step"]) == ("complete", 60)


def test_without_held_out_rows_it_is_refused_with_the_keys(tmp_path):
    recipe = str(builders.recipe(tmp_path, training={"early_stopping_patience": 2}))
    done = builders.launch(tmp_path / "workspace", "plan", recipe, "--data.validation_file=null")
    assert done.returncode == 2
    assert "training.early_stopping_patience 2 needs data.validation_file or" in done.stderr
