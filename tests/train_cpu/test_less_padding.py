"""Less padding, and still: the same steps however they are cut, resumed at the same sample, each row once an epoch."""

from __future__ import annotations

import pytest
import torch

from launch import samples
from launch.rundir import RunDir
from tests import builders, stopping

CUT = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
WAYS = [{"group_by_length": True}]


@pytest.mark.modes
@pytest.mark.parametrize("data", WAYS, ids=lambda data: next(iter(data)))
def test_stopped_and_continued_on_two_ranks_it_gives_the_weights_of_an_uninterrupted_run(tmp_path, data):
    training = {"num_train_epochs": 3, "save_steps": 1000, "max_grad_norm": 0.0, "learning_rate": 1e-4, **CUT}
    recipe = builders.recipe(tmp_path / "whole", data=data, training=training)
    whole = builders.launch(tmp_path / "h", "run", str(recipe))
    assert whole.returncode == 0, whole.stderr
    stop = stopping.at_step("8", "os.kill(os.getpid(), 15)", rank=0, times=1)
    with stopping.launched(tmp_path, ranks=1, faults={"stop": stop}, data=data, training=training) as child:
        child.wait()
        assert stopping.fired(tmp_path, "stop") == 1
        assert child.committed() == [8]
    words = ("--launch.num_processes=2", "--training.per_device_train_batch_size=2")
    again = builders.launch(child.house, "run", str(tmp_path / "tiny.yaml"), *words)
    assert again.returncode == 0, again.stderr
    assert "resuming from checkpoint-000008" in again.stdout
    taken = samples.taken(child.run)
    assert {step: sorted(rows) for step, rows in taken.items()} == {
        step: sorted(rows) for step, rows in samples.taken(RunDir(builders.only_run(tmp_path / "h"))).items()
    }
    assert len(samples.lines(child.run)) == 3
    expected, found = builders.weights(tmp_path / "whole/model"), builders.weights(tmp_path / "model")
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=2e-6, msg=name)
