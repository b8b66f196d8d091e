"""Predicted beside measured memory of the CUDA build's own allocator, on a driver without a card.
Run it by `make cuda-build-memory`.

Each configuration is trained by train_low_mem.py under our launcher: some steps, an evaluation,
saving. What is measured is torch.cuda.max_memory_allocated and max_memory_reserved of each part of
the run. Kernels did nothing (tests/fake_cuda/README.md): what a vendor's kernel takes inside itself
is not in these figures, nor is what a driver or NCCL takes beside the allocator.
"""

from __future__ import annotations

import argparse
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

from pydantic import TypeAdapter

from benchmarks import cpu_memory, recording, sources
from benchmarks.cpu_memory import (
    AUTOCAST,
    CHECKPOINTING,
    EAGER,
    EVERYWHERE,
    HALF,
    ON_HOST,
    Case,
    accumulating,
    every_n_layers,
)
from launch.schema.plan import Strategy
from tests.fake_cuda.machine import Card, Machine

SITE = recording.CODE / "tests/fake_cuda/site/sitecustomize.py"
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
SDPA, VARLEN = {"attn_implementation": "sdpa"}, {"attn_implementation": "varlen_attn"}
PACKED = {"packing": True}
IN_PARTS = {"tiled_mlp_num_shards": 4}
R16, R8 = {"r": 16}, {"r": 8}
RESULT = "cuda_build_memory"
FIGURES = ("allocated", "reserved")
# so that steps follow an evaluation and a save
EVERY_TWO = ("--training.eval_steps=2", "--training.save_steps=2")
EVERY_TWELVE = ("--training.eval_steps=12", "--training.save_steps=12")
SHOWN = ("load", "first_step", "step", "evaluation", "save")
# a mode in whose load DeepSpeed resets the counter of peaks: what it has freed by then is not seen
RESETS = "deepspeed_zero2_offload"
PINNED = ["configuration", "predicted MiB", "measured", "difference, MiB"]


def on_one_card(name: str, config: Mapping[str, Any], batch: int = 4, **fields: Any) -> Case:
    """A case with sdpa, unless it names another attention, and logits of all positions, unless its
    rows have prompts. Liger's kernels cannot be built for a card that is not there."""
    model = {**SDPA, **fields.pop("model", {})}
    everywhere = {} if fields.get("prompted") else EVERYWHERE
    training = {"use_liger_kernel": False, **everywhere, **fields.pop("training", {})}
    mode = fields.pop("mode", "single_gpu")
    return Case(name, config, batch, mode=mode, model=model, training=training, **fields)


def on_two_cards(name: str, config: Mapping[str, Any], batch: int = 4, **fields: Any) -> Case:
    return on_one_card(name, config, batch, ranks=2, **fields)


CASES = (
    on_one_card("gpt2", GPT2, 8),
    on_one_card("gpt2, autocast", GPT2, 8, training=AUTOCAST),
    on_one_card("gpt2, fp16", GPT2, 8, training={"fp16": True}),
    on_one_card("gpt2, loop of kernels", GPT2, 8, training={"optim": "adamw_torch"}),
    on_one_card("gpt2, one sample", GPT2, 1, training=AUTOCAST),
    on_one_card("gpt2, checkpointing, autocast", GPT2, 8, training={**CHECKPOINTING, **AUTOCAST}),
    on_one_card("gpt2, eager, autocast", GPT2, 8, training=AUTOCAST, model=EAGER),
    on_one_card(
        "gpt2, bf16 weights, accumulation 2", GPT2, 8, model=HALF, training=accumulating(2)
    ),
    on_one_card("gpt2, logits in parts", GPT2, 8, training={**AUTOCAST, "num_output_chunks": 4}),
    on_one_card("gpt2, 8-bit states", GPT2, 8, training={**AUTOCAST, "optim": "adamw_8bit"}),
    on_one_card(
        "gpt2, paged 8-bit states", GPT2, 8, training={**AUTOCAST, "optim": "paged_adamw_8bit"}
    ),
    on_one_card("gpt2, no clipping", GPT2, 8, training={**AUTOCAST, "max_grad_norm": 0}),
    on_one_card("gpt2, ragged rows", GPT2, 8, training=AUTOCAST, ragged=True),
    on_one_card("qwen2", QWEN),
    on_one_card("qwen2, bf16 weights", QWEN, model=HALF),
    on_one_card("qwen2, nothing padded", QWEN, training=AUTOCAST, padded=False),
    on_one_card("qwen2, float32, nothing padded", QWEN, padded=False),
    on_one_card("qwen2, autocast, accumulation 3", QWEN, training={**AUTOCAST, **accumulating(3)}),
    on_one_card("qwen2, eager, autocast", QWEN, training=AUTOCAST, model=EAGER),
    on_one_card(
        "qwen2, checkpointing, 1024 tokens",
        QWEN,
        4,
        training={**CHECKPOINTING, **AUTOCAST},
        length=1024,
    ),
    on_one_card(
        "qwen2, bf16 weights, Adafactor", QWEN, model=HALF, training={"optim": "adafactor"}
    ),
    on_one_card("qwen2, SGD", QWEN, training={**AUTOCAST, "optim": "sgd"}),
    on_one_card("qwen2, prompts", QWEN, training=AUTOCAST, padded=False, prompted=True),
    on_one_card(
        "qwen2, prompts, ragged rows",
        QWEN,
        8,
        training=AUTOCAST,
        ragged=True,
        prompted=True,
    ),
    on_one_card(
        "gpt2, prompts, logits in parts",
        GPT2,
        8,
        training={**AUTOCAST, "num_output_chunks": 4},
        padded=False,
        prompted=True,
    ),
    on_one_card("llama, autocast", LLAMA, training=AUTOCAST),
    on_one_card("llama, LoRA", LLAMA, lora=R16, training=AUTOCAST, model=HALF),
    on_one_card(
        "llama, LoRA, checkpointing",
        LLAMA,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST},
        model=HALF,
    ),
    on_one_card(
        "llama, LoRA with dropout", LLAMA, lora={**R16, "lora_dropout": 0.05}, training=AUTOCAST
    ),
    on_one_card(
        "llama, LoRA, accumulation 2", LLAMA, lora=R8, training={**AUTOCAST, **accumulating(2)}
    ),
    on_one_card(
        "llama, QLoRA", LLAMA, lora=R16, training=AUTOCAST, model=HALF, quantization=FOUR_BIT
    ),
    on_one_card(
        "llama, QLoRA, checkpointing, accumulation 2",
        LLAMA,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST, **accumulating(2)},
        model=HALF,
        quantization=FOUR_BIT,
    ),
    on_one_card(
        "llama, LoRA, checkpointing, ragged rows",
        LLAMA,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST},
        model=HALF,
        ragged=True,
    ),
    on_one_card(
        "llama, LoRA, 1 layer in 2 checkpointed",
        LLAMA,
        lora=R16,
        training={**every_n_layers(2), **AUTOCAST},
        model=HALF,
    ),
    on_one_card(
        "gpt2, 1 layer in 4 checkpointed, accumulation 2",
        GPT2,
        8,
        training={**every_n_layers(4), **AUTOCAST, **accumulating(2)},
    ),
    on_one_card(
        "qwen2, activations on the host, 1024 tokens",
        QWEN,
        4,
        training={**ON_HOST, **AUTOCAST},
        length=1024,
    ),
    on_one_card(
        "llama, QLoRA, activations on the host, accumulation 2",
        LLAMA,
        lora=R16,
        training={**ON_HOST, **AUTOCAST, **accumulating(2)},
        model=HALF,
        quantization=FOUR_BIT,
    ),
    on_one_card(
        "t5, activations on the host, ragged rows",
        T5,
        8,
        training={**ON_HOST, **AUTOCAST},
        ragged=True,
    ),
    on_one_card(
        "qwen2, varlen_attn, packed rows",
        QWEN,
        training=AUTOCAST,
        model=VARLEN,
        data=PACKED,
        ragged=True,
    ),
    on_one_card(
        "qwen2, varlen_attn, flattened rows",
        QWEN,
        training=AUTOCAST,
        model=VARLEN,
        padded=False,
    ),
    on_one_card(
        "qwen2, varlen_attn, flattened ragged rows",
        QWEN,
        8,
        training=AUTOCAST,
        model=VARLEN,
        ragged=True,
    ),
    on_one_card(
        "llama, LoRA, varlen_attn, checkpointing, packed rows",
        LLAMA,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST},
        model={**HALF, **VARLEN},
        data=PACKED,
        ragged=True,
    ),
    on_one_card(
        "qwen2, MLPs in 4 parts, checkpointing, 1024 tokens",
        QWEN,
        4,
        training={**CHECKPOINTING, **AUTOCAST, **IN_PARTS},
        length=1024,
    ),
    on_one_card(
        "llama, LoRA, MLPs in 4 parts, checkpointing, one sample of 1024 tokens",
        LLAMA,
        1,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST, **IN_PARTS},
        model=HALF,
        length=1024,
    ),
    on_one_card(
        "llama, QLoRA, MLPs in 4 parts, accumulation 2",
        LLAMA,
        lora=R16,
        training={**AUTOCAST, **IN_PARTS, **accumulating(2)},
        model=HALF,
        quantization=FOUR_BIT,
    ),
    on_one_card("t5, ragged rows", T5, 8, training=AUTOCAST, ragged=True),
    on_one_card("t5, autocast", T5, 8, training=AUTOCAST),
    on_one_card(
        "t5, checkpointing, accumulation 2",
        T5,
        8,
        training={**CHECKPOINTING, **AUTOCAST, **accumulating(2)},
    ),
    on_one_card(
        "t5, encoder frozen", T5, 8, training=AUTOCAST, model={"freeze": ["shared", "encoder"]}
    ),
    on_one_card("t5, LoRA", T5, 8, lora=R8, training=AUTOCAST),
    on_one_card(
        "gpt2, ZeRO-2, offload, one card", GPT2, training=AUTOCAST, mode="deepspeed_zero2_offload"
    ),
    on_one_card(
        "gpt2 of 12 layers, ZeRO-2, offload, one card, checkpointing",
        {**GPT2, "n_layer": 12},
        32,
        training={**CHECKPOINTING, **AUTOCAST},
        mode="deepspeed_zero2_offload",
        length=32,
    ),
    on_one_card(
        "qwen2, ZeRO-3, offload, one card", QWEN, training=AUTOCAST, mode="deepspeed_zero3_offload"
    ),
    on_two_cards("qwen2, DDP", QWEN, training=AUTOCAST, mode="dual_gpu_nccl"),
    on_two_cards(
        "gpt2, DDP, accumulation 2",
        GPT2,
        training={**AUTOCAST, **accumulating(2)},
        mode="dual_gpu_nccl",
    ),
    on_two_cards(
        "llama, LoRA, DDP", LLAMA, lora=R16, training=AUTOCAST, model=HALF, mode="dual_gpu_nccl"
    ),
    on_two_cards("t5, DDP over Gloo", T5, training=AUTOCAST, mode="dual_gpu_gloo"),
    on_two_cards(
        "qwen2, DDP, MLPs in 4 parts, checkpointing",
        QWEN,
        training={**CHECKPOINTING, **AUTOCAST, **IN_PARTS},
        mode="dual_gpu_nccl",
    ),
    on_two_cards(
        "qwen2, ZeRO-2, MLPs in 4 parts, checkpointing",
        QWEN,
        training={**CHECKPOINTING, **AUTOCAST, **IN_PARTS},
        mode="deepspeed_zero2",
    ),
    on_two_cards("qwen2, ZeRO-1", QWEN, training=AUTOCAST, mode="deepspeed_zero1"),
    on_two_cards("qwen2, ZeRO-2", QWEN, training=AUTOCAST, mode="deepspeed_zero2"),
    on_two_cards(
        "gpt2, ZeRO-2, accumulation 2",
        GPT2,
        training={**AUTOCAST, **accumulating(2)},
        mode="deepspeed_zero2",
    ),
    on_two_cards(
        "qwen2, ZeRO-2, ragged rows", QWEN, training=AUTOCAST, mode="deepspeed_zero2", ragged=True
    ),
    on_two_cards("gpt2, ZeRO-3", GPT2, training=AUTOCAST, mode="deepspeed_zero3"),
    on_two_cards(
        "llama, ZeRO-3, checkpointing",
        LLAMA,
        training={**CHECKPOINTING, **AUTOCAST},
        mode="deepspeed_zero3",
    ),
    on_two_cards(
        "llama, ZeRO-3, 1 layer in 2 checkpointed",
        LLAMA,
        training={**every_n_layers(2), **AUTOCAST},
        mode="deepspeed_zero3",
    ),
    on_two_cards(
        "gpt2, ZeRO-2, activations on the host",
        GPT2,
        training={**ON_HOST, **AUTOCAST},
        mode="deepspeed_zero2",
    ),
    on_two_cards(
        "llama, FSDP2, 1 layer in 2 checkpointed",
        LLAMA,
        training={**every_n_layers(2), **AUTOCAST},
        mode="fsdp2",
    ),
    on_two_cards(
        "qwen2, FSDP2, activations on the host",
        QWEN,
        training={**ON_HOST, **AUTOCAST},
        mode="fsdp2",
    ),
    on_two_cards("qwen2, FSDP2", QWEN, training=AUTOCAST, mode="fsdp2"),
    on_two_cards(
        "qwen2, prompts, FSDP2", QWEN, training=AUTOCAST, mode="fsdp2", padded=False, prompted=True
    ),
    on_two_cards(
        "qwen2, prompts, ZeRO-3",
        QWEN,
        training=AUTOCAST,
        mode="deepspeed_zero3",
        padded=False,
        prompted=True,
    ),
    on_two_cards(
        "llama, FSDP2, checkpointing", LLAMA, training={**CHECKPOINTING, **AUTOCAST}, mode="fsdp2"
    ),
    on_two_cards(
        "llama, LoRA, FSDP2", LLAMA, lora=R16, training=AUTOCAST, model=HALF, mode="fsdp2"
    ),
    on_two_cards(
        "llama, QLoRA, FSDP2",
        LLAMA,
        lora=R16,
        training=AUTOCAST,
        model=HALF,
        quantization=FOUR_BIT,
        mode="fsdp2",
    ),
    on_two_cards(
        "llama, QLoRA, FSDP2, checkpointing, accumulation 2",
        LLAMA,
        lora=R16,
        training={**CHECKPOINTING, **AUTOCAST, **accumulating(2)},
        model=HALF,
        quantization=FOUR_BIT,
        mode="fsdp2",
    ),
)


class RunFailed(Exception):
    """A run did not end as complete, or its plan was made without a trace: what it said."""


def without_logits(folder: Path) -> dict[str, str]:
    """The environment of ranks that compare no logits after the export: no kernel computes them,
    and what stands in their memory differs from time to time."""
    hooks = [SITE, recording.CODE / "tests/faults/inject/sitecustomize.py"]
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(
        "".join(
            f"exec(compile(open({str(path)!r}).read(), {str(path)!r}, 'exec'))\n" for path in hooks
        )
    )
    fault = {
        **{"module": "training.loop.export_check", "attribute": "trained"},
        "do": "import torch, training.loop.export_check as check\n"
        "check.logits = lambda model, inputs, accelerator: torch.zeros(1, 1)",
    }
    (folder / "marks").mkdir()
    return {
        "PYTHONPATH": f"{folder / 'site'}:{recording.CODE}",
        "PYTHON_FAULTS": json.dumps({"logits": fault}),
        "PYTHON_FAULT_MARKS": str(folder / "marks"),
    }


def launched(folder: Path, case: Case, variables: Mapping[str, str], *options: str) -> Path:
    """The run folder of a case. Raises RunFailed."""
    recipe = str(cpu_memory.write_data(folder, case))
    argv = [sys.executable, "-m", "launch", "run", recipe, *options]
    few = isinstance(case.config, str) or (case.ragged and not case.data)
    argv += EVERY_TWELVE if few else EVERY_TWO
    argv += [f"--launch.mode={case.mode}"]  # of FSDP2 the CPU's benchmark makes its own mode
    argv += ["--tokenizer.loading=file"]  # of the tests, whatever the type of the model
    env = {**recording.environment(folder), "LOWMEM_TRACES": os.environ["LOWMEM_TRACES"]}
    done = subprocess.run(
        argv, env={**env, **variables}, cwd=recording.CODE, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RunFailed(f"exit code {done.returncode}: {done.stdout}{done.stderr}")
    (file,) = (folder / "runs" / "case").glob("*/plan.json")
    return file.parent


def predicted_again(folder: Path, case: Case, row: dict[str, Any]) -> dict[str, Any] | None:
    """A row with today's predictions beside what was measured; None if today's plan is another, or
    predicts a part that was not measured."""
    machine = Machine(folder / "cards", [A100] * case.ranks)
    # a machine's cores decide how many workers load batches, and these how much is pinned
    workers = f"--training.dataloader_num_workers={row['strategy']['dataloader_num_workers']}"
    run = launched(folder, case, machine.environment(), "--dry-run", workers)
    plan = read(run / "plan.json")
    strategies = TypeAdapter(list[Strategy]).validate_python([plan["strategy"], row["strategy"]])
    planned = {phase for phase in SHOWN if plan["phases"][phase]}
    if strategies[0] != strategies[1] or not planned <= row["phases"].keys():
        return None
    for phase, figures in row["phases"].items():
        for figure, sizes in figures.items():
            sizes[0] = plan["phases"][phase][f"{figure}_bytes"]
    pinned_bytes = {"predicted_pinned_bytes": plan["estimate"]["pinned_bytes"]}
    return row | {"strategy": plan["strategy"]} | pinned_bytes | sources.digests(RESULT)


def measured(folder: Path, case: Case) -> dict[str, Any]:
    """Train a case: for each part of the run and each figure, predicted and measured bytes of the
    fullest rank; and pinned host memory."""
    machine = Machine(folder / "cards", [A100] * case.ranks)
    run = launched(folder, case, machine.environment() | without_logits(folder))
    plan = read(run / "plan.json")
    return sources.digests(RESULT) | {
        "case": case.name,
        "strategy": plan["strategy"],
        "phases": phases(run),
        "pinned_bytes": [
            process.peak_pinned_bytes
            for process in machine.processes()
            if process.peak_pinned_bytes
        ],
        "predicted_pinned_bytes": plan["estimate"]["pinned_bytes"],
    }


def phases(run: Path) -> dict[str, dict[str, list[int]]]:
    """For each part of a run that ended, and each figure: predicted and measured bytes. Raises
    RunFailed for a plan without a trace."""
    plan, outcome = read(run / "plan.json"), read(run / "attempts/01/outcome.json")
    if not plan["phases"]["step"]:
        raise RunFailed(f"its step was not traced: {plan['why'][-1]}")
    return {
        phase: {
            figure: [predicted[f"{figure}_bytes"], peaks[f"{figure}_bytes"]] for figure in FIGURES
        }
        for phase, peaks in outcome["phases"].items()
        if (predicted := plan["phases"][phase])
    }


def again(folder: Path, case: Case, row: dict[str, Any] | None) -> dict[str, Any] | None:
    """The row of a case whose measured part is of today's code, with today's predictions; None if
    the case has to be trained. A dry run has no tokenised rows, and does not know that all have one
    length, nor the order of rows of many lengths."""
    today = sources.digests(RESULT)
    if row is None or row.get(sources.MEASURED) != today[sources.MEASURED]:
        return None
    if today.items() <= row.items():
        return row
    is_known = case.padded and case.batch > 1 and not case.ragged
    return predicted_again(folder, case, row) if is_known else None


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def has(row: Mapping[str, Any], phase: str) -> bool:
    """True if a part of the run was measured."""
    if phase == "load" and row["strategy"]["mode"] == RESETS:
        return False
    return phase in row["phases"]


def off(row: Mapping[str, Any], phase: str, figure: str) -> float:
    """Predicted over measured, less one."""
    predicted, measured = row["phases"][phase][figure]
    return predicted / measured - 1


def summary(rows: Sequence[Mapping[str, Any]], phase: str) -> list[str]:
    """A line of the table of all cases: phase, cases, then median, 95th percentile and maximum of
    the error of each figure."""
    of_phase = [row for row in rows if has(row, phase)]
    line = [phase, str(len(of_phase))]
    for figure in FIGURES:
        sizes = sorted(abs(off(row, phase, figure)) for row in of_phase)
        if sizes:
            most = sizes[int(0.95 * (len(sizes) - 1))]
            line += [f"{size:.2%}" for size in (statistics.median(sizes), most, sizes[-1])]
    return line


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    return (
        "CUDA build, no card: kernels did nothing.\n\n"
        + tables(rows)
        + "\nPinned host memory of the rank that has most, as the driver was asked for it:\n\n"
        + recording.table(PINNED, [pinned(row) for row in rows if "predicted_pinned_bytes" in row])
    )


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """The summary by part of a run, and a line a case."""
    head = ["part of the run", "configurations"]
    for figure in FIGURES:
        head += [f"{figure}: median error", "95 % below", "max"]
    lines = [
        [
            row["case"],
            *(
                value
                for figure in FIGURES
                for value in (
                    *(f"{size / (1 << 20):.1f}" for size in row["phases"]["step"][figure]),
                    *(
                        f"{off(row, phase, figure):+.2%}" if has(row, phase) else ""
                        for phase in SHOWN
                    ),
                )
            ),
        ]
        for row in rows
    ]
    columns = ["configuration"]
    for figure in FIGURES:
        columns += [f"{figure}, step, predicted MiB", "measured"]
        columns += [f"error, {phase.replace('_', ' ')}" for phase in SHOWN]
    summaries = [summary(rows, phase) for phase in SHOWN]
    return recording.table(head, summaries) + "\n" + recording.table(columns, lines)


def pinned(row: Mapping[str, Any]) -> list[str]:
    """A line of the table of pinned host memory."""
    predicted, measured = row["predicted_pinned_bytes"], max(row["pinned_bytes"], default=0)
    sizes = [f"{size / (1 << 20):.1f}" for size in (predicted, measured)]
    return [row["case"], *sizes, f"{(predicted - measured) / (1 << 20):+.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose name contains this; nothing is recorded"
    )
    arguments = parser.parse_args()
    path = recording.RESULTS / f"{RESULT}.json"
    before = {row["case"]: row for row in read(path)["rows"]} if path.exists() else {}
    rows = {} if arguments.only else before
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        for number, case in enumerate(case for case in CASES if arguments.only in case.name):
            folder = Path(place) / str(number)
            folder.mkdir()
            row = None if arguments.only else again(folder, case, before.get(case.name))
            if row is None:
                shutil.rmtree(folder)
                folder.mkdir()
                row = measured(folder, case)
            figures = ", ".join(
                f"{phase} {off(row, phase, 'allocated'):+.2%} {off(row, phase, 'reserved'):+.2%}"
                for phase in row["phases"]
            )
            print(f"{case.name}: {figures}", flush=True)
            shutil.rmtree(folder)
            rows[case.name] = row
            if not arguments.only:  # a campaign that is cut off keeps what it has, and goes on
                rows = {each.name: rows[each.name] for each in CASES if each.name in rows}
                recording.write(RESULT, {"rows": [*rows.values()]}, text([*rows.values()]))
    if arguments.only:
        print(text([*rows.values()]))


if __name__ == "__main__":
    main()
