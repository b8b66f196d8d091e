"""Losses and weights of every mode that runs on CPUs, at two checkouts of this project: equal to
the last bit.

`python -m benchmarks.same_bits BEFORE [AFTER]` takes two folders. Each mode trains llama-tiny, on
texts (which no chat template is in), and t5-tiny, on prompts and responses, for the steps of
benchmarks.modes in float32. Writes benchmarks/results/same_bits.json and .md.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks import modes, recording

RUNS = (*((mode, ranks) for mode, ranks in modes.CPU_RUNS if ranks == 2), ("cpu", 1))


def trained(checkout: Path, case: modes.Case) -> dict[str, str]:
    """Hashes of the losses and of the exported weights of a case, as this checkout trains it."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        modes.write_rows(folder)
        recipe = modes.recipe(folder, case)
        if not case.family.startswith("t5"):
            _as_texts(folder / "rows.jsonl", recipe)
        python = checkout / ".venv" / "bin" / "python"
        argv = [
            str(python if python.exists() else sys.executable),
            "-m",
            "tests.modes.launch_one",
            case.mode,
        ]
        env = {
            **recording.environment(folder / "workspace"),
            "PYTHONPATH": str(checkout),
            "OMP_NUM_THREADS": "1",
        }
        done = subprocess.run(
            [*argv, str(recipe)], env=env, cwd=checkout, capture_output=True, text=True
        )
        if done.returncode != 0:
            raise RuntimeError(
                f"{checkout}: {case.name}: exit"
                f" {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            )
        (run,) = (
            path.parent for path in (folder / "workspace" / "runs" / case.name).glob("*/plan.json")
        )
        events = modes.losses(run, 1)
        weights = hashlib.sha256()
        for name, tensor in sorted(modes.read_model(folder / "models" / case.name).items()):
            weights.update(name.encode() + tensor.float().numpy().tobytes())
        losses = json.dumps([events[step]["loss"] for step in sorted(events)])
        return {
            "losses": hashlib.sha256(losses.encode()).hexdigest()[:16],
            "weights": weights.hexdigest()[:16],
        }


def _as_texts(rows: Path, recipe: Path) -> None:
    read = map(json.loads, rows.read_text(encoding="utf-8").splitlines())
    texts = [
        json.dumps({"text": f"{row['prompt']} {row['response']}"}, ensure_ascii=False) + "\n"
        for row in read
    ]
    rows.write_text("".join(texts), encoding="utf-8")
    content = yaml.safe_load(recipe.read_text(encoding="utf-8"))
    recipe.write_text(yaml.safe_dump({**content, "task": "pretrain"}), encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    lines = [
        (
            f"{results['date']}, {results['machine']}; before {results['before']}, after"
            f" {results['after']}; `{results['command']}`"
        ),
        "",
        "| mode | ranks | model | losses | weights | equal |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in results["rows"]:
        after = row["after"]
        equal = "yes" if row["before"] == after else "**no**"
        lines.append(
            f"| {row['mode']} | {row['ranks']} | {row['family']} | {after['losses']} |"
            f" {after['weights']} | {equal} |"
        )
    return "\n".join(lines) + "\n"


def commit(checkout: Path) -> str:
    """Its short hash, with a mark where files differ from it."""
    argv = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(
        argv, cwd=checkout, capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    before, after = (Path(word).resolve() for word in [*sys.argv[1:], os.curdir][:2])
    rows = []
    for mode, ranks in RUNS:
        for family in modes.FAMILIES:
            case = modes.Case(mode, ranks, family, lora=False)
            found = {
                name: trained(checkout, case)
                for name, checkout in (("before", before), ("after", after))
            }
            rows.append({"mode": mode, "ranks": ranks, "family": family, **found})
            print(
                case.name,
                "equal" if found["before"] == found["after"] else f"NOT EQUAL {found}",
                flush=True,
            )
    results = {
        "date": str(date.today()),
        "machine": recording.machine(),
        "versions": {
            name: version for name in modes.PACKAGES if (version := recording.installed(name))
        },
        "command": recording.command("same_bits"),
        "before": commit(before),
        "after": commit(after),
        "rows": rows,
    }
    (recording.RESULTS / "same_bits.json").write_text(
        json.dumps(results, indent=1) + "\n", encoding="utf-8"
    )
    (recording.RESULTS / "same_bits.md").write_text(table(results), encoding="utf-8")
    return 0 if all(row["before"] == row["after"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
