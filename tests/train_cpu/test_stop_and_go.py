"""A run that is told to stop saves, and goes on later as if nothing had happened."""

from __future__ import annotations

import signal

import torch

from tests import builders, stopping


def test_stopped_by_a_signal_and_continued_the_weights_are_those_of_an_uninterrupted_run(tmp_path):
    training = {"num_train_epochs": 60, "save_steps": 300, "eval_steps": 300}
    words = (f"--output_dir={tmp_path / 'whole_model'}",)
    with stopping.launched(tmp_path, house="whole", words=words, training=training) as child:
        assert child.wait() == 0, child.said()
    with stopping.launched(tmp_path, training=training) as child:
        child.until("steps", lambda: child.run.attempts()[-1].second_step_file.exists())
        child.ranks()[1].send_signal(signal.SIGTERM)
        assert child.wait() == 75, child.said()
        stopped_at = child.outcome()["step"]
        assert child.committed() == [stopped_at]
        assert stopped_at < 360
    again = builders.launch(tmp_path / "house", "run", str(tmp_path / "tiny.yaml"))
    assert again.returncode == 0, again.stdout
    assert f"resuming from checkpoint-{stopped_at:06d}" in again.stdout
    expected, found = builders.weights(tmp_path / "whole_model"), builders.weights(tmp_path / "model")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
