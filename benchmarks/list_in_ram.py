"""The plain script that others compare with, as one rank runs it under accelerate launch.

Each rank reads the parquet file into a Python list of {prompt, response}; the collator tokenises each micro-batch; the
same model trains with transformers.Trainer as it is. With --save-steps it saves, and goes on from the newest. Rank 0
appends the number and the time of each optimizer step to --steps-file.
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
    AutoTokenizer,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import get_last_checkpoint

from benchmarks.recording import CODE


def collate(rows: list[dict[str, str]], tokenizer: Any, max_length: int) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask, labels (batch, seq); the prompt is not a target."""
    inputs, labels = [], []
    for row in rows:
        turns = [{"role": "user", "content": row["prompt"]}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        after = [*tokenizer(row["response"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        inputs.append([*before, *after][:max_length])
        labels.append([*[-100] * len(before), *after][:max_length])
    width = max(map(len, inputs))
    pad = tokenizer.pad_token_id
    return {
        "input_ids": torch.tensor([[*ids, *[pad] * (width - len(ids))] for ids in inputs]),
        "attention_mask": torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in inputs]),
        "labels": torch.tensor([[*ids, *[-100] * (width - len(ids))] for ids in labels]),
    }


class StepTimes(TrainerCallback):
    """The number of each optimizer step and the unix time at its end, a line each."""

    def __init__(self, file: Path) -> None:
        self.file = file.open("a", encoding="utf-8", buffering=1)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, *rest: Any, **kwargs: Any) -> None:
        if args.process_index == 0:
            self.file.write(json.dumps({"step": state.global_step, "time": time.time()}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="parquet with the columns prompt, response")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--shape", required=True, help="a name in configs/models/")
    parser.add_argument("--max-length", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True, help="rows per rank and step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--steps-file", type=Path, required=True)
    parser.add_argument("--save-steps", type=int)
    arguments = parser.parse_args()
    rows = pq.read_table(arguments.rows).to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(arguments.tokenizer)
    shape = yaml.safe_load((CODE / "configs" / "models" / f"{arguments.shape}.yaml").read_text(encoding="utf-8"))
    torch.manual_seed(arguments.seed)
    output = arguments.steps_file.parent / "list_in_ram"
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape)),
        args=TrainingArguments(
            output_dir=str(output),
            per_device_train_batch_size=arguments.batch,
            max_steps=arguments.steps,
            learning_rate=1e-3,
            seed=arguments.seed,
            use_cpu=True,
            ddp_backend="gloo",
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
        data_collator=lambda batch: collate(batch, tokenizer, arguments.max_length),
        callbacks=[StepTimes(arguments.steps_file)],
    )
    assert trainer.args.world_size == 2
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(output)) if output.is_dir() else None)


if __name__ == "__main__":
    main()
