"""Every launch mode that runs on CPUs: trained, compared with one plain process, resumed, exported.
`make modes`.

Each mode is a real `accelerate launch` of 20 steps at one effective batch of 8 in fp32, cut
differently by each number of ranks, on 45 rows: the last step of an epoch is smaller. Then its last
checkpoint and its outcome are taken away, as a kill would, and the same line runs again. The model
folder is read by plain transformers. FSDP2 runs through the shim of tests/modes. The figures go to
benchmarks/results/modes.json and, as a table, to docs/modes.md between its marks; the rows of modes
that need a GPU come from benchmarks/results/modes-gpu.json, which --gpu writes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import yaml

from benchmarks import recording

STEPS, SAVE_STEPS, EFFECTIVE_BATCH = 20, 10, 8
LOSS_TOLERANCE = 1e-5  # relative, at every step; float32 rounding carried over 20 steps
WEIGHT_TOLERANCE = 2e-5  # absolute; Adam moves a weight by up to the learning rate, 1e-3, a step
FAMILIES = ("llama-tiny", "t5-tiny")
# its LoRA cases start from a local folder, which ZeRO-3 reads in shards; the others from a shape
LOADED = "llama-tiny"
STATES_TOLERANCE = 0.02  # of the predicted bytes of weights and optimizer states on a rank
STATES = ("weights", "optimizer", "offloaded")
PROMISES = ("runs", "fits", "equal", "resumes", "exports")
TIME_LIMIT_S = 180
PACKAGES = (*recording.PACKAGES, "deepspeed", "peft")
CPU_RUNS = (
    ("cpu", 1),
    ("multi_cpu", 2),
    ("deepspeed_zero1", 1),
    ("deepspeed_zero1", 2),
    ("deepspeed_zero2", 1),
    ("deepspeed_zero2", 2),
    ("deepspeed_zero2_offload", 1),
    ("deepspeed_zero2_offload", 2),
    ("deepspeed_zero3", 1),
    ("deepspeed_zero3", 2),
    ("deepspeed_zero3_offload", 1),
    ("deepspeed_zero3_offload", 2),
    ("fsdp2", 2),
)
BF16_RUNS = (
    ("cpu", 1),
    ("multi_cpu", 2),
    ("fsdp2", 2),
    ("deepspeed_zero1", 2),
    ("deepspeed_zero2", 2),
    ("deepspeed_zero3", 2),
)
GPU_RUNS = (
    ("single_gpu", 1),
    ("deepspeed_zero2", 1),
    ("deepspeed_zero2_offload", 1),
    ("deepspeed_zero3_offload", 1),
    ("dual_gpu_nccl", 2),
    ("dual_gpu_gloo", 2),
    ("deepspeed_zero1", 2),
    ("deepspeed_zero2", 2),
    ("deepspeed_zero2_offload", 2),
    ("deepspeed_zero3", 2),
    ("deepspeed_zero3_offload", 2),
    ("fsdp2", 2),
)
BEGIN, END = "<!-- table: written by make modes -->", "<!-- end of table -->"


@dataclass(frozen=True)
class Case:
    """One mode with so many ranks, training one model whole or by LoRA."""

    mode: str
    ranks: int
    family: str
    lora: bool
    bf16: bool = False

    @property
    def name(self) -> str:
        trained = "lora" if self.lora else "full"
        return f"{self.family}-{trained}-{self.mode}-{self.ranks}{'-bf16' if self.bf16 else ''}"


def recipe(folder: Path, case: Case) -> Path:
    """The recipe file of a case, in the one workspace that all share."""
    micro = 2 if case.ranks > 1 else 4
    content: dict[str, Any] = {
        "name": case.name,
        "task": "sft",
        "model": {"shape": case.family},
        "data": {"train_file": str(folder / "rows.jsonl"), "max_length": 64},
        "training": {
            "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": EFFECTIVE_BATCH // micro // case.ranks,
            "max_steps": STEPS,
            "learning_rate": 1e-3,
            "warmup_steps": 3,
            "bf16": case.bf16,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_steps": SAVE_STEPS,
        },
        "launch": {"num_processes": case.ranks},
        "output_dir": str(folder / "models" / case.name),
    }
    if case.lora:
        content["lora"] = {"r": 4, "lora_alpha": 8}
        if case.family == LOADED:
            content["model"] = {"path": str(folder / "pretrained")}
            content["tokenizer"] = {"path": str(folder / "pretrained")}
    path = folder / f"{case.name}.yaml"
    path.write_text(yaml.safe_dump(content), encoding="utf-8")
    return path


def write_rows(folder: Path) -> None:
    from tests import builders

    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in builders.rows(45)]
    (folder / "rows.jsonl").write_text("".join(lines), encoding="utf-8")


def pretrain(folder: Path, mode: str) -> None:
    """A local model folder to start from: one plain run's."""
    case = Case(mode, 1, LOADED, lora=False)
    launch(folder, case)
    (folder / "models" / case.name).rename(folder / "pretrained")
    shutil.rmtree(folder / "workspace" / "runs")


def launch(folder: Path, case: Case) -> tuple[Path, float]:
    """Run the case's line; (its run folder, wall seconds). Raises RuntimeError with what it
    said."""
    argv = [sys.executable, "-m", "tests.modes.launch_one", case.mode, str(recipe(folder, case))]
    env = {**recording.environment(folder / "workspace"), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        argv, env=env, cwd=recording.CODE, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"{case.name}: exit {done.returncode}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    (run,) = (
        path.parent for path in (folder / "workspace" / "runs" / case.name).glob("*/plan.json")
    )
    return run, time.monotonic() - began


def losses(run: Path, attempt: int) -> dict[int, dict[str, Any]]:
    """step -> event of one attempt."""
    lines = (
        (run / "attempts" / f"{attempt:02d}" / "events.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return {event["step"]: event for event in map(json.loads, lines)}


def read_model(folder: Path) -> dict[str, Any]:
    """The weights of an exported folder, as plain transformers reads them, or PEFT's adapter."""
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    AutoTokenizer.from_pretrained(folder)
    if (folder / "adapter_config.json").exists():
        return load_file(folder / "adapter_model.safetensors")
    family = (
        AutoModelForSeq2SeqLM
        if AutoConfig.from_pretrained(folder).is_encoder_decoder
        else AutoModelForCausalLM
    )
    return family.from_pretrained(folder).state_dict()


def measure(folder: Path, case: Case, plain: dict[str, Any]) -> dict[str, Any]:
    """Train, compare, cut short, resume, compare again. `plain` holds the one process's figures, or
    is filled."""
    run, wall_s = launch(folder, case)
    first = losses(run, 1)
    assert sorted(first) == list(range(1, STEPS + 1)), f"{case.name}: steps {sorted(first)}"
    model = read_model(folder / "models" / case.name)
    states = {
        "predicted": read(run / "plan.json")["estimate"],
        "measured": read(run / "attempts/01/outcome.json"),
    }
    shutil.rmtree(run / "checkpoints" / f"checkpoint-{STEPS:06d}")
    (run / "attempts" / "01" / "outcome.json").unlink()
    shutil.rmtree(folder / "models" / case.name)
    launch(folder, case)
    second = losses(run, 2)
    assert sorted(second) == list(range(SAVE_STEPS + 1, STEPS + 1)), (
        f"{case.name} resumed: steps {sorted(second)}"
    )
    resumed = read_model(folder / "models" / case.name)
    reference = plain.setdefault("events", first), plain.setdefault("model", model)
    return {
        "mode": case.mode,
        "ranks": case.ranks,
        "family": case.family,
        "lora": case.lora,
        "loss_error": max(abs(first[at]["loss"] / reference[0][at]["loss"] - 1) for at in first),
        "resumed_loss_error": max(abs(second[at]["loss"] / first[at]["loss"] - 1) for at in second),
        "resumed_weight_error": _distance(resumed, model),
        "export_error": _distance(model, reference[1]),
        "weights_prediction_error": _off(states, "weights_bytes"),
        "optimizer_prediction_error": _off(states, "optimizer_bytes"),
        "offloaded_prediction_error": _off(states, "offloaded_bytes"),
        "samples_seen": first[STEPS]["samples_seen"],
        "seconds_per_step": statistics.median(
            event["seconds"] for event in list(first.values())[2:]
        ),
        "wall_s": wall_s,
    }


def bf16_beside_float32() -> dict[str, Any]:
    """How far every step's loss under bf16 is from one plain process's in float32 and in bf16, by
    mode and family."""
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_rows(folder)
        for family in FAMILIES:
            cases = [
                Case("cpu", 1, family, False),
                *(Case(*run, family, False, bf16=True) for run in BF16_RUNS),
            ]
            found = {case: losses(launch(folder, case)[0], 1) for case in cases}
            plain = {
                precision: found[case]
                for precision, case in zip(("float32", "bf16"), cases, strict=False)
            }
            for case in cases[1:]:
                error = {
                    precision: max(
                        abs(found[case][at]["loss"] / events[at]["loss"] - 1) for at in events
                    )
                    for precision, events in plain.items()
                }
                rows.append(
                    {"mode": case.mode, "ranks": case.ranks, "family": family, "loss_error": error}
                )
                print(f"{case.name}: {error}", flush=True)
    return {"date": str(date.today()), "command": recording.command("modes"), "rows": rows}


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def _off(states: dict[str, dict[str, Any]], name: str) -> float:
    """Measured over predicted, less 1; 0 when both are nothing (on the host instead)."""
    predicted, measured = states["predicted"][name], states["measured"][name]
    return measured / predicted - 1 if predicted else float(measured)


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys(), f"tensors differ: {sorted(one.keys() ^ other.keys())}"
    return max((one[name].float() - other[name].float()).abs().max().item() for name in one)


def verdicts(row: dict[str, Any]) -> dict[str, bool]:
    """Which of the promises a row keeps; a case that failed to run keeps none."""
    if "failed" in row:
        return dict.fromkeys(PROMISES, False)
    return {
        "runs": True,
        "fits": max(abs(row[f"{name}_prediction_error"]) for name in STATES) <= STATES_TOLERANCE,
        "equal": row["loss_error"] <= LOSS_TOLERANCE,
        "resumes": (
            row["resumed_loss_error"] <= LOSS_TOLERANCE
            and row["resumed_weight_error"] <= WEIGHT_TOLERANCE
        ),
        "exports": row["export_error"] <= WEIGHT_TOLERANCE,
    }


def table(results: dict[str, Any] | None, gpu: dict[str, Any] | None) -> str:
    """Format the table of docs/modes.md: a row for each mode and number of ranks, with the worst of
    its cases."""
    sources = [
        f"{where} rows: "
        + (f"{part['date']}, {part['machine']}; {_versions(part)}." if part else "not yet run.")
        for where, part in (("CPU", results), ("GPU", gpu))
    ]
    lines = [
        " ".join(sources),
        "",
        (
            "| mode | ranks | where | runs | fits | equal (worst loss error) | resumes | exports |"
            " s/step: llama, t5 |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for where, source, runs in (("CPU, Gloo", results, CPU_RUNS), ("GPU", gpu, GPU_RUNS)):
        for mode, ranks in runs:
            rows = [
                row
                for row in (source or {"rows": []})["rows"]
                if (row["mode"], row["ranks"]) == (mode, ranks)
            ]
            place = (
                "CPU, Gloo, test shim"
                if mode == "fsdp2" and where != "GPU"
                else "CPU"
                if mode == "cpu"
                else where
            )
            lines.append(f"| {mode} | {ranks} | {place} | {_cells(rows)} |")
    ended = (results or {}).get("endings")
    lines += [
        "",
        *_bf16_lines((results or {}).get("bf16")),
        "",
        (
            f"Processes left behind: after {ended['passed']} of {ended['of']} endings (each CPU"
            " mode: success, a killed rank, Ctrl-C, SIGTERM, SIGKILL of the launcher) no process of"
            f" the run was alive or listening 5 s later ({ended['date']})."
            if ended
            else "Processes left behind: not yet run."
        ),
    ]
    return "\n".join(lines)


def _bf16_lines(found: dict[str, Any] | None) -> list[str]:
    if not found:
        return ["bf16 beside float32: not yet run."]
    return [
        (
            f"bf16 beside float32 (CPU, {found['date']}): the largest relative difference of a"
            f" loss, over {STEPS} steps of llama-tiny and t5-tiny, from one process"
        ),
        "",
        "| mode under bf16 | ranks | in float32: llama, t5 | in bf16: llama, t5 |",
        "| --- | --- | --- | --- |",
        *(
            f"| {mode} | {ranks} | {_errors(found['rows'], mode, 'float32')} |"
            f" {_errors(found['rows'], mode, 'bf16')} |"
            for mode, ranks in BF16_RUNS
        ),
    ]


def _errors(rows: list[dict[str, Any]], mode: str, precision: str) -> str:
    return ", ".join(f"{row['loss_error'][precision]:.1e}" for row in rows if row["mode"] == mode)


def _cells(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "not yet run | | | | | "
    kept = [verdicts(row) for row in rows]
    cells = ["yes" if all(row[name] for row in kept) else "**no**" for name in PROMISES]
    good = [row for row in rows if "failed" not in row]
    if good:
        cells[2] += f" ({max(row['loss_error'] for row in good):.1e})"
    paces = [
        [row["seconds_per_step"] for row in good if row["family"] == family] for family in FAMILIES
    ]
    return " | ".join(
        [*cells, ", ".join(f"{statistics.median(pace):.3f}" if pace else "-" for pace in paces)]
    )


def _versions(results: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in results["versions"].items())


def endings() -> dict[str, Any]:
    """How many ways of ending a run, over all modes, leave neither a process nor a listening port 5
    s later."""
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/modes/test_nothing_is_left.py",
    ]
    done = subprocess.run(argv, cwd=recording.CODE, capture_output=True, text=True)
    print(done.stdout[-3000:])
    counts = {
        word: int(number)
        for number, word in re.findall(r"(\d+) (passed|failed|error)", done.stdout)
    }
    return {
        "date": str(date.today()),
        "passed": counts.get("passed", 0),
        "of": sum(counts.values()),
    }


def add_to_results(part: dict[str, Any]) -> dict[str, Any]:
    """Put a part of the figures into those of the CPU's campaign, and into the page; all of
    them."""
    path = recording.RESULTS / "modes.json"
    results = {**read(path), **part}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_doc()
    return results


def write_doc() -> None:
    """Put the table of the recorded figures between the marks of docs/modes.md."""
    files = (recording.RESULTS / name for name in ("modes.json", "modes-gpu.json"))
    cpu, gpu = (
        json.loads(file.read_text(encoding="utf-8")) if file.exists() else None for file in files
    )
    recording.put_between(recording.CODE / "docs" / "modes.md", BEGIN, END, table(cpu, gpu))


def possible(runs: Sequence[tuple[str, int]], on_gpu: bool) -> list[tuple[str, int]]:
    """The runs that this machine has the cards and the packages for."""
    sys.path.insert(0, str(recording.CODE))
    from launch.probe import machine

    cards = len(machine.machine().gpus)
    assert cards or not on_gpu, "--gpu: no GPU here"
    has_deepspeed = importlib.util.find_spec("deepspeed") is not None
    return [
        (mode, ranks)
        for mode, ranks in runs
        if (not on_gpu or ranks <= cards) and (has_deepspeed or not mode.startswith("deepspeed"))
    ]


def measured(
    runs: Sequence[tuple[str, int]], only: str = "", spread: bool = False
) -> list[dict[str, Any]]:
    """The rows of all cases; the first run is the plain one that the others are compared with.

    `spread`: the runs in turn over the four models, instead of each with all of them.
    """
    plain_mode, rows = runs[0][0], []
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_rows(folder)
        pretrain(folder, plain_mode)
        models = [(family, lora) for family in FAMILIES for lora in (False, True)]
        for i, (family, lora) in enumerate(models):
            plain: dict[str, Any] = {}
            chosen = [run for at, run in enumerate(runs[1:]) if not spread or at % len(models) == i]
            for mode, ranks in [runs[0], *chosen]:
                case = Case(mode, ranks, family, lora)
                if mode != plain_mode and only not in case.name:
                    continue
                try:
                    row = measure(folder, case, plain)
                except (RuntimeError, AssertionError, OSError, subprocess.TimeoutExpired) as error:
                    row = {**vars(case), "failed": str(error)}
                    print(error, file=sys.stderr)
                rows.append(row)
                kept = verdicts(row)
                shown = " ".join(name if kept[name] else name.upper() + "-NOT" for name in kept)
                print(
                    f"{case.name}: {shown}; loss error {row.get('loss_error', math.nan):.1e}",
                    flush=True,
                )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this; writes nothing")
    parser.add_argument(
        "--gpu", action="store_true", help="the modes that need GPUs, as far as there are cards"
    )
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="only losses under bf16 beside float32's, into the figures",
    )
    parser.add_argument(
        "--endings",
        action="store_true",
        help="only what is left after each ending, into the figures",
    )
    arguments = parser.parse_args()
    if arguments.bf16:
        add_to_results({"bf16": bf16_beside_float32()})
        return 0
    if arguments.endings:
        results = add_to_results({"endings": endings()})
        return 0 if results["endings"]["passed"] == results["endings"]["of"] > 0 else 1
    runs = possible(GPU_RUNS if arguments.gpu else CPU_RUNS, arguments.gpu)
    rows = measured(runs, arguments.only)
    results = {
        "date": str(date.today()),
        "machine": recording.machine(),
        "versions": {name: version for name in PACKAGES if (version := recording.installed(name))},
        "command": recording.command("modes"),
        "tolerances": {
            "loss": LOSS_TOLERANCE,
            "weights": WEIGHT_TOLERANCE,
            "states": STATES_TOLERANCE,
        },
        "rows": rows,
    }
    if not arguments.only:
        path = recording.RESULTS / f"modes{'-gpu' if arguments.gpu else ''}.json"
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        write_doc()
    return 0 if all(all(verdicts(row).values()) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
