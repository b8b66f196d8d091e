"""Predicted beside measured memory of the CUDA build's own allocator, on a driver without a card.
Run it by `make cuda-build-memory`.

Each configuration is trained by train_low_mem.py under our launcher: some steps, an evaluation,
saving. What is measured is torch.cuda.max_memory_allocated and max_memory_reserved of each part of
the run. Kernels did nothing (tests/fake_cuda/README.md): what a vendor's kernel takes inside itself
is not in these figures, nor is what a driver or NCCL takes beside the allocator.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import cpu_memory, recording
from benchmarks.cpu_memory import AUTOCAST, CHECKPOINTING, EAGER, HALF, Case, accumulating
from launch.base.workspace import Workspace
from launch.plan.planner import Choice
from launch.plan.resolve import resolve
from launch.render import command as render_command
from launch.run_folder import layout
from launch.run_folder.layout import AttemptDir
from launch.schema.plan import Command
from launch.supervise import attempt as supervise_attempt
from launch.supervise.screen import Screen
from tests import builders
from tests.fake_cuda.machine import Card, Machine

A100 = Card("NVIDIA A100-SXM4-80GB", 80, "8.0", 108)
GPT2 = {**cpu_memory.GPT2, "vocab_size": 50257, "n_embd": 768, "n_head": 12}
QWEN = {
    **cpu_memory.QWEN,
    "vocab_size": 32768,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_attention_heads": 14,
}
LLAMA = {
    **cpu_memory.LLAMA,
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
}
T5 = {
    **cpu_memory.T5,
    "vocab_size": 32128,
    "d_model": 768,
    "d_kv": 64,
    "d_ff": 2048,
    "num_heads": 12,
}
FOUR_BIT = {"load_in_4bit": True}
R16, R8 = {"r": 16}, {"r": 8}
FIGURES = ("allocated", "reserved")


def one(name: str, config: Mapping[str, Any], batch: int = 4, **fields: Any) -> Case:
    return Case(name, config, batch, mode=fields.pop("mode", "single_gpu"), **fields)


def two(name: str, config: Mapping[str, Any], batch: int = 4, **fields: Any) -> Case:
    return Case(name, config, batch, ranks=2, **fields)


CASES = (
    one("gpt2", GPT2, 8),
    one("gpt2, autocast", GPT2, 8, training=AUTOCAST),
    one("gpt2, fp16", GPT2, 8, training={"fp16": True}),
    one("gpt2, loop of kernels", GPT2, 8, training={"optim": "adamw_torch"}),
    one("gpt2, one sample", GPT2, 1, training=AUTOCAST),
    one("gpt2, checkpointing, autocast", GPT2, 8, training={**CHECKPOINTING, **AUTOCAST}),
    one("gpt2, eager, autocast", GPT2, 8, training=AUTOCAST, model=EAGER),
    one("gpt2, bf16 weights, accumulation 2", GPT2, 8, model=HALF, training=accumulating(2)),
    one("gpt2, logits in parts", GPT2, 8, training={**AUTOCAST, "num_output_chunks": 4}),
    one("gpt2, 8-bit states", GPT2, 8, training={**AUTOCAST, "optim": "adamw_8bit"}),
    one("gpt2, paged 8-bit states", GPT2, 8, training={**AUTOCAST, "optim": "paged_adamw_8bit"}),
    one("gpt2, no clipping", GPT2, 8, training={**AUTOCAST, "max_grad_norm": 0}),
    one("qwen2", QWEN),
    one("qwen2, bf16 weights", QWEN, model=HALF),
    one("qwen2, nothing padded", QWEN, training=AUTOCAST, padded=False),
    one("qwen2, autocast, accumulation 3", QWEN, training={**AUTOCAST, **accumulating(3)}),
    one("qwen2, eager, autocast", QWEN, training=AUTOCAST, model=EAGER),
    one(
        "qwen2, checkpointing, 1024 tokens",
        QWEN,
        4,
        training={**CHECKPOINTING, **AUTOCAST},
        length=1024,
    ),
    one("qwen2, bf16 weights, Adafactor", QWEN, model=HALF, training={"optim": "adafactor"}),
    one("qwen2, SGD", QWEN, training={**AUTOCAST, "optim": "sgd"}),
    one("llama, autocast", LLAMA, training=AUTOCAST),
    one("llama, LoRA", LLAMA, lora=R16, training=AUTOCAST, model=HALF),
    one(
        "llama, LoRA, checkpointing",
        LLAMA,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST},
        model=HALF,
    ),
    one("llama, LoRA with dropout", LLAMA, lora={**R16, "lora_dropout": 0.05}, training=AUTOCAST),
    one("llama, LoRA, accumulation 2", LLAMA, lora=R8, training={**AUTOCAST, **accumulating(2)}),
    one("llama, QLoRA", LLAMA, lora=R16, training=AUTOCAST, model=HALF, quantization=FOUR_BIT),
    one(
        "llama, QLoRA, checkpointing, accumulation 2",
        LLAMA,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST, **accumulating(2)},
        model=HALF,
        quantization=FOUR_BIT,
    ),
    one("t5, autocast", T5, 8, training=AUTOCAST),
    one(
        "t5, checkpointing, accumulation 2",
        T5,
        8,
        training={**CHECKPOINTING, **AUTOCAST, **accumulating(2)},
    ),
    one("t5, encoder frozen", T5, 8, training=AUTOCAST, model={"freeze": ["shared", "encoder"]}),
    one("t5, LoRA", T5, 8, lora=R8, training=AUTOCAST),
    one("gpt2, ZeRO-2, offload, one card", GPT2, training=AUTOCAST, mode="deepspeed_zero2_offload"),
    one(
        "qwen2, ZeRO-3, offload, one card", QWEN, training=AUTOCAST, mode="deepspeed_zero3_offload"
    ),
    two("qwen2, DDP", QWEN, training=AUTOCAST, mode="dual_gpu_nccl"),
    two(
        "gpt2, DDP, accumulation 2",
        GPT2,
        training={**AUTOCAST, **accumulating(2)},
        mode="dual_gpu_nccl",
    ),
    two("llama, LoRA, DDP", LLAMA, lora=R16, training=AUTOCAST, model=HALF, mode="dual_gpu_nccl"),
    two("t5, DDP over Gloo", T5, training=AUTOCAST, mode="dual_gpu_gloo"),
    two("qwen2, ZeRO-1", QWEN, training=AUTOCAST, mode="deepspeed_zero1"),
    two("qwen2, ZeRO-2", QWEN, training=AUTOCAST, mode="deepspeed_zero2"),
    two(
        "gpt2, ZeRO-2, accumulation 2",
        GPT2,
        training={**AUTOCAST, **accumulating(2)},
        mode="deepspeed_zero2",
    ),
    two("gpt2, ZeRO-3", GPT2, training=AUTOCAST, mode="deepspeed_zero3"),
    two(
        "llama, ZeRO-3, checkpointing",
        LLAMA,
        training={**CHECKPOINTING, **AUTOCAST},
        mode="deepspeed_zero3",
    ),
    two("qwen2, FSDP2", QWEN, training=AUTOCAST, mode="fsdp2"),
    two("llama, FSDP2, checkpointing", LLAMA, training={**CHECKPOINTING, **AUTOCAST}, mode="fsdp2"),
    two("llama, LoRA, FSDP2", LLAMA, lora=R16, training=AUTOCAST, model=HALF, mode="fsdp2"),
)


def train(folder: Path, case: Case) -> dict[str, Any]:
    """Train a case on the cards that are here: the plan's figures and those of each section, the
    most of all ranks."""
    os.environ["LOWMEM_ROOT"] = str(folder)
    choice = resolve(str(cpu_memory.write_data(folder, case)), [])
    with contextlib.redirect_stdout(io.StringIO()):
        attempt = attempted(choice)
    ranks = [json.loads(file.read_text()) for file in sorted(attempt.root.glob("memory-*.json"))]
    sections: dict[str, dict[str, int]] = {}
    for section in (section for rank in ranks for section in rank):
        most = sections.setdefault(named(section["name"]), dict.fromkeys(FIGURES, 0))
        for figure in FIGURES:
            most[figure] = max(most[figure], section[f"{figure}_bytes"])
    estimate = choice.plan.estimate
    assert estimate is not None
    return {
        "case": case.name,
        "predicted": {figure: getattr(estimate, f"step_{figure}_bytes") for figure in FIGURES},
        "measured": sections,
    }


def named(section: str) -> str:
    """Every step after the first counts as a step."""
    is_later_step = section.startswith("step ") and section != "step 1"
    return "step" if is_later_step else "first step" if section == "step 1" else section


def attempted(choice: Choice) -> AttemptDir:
    """An attempt whose ranks have noted their allocator's peaks."""
    run, attempt = builders.opened_run(choice)
    workspace = Workspace.here()
    command = render_command.command(
        choice.plan, choice.machine, run, attempt, workspace, os.environ
    )
    product = str(recording.CODE / "train_low_mem.py")
    counted = str(recording.CODE / "benchmarks" / "cuda_rank.py")
    argv = tuple(counted if word == product else word for word in command.argv)
    command = Command(argv, {**command.env, "PYTHONPATH": str(recording.CODE)})
    screen = Screen(layout.log_file(workspace.root, run))
    result = supervise_attempt.run(choice.recipe, choice.machine, run, attempt, command, screen)
    assert result.failure is None, (result.failure, attempt.log_file.read_text()[-3000:])
    return attempt


def measured(folder: Path, case: Case) -> dict[str, Any]:
    """The figures of a case, trained in a process of a machine with cards."""
    machine = Machine(folder / "cards", [A100] * case.ranks)
    env = {**os.environ, "PYTHONPATH": str(recording.CODE), **machine.environment()}
    file = folder / "figures.json"
    argv = [sys.executable, "-m", "benchmarks.cuda_build_memory", "--only", case.name]
    done = subprocess.run(
        [*argv, "--into", str(file)], env=env, cwd=recording.CODE, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(file.read_text(encoding="utf-8"))


def off(row: Mapping[str, Any], figure: str) -> float:
    """Predicted over measured, of a training step from the second on, less one."""
    return row["predicted"][figure] / row["measured"]["step"][figure] - 1


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [row["case"]]
        + [
            value
            for figure in FIGURES
            for value in (
                f"{row['predicted'][figure] / (1 << 20):.1f}",
                f"{row['measured']['step'][figure] / (1 << 20):.1f}",
                f"{off(row, figure):+.2%}",
            )
        ]
        for row in rows
    ]
    head = ["case"]
    for figure in FIGURES:
        head += [f"{figure}, predicted MiB", "measured", "error"]
    summary = []
    for figure in FIGURES:
        sizes = sorted(abs(off(row, figure)) for row in rows)
        summary.append(
            f"{figure}: median |error| {statistics.median(sizes):.2%},"
            f" 95 % of them below {sizes[int(0.95 * (len(sizes) - 1))]:.2%}, max {sizes[-1]:.2%}"
        )
    return (
        f"CUDA build, no card: kernels did nothing. {len(rows)} configurations, a step from the"
        f" second on. {'; '.join(summary)}.\n\n{recording.table(head, lines)}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # in a process with cards
    arguments = parser.parse_args()
    if arguments.into:
        (case,) = (case for case in CASES if case.name == arguments.only)
        arguments.into.write_text(json.dumps(train(arguments.into.parent, case)), encoding="utf-8")
        return
    rows = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        for number, case in enumerate(case for case in CASES if arguments.only in case.name):
            folder = Path(place) / str(number)
            folder.mkdir()
            rows.append(measured(folder, case))
            figures = ", ".join(f"{figure} {off(rows[-1], figure):+.2%}" for figure in FIGURES)
            print(f"{case.name}: {figures}", flush=True)
            shutil.rmtree(folder)
    if arguments.only:
        print(json.dumps(rows, indent=1), text(rows))
    else:
        recording.write("cuda_build_memory", {"rows": rows}, text(rows))


if __name__ == "__main__":
    main()
