"""Predicted beside measured memory of real runs on CPUs: every byte of torch's allocator, and the
job's host RAM.

Each configuration is trained by train_low_mem.py under our launcher: some steps, an evaluation, an
export. A preloaded counter (allocator.c) sees each allocation of each rank in every thread; the
peak of the steps from the second on is compared with the plan's, that of the evaluation with the
trace's. Host RAM is what the report shows. FSDP2 runs through the shim of tests/modes. A quarter of
the rows is a little shorter than the rest: batches are padded.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks import recording
from launch.base.workspace import Workspace
from launch.plan import facts as plan_facts
from launch.plan.planner import Choice
from launch.plan.resolve import resolve
from launch.predict import estimate
from launch.predict.facts import Facts
from launch.predict.memory import traced_steps
from launch.render import run_files
from launch.run_folder import layout
from launch.run_folder.layout import AttemptDir
from launch.schema.plan import Command, Strategy
from launch.supervise import attempt as supervise_attempt
from launch.supervise.screen import Screen
from tests import builders
from tests.modes.launch_one import as_fsdp2

LENGTH = 256
FEWER_WORDS = 12  # of a row; its template adds eight tokens
WORDS = ("red", "blue", "green", "stone")
GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 4096,
    "n_positions": 512,
    "n_embd": 256,
    "n_layer": 6,
    "n_head": 4,
}
WIDE = {**GPT2, "n_embd": 512, "vocab_size": 512}
QWEN = {
    "model_type": "qwen2",
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "max_position_embeddings": 1024,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 7,
    "num_attention_heads": 8,
    "max_position_embeddings": 1024,
}
T5 = {
    "model_type": "t5",
    "vocab_size": 4096,
    "d_model": 256,
    "d_kv": 32,
    "d_ff": 768,
    "num_layers": 5,
    "num_decoder_layers": 5,
    "num_heads": 8,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
CHECKPOINTING, AUTOCAST = {"activation_checkpointing": True}, {"bf16": True}
ON_HOST = {**CHECKPOINTING, "activation_checkpointing_kwargs": {"offload": True}}
EVERYWHERE = {"logits_at_targets": False}
HALF, EAGER = {"dtype": "bfloat16"}, {"attn_implementation": "eager"}


@dataclass(frozen=True)
class Case:
    """One configuration; sections lay over the recipe's."""

    name: str
    config: Mapping[str, Any] | str  # of a model with random weights, or the name of a known shape
    batch: int = 4
    training: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] | None = None
    quantization: Mapping[str, Any] | None = None
    mode: str = "cpu"
    ranks: int = 1
    length: int = LENGTH
    padded: bool = True
    short_words: int = 0  # of each fourth row that is padded; 0: of an almost full row
    ragged: bool = False  # each row has a length of its own
    prompted: bool = False  # a quarter of a row's words, or more, are a prompt, the same each time
    steps: int = 4

    @property
    def is_encoder_decoder(self) -> bool:
        return "decoder_start_token_id" in self.config

    @property
    def effective_batch_size(self) -> int:
        return self.batch * self.training.get("gradient_accumulation_steps", 1) * self.ranks


def every_n_layers(n: int) -> dict[str, Any]:
    return {**CHECKPOINTING, "activation_checkpointing_kwargs": {"every_n_layers": n}}


def accumulating(count: int) -> dict[str, int]:
    return {"gradient_accumulation_steps": count}


CASES = (
    Case("gpt2", GPT2),
    Case("gpt2, loop AdamW", GPT2, training={"optim": "adamw_torch"}),
    Case("gpt2, eager", GPT2, model=EAGER),
    Case("gpt2, autocast", GPT2, training=AUTOCAST),
    Case("gpt2, bf16 weights", GPT2, model=HALF),
    Case("gpt2, bf16 weights, accumulation 2", GPT2, model=HALF, training=accumulating(2)),
    Case(
        "gpt2, checkpointing, accumulation 2", GPT2, training={**CHECKPOINTING, **accumulating(2)}
    ),
    Case("gpt2, optimizer is the peak", WIDE, 1, {"optim": "adamw_torch"}, length=32),
    Case("qwen2", QWEN),
    Case("qwen2, one sample", QWEN, 1),
    Case("qwen2, nothing padded", QWEN, padded=False),
    Case("qwen2, checkpointing", QWEN, training=CHECKPOINTING),
    Case(
        "qwen2, autocast, accumulation 3",
        QWEN,
        training={**AUTOCAST, **accumulating(3)},
        length=192,
    ),
    Case("qwen2, bf16 weights, Adafactor", QWEN, model=HALF, training={"optim": "adafactor"}),
    Case(
        "qwen2, eager, checkpointing, autocast",
        QWEN,
        3,
        model=EAGER,
        training={**CHECKPOINTING, **AUTOCAST},
    ),
    Case("qwen2, prompts", QWEN, padded=False, prompted=True),
    Case(
        "gpt2, prompts, autocast, logits in 4 parts",
        GPT2,
        training={**AUTOCAST, "num_output_chunks": 4},
        padded=False,
        prompted=True,
    ),
    Case(
        "qwen2, prompts, logits everywhere", QWEN, training=EVERYWHERE, padded=False, prompted=True
    ),
    Case("llama, LoRA", LLAMA, lora={"r": 16}),
    Case("llama, LoRA, checkpointing", LLAMA, lora={"r": 16}, training=CHECKPOINTING),
    Case(
        "llama, LoRA with dropout, bf16 weights",
        LLAMA,
        lora={"r": 16, "lora_dropout": 0.05},
        model=HALF,
    ),
    Case(
        "llama, LoRA, autocast, accumulation 2",
        LLAMA,
        lora={"r": 8},
        training={**AUTOCAST, **accumulating(2)},
    ),
    Case("llama, no clipping", LLAMA, training={"max_grad_norm": 0}),
    Case(
        "llama, Adafactor, checkpointing",
        LLAMA,
        8,
        {"optim": "adafactor", **CHECKPOINTING},
        length=128,
    ),
    Case("llama, SGD", LLAMA, training={"optim": "sgd"}),
    Case("llama, 8-bit AdamW", LLAMA, training={"optim": "adamw_8bit"}),
    Case(
        "gpt2, bf16 weights, paged 8-bit AdamW",
        GPT2,
        model=HALF,
        training={"optim": "paged_adamw_8bit"},
    ),
    Case("t5", T5, length=128),
    Case("t5, checkpointing", T5, training=CHECKPOINTING, length=128),
    Case("t5, autocast, accumulation 2", T5, training={**AUTOCAST, **accumulating(2)}, length=128),
    Case(
        "t5, encoder frozen, autocast",
        T5,
        training=AUTOCAST,
        model={"freeze": ["shared", "encoder"]},
        length=128,
    ),
    Case("t5, LoRA", T5, lora={"r": 8}, length=128),
    Case("t5, eager", T5, model=EAGER, length=128),
    Case("qwen2, DDP", QWEN, mode="multi_cpu", ranks=2),
    Case("gpt2, DDP, accumulation 2", GPT2, 2, accumulating(2), mode="multi_cpu", ranks=2),
    Case("t5, DDP, autocast", T5, training=AUTOCAST, mode="multi_cpu", ranks=2, length=128),
    Case("llama, LoRA, DDP", LLAMA, lora={"r": 16}, mode="multi_cpu", ranks=2),
    Case("qwen2, FSDP2", QWEN, mode="fsdp2", ranks=2),
    Case("llama, FSDP2, checkpointing", LLAMA, training=CHECKPOINTING, mode="fsdp2", ranks=2),
    Case("qwen2, ZeRO-2", QWEN, mode="deepspeed_zero2", ranks=2),
    Case("gpt2, wide, ZeRO-2", WIDE, 1, mode="deepspeed_zero2", ranks=2),
    Case("gpt2, ZeRO-3", GPT2, mode="deepspeed_zero3", ranks=2),
    Case(
        "qwen2, prompts, ZeRO-3", QWEN, mode="deepspeed_zero3", ranks=2, padded=False, prompted=True
    ),
    Case("qwen2, prompts, FSDP2", QWEN, mode="fsdp2", ranks=2, padded=False, prompted=True),
)


def write_data(folder: Path, case: Case) -> Path:
    """Model folder with random weights, tokenizer, rows and recipe of a case; the recipe's file."""
    from tests.builders import write_parquet

    rng = random.Random(0)

    def rows(count: int) -> list[dict[str, str]]:
        found = []
        for number in range(count):
            shorter = case.padded and number % 4 == 0
            short = case.short_words or case.length - FEWER_WORDS
            words = short if shorter else 3 * case.length
            if case.ragged:
                words = int(min(max(rng.lognormvariate(4.2, 0.6), 8), 2 * case.length))
            prompt = " ".join(rng.choices(WORDS, k=words if case.is_encoder_decoder else 3))
            if case.prompted:
                prompt = " ".join(WORDS * (case.length // 16))
            found.append({"prompt": prompt, "response": " ".join(rng.choices(WORDS, k=words))})
        return found

    steps = 24 if case.ragged else case.steps
    held_out = 24 if case.data else 3  # packed, they fill a batch too
    write_parquet(folder / "train.parquet", rows(steps * case.effective_batch_size))
    write_parquet(folder / "valid.parquet", rows(held_out * case.batch * case.ranks))
    shape = case.config if isinstance(case.config, str) else None
    if not shape and not (folder / "model").exists():
        child = [sys.executable, "-m", "benchmarks.random_model"]
        argv = [*child, json.dumps(case.config), str(folder)]
        subprocess.run(argv, check=True, cwd=recording.CODE, stderr=subprocess.DEVNULL)
    recipe = {
        "name": "case",
        "task": "sft",
        "model": {**({"shape": shape} if shape else {"path": str(folder / "model")}), **case.model},
        # words, which Qwen2's own class of tokenizers does not read
        "tokenizer": {"vocab_size": 1024}
        if shape
        else {"path": str(folder / "tokenizer"), "loading": "file"},
        "data": {
            "train_file": str(folder / "train.parquet"),
            "validation_file": str(folder / "valid.parquet"),
            "max_length": case.length,
            **case.data,
        },
        "training": {
            "per_device_train_batch_size": case.batch,
            "num_train_epochs": 1,
            "learning_rate": 1e-4,
            "logging_steps": 1,
            "save_steps": 1000,
            **case.training,
        },
        "launch": {"mode": "multi_cpu" if case.mode == "fsdp2" else case.mode},
        "output_dir": str(folder / "out"),
    }
    if case.mode != "cpu":
        recipe["launch"]["num_processes"] = case.ranks
    for section in ("lora", "quantization"):
        if getattr(case, section) is not None:
            recipe[section] = dict(getattr(case, section))
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    return file


def measured(case: Case, folder: Path, counter: Path) -> dict[str, Any]:
    """Run a case and put what was predicted beside what was counted."""
    os.environ["LOWMEM_ROOT"] = str(folder)
    recipe_file = write_data(folder, case)
    choice = resolve(str(recipe_file), [])
    if case.mode == "fsdp2":
        plan = as_fsdp2(choice.plan, choice.recipe, choice.facts.model.parameters)
        choice = replace(choice, plan=plan)
    attempt = counted(choice, counter)
    plain = started(case, folder, recipe_file)
    facts = at_length(case, choice)
    judged = estimate.judge(facts, choice.plan.strategy)
    return {
        "case": case.name,
        **predicted(case, facts, choice.plan.strategy),
        **counted_peaks(attempt),
        "host_predicted_bytes": judged.memory.host_bytes,
        "host_measured_bytes": plain["host_peak_bytes"],
        "host_phase": judged.memory.host_phase,
        "host_predicted_by_cause": dict(judged.memory.host),
    }


def at_length(case: Case, choice: Choice) -> Facts:
    """The context of a plan, with the longest row of the case, and the traces of its choice."""
    rows = plan_facts.with_counts(choice.facts.rows)  # with what tokenising has counted
    rows = replace(rows, lengths=(case.length, case.length), is_ragged=case.padded)
    facts = replace(choice.facts, rows=rows)
    with facts.asking():
        facts.fetch([choice.plan.strategy])
    return facts


def predicted(case: Case, facts: Facts, strategy: Strategy) -> dict[str, int]:
    """The most that torch's allocator holds in a step and in an evaluation, by the traces."""
    with facts.asking():
        steps = traced_steps.list_steps(facts, strategy)
        facts.fetch_steps(step.question for step in steps)
    evaluated = min(strategy.per_device_eval_batch_size, 3 * case.batch)
    peaks = [
        (section, peak.allocated_bytes)
        for step in steps
        if (trace := traced_steps.trace(facts, step, strategy))
        for section, peak in trace.peaks(step.rows, evaluated).items()
    ]
    assert peaks, facts.traces and facts.traces.failure
    return {
        "predicted_bytes": max(size for section, size in peaks if section != "evaluation"),
        "evaluation_predicted_bytes": max(
            size for section, size in peaks if section == "evaluation"
        ),
    }


def counted_peaks(attempt: AttemptDir) -> dict[str, int]:
    """The most that it held in an attempt: of the steps from the second on, and of evaluations."""
    ranks = [json.loads(file.read_text()) for file in sorted(attempt.root.glob("allocator-*.json"))]
    sections = [one for rank in ranks for one in rank]
    steps = [one for one in sections if one["name"].startswith("step ") and one["name"] != "step 1"]
    evaluations = [one for one in sections if one["name"] == "evaluation"]
    return {
        "measured_bytes": max(one["peak_bytes"] for one in steps),
        "evaluation_measured_bytes": max(one["peak_bytes"] for one in evaluations),
    }


def counted(choice: Choice, counter: Path) -> AttemptDir:
    """An attempt whose ranks have counted what their allocator hands out."""
    plan, machine, workspace = choice.plan, choice.machine, Workspace.here()
    with contextlib.redirect_stdout(io.StringIO()):
        run, attempt = builders.opened_run(choice)
    command = run_files.command(plan, machine, run, attempt, workspace, os.environ)
    instead = {
        str(recording.CODE / "train_low_mem.py"): str(
            recording.CODE / "benchmarks" / "counted_rank.py"
        )
    }
    added = {"PYTHONPATH": str(recording.CODE), "LD_PRELOAD": str(counter)}
    command = Command(
        tuple(instead.get(word, word) for word in command.argv), {**command.env, **added}
    )
    with contextlib.redirect_stdout(io.StringIO()):
        screen = Screen(layout.log_file(workspace.root, run))
        result = supervise_attempt.run(choice.recipe, machine, run, attempt, command, screen)
    assert result.failure is None, (result.failure, attempt.log_file.read_text()[-3000:])
    return attempt


def started(case: Case, folder: Path, recipe_file: Path) -> dict[str, Any]:
    """What the launcher has seen of the same, started as users start it, tokenised already."""
    launcher = ["launch", "run"]
    if case.mode == "fsdp2":  # through the shim
        launcher = ["tests.modes.launch_one", case.mode]
    argv = [sys.executable, "-m", *launcher, str(recipe_file), "--name=plain"]
    env = {**recording.environment(folder), "LOWMEM_TRACES": os.environ["LOWMEM_TRACES"]}
    done = subprocess.run(argv, env=env, cwd=recording.CODE, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (attempt,) = (folder / "runs" / "plain").glob("*/attempts/01")
    return json.loads(AttemptDir(attempt).supervisor_file.read_text(encoding="utf-8"))


def build_counter(folder: Path) -> Path:
    target = folder / "allocator.so"
    source = recording.CODE / "benchmarks" / "allocator.c"
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", str(target), str(source), "-ldl", "-lpthread"],
        check=True,
    )
    return target


def off(row: Mapping[str, Any], what: str) -> float:
    return row[f"{what}predicted_bytes"] / row[f"{what}measured_bytes"] - 1


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for row in rows:
        line = [row["case"]]
        for what in ("", "evaluation_", "host_"):
            line += [
                f"{row[f'{what}{side}_bytes'] / (1 << 20):.1f}"
                for side in ("predicted", "measured")
            ]
            line.append(f"{off(row, what):+.3%}" if what != "host_" else f"{off(row, what):+.1%}")
        lines.append(line)
    head = [
        "case",
        "step, predicted MiB",
        "measured",
        "error",
        "evaluation, predicted",
        "measured",
        "error",
    ]
    head += ["host RAM, predicted", "measured", "error"]
    summary = []
    for what, words in (
        ("", "peak of a step"),
        ("evaluation_", "peak of an evaluation"),
        ("host_", "host RAM of the job"),
    ):
        sizes = [abs(off(row, what)) for row in rows]
        summary.append(
            f"{words}: median |error| {statistics.median(sizes):.3%}, max {max(sizes):.3%}"
        )
    measured_on = Counter(row["measured_on"] for row in rows)
    origin = "; ".join(f"{count} of {where}" for where, count in measured_on.items())
    return (
        f"{len(rows)} configurations: {origin}. "
        + "; ".join(summary)
        + ".\n\n"
        + recording.table(head, lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose name holds this; recorded beside the others' rows"
    )
    arguments = parser.parse_args()
    rows = recording.rows("cpu_memory") if arguments.only else {}
    today = f"{date.today().isoformat()}, {recording.machine()}"
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        counter = build_counter(Path(place))
        for number, case in enumerate(case for case in CASES if arguments.only in case.name):
            folder = Path(place) / str(number)
            folder.mkdir()
            row = {**measured(case, folder, counter), "measured_on": today}
            rows[case.name] = row
            print(
                f"{case.name}: {off(row, ''):+.3%}, {off(row, 'evaluation_'):+.3%},"
                f" {off(row, 'host_'):+.1%}",
                flush=True,
            )
            shutil.rmtree(folder)
    in_order = [rows[case.name] for case in CASES if case.name in rows]
    recording.write("cpu_memory", {"rows": in_order}, text(in_order))


if __name__ == "__main__":
    main()
