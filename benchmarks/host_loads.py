"""Predicted beside measured host RAM of trainings whose weights are larger than the limit they run
in, or that the host converts, packs or lets grow.

Each is started by `python -m launch run` in a memory cgroup. What is measured is the most anonymous
and shared memory of all its processes; what is predicted is the plan's peak without the pages of
libraries and mapped weights, which the kernel counts apart. As root; an hour with the 7B.

By the python of `make cuda-build` the cases of a card are measured instead, on a driver without
one: it has the memory of the card that is written in host RAM too, and no context. Such a case has
its card's planned bytes and 2 GiB. The rows of the other cases stay.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import cgroups, cuda_build_memory, recording
from launch.probe import torch_build
from launch.schema.machine import GIB
from tests.fake_cuda.machine import Card, Machine

LLAMA_7B = {
    **{"model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "rms_norm_eps": 1e-5},
    **{"intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
    "max_position_embeddings": 2048,
}
LLAMA = {  # 1.6 billion parameters
    **{"model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "rms_norm_eps": 1e-5},
    **{"intermediate_size": 8192, "num_hidden_layers": 24, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "max_position_embeddings": 2048},
}
LARGER = int(1.5 * 2.96 * GIB)  # than its weights
WIDE = {**LLAMA, "vocab_size": 128256, "num_hidden_layers": 2}  # mostly embeddings
LORA = {"r": 8, "target_modules": ["q_proj", "v_proj"]}
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
NOT_ANONYMOUS = ("libraries", "weights' files")  # causes of the plan


@dataclass(frozen=True)
class Case:
    """A training, and the limit of its cgroup."""

    name: str
    config: Mapping[str, Any]
    limit_bytes: int
    sections: Mapping[str, Any] = field(default_factory=dict)
    stored: str = "bfloat16"
    shards: int = 1
    ranks: int = 1
    is_full: bool = False  # the tokenizer has a word for each row of the embeddings
    on_card: bool = False  # whose planned bytes the limit leaves beside its own


def bf16(**more: Any) -> dict[str, Any]:
    return {"model": {"dtype": "bfloat16"}, "lora": LORA, **more}


CASES = (
    Case("1.6B, LoRA, bf16", LLAMA, LARGER, bf16()),
    Case("1.6B, LoRA, bf16, two ranks", LLAMA, LARGER, bf16(), ranks=2),
    Case("1.6B, LoRA, float32 of bf16", LLAMA, 9 * GIB, {"lora": LORA}),
    Case("1.6B, 4 bits", LLAMA, 3 * GIB, bf16(quantization=FOUR_BITS)),
    Case("1.6B, 4 bits, two ranks", LLAMA, 5 * GIB, bf16(quantization=FOUR_BITS), ranks=2),
    Case(
        "wide, LoRA, grown vocabulary",
        WIDE,
        6 * GIB,
        bf16(tokenizer={"add_tokens": [f"<new{number}>" for number in range(8)]}),
        is_full=True,
    ),
    Case(
        "llama-7b, 4 bits, LoRA r=8, 64 tokens",
        LLAMA_7B,
        6 * GIB,
        bf16(quantization=FOUR_BITS),
        shards=3,
    ),
    Case(
        "llama-7b, 4 bits, to a card",
        LLAMA_7B,
        2 * GIB,
        bf16(quantization=FOUR_BITS),
        shards=3,
        on_card=True,
    ),
)


def write(folder: Path, case: Case) -> Path:
    """The model's folder, rows and recipe of a case; the recipe's file."""
    vocab_size = case.config["vocab_size"] if case.is_full else 0
    cgroups.with_tokenizer(folder, case.config, case.stored, case.shards, vocab_size)
    mode = "single_gpu" if case.on_card else "multi_cpu" if case.ranks > 1 else "cpu"
    return cgroups.write_recipe(folder, mode, 2 * case.ranks, case.sections)


def measured(case: Case, folder: Path) -> dict[str, Any]:
    """The bytes that the plan of a case names, and those that its processes held."""
    recipe = write(folder, case)
    env = cgroups.environment(folder)
    if case.on_card:
        machine = Machine(folder / "cards", [Card(memory_gib=6)])  # no room to compare the export
        env |= machine.environment() | cuda_build_memory.without_logits(folder)
    start = [sys.executable, "-m", "launch"]
    # traces are made outside the limit, as by an earlier plan
    planned = cgroups.run([*start, "plan", str(recipe), "--json"], env)
    limit_bytes = case.limit_bytes
    if case.on_card:
        limit_bytes += json.loads(planned.said)["phases"]["step"]["reserved_bytes"]
    ended = cgroups.run([*start, "run", str(recipe), "--name=case"], env, limit_bytes)
    assert ended.exit_code == 0, ended.said
    (run,) = (folder / "runs/case").glob("*")
    plan = json.loads((run / "attempts/01/plan.json").read_text(encoding="utf-8"))
    supervisor = json.loads((run / "attempts/01/supervisor.json").read_text(encoding="utf-8"))
    phases = {name: part["by_cause"] for name, part in plan["host"].items() if part}
    anonymous = {
        name: sum(size for cause, size in causes.items() if cause not in NOT_ANONYMOUS)
        for name, causes in phases.items()
    }
    return {
        "case": case.name,
        "limit_bytes": limit_bytes,
        "weights_bytes": sum(
            file.stat().st_size for file in (folder / "model").glob("*.safetensors")
        ),
        "predicted_bytes": sum(plan["estimate"]["host"].values()),
        "reported_bytes": supervisor["host_peak_bytes"],
        "predicted_anonymous_bytes": max(anonymous.values()),
        "anonymous_by_phase": anonymous,
        "held_bytes": ended.held_bytes,
        "wall_s": ended.wall_s,
    }


ON_CARD = {case.name for case in CASES if case.on_card}  # what is held has their cards' memory


def _difference(row: Mapping[str, Any]) -> str:
    predicted, held = row["predicted_anonymous_bytes"], row["held_bytes"]
    return f"{(predicted - held) / GIB:+.2f} GiB, {predicted / held - 1:+.1%}"


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["training", "weights, GiB", "limit", "anonymous, predicted", "held", "difference"]
    head += ["all, predicted", "reported"]
    lines = [
        [
            row["case"],
            *(
                f"{row[key] / GIB:.2f}"
                for key in (
                    *("weights_bytes", "limit_bytes", "predicted_anonymous_bytes", "held_bytes"),
                )
            ),
            "-" if row["case"] in ON_CARD else _difference(row),
            *(f"{row[key] / GIB:.2f}" for key in ("predicted_bytes", "reported_bytes")),
        ]
        for row in rows
    ]
    return recording.table(head, lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose name contains this; the rows of others stay"
    )
    only = parser.parse_args().only
    build = torch_build.installed()
    on_card = build is not None and bool(build.cuda)
    cases = [case for case in CASES if only in case.name and case.on_card == on_card]
    rows = recording.rows("host_loads")
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        for number, case in enumerate(cases):
            folder = Path(place) / str(number)
            folder.mkdir()
            rows[case.name] = measured(case, folder)
            print(json.dumps(rows[case.name]), flush=True)
            shutil.rmtree(folder)
            in_order = [rows[each.name] for each in CASES if each.name in rows]
            recording.write("host_loads", {"rows": in_order}, text(in_order))


if __name__ == "__main__":
    main()
