"""Training with model.tie_word_embeddings: false on a folder that ties its output head: the head is
trained apart, through a kill too, and plain transformers loads the result."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from launch.run_folder.layout import RunDir
from tests import builders
from tests.modes.test_added_tokens import base_folder, held_out_loss
from tests.train_cpu.test_resume import kill_after


@pytest.mark.modes
@pytest.mark.parametrize(
    "mode",
    ["cpu", pytest.param("deepspeed_zero2", marks=pytest.mark.campaign), "deepspeed_zero3"],
)
def test_an_untied_head_is_trained_and_goes_on_after_a_kill(tmp_path, mode):
    base = base_folder(tmp_path / "base", tied=True)
    ranks = {} if mode == "cpu" else {"num_processes": 2}
    recipe = builders.recipe(
        tmp_path,
        model={"shape": None, "path": str(base), "tie_word_embeddings": False},
        training={"max_steps": 8, "save_steps": 2, "learning_rate": 5e-3},
        launch={"mode": mode, **ranks},
    )
    workspace, words = tmp_path / "workspace", ["run", str(recipe)]
    kill_after(workspace, words, step=5)
    done = builders.launch(workspace, *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "resuming from" in done.stdout
    run = RunDir(builders.only_run(workspace))
    outcome = json.loads(run.attempts()[-1].outcome_file.read_text())
    estimate = run.read_plan().estimate
    assert outcome["weights_bytes"] == estimate.weights_bytes
    start = AutoModelForCausalLM.from_pretrained(base)
    rows = start.lm_head.weight.numel()
    counted = sum(part.numel() for part in start.parameters()) + rows
    assert run.read_plan().shape.parameters == counted
    first = next(event for event in builders.events(run.root) if "loss" in event)
    assert first["loss"] > outcome["eval_loss"]
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    assert trained.config.tie_word_embeddings is False
    head, embedding = trained.lm_head.weight, trained.model.embed_tokens.weight
    assert not torch.allclose(head, embedding, atol=1e-3)
    assert held_out_loss(trained, workspace) == pytest.approx(outcome["eval_loss"], rel=1e-4)
