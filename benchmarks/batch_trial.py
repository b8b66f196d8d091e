"""One short training inside whatever memory limit its process has: what the searchers of
batch_search.py try.

`ours RECIPE BATCH` is our launcher and trainer with the batch forced, `plain RECIPE BATCH`
transformers.Trainer on the same model and rows in this process. The last line printed is JSON:
seconds of a step and its samples, or the failure.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

STEPS = 3  # as tune's own trials take; the first finds no optimizer states


def say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


def ours(recipe_file: str, batch: int) -> None:
    """Train under our launcher, whatever planning would have said of the batch."""
    from launch.base.workspace import Workspace
    from launch.plan.resolve import resolve
    from launch.render import run_files
    from launch.run_folder import layout
    from launch.supervise import attempt as supervise_attempt
    from launch.supervise.screen import Screen
    from tests import builders

    steps = (f"max_steps={STEPS}", f"eval_steps={STEPS}", f"save_steps={STEPS + 1}")
    overrides = [f"--training.{word}" for word in steps] + ["--launch.host_reserve_gib=0"]
    choice = resolve(recipe_file, overrides, trace=False)
    asked = choice.plan.strategy
    strategy = replace(
        asked,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=asked.effective_batch_size // batch,
        per_device_eval_batch_size=batch,
    )
    choice, workspace = (
        replace(choice, plan=replace(choice.plan, strategy=strategy)),
        Workspace.here(),
    )
    machine = choice.machine
    with contextlib.redirect_stdout(io.StringIO()):
        run, attempt = builders.opened_run(choice)
        command = run_files.command(choice.plan, machine, run, attempt, workspace, os.environ)
        screen = Screen(layout.log_file(workspace.root, run))
        result = supervise_attempt.run(choice.recipe, machine, run, attempt, command, screen)
    if result.failure is not None:
        say(failure=result.failure.kind)
        return
    events = [
        json.loads(line) for line in attempt.events_file.read_text(encoding="utf-8").splitlines()
    ]
    say(
        step_s=statistics.median(event["seconds"] for event in events[1:]),
        samples=strategy.effective_batch_size,
    )


def plain(recipe_file: str, batch: int) -> None:
    """Train with transformers.Trainer; the effective batch is cut as far as it can be, not held."""
    import pyarrow.parquet as pq
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    recipe = yaml.safe_load(Path(recipe_file).read_text(encoding="utf-8"))
    length, asked = recipe["data"]["max_length"], recipe["training"]["per_device_train_batch_size"]
    accumulation = asked // batch
    tokenizer = AutoTokenizer.from_pretrained(recipe["tokenizer"]["path"])
    rows = []
    for row in pq.read_table(recipe["data"]["train_file"]).to_pylist()[: asked * STEPS]:
        text = f"{row['prompt']} {row['response']}"
        ids = tokenizer(text, truncation=True, max_length=length, padding="max_length")["input_ids"]
        rows.append({"input_ids": ids, "labels": ids})
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            ends.append(time.perf_counter())

    arguments = TrainingArguments(
        output_dir=recipe["output_dir"],
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        max_steps=STEPS,
        use_cpu=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    network = AutoModelForCausalLM.from_pretrained(recipe["model"]["path"])
    Trainer(network, arguments, train_dataset=rows, callbacks=[Clock()]).train()  # type: ignore[arg-type]  a list has all it asks
    seconds = [after - before for before, after in pairwise(ends)]
    say(step_s=statistics.median(seconds), samples=batch * accumulation)


if __name__ == "__main__":
    mode, file, size = sys.argv[1:]
    {"ours": ours, "plain": plain}[mode](file, int(size))
