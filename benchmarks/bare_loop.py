"""The loop that a Trainer is measured against: the same batches, loss, clipping, optimizer and
schedule, nothing else.

    python -m benchmarks.bare_loop ASKED.json

Batches are made before the first step. The time and the loss of each step are written at the end.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup

from launch.data.rows import IGNORED
from training.data.batches import Collator, TokenRows
from training.data.sample_order import SampleOrder
from training.levers.logits import target_loss_sum


def batches_of(
    tokens: str, pad_token_id: int, batch: int, steps: int, seed: int
) -> list[dict[str, torch.Tensor]]:
    """The batches of a run of ours with this seed."""
    rows, collate = TokenRows(Path(tokens)), Collator(pad_token_id)
    order = SampleOrder(len(rows), batch, 1, 1, 0, seed)
    return [collate(rows.__getitems__(order.rows_of(step, [0]))) for step in range(1, steps + 1)]


def main(asked: dict[str, Any]) -> None:
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).train()
    model.config.use_cache = False  # as Trainer has it
    batches = batches_of(
        asked["tokens"], model.config.pad_token_id, asked["batch"], asked["steps"], asked["seed"]
    )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=asked["learning_rate"], weight_decay=0.0, fused=True
    )
    schedule = get_linear_schedule_with_warmup(optimizer, 0, asked["steps"])
    losses, times = [], []
    for batch in batches:
        labels, _ = batch.pop("labels"), batch.pop("is_padded")
        loss = (
            target_loss_sum(model(**batch).logits, labels, shift=True) / (labels != IGNORED).sum()
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), asked["max_grad_norm"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        times.append(time.time())
    found = {"times": times, "losses": torch.stack(losses).tolist()}
    Path(asked["times_file"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
