"""Predicted beside measured memory of real runs on one GPU, and the batch chosen beside the largest
that fits.

Each case trains some steps under our launcher; the second step's figures (allocated, reserved,
outside the allocator) are put beside the plan's. Then the largest micro-batch is searched by real
runs, and every verdict "fits" below it has to hold. Without a GPU the result says that nothing was
run.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks import recording

LENGTH = 512
FOUR_BIT = {"load_in_4bit": True}
HALF, AUTOCAST, CHECKPOINTING = (
    {"dtype": "bfloat16"},
    {"bf16": True},
    {"activation_checkpointing": True},
)


@dataclass(frozen=True)
class Case:
    """One configuration; sections lay over the recipe's."""

    name: str
    shape: str
    batch: int
    training: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None


CASES = (
    Case("gpt2-small", "gpt2-small", 8),
    Case("gpt2-small, autocast", "gpt2-small", 8, AUTOCAST),
    Case("gpt2-small, loop of kernels", "gpt2-small", 8, {"optim": "adamw_torch"}),
    Case("gpt2-medium, checkpointing, autocast", "gpt2-medium", 8, {**AUTOCAST, **CHECKPOINTING}),
    Case("qwen2-0.5b, bf16 weights", "qwen2-0.5b", 4, model=HALF),
    Case(
        "qwen2-0.5b, autocast, accumulation",
        "qwen2-0.5b",
        4,
        {**AUTOCAST, "gradient_accumulation_steps": 2},
    ),
    Case("qwen2-0.5b, eager", "qwen2-0.5b", 4, AUTOCAST, {"attn_implementation": "eager"}),
    Case("t5-chatlm-0.2b, autocast", "t5-chatlm-0.2b", 8, AUTOCAST),
    Case("minigpt-medium, autocast", "minigpt-medium", 16, AUTOCAST),
    Case("llama-7b, LoRA", "llama-7b", 2, AUTOCAST, HALF, {"r": 16}),
    Case(
        "llama-7b, LoRA, checkpointing",
        "llama-7b",
        4,
        {**AUTOCAST, **CHECKPOINTING},
        HALF,
        {"r": 16},
    ),
    Case(
        "llama-7b, QLoRA, checkpointing",
        "llama-7b",
        4,
        {**AUTOCAST, **CHECKPOINTING},
        HALF,
        {"r": 16},
        FOUR_BIT,
    ),
)


def recipe(folder: Path, case: Case) -> Path:
    from tests.builders import write_parquet

    rng = random.Random(0)
    words = ["red", "blue", "green", "stone", "river"]
    rows = [
        {"prompt": f"{n}", "response": " ".join(rng.choices(words, k=3 * LENGTH))}
        for n in range(256)
    ]
    write_parquet(folder / "train.parquet", rows)
    content: dict[str, Any] = {
        "name": "case",
        "task": "sft",
        "model": {"shape": case.shape, **case.model},
        "tokenizer": {"vocab_size": 1024},
        "data": {"train_file": str(folder / "train.parquet"), "max_length": LENGTH},
        "training": {
            "per_device_train_batch_size": case.batch,
            "max_steps": 4,
            "logging_steps": 1,
            "save_steps": 1000,
            **case.training,
        },
        "launch": {"mode": "single_gpu", "vram_fraction": 1.0, "exact_batch": True},
        "output_dir": str(folder / "out"),
    }
    for name in ("lora", "quantization"):
        if getattr(case, name) is not None:
            content[name] = dict(getattr(case, name))
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return file


def run(folder: Path, case: Case, batch: int) -> dict[str, Any] | None:
    """Train with this micro-batch; the plan's and the second step's figures, or None: out of
    memory."""
    from launch.base.workspace import Workspace
    from launch.plan.resolve import resolve
    from launch.render import command as render_command
    from launch.supervise import attempt as supervise_attempt
    from launch.supervise.screen import Screen
    from tests import builders

    os.environ["LOWMEM_ROOT"] = str(folder)
    choice = resolve(str(recipe(folder, case)), [f"--training.per_device_train_batch_size={batch}"])
    plan, machine = choice.plan, choice.machine
    run, attempt = builders.opened_run(choice)
    command = render_command.command(plan, machine, run, attempt, Workspace.here(), os.environ)
    with Path(os.devnull).open("w") as nowhere:
        screen = Screen(stream=nowhere)
        result = supervise_attempt.run(choice.recipe, machine, run, attempt, command, screen)
    if result.exit_code == 12:
        return None
    assert result.failure is None, result.failure
    measured = json.loads(attempt.second_step_file.read_text())
    gpu = machine.gpus[0]
    return {
        "batch": batch,
        "allocated": [plan.estimate.step_allocated_bytes, measured["allocated_bytes"]],
        "reserved": [plan.estimate.step_reserved_bytes, measured["reserved_bytes"]],
        "outside": [
            plan.estimate.outside_bytes,
            gpu.free_bytes - measured["free_bytes"] - measured["reserved_bytes"],
        ],
        "seconds": result.summary["train_seconds"] / result.summary["step"],
    }


def largest(folder: Path, case: Case) -> tuple[int, int, int]:
    """(largest micro-batch that is predicted to fit, largest that runs, verdicts "fits" that ran
    out of memory)."""
    from launch.base.errors import DoesNotFit

    predicted, true, wrong = 0, 0, 0
    for batch in (2**power for power in range(13)):
        try:
            found = run(folder, case, batch)
        except DoesNotFit:
            break
        predicted = batch
        wrong += found is None
        true = batch if found else true
    return predicted, true, wrong


def percent(pair: Sequence[int]) -> str:
    return f"{pair[0] / pair[1] - 1:+.2%}" if pair[1] else ""


def main() -> None:
    from launch.probe import machine as probe_machine

    machine = probe_machine.machine()
    if not machine.gpus:
        text = (
            f"Not run: {machine.gpus_reason}. {len(CASES)} cases are written and have never been"
            " measured.\n"
        )
        recording.write("gpu_memory", {"run": False, "cases": [case.name for case in CASES]}, text)
        sys.exit(0)
    rows = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        for number, case in enumerate(CASES):
            folder = Path(place) / str(number)
            folder.mkdir()
            found = run(folder, case, case.batch)
            assert found is not None, f"{case.name}: out of memory at its own batch"
            predicted, true, wrong = largest(folder, case)
            rows.append(
                {"case": case.name, **found, "predicted": predicted, "true": true, "wrong": wrong}
            )
            print(case.name, percent(found["allocated"]), percent(found["reserved"]), flush=True)
    lines = [
        [
            row["case"],
            percent(row["allocated"]),
            percent(row["reserved"]),
            *row["outside"],
            row["predicted"],
            row["true"],
        ]
        for row in rows
    ]
    sizes = sorted(abs(row["allocated"][0] / row["allocated"][1] - 1) for row in rows)
    text = (
        f"allocated: median |error| {statistics.median(sizes):.2%}, max {sizes[-1]:.2%}; verdicts"
        f" that ran out of memory: {sum(row['wrong'] for row in rows)}.\n\n"
        + recording.table(
            [
                "case",
                "allocated",
                "reserved",
                "outside, predicted",
                "measured",
                "largest batch, predicted",
                "true",
            ],
            lines,
        )
    )
    recording.write("gpu_memory", {"run": True, "rows": rows}, text)


if __name__ == "__main__":
    main()
