"""The plain script that others compare with, as one rank runs it under accelerate launch.

Each rank reads the parquet file into a Python list of {prompt, response}; the collator tokenises
each micro-batch; the same model trains with transformers.Trainer as it is. With --save-steps it
saves, and goes on from the newest. Rank 0 appends the number and the time of each optimizer step,
and how many of its own tokens were no padding, to --steps-file. A model folder may be a T5's;
--pad-to-max-length pads every row to it, as the guides' scripts do.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch
import yaml
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.recording import CODE


def collate(
    rows: list[dict[str, str]],
    tokenizer: Any,
    max_length: int,
    is_t5: bool = False,
    pads_all: bool = False,
) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, labels (batch, seq); the prompt is not a target."""
    inputs, labels = [], []
    for row in rows:
        after = [
            *tokenizer(row["response"], add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]
        if is_t5:
            before = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"][
                : max_length - 1
            ]
            inputs.append([*before, tokenizer.eos_token_id])
            labels.append(after[:max_length])
            continue
        turns = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        inputs.append([*before, *after][:max_length])
        labels.append([*[-100] * len(before), *after][:max_length])

    def padded(parts: list[list[int]], value: int) -> torch.Tensor:
        width = max_length if pads_all else max(map(len, parts))
        return torch.tensor([[*part, *[value] * (width - len(part))] for part in parts])

    return {
        "input_ids": padded(inputs, tokenizer.pad_token_id),
        "attention_mask": padded([[1] * len(ids) for ids in inputs], 0),
        "labels": padded(labels, -100),
    }


class Counting(Trainer):
    """Trainer, which also counts what is no padding."""

    tokens = 0

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        mask = inputs.get("attention_mask")  # none: all rows in one sequence, without padding
        self.tokens += inputs["input_ids"].numel() if mask is None else int(mask.sum())
        if self.model.config.is_encoder_decoder:
            self.tokens += int((inputs["labels"] != -100).sum())
        return super().training_step(model, inputs, *args, **kwargs)


class StepTimes(TrainerCallback):
    """The number of each optimizer step, the unix time at its end and the tokens so far, a line
    each."""

    trainer: Counting

    def __init__(self, file: Path) -> None:
        self.file = file.open("a", encoding="utf-8", buffering=1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any
    ) -> None:
        if args.process_index == 0:
            said = {"step": state.global_step, "time": time.time(), "tokens": self.trainer.tokens}
            self.file.write(json.dumps(said) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=Path, required=True, help="parquet with the columns prompt, response"
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--shape", help="a name in configs/models/")
    model.add_argument("--model", type=Path, help="a folder")
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows per rank and micro-step")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps-file", type=Path, required=True)
    parser.add_argument("--save-steps", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pad-to-max-length", action="store_true")
    arguments = parser.parse_args()
    rows = pq.read_table(arguments.rows).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    torch.manual_seed(arguments.seed)
    if arguments.model:
        config = AutoConfig.from_pretrained(arguments.model)
        family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
        network = family.from_pretrained(arguments.model)
    else:
        shape = yaml.safe_load(
            (CODE / "configs" / "models" / f"{arguments.shape}.yaml").read_text(encoding="utf-8")
        )
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    is_t5 = network.config.is_encoder_decoder
    output = arguments.steps_file.parent / "list_in_ram"
    times = StepTimes(arguments.steps_file)
    times.trainer = trainer = Counting(
        model=network,
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=arguments.batch,
            gradient_accumulation_steps=arguments.accumulation,
            max_steps=arguments.steps,
            learning_rate=1e-3,
            seed=arguments.seed,
            use_cpu=True,
            ddp_backend="gloo" if arguments.ranks > 1 else None,
            ddp_find_unused_parameters=False,
            save_strategy="steps" if arguments.save_steps else "no",
            save_steps=arguments.save_steps or 500,
            save_total_limit=2,
            report_to=[],
            disable_tqdm=True,
            logging_steps=1,
            remove_unused_columns=False,
        ),
        train_dataset=rows,
        data_collator=lambda batch: collate(
            batch, tokenizer, arguments.max_length, is_t5, arguments.pad_to_max_length
        ),
        callbacks=[times],
    )
    assert trainer.args.world_size == arguments.ranks
    trainer.train(
        resume_from_checkpoint=get_last_checkpoint(str(output)) if output.is_dir() else None
    )


if __name__ == "__main__":
    main()
