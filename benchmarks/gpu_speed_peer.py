"""A peer's training of gpu_speed, as its users write it: plain Trainer, TRL with Liger, or Unsloth.

    python -m benchmarks.gpu_speed_peer ASKED.json

All read the same model folder and rows that are tokenised already. It stops at the gates of
gpu_speed_hook. What is asked, and where: benchmarks/gpu_speed.py.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks import gpu_speed_hook
from benchmarks.gpu_speed_hook import Counts, Segments

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Asked = Mapping[str, Any]


def settle(asked: Asked) -> None:
    """Set what the libraries read when they are imported; Unsloth has to be the first of them."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    if asked["kind"] == "unsloth":
        os.environ["UNSLOTH_DISABLE_STATISTICS"] = "1"
        os.environ["UNSLOTH_DISABLE_AUTO_UPDATES"] = "1"
        os.environ["UNSLOTH_COMPILE_LOCATION"] = str(Path(asked["folder"]) / "unsloth_compiled")
        import_module("unsloth")  # before the libraries that it changes
    for name in (
        "datasets",
        "peft",
        "transformers",
        *(["trl"] if asked["kind"] != "plain" else []),
    ):
        import_module(name)


def arguments(asked: Asked) -> dict[str, Any]:
    """TrainingArguments that all peers share, and those of this one."""
    plan = Segments.from_text(os.environ[gpu_speed_hook.STEPS])
    by_torch = asked["checkpointing"] and asked["kind"] != "unsloth"
    reentrant = {"gradient_checkpointing_kwargs": {"use_reentrant": False}} if by_torch else {}
    return {
        "output_dir": str(Path(asked["folder"]) / "trained"),
        "max_steps": plan.max_steps,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_num_workers": 2,
        "gradient_checkpointing": asked["checkpointing"],
        **reentrant,
        **asked["training"],
        **asked["arguments"],
    }


def rows(asked: Asked) -> Any:
    """The tokenised rows: input_ids and labels."""
    import datasets

    return datasets.Dataset.from_file(asked["rows"])


def network(asked: Asked) -> Any:
    """The model, in float32 if all of it is trained, else in bfloat16 or 4 bits."""
    import torch
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    dtype = torch.bfloat16 if asked["lora"] else torch.float32
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if asked["four_bit"]:
        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
        options["device_map"] = {"": 0}
    return AutoModelForCausalLM.from_pretrained(asked["model"], **options)


def adapters(asked: Asked) -> Any:
    """LoRA's configuration; None where all weights are trained."""
    import peft

    if not asked["lora"]:
        return None
    return peft.LoraConfig(
        **asked["lora"], lora_dropout=0.0, target_modules=TARGETS, task_type="CAUSAL_LM"
    )


def plain(asked: Asked) -> Any:
    """transformers.Trainer."""
    import peft
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

    model = network(asked)
    if asked["four_bit"]:
        model = peft.prepare_model_for_kbit_training(
            model,
            use_gradient_checkpointing=asked["checkpointing"],
            gradient_checkpointing_kwargs={"use_reentrant": False},
        )
    elif asked["lora"] and asked["checkpointing"]:
        model.enable_input_require_grads()
    if asked["lora"]:
        model = peft.get_peft_model(model, adapters(asked))
    model.config.use_cache = False
    collator = DataCollatorForSeq2Seq(AutoTokenizer.from_pretrained(asked["tokenizer"]))
    given = TrainingArguments(**arguments(asked))
    return Trainer(model=model, args=given, train_dataset=rows(asked), data_collator=collator)


def trl(asked: Asked) -> Any:
    """TRL's SFTTrainer."""
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=network(asked),
        args=SFTConfig(max_length=asked["max_length"], **arguments(asked)),
        train_dataset=rows(asked),
        processing_class=AutoTokenizer.from_pretrained(asked["tokenizer"]),
        peft_config=adapters(asked),
    )


def unsloth(asked: Asked) -> Any:
    """TRL's SFTTrainer of a model that Unsloth has patched."""
    import torch
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer
    from unsloth import FastLanguageModel

    model, _ = FastLanguageModel.from_pretrained(
        asked["model"],
        max_seq_length=asked["max_length"],
        dtype=torch.bfloat16,
        load_in_4bit=asked["four_bit"],
        local_files_only=True,
        device_map={"": 0},
    )
    model = FastLanguageModel.get_peft_model(
        model,
        **asked["lora"],
        target_modules=TARGETS,
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth" if asked["checkpointing"] else False,
        random_state=asked["training"]["seed"],
    )
    return SFTTrainer(
        model=model,
        args=SFTConfig(max_length=asked["max_length"], dataset_num_proc=1, **arguments(asked)),
        train_dataset=rows(asked),
        processing_class=AutoTokenizer.from_pretrained(asked["tokenizer"]),
    )


KINDS: Mapping[str, Callable[[Asked], Any]] = {"plain": plain, "trl": trl, "unsloth": unsloth}


def count(trainer: Any, counts: Counts) -> None:
    """Count the tokens and losses of each step, without a synchronisation."""
    inner, plan = trainer.training_step, Segments.from_text(os.environ[gpu_speed_hook.STEPS])

    def training_step(model: Any, inputs: Any, *words: Any, **named: Any) -> Any:
        ids, mask = inputs["input_ids"], inputs.get("attention_mask")
        if len(counts.tokens) < plan.begin(plan.rounds):
            is_padded = mask is not None and mask.dim() == 2
            counts.tokens.append(mask.sum() if is_padded else ids.numel())
            counts.computed.append(ids.numel())
        loss = inner(model, inputs, *words, **named)
        if len(counts.losses) < plan.warm:
            counts.losses.append(loss.detach())
        return loss

    trainer.training_step = training_step


def facts_of(trainer: Any) -> dict[str, Any]:
    """The arguments and the model as the libraries made them."""
    parameters = list(trainer.model.parameters())
    args = trainer.args
    names = ("packing", "use_liger_kernel", "gradient_checkpointing", "bf16", "optim")
    names += ("train_sampling_strategy", "per_device_train_batch_size")
    return {
        "trainable": sum(one.numel() for one in parameters if one.requires_grad),
        "dtypes": sorted({f"{one.dtype}, trained: {one.requires_grad}" for one in parameters}),
        "attention": str(getattr(trainer.model.config, "_attn_implementation", None)),
        "collator": type(trainer.data_collator).__name__,
        "arguments": {name: str(getattr(args, name, None)) for name in names},
    }


def main(asked: Asked) -> None:
    settle(asked)
    gpu_speed_hook.rehearse()
    import torch

    torch.manual_seed(asked["training"]["seed"])
    gpu_speed_hook.stop_before_the_card()
    trainer = KINDS[asked["kind"]](asked)
    counts = Counts()
    count(trainer, counts)
    trainer.add_callback(gpu_speed_hook.callback(counts, lambda: facts_of(trainer)))
    trainer.train()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
