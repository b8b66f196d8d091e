"""Plans for models that are larger than the cards, and for long rows: scaled down, and run.

Each is planned at its real size for described cards, and must have the levers of its row. Then a
model of the same kind with few narrow layers is trained with the same levers: on a CPU by one and
by two Gloo ranks, and by the CUDA build of torch on a driver without a card, where kernels did
nothing. Allocated and pinned bytes stand beside predicted ones. A second run is killed by SIGKILL
and goes on: on a CPU its adapter must have the bits of the first one. A process without our code
loads base and adapter by transformers and peft, and on a CPU, where both compute in float32,
its logits must be those of the training. Ranks compute with one thread.

What is measured joins the rows that are there: `--only REGEX` makes some of them again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cpu_memory, recording
from benchmarks.cpu_memory import AUTOCAST, CHECKPOINTING, HALF, LLAMA, ON_HOST, Case
from launch.plan.resolve import resolve
from tests import builders
from tests.train_cpu.test_resume import kill_after

RESULT, NAME = "fit_levers", "tiny"  # the name of the runs that are killed
CUDA_BUILD = recording.CODE / ".cache" / "cuda_build" / "bin" / "python"
STEPS, SAVED, KILLED = 12, 4, 7
WITHIN_S = 600.0
# loading and the first step of a run that goes on hold the optimizer's states of its checkpoint too
STEADY = "step", "evaluation", "save"
LAYERS = 10
WIDER = {"hidden_size": 512, "intermediate_size": 1408}  # on cards, where nothing is computed
SMALL = {**LLAMA, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": LAYERS}
FOUR_BIT = {"load_in_4bit": True}
R16 = {"r": 16}
MOST_OFF, MOST_PINNED_OFF = 0.01, 0.03  # of allocated, and of pinned bytes
MOST_LOGITS_OFF = 1e-5  # of the largest logit
ON_CPU = {1: "cpu", 2: "multi_cpu"}  # ranks -> mode
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
# argv: JSON of the base's folder, the adapter's, the arguments of BitsAndBytesConfig or null, and a
# file of inputs and logits or null. Standard output: how far the logits are off, modules of ours
LOADED = """
import json, sys
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

base, adapter, four_bit, file = json.loads(sys.argv[1])
settings = {"quantization_config": BitsAndBytesConfig(**four_bit)} if four_bit else {}
network = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, **settings)
# no dropout; beside eval() bitsandbytes computes 4-bit products of a CPU with AVX-512 in bfloat16
network = PeftModel.from_pretrained(network, adapter).train()
inputs, expected = torch.load(file) if file else ({"input_ids": [5, 6, 7]}, None)
with torch.no_grad():
    logits = network(input_ids=torch.tensor([inputs["input_ids"]])).logits[0]
off = (logits - expected).abs().max() / expected.abs().max() if file else logits.isnan().sum()
ours = {"launch", "training", "benchmarks", "tests"} & {name.split(".")[0] for name in sys.modules}
print(json.dumps([off.item(), sorted(ours)]))
"""


@dataclass(frozen=True)
class Row:
    """A plan; the levers that it has, and those of its small model."""

    name: str
    line: str  # words of `plan` for the whole model on described cards, without the common ones
    planned: Mapping[str, Any]  # levers of the plan
    training: Mapping[str, Any]  # the same of the small model, as keys
    quantization: Mapping[str, Any] | None = None
    cards: int = 1
    length: int = 256  # tokens of a row of the small model

    def case(self, mode: str, ranks: int) -> Case:
        """The small model in a mode. A CPU has activations in host RAM anyway, and computes in
        float32 here, so that rounding hides nothing."""
        training = {**CHECKPOINTING, "save_steps": SAVED, **self.training}
        on_cards = not mode.endswith("cpu")
        if on_cards:
            training |= {**AUTOCAST, **ON_HOST}
        return Case(
            self.name,
            {**SMALL, **(WIDER if on_cards else {})},
            batch=1,
            training={**training, "gradient_accumulation_steps": 2},
            model=HALF if on_cards else {},
            lora=R16,
            quantization=self.quantization,
            mode=mode,
            ranks=ranks,
            length=self.length,
            padded=False,
            steps=STEPS,
        )


IN_PARTS = {"activation_offloading": True, "num_output_chunks": 8, "every_n_layers": 1}
ROWS = (
    Row(
        "QLoRA of llama3.1-70b, RTX 4090, 64 GiB",
        "4 --gpu 'RTX 4090' --ram 64 --rows-of 2048 --model.shape=llama3.1-70b"
        " --data.max_length=2048 --training.gradient_accumulation_steps=4"
        " --quantization.load_in_4bit=true",
        {**IN_PARTS, "streamed_layers": 56},
        {"streamed_layers": 7, "num_output_chunks": 8},
        FOUR_BIT,
    ),
    Row(
        "QLoRA of llama3.1-70b, 2 x RTX 3090, 64 GiB",
        "4 --gpu 'RTX 3090' --gpus 2 --ram 64 --rows-of 2048 --model.shape=llama3.1-70b"
        " --data.max_length=2048 --training.gradient_accumulation_steps=2"
        " --quantization.load_in_4bit=true",
        {**IN_PARTS, "streamed_layers": 59},
        {"streamed_layers": 7, "num_output_chunks": 8},
        FOUR_BIT,
        cards=2,
    ),
    Row(
        "LoRA of qwen2.5-14b, RTX 4060 Ti 16GB, 32 GiB",
        "4 --gpu 'RTX 4060 Ti 16GB' --ram 32 --rows-of 2048 --model.shape=qwen2.5-14b"
        " --data.max_length=2048 --training.gradient_accumulation_steps=4",
        {**IN_PARTS, "streamed_layers": 34},
        {"streamed_layers": 7, "num_output_chunks": 8},
    ),
    Row(
        "LoRA of llama3.1-8b, 32,768 tokens, RTX 4090",
        "1 --gpu 'RTX 4090' --ram 64 --rows-of 32768 --model.shape=llama3.1-8b"
        " --data.max_length=32768 --training.gradient_accumulation_steps=1",
        {**IN_PARTS, "num_output_chunks": 32, "tiled_mlp_num_shards": 8},
        {"num_output_chunks": 32, "tiled_mlp_num_shards": 8},
        length=512,
    ),
    Row(
        "QLoRA of llama3.1-8b, 65,536 tokens, RTX 4090",
        "1 --gpu 'RTX 4090' --ram 64 --rows-of 65536 --model.shape=llama3.1-8b"
        " --data.max_length=65536 --training.gradient_accumulation_steps=1"
        " --quantization.load_in_4bit=true",
        IN_PARTS,
        {"num_output_chunks": 8},
        FOUR_BIT,
        length=1024,
    ),
)


def planned(row: Row, folder: Path) -> dict[str, Any]:
    """The plan of the whole model. AssertionError where it has other levers than the row's."""
    common = "--lora.r=16 --model.dtype=bfloat16 --json"
    words = ("plan", "sft_fast", *shlex.split(f"{row.line} {common}"))
    done = builders.launch(folder, *words)
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    levers = plan["strategy"]["levers"]
    assert row.planned.items() <= levers.items(), levers
    assert bool(levers["streamed_layers"]) == ("streamed_layers" in row.planned), levers
    estimate = plan["estimate"]
    return {
        "mode": plan["strategy"]["mode"],
        "vram_bytes": estimate["step_reserved_bytes"] + estimate["outside_bytes"],
        "ram_bytes": sum(estimate["host"].values()),
        "seconds_per_step": plan["seconds_per_step"],
    }


def on_cpu(row: Row, ranks: int, folder: Path, is_killed: bool = True) -> dict[str, Any]:
    """The figures of a row on a CPU. AssertionError where a run, its resumption, which is left out
    unless `is_killed`, or its export is not what it should be."""
    os.environ |= {"LOWMEM_ROOT": str(folder), **ONE_THREAD, **builders.TRACES}
    folder.mkdir(parents=True, exist_ok=True)
    case = row.case(ON_CPU[ranks], ranks)
    file = str(cpu_memory.write_data(folder, case))
    choice = resolve(file, [])
    attempt = cpu_memory.counted(choice, cpu_memory.build_counter(folder))
    facts = cpu_memory.at_length(case, choice)
    predicted = cpu_memory.predicted(case, facts, choice.plan.strategy)["predicted_bytes"]
    measured = cpu_memory.counted_peaks(attempt)["measured_bytes"]
    if ranks == 1:  # what several share is no allocator's
        outcome = json.loads((attempt.root / "outcome.json").read_text())
        measured -= outcome["offloaded_bytes"]
    if is_killed:
        words = ["run", file, f"--name={NAME}", f"--output_dir={folder / NAME}"]
        kill_after(folder, words, KILLED, within_s=WITHIN_S, **ONE_THREAD)
        done = builders.launch(folder, *words, **ONE_THREAD)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"resuming from checkpoint-{SAVED:06}" in done.stdout, done.stdout
        assert adapter_of(folder / NAME) == adapter_of(folder / "out"), "another adapter"
    four_bit = choice.recipe.quantized("no")
    options = four_bit.model_dump() if four_bit else None
    export = folder / (NAME if is_killed else "out")
    logits_off = loaded(folder, export, options, attempt.root / "trained.pt")
    assert logits_off <= MOST_LOGITS_OFF, logits_off
    allocated = {"step": [predicted, measured]}
    assert off(allocated) <= MOST_OFF, allocated
    return {"where": f"CPU, {ranks} ranks", "allocated": allocated, "logits_off": logits_off}


def on_cards(row: Row, folder: Path) -> dict[str, Any]:
    """The figures of a row on the driver without a card, in its venv."""
    from tests.cuda_build import test_streamed_layers
    from tests.cuda_build.conftest import Workplace
    from tests.fake_cuda.machine import Card

    place = Workplace(folder, *[Card()] * row.cards)
    case = row.case("dual_gpu_nccl" if row.cards > 1 else "single_gpu", row.cards)
    file = str(cpu_memory.write_data(folder, case))
    words = [file, f"--name={NAME}", f"--output_dir={folder / NAME}"]
    on_machine = ONE_THREAD | place.machine.environment()
    kill_after(folder / "workspace", ["run", *words], KILLED, within_s=WITHIN_S, **on_machine)
    pinned, _ = test_streamed_layers.run(place, *words)
    plan, outcome = test_streamed_layers.records(place, attempt=2)
    allocated = {
        phase: [each[phase]["allocated_bytes"] for each in (plan["phases"], outcome["phases"])]
        for phase in STEADY
    }
    assert off(allocated) <= MOST_OFF, allocated
    predicted = plan["estimate"]["pinned_bytes"]
    assert abs(predicted / pinned - 1) <= MOST_PINNED_OFF, (predicted, pinned)
    assert plan["strategy"]["levers"]["streamed_layers"] == row.training.get("streamed_layers", 0)
    loaded(folder, folder / NAME, None, None)
    where = f"CUDA build, {row.cards} cards without a card"
    return {"where": where, "allocated": allocated, "pinned": [predicted, pinned]}


def adapter_of(folder: Path) -> bytes:
    (file,) = folder.rglob("adapter_model.safetensors")
    return file.read_bytes()


def loaded(
    folder: Path, export: Path, four_bit: Mapping[str, Any] | None, trained: Path | None
) -> float:
    """The largest difference between the logits of an adapter, in a process without our code, and
    those of its training, as a share of the largest logit."""
    (file,) = export.rglob("adapter_model.safetensors")
    asked = [str(folder / "model"), str(file.parent), four_bit, trained and str(trained)]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", LOADED, json.dumps(asked)],
        stdout=subprocess.PIPE,
        cwd=folder,
        env={**env, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        text=True,
        check=True,
    )
    logits_off, ours = json.loads(done.stdout)
    assert not ours, ours
    return logits_off


def off(allocated: Mapping[str, Sequence[int]]) -> float:
    """The largest share by which a prediction differs."""
    return max(abs(predicted / measured - 1) for predicted, measured in allocated.values())


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["plan", "mode", "levers", "GiB of a card", "GiB of RAM", "s/step"]
    plans = {row["plan"]: row["planned"] for row in rows}
    lines = [
        [
            row.name,
            plans[row.name]["mode"],
            ", ".join(f"{name} {value}" for name, value in row.planned.items()),
            *(f"{plans[row.name][of] / (1 << 30):.1f}" for of in ("vram_bytes", "ram_bytes")),
            f"{plans[row.name]['seconds_per_step']:.0f}",
        ]
        for row in ROWS
        if row.name in plans
    ]
    small = [
        [
            row["plan"],
            row["where"],
            f"{off(row['allocated']):.2%}",
            f"{off({'pinned': row['pinned']}):.2%}" if "pinned" in row else "",
            f"{row['logits_off']:.1e}" if "logits_off" in row else "",
        ]
        for row in rows
    ]
    figures = ["plan", "small model on", "allocated, most off", "pinned, off", "logits, off"]
    return (
        "Planned, not measured on a card:\n\n"
        + recording.table(head, lines)
        + "\nThe same levers in a small model, killed, gone on with, exported and loaded by plain"
        " transformers and peft. On a CPU the adapter has the bits of a run that was not killed; on"
        " the CUDA build kernels did nothing, and logits mean nothing.\n\n"
        + recording.table(figures, small)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="REGEX", help="plans to run (default: all)")
    parser.add_argument("--on-cards", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = [row for row in ROWS if re.search(arguments.only, row.name)]
    if arguments.on_cards:
        print(json.dumps(on_cards(chosen[0], Path(arguments.on_cards))))
        return
    path = recording.RESULTS / f"{RESULT}.json"
    for row in chosen:
        with tempfile.TemporaryDirectory() as place:
            about = {"plan": row.name, "planned": planned(row, Path(place) / "plan")}
            figures = [on_cards_of_venv(row, Path(place) / "cards")]
            figures += [on_cpu(row, ranks, Path(place) / str(ranks)) for ranks in ON_CPU]
        print(json.dumps([about, *figures]), flush=True)
        rows = json.loads(path.read_text())["rows"] if path.exists() else []
        rows = [each for each in rows if each["plan"] != row.name]
        rows += [about | each for each in figures]
        rows.sort(key=lambda each: [one.name for one in ROWS].index(each["plan"]))
        recording.write(RESULT, {"rows": rows}, text(rows))


def on_cards_of_venv(row: Row, folder: Path) -> dict[str, Any]:
    argv = [str(CUDA_BUILD), "-m", "benchmarks.fit_levers", "--only", re.escape(row.name)]
    done = subprocess.run(
        [*argv, "--on-cards", str(folder)],
        cwd=recording.CODE,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
