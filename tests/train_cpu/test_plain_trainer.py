"""Logits at targets alone: the losses and weights of transformers.Trainer, which computes the
logits of every position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import Trainer
from transformers.trainer_callback import PrinterCallback

from launch.data.rows import IGNORED
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from tests import builders
from tests.real_steps import Loader
from training.data.batches import NOTHING, Collator, Row
from training.data.sample_order import SampleOrder
from training.loop import arguments
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer
from training.model import build

STEPS, ACCUMULATION = 3, 2
# tokens of the prompt and of the answer of each row, by micro-batch; one has no target
ROWS = (
    ((9, 5), (3, 14)),
    ((4, 4), (20, 1)),
    ((12, 0), (7, 0)),
    ((2, 17), (8, 8)),
    ((15, 3), (1, 1)),
    ((6, 6), (6, 6)),
)


def rows_of(lengths: Sequence[tuple[int, int]], is_pair: bool, random: Any) -> list[Row]:
    rows = []
    for number, (prompt, answer) in enumerate(lengths):
        ids, labels = (random.integers(5, 100, size) for size in (prompt + answer, answer))
        if is_pair:
            labels = labels if answer else np.full(1, IGNORED)
            rows.append(Row(ids[:prompt], labels, number=number))
            continue
        labels = np.concatenate([np.full(prompt, IGNORED), ids[prompt:]])
        rows.append(Row(ids, labels, np.array([prompt + answer]), number=number))
    return rows


def batches(plan: Plan, is_packed: bool, names_targets: bool) -> Loader:
    is_pair = plan.shape.is_encoder_decoder
    collate = Collator(0, 0 if is_pair else None, is_packed=is_packed, names_targets=names_targets)
    random = np.random.default_rng(0)
    made = [collate(rows_of(lengths, is_pair, random)) for lengths in ROWS]
    assert all(made), NOTHING
    return Loader(made)


def network(recipe: Recipe, plan: Plan) -> Any:
    torch.manual_seed(0)
    made = build.from_shape(recipe.model, plan.shape)
    return build.prepare_to_train(made, recipe.model, recipe.lora, plan.lora_targets)


def losses_and_weights(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(0)
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert len(losses) == STEPS
    return losses, {name: one.detach() for name, one in trainer.model.named_parameters()}


def plain_loss(
    outputs: Any, labels: torch.Tensor, num_items_in_batch: Any, shift: bool, smoothing: float
) -> Any:
    """That of transformers' models, for encoder-decoders too."""
    logits, targets = outputs.logits.float(), labels
    if shift:
        logits, targets = logits[:, :-1], labels[:, 1:]
    summed = functional.cross_entropy(
        logits.reshape(-1, logits.size(-1)), targets.reshape(-1), reduction="sum"
    )
    mean_loss = -logits[targets != IGNORED].log_softmax(-1).mean(-1).sum()
    return ((1 - smoothing) * summed + smoothing * mean_loss) / num_items_in_batch


@pytest.mark.parametrize(
    "case",
    [
        *("plain", "packed", "bf16", "in 3 chunks", "LoRA"),
        *("smoothed", "packed, smoothed", "in 3 chunks, smoothed"),
    ],
)
@pytest.mark.parametrize(
    "shape",
    ["llama-tiny", pytest.param("gpt2-tiny", marks=pytest.mark.modes), "t5-tiny"],
)
def test_losses_and_weights_are_those_of_every_position(tmp_path, monkeypatch, shape, case):
    if shape == "t5-tiny" and "packed" in case:
        pytest.skip("rows of an encoder-decoder are not packed")
    monkeypatch.chdir(tmp_path)
    sections: dict[str, Any] = {"lora": {"r": 4}} if case == "LoRA" else {}
    training = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": ACCUMULATION,
        "num_output_chunks": 3 if "in 3 chunks" in case else 1,
        "bf16": case == "bf16",
        "optim": "sgd",  # whose steps are as exact as the gradients
        "learning_rate": 0.1,
        "logging_steps": 1,
        "max_steps": STEPS,
    }
    recipe = builders.recipe_of(
        model={"shape": shape}, training=training, data={"packing": "packed" in case}, **sections
    )
    plan = builders.plan(recipe)
    assert plan.strategy.levers.logits_at_targets
    made = arguments.make_arguments(recipe, plan, 4 * STEPS, False, {"ddp_backend": None})
    made.label_smoothing_factor = 0.3 if "smoothed" in case else 0.0
    made.report_to, made.save_strategy, made.output_dir = [], "no", "."
    is_packed, shift = "packed" in case, shape != "t5-tiny"

    class Ours(LowMemTrainer):
        def get_train_dataloader(self) -> Any:
            return batches(plan, is_packed, names_targets=True)

    class Plain(Trainer):
        def get_train_dataloader(self) -> Any:
            loader = batches(plan, is_packed, names_targets=False)
            unused = ("sample_ids", "num_tokens", "num_samples", "is_padded")
            return Loader([{k: v for k, v in each.items() if k not in unused} for each in loader])

    ours = Ours(
        order=SampleOrder(4 * STEPS, 2, ACCUMULATION, 1, 0, 0),
        meter=StepMeter(),
        keep_checkpoints=2,
        levers=plan.strategy.levers,
        facts={},
        model=network(recipe, plan),
        args=made,
        train_dataset=[0],
    )
    plain = Plain(
        model=network(recipe, plan),
        args=made,
        train_dataset=[0],  # pyright: ignore[reportArgumentType]
        compute_loss_func=lambda outputs, labels, num_items_in_batch: plain_loss(
            outputs, labels, num_items_in_batch, shift, made.label_smoothing_factor
        ),
    )
    (losses, weights), (expected, expected_weights) = map(losses_and_weights, (ours, plain))
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)
