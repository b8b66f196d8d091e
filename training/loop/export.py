"""Export of a run that is complete: the model is collected from all ranks; then rank 0 writes it as
an ordinary Hugging Face folder with tokenizer and model card, which replaces the previous folder in
one step, and checks it."""

import itertools
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from launch.base import files
from launch.base.errors import ExportError
from launch.data.conversation import Conversation
from launch.run_folder import layout
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import ExportedModel
from training.compat import deepspeed_private
from training.compat.transformers_private import Network
from training.data import tokenizer as data_tokenizer
from training.engines import setup
from training.log import logger
from training.loop import export_check, exported_files, nan_guard
from training.loop.callbacks import HostMemory
from training.loop.trainer import LowMemTrainer
from training.model import build, four_bit, merging


def collect(
    start: layout.RankStart, trainer: LowMemTrainer, tokens: Path, questions: Sequence[Conversation]
) -> tuple[Network, export_check.Trained] | None:
    """Collect what rank 0 exports: the model with all its weights (the trainer's own, or a copy on
    the host), and what its folder must compute. None on another rank. Collective."""
    expected = export_check.trained(start, trainer, tokens, questions)
    network: Network = trainer.accelerator.unwrap_model(trainer.model)
    if start.plan.strategy.launch_mode.shards_parameters:
        network = _gathered(start, trainer, network)
    return (network, expected) if trainer.args.process_index == 0 else None


def _gathered(start: layout.RankStart, trainer: LowMemTrainer, trained: Network) -> Network | None:
    """The model on rank 0's host, with the weights of all ranks, gathered one at a time. Another
    rank's has no values. Collective."""
    recipe, plan, is_first = start.recipe, start.plan, trainer.args.process_index == 0
    quantization = recipe.quantized(plan.strategy.mixed_precision)
    if quantization and recipe.model.path is not None:  # the folder has the weights of 4 bits
        four_bit.gather_trained(trained, is_first)
        return trained
    network, copies = None, {}
    if is_first:
        with setup.whole_weights(plan.strategy):
            network = build.build(
                *(recipe.model, plan.shape, recipe.lora, plan.lora_targets),
                *(trainer.processing_class, recipe.training.seed, quantization),
                keeps_ids=recipe.keeps_ids,
            )
        copies = dict(four_bit.named_numbers(network))
    # weights of 4 bits are those of the same seed
    for name, parameter in four_bit.named_numbers(trained):
        with deepspeed_private.gathered([parameter]), torch.no_grad():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            if is_first:
                copies.pop(name).copy_(full)
    assert not copies, f"not gathered: {sorted(copies)}"
    return network


def write(
    start: layout.RankStart,
    run_id: str,
    trainer: LowMemTrainer,
    network: Network,
    expected: export_check.Trained,
    host: HostMemory,
    uninterrupted: Callable[[], AbstractContextManager[None]],
) -> str:
    """Write the model's folder on rank 0 and check it; a sentence on what was compared. The folder
    takes its name `uninterrupted`. Raises ExportError."""
    recipe, plan = start.recipe, start.plan
    folder = Path(recipe.output_dir)
    if trainer.streaming is not None and recipe.model.path is None:
        trainer.streaming.give_back()  # the adapter is merged
        network.to("cpu")
    content = _write_folder(network, trainer, recipe, plan, run_id, uninterrupted)
    logger.info("model: %s (%s)", folder, content)
    free_bytes = export_check.close_engine(trainer, plan.estimate.host_bytes, host.read())
    try:
        with setup.whole_weights(plan.strategy):
            checked = export_check.check(
                *(folder, recipe, trainer.accelerator, network, expected, free_bytes)
            )
    except ExportError as error:
        _write_check(folder, f"{layout.NOT_CHECKED}: {error}")
        error.fix = (
            "do not use this folder; the same line again exports the last step, and checks it again"
        )
        raise
    _write_check(folder, checked)
    logger.info("checked: %s", checked)
    return checked


def _write_folder(
    network: Network,
    trainer: LowMemTrainer,
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
    aside, old = (
        cleared(target.with_name(f".{target.name}.{ending}")) for ending in ("tmp", "old")
    )
    nan_guard.check_export(
        network, trainer.state.global_step, recipe.output_dtype(plan.shape.config)
    )
    aside.mkdir(parents=True)
    quantization = recipe.quantized(plan.strategy.mixed_precision)
    facts = ExportedModel(
        run_id,
        recipe.name,
        trainer.state.global_step,
        quantization=quantization.model_dump() if quantization else None,
        dtype=recipe.model.dtype,
        tokenizer_loading=data_tokenizer.loading_of_recipe(recipe),
        downloaded=tuple(map(str, layout.downloads(recipe))),
        check=f"{layout.NOT_CHECKED}: the run ended before",
    )
    files.write_json(aside / "lowmem.json", facts)  # first: it marks the folder as ours
    content = save_weights(
        *(network, trainer.processing_class, recipe, plan.shape.config, aside),
        trainer.state.global_step,
        is_short_of_ram=plan.strategy.launch_mode.offloads,
    )
    (aside / "README.md").write_text(_card(trainer, recipe, plan, content), encoding="utf-8")
    files.sync_all(aside)
    with uninterrupted():
        swap(aside, target, old, is_another_runs=bool(layout.kept_aside(target, run_id)))
    return content


def _write_check(folder: Path, check: str) -> None:
    """Write into an exported folder how its check has ended."""
    facts = files.read(folder / "lowmem.json", ExportedModel)
    assert facts is not None
    files.write_json(folder / "lowmem.json", replace(facts, check=check))


@torch.no_grad()
def round_weights(model: Network, recipe: Recipe, config: Mapping[str, Any]) -> None:
    """Round trained weights, of which this rank may hold parts, to numbers of the exported type, so
    that what is scored is what is exported. Adapters are not rounded."""
    dtype = recipe.output_dtype(config)
    if recipe.lora is not None or dtype == recipe.model.dtype:
        return
    for parameter in model.parameters():
        # ZeRO 3 keeps small weights whole beside its part
        gathered = [parameter.data] if hasattr(parameter, "ds_tensor") else []
        for part in (nan_guard.local_part(parameter), *gathered):
            part.copy_(part.to(getattr(torch, dtype)))


def swap(aside: Path, target: Path, old: Path, is_another_runs: bool) -> None:
    """Put `aside` in the place of `target`. What stood there is kept as `.previous` if it is the
    model of another run, or not ours: somebody has made it while the run trained."""
    if os.path.lexists(target):
        target.rename(old)
    aside.rename(target)
    if not os.path.lexists(old):
        return
    if files.is_model(old) and not is_another_runs:
        shutil.rmtree(old)
        return
    with suppress(OSError):  # an empty folder of the user's
        old.rmdir()
        return
    aside = cleared(target.with_name(f"{target.name}.previous"))
    old.rename(aside)
    if not is_another_runs:
        logger.warning("%s: what others have put there is kept as %s", target, aside)


def cleared(path: Path) -> Path:
    """The path, of which a model of ours is removed; one with a number where something else stands
    there."""
    if files.is_model(path):
        shutil.rmtree(path)
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(free for free in itertools.chain([path], numbered) if not os.path.lexists(free))


def save_weights(
    model: Network,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    config: Mapping[str, Any],
    folder: Path,
    step: int,
    is_short_of_ram: bool = False,
) -> str:
    """Save the weights; return a description of the content. `config` is that of the model before
    training. A LoRA adapter on a named shape is
    merged, because its random base is stored nowhere else. An adapter on a local folder stays
    separate, also on 4-bit weights: the folder still has the full weights, into which it can be
    merged."""
    section = recipe.model
    is_lora = hasattr(model, "peft_config")
    if is_lora and section.path is None:
        model.save_pretrained(folder / "adapter")
        merge = (
            model.merge_and_unload
            if recipe.quantization is None
            else partial(four_bit.merged, model, getattr(torch, section.dtype))
        )
        model = merging.merged(model, merge)
    source = recipe.tokenizer.path or section.path
    for line in exported_files.save_tokenizer(tokenizer, folder, Path(source) if source else None):
        logger.info("%s", line)
    if is_lora and section.path is not None:
        model.save_pretrained(folder)
        model.get_base_model().generation_config.save_pretrained(folder)
        return f"a LoRA adapter for {section.path}"
    dtype = recipe.output_dtype(config)
    for parameter in model.parameters():
        if parameter.dtype != getattr(torch, dtype):
            parameter.data = parameter.data.to("cpu", getattr(torch, dtype))
    nan_guard.check_export(model, step, dtype)
    exported_files.save_model(model, folder, config, is_short_of_ram)
    return "the model with its LoRA adapter merged" if is_lora else "the whole model"


def _quantization(recipe: Recipe) -> list[str]:
    section = recipe.quantization
    if section is None:
        return []
    line = f"- trained on linear weights of 4 bits ({section.bnb_4bit_quant_type})"
    if recipe.model.path is None:
        return [f"{line}; merged into them, dequantised"]
    path, base = recipe.model.path, ""
    if hasattr(build.folder_config(path), "quantization_config"):
        path, base = "the original of " + path, " --base ORIGINAL"
    return [
        f"{line}; to merge it into the full weights of {path}: python -m launch merge FOLDER{base}"
        " --out NEW"
    ]


def last(history: list[dict[str, float]], key: str) -> float | None:
    """The latest value of a key in Trainer's log history."""
    return next((entry[key] for entry in reversed(history) if key in entry), None)


def _licence(recipe: Recipe) -> list[str]:
    """The line of a card for the licence of the model that was downloaded and trained."""
    return [
        f"license: {each.licence}"
        for each in layout.downloads(recipe)
        if not each.name.startswith("hf:") and re.fullmatch(r"[\w.-]+", each.licence)
    ]


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
        *(f"- downloaded: {record}" for record in layout.downloads(recipe)),
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
            *_licence(recipe),
            "---",
            f"# {Path(recipe.output_dir).name}",
            "",
            *figures,
            "",
        ]
    )
