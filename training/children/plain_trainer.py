"""Train the model of a self-check with transformers.Trainer alone: python -m
training.children.plain_trainer BATCH. Prints a line of JSON."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

LENGTH, STEPS, WARM_UP_STEPS = 512, 40, 5


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.monotonic())


def main(batch: int) -> None:
    network = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", vocab_size=512))
    tokens = torch.randint(512, (STEPS * batch, LENGTH))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=batch,
            max_steps=STEPS,
            bf16=True,
            logging_steps=STEPS,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(model=network, args=args, train_dataset=rows, callbacks=[clock])  # pyright: ignore
        trainer.train()
    times = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    seconds = statistics.median(times[WARM_UP_STEPS:])
    print(json.dumps({"seconds_per_step": seconds, "tokens_per_second": batch * LENGTH / seconds}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
