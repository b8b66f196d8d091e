"""MLPs that compute a part of the tokens at a time, in real runs: the losses are those of runs
without, a run goes on with another number of parts, and the model is exported as ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import builders
from tests.train_cpu.test_resume import kill_after

SHORT = {"num_train_epochs": 3, "save_steps": 3, "optim": "sgd", "learning_rate": 0.1}
IN_PARTS = ("--training.activation_checkpointing=true", "--training.tiled_mlp_num_shards=4")


def losses(workspace: Path) -> dict[int, float]:
    """The loss of each step of a run, by the attempt that has trained it last."""
    events = builders.events(builders.only_run(workspace))
    return {event["step"]: event["loss"] for event in events}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


@pytest.mark.parametrize(
    ("shape", "ranks", "sections"),
    [
        ("llama-tiny", 1, {"lora": {"r": 4}}),
        pytest.param("gpt2-tiny", 1, {}, marks=pytest.mark.modes),
        pytest.param("t5-tiny", 2, {}, marks=pytest.mark.modes),
    ],
)
def test_losses_and_model_are_those_of_a_run_without_also_where_parts_change_at_a_resume(
    tmp_path, shape, ranks, sections: dict[str, Any]
):
    training = {**SHORT, "per_device_train_batch_size": 8 // ranks}
    recipe = str(builders.recipe(tmp_path, shape, training=training, **sections))
    words = ["run", recipe, f"--launch.num_processes={ranks}"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = builders.launch(whole, *words, f"--output_dir={whole / 'model'}")
    assert done.returncode == 0, done.stdout + done.stderr
    kill_after(parts, [*words, *IN_PARTS], step=7)
    expected, before = losses(whole), losses(parts)
    again = builders.launch(parts, *words, "--training.tiled_mlp_num_shards=3")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from checkpoint-00000" in again.stdout
    after = losses(parts)
    assert len(expected) == len(after) == 18
    for step, loss in expected.items():
        assert after[step] == pytest.approx(loss, rel=1e-5)
        assert before.get(step, loss) == pytest.approx(loss, rel=1e-5)
    plans = [plan.read_text() for plan in sorted(parts.glob("runs/tiny/2*/attempts/*/plan.json"))]
    assert ['"tiled_mlp_num_shards": 4' in plan for plan in plans] == [True, False]
    assert ['"tiled_mlp_num_shards": 3' in plan for plan in plans] == [False, True]
    one, other = weights(whole / "model"), weights(tmp_path / "model")
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-5, msg=name)
