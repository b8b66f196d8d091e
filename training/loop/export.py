"""Export of the trained model as an ordinary Hugging Face folder with tokenizer and model card. It
replaces the previous folder in one step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from launch.base import files
from launch.run_folder import layout
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import ExportedModel
from training.compat.transformers_private import Network
from training.data import tokenizer as data_tokenizer
from training.loop import nan_guard
from training.loop.trainer import LowMemTrainer
from training.model import four_bit


def write(
    network: Network,
    trainer: LowMemTrainer,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    plan: Plan,
    run_id: str,
    uninterrupted: Callable[[], AbstractContextManager[None]],
) -> str:
    """Write recipe.output_dir and return a description of its content. A previous folder is ours,
    which was checked before the launch.

    `network` holds all the weights. It is the trainer's own model or a copy. The folders are
    swapped `uninterrupted`.
    """
    target = Path(recipe.output_dir)
    aside, old = (target.with_name(f".{target.name}.{ending}") for ending in ("tmp", "old"))
    for leftover in (aside, old):
        if leftover.exists():
            shutil.rmtree(leftover)
    nan_guard.check_export(network, trainer.state.global_step)
    aside.mkdir(parents=True)
    content = save_weights(network, tokenizer, recipe, aside, trainer.state.global_step)
    (aside / "README.md").write_text(_card(trainer, recipe, plan, content), encoding="utf-8")
    quantization = recipe.quantized(plan.strategy.mixed_precision)
    facts = ExportedModel(
        run_id,
        recipe.name,
        trainer.state.global_step,
        quantization=quantization.model_dump() if quantization else None,
        tokenizer_loading=data_tokenizer.loading_of_recipe(recipe),
        check=f"{layout.NOT_CHECKED}: the run ended before",
    )
    files.write_json(aside / "lowmem.json", facts)
    files.sync_all(aside)
    with uninterrupted():
        _swap(aside, target, old, is_another_runs=bool(layout.kept_aside(target, run_id)))
    return content


def write_check(folder: Path, check: str) -> None:
    """Write into an exported folder how its check has ended."""
    facts = files.read(folder / "lowmem.json", ExportedModel)
    assert facts is not None
    files.write_json(folder / "lowmem.json", replace(facts, check=check))


def _swap(aside: Path, target: Path, old: Path, is_another_runs: bool) -> None:
    if target.exists():
        target.rename(old)
    aside.rename(target)
    if is_another_runs:
        previous = target.with_name(f"{target.name}.previous")
        if previous.exists():
            shutil.rmtree(previous)
        old.rename(previous)
    elif old.exists():
        shutil.rmtree(old)


def save_weights(
    model: Network, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, folder: Path, step: int
) -> str:
    """Save the weights; return a description of the content. A LoRA adapter on a named shape is
    merged, because its random base is stored nowhere else. An adapter on a local folder stays
    separate, also on 4-bit weights: the folder still has the full weights, into which it can be
    merged."""
    section = recipe.model
    is_lora = hasattr(model, "peft_config")
    if is_lora and section.path is None:
        model.save_pretrained(folder / "adapter")
        if recipe.quantization is not None:
            model = four_bit.merged(model, getattr(torch, section.dtype))
        else:
            model = model.merge_and_unload()
        nan_guard.check_export(model, step)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if not is_lora:
        return "the whole model"
    return (
        "the model with its LoRA adapter merged"
        if section.path is None
        else f"a LoRA adapter for {section.path}"
    )


def _quantization(recipe: Recipe) -> list[str]:
    section = recipe.quantization
    if section is None:
        return []
    line = f"- trained on linear weights of 4 bits ({section.bnb_4bit_quant_type})"
    if recipe.model.path is None:
        return [f"{line}; merged into them, dequantised"]
    return [
        f"{line}; to merge it into the full weights of {recipe.model.path}: python -m launch merge"
        " FOLDER --out NEW"
    ]


def last(history: list[dict[str, float]], key: str) -> float | None:
    """The latest value of a key in Trainer's log history."""
    return next((entry[key] for entry in reversed(history) if key in entry), None)


def _card(trainer: LowMemTrainer, recipe: Recipe, plan: Plan, content: str) -> str:
    state = trainer.state
    eval_loss = (
        state.best_metric if state.best_global_step else last(state.log_history, "eval_loss")
    )
    figures = [
        f"- recipe: {recipe.name} ({recipe.task})",
        (
            f"- model: {plan.shape.name}, {plan.shape.parameters:,} parameters; this folder holds"
            f" {content}"
        ),
        *_quantization(recipe),
        f"- data: {recipe.data.train_names}",
        (
            f"- effective batch size {plan.strategy.effective_batch_size},"
            f" {trainer.state.global_step:,} optimizer steps"
        ),
        f"- learning rate {trainer.args.learning_rate:g}, {recipe.training.lr_scheduler_type}",
        (
            f"- held-out loss: {eval_loss:.4f}"
            if eval_loss is not None
            else "- held-out loss: not measured"
        ),
        *(
            [f"- weights of step {state.best_global_step:,}, which had the lowest"]
            if state.best_global_step
            else []
        ),
    ]
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            "---",
            f"# {Path(recipe.output_dir).name}",
            "",
            *figures,
            "",
        ]
    )
