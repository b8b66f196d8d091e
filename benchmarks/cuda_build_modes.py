"""Every GPU mode with the CUDA build of torch on a driver without a card: started, saved, resumed,
exported, its memory beside the prediction. Run it by `make cuda-build-modes`.

Kernels did nothing: losses and seconds mean nothing. What is real is PyTorch's caching allocator,
the engines, what they save and what they read back (tests/fake_cuda/README.md). A case is a real
launch on two described cards; then its last checkpoint and its outcome are taken away, as a kill
would, and the same line runs again. The figures go to benchmarks/results/cuda_build_modes; a run
of some cases replaces only theirs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks import recording, sources
from benchmarks.modes import GPU_RUNS
from launch.schema.modes import LAUNCH_MODES, Mode
from tests import builders
from tests.fake_cuda.machine import Card, Machine

RESULT = "cuda_build_modes"
STEPS, SAVE_STEPS, EFFECTIVE_BATCH = 6, 3, 8
FAMILIES = ("llama-tiny", "t5-tiny")
TUNED = ("full", "lora", "qlora")
PRECISIONS = ("bf16", "fp16", "fp32")
TIME_LIMIT_S = 300
FIGURES = ("allocated", "reserved")
BEGIN = "<!-- table: written by make cuda-build-modes -->"
END = "<!-- end of the table of the CUDA build -->"
SDPA = {"attn_implementation": "sdpa"}  # every mode and model has it


@dataclass(frozen=True)
class Case:
    """A mode with so many ranks, training a model in one way and precision."""

    mode: Mode
    ranks: int
    family: str
    tuned: str
    precision: str

    @property
    def name(self) -> str:
        return f"{self.family}-{self.tuned}-{self.mode}-{self.ranks}-{self.precision}"

    @property
    def is_refused(self) -> bool:
        """True if the mode is documented to refuse this case."""
        return self.tuned == "qlora" and LAUNCH_MODES[self.mode].engine == "deepspeed"


def cases() -> list[Case]:
    models = itertools.product(PRECISIONS, FAMILIES, TUNED, GPU_RUNS)
    return [Case(*run, family, tuned, precision) for precision, family, tuned, run in models]


def recipe(folder: Path, case: Case) -> Path:
    content: dict[str, Any] = {
        "name": case.name,
        "task": "sft",
        "model": {"shape": case.family, **SDPA},
        "data": {"train_file": str(folder / "train.parquet"), "max_length": 64},
        "training": {
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": EFFECTIVE_BATCH // 2 // case.ranks,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "bf16": case.precision == "bf16",
            "fp16": case.precision == "fp16",
            "logging_steps": 1,
            "save_steps": SAVE_STEPS,
        },
        "launch": {"num_processes": case.ranks, "mode": case.mode},
        "output_dir": str(folder / "models" / case.name),
    }
    if case.tuned != "full":
        pretrained = str(folder / "pretrained" / case.family)
        content |= {"lora": {"r": 4}, "model": {"path": pretrained, **SDPA}}
        content["tokenizer"] = {"path": pretrained}
    if case.tuned == "qlora":
        content["quantization"] = {"load_in_4bit": True}
    path = folder / f"{case.name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def launch(machine: Machine, folder: Path, case: Case) -> Path:
    """Run the case's line; its run folder. Raises RuntimeError with what it said."""
    argv = [sys.executable, "-m", "launch", "run", str(recipe(folder, case))]
    env = recording.environment(folder / "workspace") | machine.environment()
    done = subprocess.run(
        argv, env=env, cwd=recording.CODE, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
        text = (errors or [done.stderr.strip() or done.stdout])[-1]
        raise RuntimeError(f"exit {done.returncode}: {text[-500:]}")
    (plan,) = (folder / "workspace" / "runs" / case.name).glob("*/plan.json")
    return plan.parent


def steps(run: Path, attempt: int) -> list[int]:
    events = run / "attempts" / f"{attempt:02d}" / "events.jsonl"
    return [json.loads(line)["step"] for line in events.read_text("utf-8").splitlines()]


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def require(condition: bool, text: str) -> None:
    if not condition:
        raise RuntimeError(text)


def measure(machine: Machine, folder: Path, case: Case) -> dict[str, Any]:
    """Train, compare with the prediction, cut short, resume, export again."""
    run = launch(machine, folder, case)
    require(steps(run, 1) == list(range(1, STEPS + 1)), f"steps {steps(run, 1)}")
    estimate, outcome = read(run / "plan.json")["estimate"], read(run / "attempts/01/outcome.json")
    shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS:06d}")
    (run / "attempts" / "01" / "outcome.json").unlink()
    shutil.rmtree(folder / "models" / case.name)
    launch(machine, folder, case)
    after = list(range(SAVE_STEPS + 1, STEPS + 1))
    require(steps(run, 2) == after, f"resumed: steps {steps(run, 2)}")
    kind = "model" if case.tuned == "full" else "adapter_model"
    require(
        (folder / "models" / case.name / f"{kind}.safetensors").exists(), f"no {kind}.safetensors"
    )
    return {
        f"{figure}_bytes": [estimate[f"step_{figure}_bytes"], outcome[f"vram_{figure}_bytes"]]
        for figure in FIGURES
    }


def pretrain(machine: Machine, folder: Path) -> None:
    """A folder of each family, which adapters start from."""
    for family in FAMILIES:
        case = Case("single_gpu", 1, family, "full", "bf16")
        launch(machine, folder, case)
        shutil.move(folder / "models" / case.name, folder / "pretrained" / family)
    shutil.rmtree(folder / "workspace" / "runs")


def campaign(chosen: list[Case]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        machine = Machine(folder / "cards", [Card(), Card()])
        builders.write_parquet(folder / "train.parquet", builders.rows(45))
        pretrain(machine, folder)
        for case in chosen:
            began = time.monotonic()
            described = asdict(case) | sources.digests(RESULT)
            try:
                row = described | measure(machine, folder, case)
                require(not case.is_refused, "it was not refused")
            except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                is_refusal = case.is_refused and str(error).startswith("exit 2: ")
                row = described | {"refused" if is_refusal else "failed": str(error)}
            seconds = time.monotonic() - began
            ended = row.get("failed") or ("refused" if "refused" in row else "ok")
            print(f"{case.name}: {ended} ({seconds:.0f} s)", flush=True)
            yield row


def error_percent(row: dict[str, Any], figure: str) -> float:
    predicted, measured = row[f"{figure}_bytes"]
    return (measured / predicted - 1) * 100


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each mode: cases that passed, and how far off the worst prediction was."""
    lines = []
    for mode, ranks in GPU_RUNS:
        of_mode = [
            row
            for row in rows
            if (row["mode"], row["ranks"]) == (mode, ranks) and "refused" not in row
        ]
        good = [row for row in of_mode if "failed" not in row]
        worst = [
            f"{min(errors):+.1f} to {max(errors):+.1f}" if errors else "-"
            for figure in FIGURES
            for errors in [[error_percent(row, figure) for row in good]]
        ]
        lines.append([mode, str(ranks), f"{len(good)} of {len(of_mode)}", *worst])
    titles = ["mode", "ranks", "cases that start, save, resume and export"]
    titles += [f"{figure}: measured beside predicted, %" for figure in FIGURES]
    failed = [f"- {name(row)}: {row['failed']}" for row in rows if "failed" in row]
    return recording.table(titles, lines) + "".join(f"\n{line}" for line in failed) + "\n"


def docs_text(rows: list[dict[str, Any]]) -> str:
    """The table of docs/modes.md, a line for each mode: the precisions in which every model
    passed, by way of training."""
    of_case = {name(row): row for row in rows}
    lines = []
    for run in GPU_RUNS:
        cells = []
        for tuned in TUNED:
            passed = []
            for precision in PRECISIONS:
                named = [Case(*run, family, tuned, precision).name for family in FAMILIES]
                known = [of_case[case] for case in named if case in of_case]
                failed = [row["family"] for row in known if "failed" in row]
                if any("refused" in row for row in known):
                    passed.append(f"{precision} refused")
                elif failed:
                    passed.append(f"{precision} ({', '.join(failed)} failed)")
                elif len(known) == len(FAMILIES):
                    passed.append(precision)
            cells.append(", ".join(passed) or "not yet run")
        lines.append([run[0], str(run[1]), *cells])
    table = recording.table(["mode", "ranks", *TUNED], lines).strip()
    return f"{len(rows)} of {len(cases())} cases have run.\n\n{table}"


def write_docs(rows: list[dict[str, Any]]) -> None:
    """Put the text of the recorded cases between its marks of docs/modes.md."""
    page = recording.CODE / "docs" / "modes.md"
    recording.put_between(page, BEGIN, END, docs_text(rows))


def name(row: dict[str, Any]) -> str:
    return Case(*(row[field] for field in Case.__dataclass_fields__)).name


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    chosen = [case for case in cases() if parser.parse_args().only in case.name]
    path = recording.RESULTS / f"{RESULT}.json"
    rows = {name(row): row for row in read(path)["rows"]} if path.exists() else {}
    # a campaign that is cut off keeps what it has, and goes on with the rest
    current = sources.digests(RESULT)
    done = {
        key for key, row in rows.items() if current.items() <= row.items() and "failed" not in row
    }
    for row in campaign([case for case in chosen if case.name not in done]):
        rows[name(row)] = row
        text = "CUDA build, no card: kernels did nothing.\n\n" + table(list(rows.values()))
        recording.write(RESULT, {"rows": list(rows.values())}, text)
        write_docs(list(rows.values()))
    return 1 if any("failed" in row for row in rows.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
