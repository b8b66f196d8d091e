"""Plans at the edge of host RAM: is a training refused that runs, or taken that does not?

Seeded trainings (model, stored type, type, method, mode, ranks) on the CPU. Each runs once without
a limit, which shows what it needs; then it is planned in a memory cgroup of 0.90 to 1.10 of that,
without a reserve and without the guard, so that the budget is all of the cgroup. What is taken has
to end well. What is refused is started all the same by --assume-fits: it may end well only if its
need was within 3 % of the budget. As root; about an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import cgroups, recording
from launch.schema.machine import GIB

WIDTHS = (512, 768, 1024)
MODELS: dict[str, Mapping[str, Any]] = {
    "llama": {"intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 4},
    "qwen2": {
        **{"intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 2},
        "tie_word_embeddings": True,
    },
}
MODES = ("cpu", "multi_cpu", "deepspeed_zero2", "deepspeed_zero3")
SPARED = 0.03  # of the budget: a refusal may be wrong by so much
WITHIN = (0.90, 1.10)


@dataclass(frozen=True)
class Drawn:
    """A training of the campaign, and the share of its need that the cgroup has."""

    seed: int
    model: str
    width: int
    layers: int
    vocab_size: int
    stored: str
    dtype: str
    method: str
    mode: str
    batch: int
    length: int
    share: float

    @property
    def config(self) -> dict[str, Any]:
        return {
            **{"model_type": self.model, **MODELS[self.model], "vocab_size": self.vocab_size},
            **{"hidden_size": self.width, "num_hidden_layers": self.layers},
            "max_position_embeddings": 1024,
        }

    @property
    def name(self) -> str:
        dtypes = f"{self.stored} in {self.dtype}"
        return f"{self.seed}: {self.model} {self.width}x{self.layers}, {dtypes}, {self.method}"


def drawn(seed: int) -> Drawn:
    rng = random.Random(seed)
    method = rng.choice(("full", "lora", "qlora"))
    modes = [mode for mode in MODES if method != "qlora" or not mode.startswith("deepspeed")]
    mode = rng.choice(modes)  # DeepSpeed trains weights in float32
    dtypes = ("float32",) if mode.startswith("deepspeed") else ("bfloat16", "float32")
    return Drawn(
        seed,
        model=rng.choice(sorted(MODELS)),
        width=rng.choice(WIDTHS),
        layers=rng.randint(6, 16),
        vocab_size=rng.choice((8192, 32000, 64000)),
        stored=rng.choice(("bfloat16", "float32")),
        dtype=rng.choice(dtypes),
        method=method,
        mode=mode,
        batch=rng.choice((1, 2, 4)),
        length=rng.choice((64, 128, 256)),
        share=round(rng.uniform(*WITHIN), 3),
    )


def write(folder: Path, case: Drawn) -> Path:
    """The model's folder, rows and recipe of a training; the recipe's file."""
    cgroups.with_tokenizer(folder, case.config, case.stored)
    sections: dict[str, dict[str, Any]] = {
        "model": {"dtype": case.dtype},
        "data": {"max_length": case.length},
        "training": {
            **{"per_device_train_batch_size": case.batch, "max_steps": 3},
            "num_output_chunks": 1,
        },
        "launch": {"exact_batch": True},
    }
    if case.method != "full":
        sections["lora"] = {"r": 8}
    if case.method == "qlora":
        sections["quantization"] = {"load_in_4bit": True}
    return cgroups.write_recipe(folder, case.mode, 6 * case.batch, sections)


def tried(case: Drawn, folder: Path) -> dict[str, Any]:
    """The need of a training, the plan at its share of that, and how it ends there."""
    recipe = write(folder, case)
    env = cgroups.environment(folder)
    start = [sys.executable, "-m", "launch", "run", str(recipe), "--resume=never"]
    free = cgroups.run([*start, "--name=free"], env)
    assert free.exit_code == 0, free.said
    need_bytes, predicted_bytes = measured(folder, "free")
    limit_bytes = int(case.share * need_bytes)
    planned = cgroups.run([*start, "--dry-run"], env, limit_bytes)
    assert planned.exit_code in (0, 3), planned.said
    words = [] if planned.exit_code == 0 else ["--assume-fits"]
    ended = cgroups.run([*start, "--name=edge", *words], env, limit_bytes)
    row = {
        **asdict(case),
        **{"need_bytes": need_bytes, "predicted_bytes": predicted_bytes},
        **{"held_bytes": free.held_bytes, "limit_bytes": limit_bytes},
        **{"taken": planned.exit_code == 0, "exit_code": ended.exit_code},
    }
    if ended.exit_code == 0:
        row["peak_bytes"] = measured(folder, "edge")[0]
    return {**row, "verdict": verdict(row)}


def measured(folder: Path, name: str) -> tuple[int, int]:
    """(the most host RAM of a run's job, the plan's)."""
    (attempt,) = (folder / "runs" / name).glob("*/attempts/01")
    supervisor = json.loads((attempt / "supervisor.json").read_text(encoding="utf-8"))
    plan = json.loads((attempt / "plan.json").read_text(encoding="utf-8"))
    return supervisor["host_peak_bytes"], sum(plan["estimate"]["host"].values())


def verdict(row: Mapping[str, Any]) -> str:
    if row["taken"]:
        return "taken, ends well" if row["exit_code"] == 0 else "FALSE FIT"
    if row["exit_code"] != 0:
        return "refused, does not end"
    is_near = row["need_bytes"] >= (1 - SPARED) * row["limit_bytes"]
    return "refused, near the budget" if is_near else "FALSE REFUSAL"


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["training", "mode", "batch", "need, GiB", "predicted", "error", "budget", "verdict"]
    lines = [
        [
            Drawn(**{key: row[key] for key in Drawn.__annotations__}).name,
            row["mode"],
            f"{row['batch']} x {row['length']}",
            f"{row['need_bytes'] / GIB:.2f}",
            f"{row['predicted_bytes'] / GIB:.2f}",
            f"{row['predicted_bytes'] / row['need_bytes'] - 1:+.1%}",
            f"{row['limit_bytes'] / GIB:.2f} ({row['share']})",
            row["verdict"],
        ]
        for row in rows
    ]
    false = sum(row["verdict"].isupper() for row in rows)
    taken = sum(row["taken"] for row in rows)
    summary = f"{len(rows)} trainings, {taken} taken; {false} false fits and false refusals."
    return f"{summary}\n\n{recording.table(head, lines)}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, help="this one alone; nothing is recorded")
    arguments = parser.parse_args()
    seeds = range(arguments.count) if arguments.seed is None else [arguments.seed]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        for seed in seeds:
            folder = Path(place) / str(seed)
            folder.mkdir()
            rows.append(tried(drawn(seed), folder))
            print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(folder)
            if arguments.seed is None:
                recording.write("host_edge", {"rows": rows}, text(rows))
    if arguments.seed is not None:
        print(text(rows))


if __name__ == "__main__":
    main()
