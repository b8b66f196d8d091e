"""Real steps of LowMemTrainer in this process: random weights, one random batch again and again."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from launch.data.rows import IGNORED
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from training.data.batches import TARGET_TENSORS, Collator, Row, targets
from training.data.sample_order import SampleOrder
from training.loop import arguments
from training.loop.callbacks import StepMeter
from training.loop.trainer import LowMemTrainer
from training.model import build, four_bit, varlen_attention


class Loader(list[dict[str, Any]]):
    """Batches, as Trainer wants to have them."""

    dataset = (0,)


def trainer(recipe: Recipe, plan: Plan, length: int, padded: bool, steps: int) -> LowMemTrainer:
    """A trainer on the CPU whose train() takes so many optimizer steps on rows of `length` tokens.

    `padded`: the first row is half as long."""
    strategy = plan.strategy
    args = arguments.make_arguments(recipe, plan, 9, False, {"ddp_backend": None})
    args.report_to, args.save_strategy, args.output_dir, args.max_steps = [], "no", ".", steps
    torch.manual_seed(1)
    rows = batch(recipe, plan, length, padded)

    class Repeated(LowMemTrainer):
        def get_train_dataloader(self) -> Any:
            return Loader([rows] * (steps * strategy.gradient_accumulation_steps))

    torch.manual_seed(0)
    with torch.device("cpu"):
        attention = strategy.levers.attn_implementation
        built = "eager" if attention == "eager" else "sdpa"
        made = build.from_shape(
            recipe.model, plan.shape, recipe.quantized(strategy.mixed_precision), built
        )
        varlen_attention.register(attention)
        made.config._attn_implementation = attention
        network = build.prepare_to_train(made, recipe.model, recipe.lora, plan.lora_targets)
    found = Repeated(
        order=SampleOrder(
            9, strategy.per_device_train_batch_size, strategy.gradient_accumulation_steps, 1, 0, 0
        ),
        meter=StepMeter(),
        keep_checkpoints=2,
        levers=strategy.levers,
        facts={},
        model=network,
        args=args,
        train_dataset=[0],
    )
    found.remove_callback(PrinterCallback)
    return found


class _Steps(TrainerCallback):
    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        with record_function("step"):
            pass


def peak_bytes(trainer: LowMemTrainer, since_step: int = 0) -> int:
    """The most that torch's allocator holds while it trains, every allocation counted.

    since_step: the peak of the steps before it is none."""
    trainer.add_callback(_Steps())
    network = trainer.model
    scales = [tensor for one in network.parameters() for tensor in four_bit.scales(one)]
    there = (*network.parameters(), *network.buffers(), *scales)
    held = {one.untyped_storage().data_ptr(): one.nbytes for one in there}
    gc.collect()  # blocks of an earlier count, kept by cycles, would be taken off this one
    # it packs half-precision factors in buffers of its own
    without_onednn = torch.backends.mkldnn.flags(enabled=False)
    with (
        without_onednn,
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled,
    ):
        trainer.train()
    events = profiled.profiler.kineto_results.events()
    start = sorted(event.start_ns() for event in events if event.name() == "step")[since_step]
    live = highest = sum(held.values())
    for at, size in sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ):
        live += size
        if at >= start:
            highest = max(highest, live)
    return highest


def batch(recipe: Recipe, plan: Plan, length: int, padded: bool) -> dict[str, Any]:
    """A micro-batch of random tokens, as the collator shapes it."""
    count = plan.strategy.per_device_train_batch_size
    made = {
        "input_ids": torch.randint(5, 100, (count, length)),
        "attention_mask": torch.ones(count, length, dtype=torch.int64),
        "labels": torch.randint(5, 100, (count, length)),
    }
    if padded:
        made["attention_mask"][0, length // 2 :] = 0
        made["labels"][0, length // 2 :] = IGNORED
    if recipe.data.packing:
        del made["attention_mask"]
        made["position_ids"] = (torch.arange(length) % (length // 3)).repeat(count, 1)
        made["labels"][made["position_ids"] == 0] = IGNORED
    if plan.shape.config["model_type"] == "t5":
        made["decoder_input_ids"] = made["input_ids"].clone()
    else:
        made["labels"][:, 0] = IGNORED
    if plan.strategy.levers.flattens:
        made = _flattened(made)
    if plan.strategy.levers.logits_at_targets:
        shift = "decoder_input_ids" not in made
        made |= dict(zip(TARGET_TENSORS, targets(made["labels"].numpy(), shift), strict=True))
    return made


def _flattened(made: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The same documents, as the collator shapes them for flash_attn."""
    rows = []
    for at, ids in enumerate(made["input_ids"]):
        ids, labels, lengths = ids.numpy(), made["labels"][at].numpy(), None
        if "attention_mask" in made:
            count = int(made["attention_mask"][at].sum())
            ids, labels = ids[:count], labels[:count]
        else:
            starts = [*(made["position_ids"][at] == 0).nonzero().flatten().tolist(), len(ids)]
            lengths = np.diff(starts)
        rows.append(Row(ids, labels, lengths, number=at))
    return Collator(pad_token_id=0, flattens=True)(rows)
