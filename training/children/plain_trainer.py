"""Train the model of a self-check with transformers.Trainer alone: python -m
training.children.plain_trainer BATCH. Prints a line of JSON."""

import json
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH, STEPS, WARM_UP_STEPS = 512, 512, 40, 5


class Clock(TrainerCallback):
    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        torch.cuda.synchronize()
        self.ends.append(time.monotonic())


def main(batch: int) -> None:
    network = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY))
    tokens = torch.randint(VOCABULARY, (STEPS * batch, LENGTH))
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
        Trainer(model=network, args=args, train_dataset=rows, callbacks=[clock]).train()  # pyright: ignore
    times = [after - before for before, after in zip(clock.ends, clock.ends[1:], strict=False)]
    seconds = statistics.median(times[WARM_UP_STEPS:])
    print(json.dumps({"seconds_per_step": seconds, "tokens_per_second": batch * LENGTH / seconds}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
