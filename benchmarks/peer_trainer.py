"""A peer as its users write it, started by accelerate launch: transformers.Trainer, or TRL's
SFTTrainer.

    python -m benchmarks.peer_trainer ASKED.json

Both read rows that are tokenised already (TRL takes them as they are), so that all train on the
same tokens. After each optimizer step a line {step, time, tokens} goes to steps.jsonl; the losses
that were logged go to losses.json, and the model to trained/. What is asked, and where:
benchmarks/trainings.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    TrainingArguments,
)

from benchmarks.list_in_ram import Counting, StepTimes


def made(asked: dict[str, Any]) -> Counting:
    """The trainer that was asked for."""
    rows = datasets.Dataset.from_file(asked["tokens"])
    rows = rows.select_columns(
        [name for name in ("input_ids", "labels") if name in rows.column_names]
    )
    if asked["order"] is not None:
        rows = rows.select(asked["order"])
    tokenizer = AutoTokenizer.from_pretrained(asked["model"])
    config = AutoConfig.from_pretrained(asked["model"])
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_pretrained(asked["model"], dtype=torch.float32)
    if asked["sft"] is None:
        collator = DataCollatorForSeq2Seq(
            tokenizer, model=model if config.is_encoder_decoder else None
        )
        return Counting(
            model=model,
            args=TrainingArguments(**asked["arguments"]),
            train_dataset=rows,
            data_collator=collator,
        )
    # no package of ours: benchmarks/peers.py says how to get it
    from trl import SFTConfig, SFTTrainer

    class CountingSFT(Counting, SFTTrainer):
        pass

    arguments = SFTConfig(**asked["arguments"], **asked["sft"])
    return CountingSFT(model=model, args=arguments, train_dataset=rows, processing_class=tokenizer)


def main(asked: dict[str, Any]) -> None:
    trainer, folder = made(asked), Path(asked["folder"])
    times = StepTimes(folder / "steps.jsonl")
    times.trainer = trainer
    trainer.add_callback(times)
    trainer.train()
    found = {
        "losses": [one["loss"] for one in trainer.state.log_history if "loss" in one],
        "vram_bytes": torch.cuda.max_memory_reserved() if torch.cuda.is_available() else 0,
    }
    (folder / "losses.json").write_text(json.dumps(found), encoding="utf-8")
    trainer.save_model()


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
