"""transformers' TrainingArguments, made from a recipe and its plan."""

import os
from typing import Any

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from launch.schema.levers import Levers
from launch.schema.plan import Plan, Strategy
from launch.schema.recipe import Recipe
from launch.schema.training_section import COMPILE_KEYS, TENSORBOARD, TrainingSection
from training.compat import transformers_private


def make_arguments(
    recipe: Recipe, plan: Plan, rows: int, evaluates: bool, engine: dict[str, Any]
) -> TrainingArguments:
    """The recipe's training section as TrainingArguments. Its construction starts the process
    group."""
    training, strategy = recipe.training, plan.strategy
    if strategy.device == "cpu" and torch.distributed.is_initialized():
        # accelerate's cpu:0 is another device: .to() would copy weights that are views of files
        PartialState().device = torch.device("cpu")
    steps_per_epoch = -(-rows // strategy.effective_batch_size)
    args = TrainingArguments(
        output_dir=os.devnull,  # the ranks agree on the run folder later
        per_device_train_batch_size=strategy.per_device_train_batch_size,
        per_device_eval_batch_size=strategy.per_device_eval_batch_size,
        gradient_accumulation_steps=strategy.gradient_accumulation_steps,
        num_train_epochs=training.num_train_epochs,
        max_steps=training.max_steps,
        learning_rate=training.learning_rate_at(strategy.effective_batch_size),
        warmup_steps=training.warmup_steps,
        lr_scheduler_type=training.lr_scheduler_type,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        label_smoothing_factor=training.label_smoothing_factor,
        bf16=strategy.mixed_precision == "bf16",
        fp16=strategy.mixed_precision == "fp16",
        **transformers_private.by_installed_names(_extras(training, strategy, evaluates)),
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # show a NaN as a NaN
        save_strategy="steps",
        save_steps=training.save_steps,
        save_total_limit=None,  # commit.py deletes old checkpoints
        metric_for_best_model=(
            "eval_loss"
            if training.load_best_model_at_end or training.early_stopping_patience
            else None
        ),
        eval_strategy="steps" if evaluates else "no",
        eval_steps=training.eval_steps or steps_per_epoch,
        seed=training.seed,
        dataloader_num_workers=strategy.dataloader_num_workers,
        use_cpu=strategy.device == "cpu",
        **engine,
        report_to=[TENSORBOARD] if TENSORBOARD in training.report_to else [],  # trackers.py: others
        disable_tqdm=True,
        remove_unused_columns=False,
        tf32=None if strategy.tf32 else False,  # torch.compile would turn it on otherwise
    )
    if strategy.device == "cuda":
        transformers_private.hold_to_one_gpu(args)
        # This overrides TORCH_ALLOW_TF32_CUBLAS_OVERRIDE too, which containers set.
        # TrainingArguments' own setting does not, and reading this flag after it is an error (torch
        # 2.13: "mix of the legacy and new APIs").
        torch.backends.cuda.matmul.allow_tf32 = strategy.tf32
    return args


def timeout_s(training: TrainingSection) -> float:
    """Seconds that a rank waits for the others."""
    return training.extras.get("ddp_timeout", TrainingArguments.ddp_timeout)


def _extras(training: TrainingSection, strategy: Strategy, evaluates: bool) -> dict[str, Any]:
    """The recipe's other fields over our defaults, and levers. Our models use all their
    parameters."""
    defaults = {"ddp_find_unused_parameters": False, "dataloader_persistent_workers": True}
    left_out = [
        # Fields that make_arguments() sets; the only save_strategy of a recipe is steps
        *("tf32", "save_strategy"),
        *([] if evaluates else ["eval_on_start"]),
        # transformers refuses it without workers
        *([] if strategy.dataloader_num_workers else ["dataloader_prefetch_factor"]),
        *([] if strategy.levers.torch_compile else COMPILE_KEYS),  # each of them turns it on
    ]
    extras = {**defaults, **training.extras, **_levers(training, strategy.levers)}
    return {name: value for name, value in extras.items() if name not in left_out}


def _levers(training: TrainingSection, levers: Levers) -> dict[str, Any]:
    """The levers that transformers applies by itself."""
    checkpointing = {
        **training.activation_checkpointing_kwargs.arguments,
        **({"every_n_layers": levers.every_n_layers} if levers.every_n_layers > 1 else {}),
        **({"offload": True} if levers.activation_offloading else {}),
    }
    return {
        "optim": levers.optim,
        "torch_compile": levers.torch_compile,
        "activation_checkpointing": levers.every_n_layers > 0,
        "activation_checkpointing_kwargs": checkpointing or None,
    }
