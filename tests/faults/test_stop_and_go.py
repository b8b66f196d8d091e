"""A run that is told to stop saves, and goes on later as if nothing had happened."""

from __future__ import annotations

import pytest
import torch

from tests import builders, stopping


@pytest.mark.fast_faults
@pytest.mark.shows("F7", "SIGTERM to one of two ranks at step 10; it left a mark")
def test_stopped_by_a_signal_and_continued_the_weights_are_those_of_an_uninterrupted_run(tmp_path):
    training = {"num_train_epochs": 4, "save_steps": 100, "eval_steps": 100}
    words = (f"--output_dir={tmp_path / 'whole_model'}",)
    with stopping.launched(tmp_path, workspace="whole", words=words, training=training) as child:
        assert child.wait() == 0, child.said()
    stop = stopping.at_step("10", "os.kill(os.getpid(), 15)", times=1)
    with stopping.launched(tmp_path, faults={"stop": stop}, training=training) as child:
        assert child.wait() == 75, child.said()
        assert stopping.fired(tmp_path, "stop") == 1
        stopped_at = child.outcome()["step"]
        assert child.committed() == [stopped_at]
        assert 10 <= stopped_at < 24
    again = builders.launch(tmp_path / "workspace", "run", str(tmp_path / "tiny.yaml"))
    assert again.returncode == 0, again.stdout
    assert f"resuming from checkpoint-{stopped_at:06d}" in again.stdout
    expected, found = (
        builders.weights(tmp_path / "whole_model"),
        builders.weights(tmp_path / "model"),
    )
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
