"""transformers' TrainingArguments, made from a recipe and its plan."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import TrainingArguments

from launch.schema.plan import Plan, Strategy
from launch.schema.recipe import COMPILE_KEYS, LIGER_LOSSES, Recipe, TrainingSection
from training.compat import transformers_private

SWITCHED = ("tf32", "use_liger_kernel")  # as the plan says


def of(
    recipe: Recipe, plan: Plan, rows: int, evaluates: bool, engine: dict[str, Any]
) -> TrainingArguments:
    """The recipe's training section as transformers takes it; making it starts the process
    group."""
    training, strategy = recipe.training, plan.strategy
    steps_per_epoch = -(-rows // strategy.effective_batch_size)
    args = TrainingArguments(
        output_dir=os.devnull,  # the run folder is agreed on once the ranks can talk
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
        optim=training.optim,
        bf16=strategy.mixed_precision == "bf16",
        fp16=strategy.mixed_precision == "fp16",
        **transformers_private.by_installed_names(
            {
                "activation_checkpointing": strategy.activation_checkpointing,
                **_extras(training, strategy),
            }
        ),
        logging_steps=training.logging_steps,
        logging_nan_inf_filter=False,  # a NaN is shown as a NaN
        save_strategy="steps",
        save_steps=training.save_steps,
        save_total_limit=None,  # rotation is ours (checkpoint.py)
        metric_for_best_model="eval_loss" if training.load_best_model_at_end else None,
        eval_strategy="steps" if evaluates else "no",
        eval_steps=training.eval_steps or steps_per_epoch,
        seed=training.seed,
        dataloader_num_workers=strategy.dataloader_num_workers,
        use_cpu=strategy.device == "cpu",
        **engine,
        report_to=["tensorboard"],
        disable_tqdm=True,
        remove_unused_columns=False,
        tf32=None if strategy.tf32 else False,  # not turned on beside torch.compile by itself
    )
    if strategy.device == "cuda":
        transformers_private.hold_to_one_gpu(args)
        # Also against TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which containers set. TrainingArguments'
        # own way leaves that as it is, and asking for this flag is an error after it (torch 2.13:
        # "mix of the legacy and new APIs").
        torch.backends.cuda.matmul.allow_tf32 = strategy.tf32
    return args


def _extras(training: TrainingSection, strategy: Strategy) -> dict[str, Any]:
    """What else the recipe says, over defaults of ours: nothing we build leaves a parameter out."""
    found = {
        "ddp_find_unused_parameters": False,
        "dataloader_persistent_workers": True,
        **training.extras,
    }
    left_out = SWITCHED if strategy.torch_compile else (*SWITCHED, *COMPILE_KEYS)
    found = {key: value for key, value in found.items() if key not in left_out}
    if strategy.use_liger_kernel:  # without its losses: ours is not the model's (trainer.py)
        losses = dict.fromkeys(LIGER_LOSSES, False)
        found |= {
            "use_liger_kernel": True,
            "liger_kernel_config": {**(found.get("liger_kernel_config") or {}), **losses},
        }
    found.pop("save_strategy", None)  # steps, all that a recipe may say, is said above
    # transformers refuses it where nobody is there to work ahead
    if not strategy.dataloader_num_workers:
        found.pop("dataloader_prefetch_factor", None)
    return found
