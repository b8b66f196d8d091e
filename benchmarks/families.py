"""Every family of models: planned, trained, cut off and resumed, exported, and loaded by plain
transformers.

Each family is trained twice by train_low_mem.py on a CPU, all its weights and LoRA on every linear
layer, with one of the levers that change a step's memory: 20 steps, a checkpoint after 10, an
evaluation, an export. A fourth of the rows are half as long as the others. As in cpu_memory.py a
preloaded counter sees each allocation, and the peaks of a step and of an evaluation stand beside
the predicted ones. Then the second checkpoint and the export are removed, and `python -m launch
run` goes on from the first: the export must hold the same bytes. A process without our code loads
it with transformers (and peft) alone. Models have random weights. Ranks compute with one thread.

Rows are kept in .cache/families.json: a campaign that was cut off goes on there, with rows that are
missing or failed. Where the code of predictions has changed, a row is predicted again; where that
of the training has, the table says so, and --again measures it again.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cpu_memory, recording, sources
from benchmarks.cpu_memory import AUTOCAST, CHECKPOINTING, HALF, Case, every_n_layers, off
from launch.plan.resolve import resolve
from launch.run_folder import layout
from tests import builders

STEPS, CUT_AT = 20, 10
SHORT_WORDS = 64  # half of a full row: full batches have the most targets, others have masks
MEDIAN_GOAL, MOST_GOAL = 0.005, 0.02
STORE = recording.CODE / ".cache" / "families.json"
# of a row: hashes of the code that a measurement (no traces, no children), and a prediction, is of
CODE_OF = {"measured_code": ("training",), "predicted_code": ("training", "launch/predict")}
DECODER = {
    "vocab_size": 2048,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
GATED = {**DECODER, "intermediate_size": 384, "num_key_value_heads": 2}
HEADS_OF_32 = {**GATED, "head_dim": 32}
ONE_IN_TWO = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
T5 = {
    "vocab_size": 2048,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 384,
    **dict.fromkeys(("num_layers", "num_decoder_layers"), 3),
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
BART = {
    "vocab_size": 2048,
    "d_model": 128,
    **dict.fromkeys(("encoder_layers", "decoder_layers"), 3),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 384),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id", "forced_eos_token_id"), 0),
    "max_position_embeddings": 512,
}
# name -> its config; a name is followed by another family of the same code in brackets
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "gemma": {"model_type": "gemma", **HEADS_OF_32},
    "gemma2": {"model_type": "gemma2", **HEADS_OF_32, **ONE_IN_TWO},
    "gemma3": {"model_type": "gemma3_text", **HEADS_OF_32, **ONE_IN_TWO},
    "phi": {"model_type": "phi", **GATED},
    "phi3 (Phi-4)": {"model_type": "phi3", **GATED},
    "opt": {"model_type": "opt", **DECODER, "ffn_dim": 512, "word_embed_proj_dim": 128},
    "gpt_neox": {"model_type": "gpt_neox", **DECODER, "intermediate_size": 512},
    "gpt2": {"model_type": "gpt2", **DECODER},
    "bloom": {"model_type": "bloom", **DECODER},
    "falcon": {"model_type": "falcon", **DECODER},
    "llama (SmolLM)": {"model_type": "llama", **GATED},
    "mistral": {"model_type": "mistral", **GATED, "sliding_window": 32},
    "mixtral": {"model_type": "mixtral", **GATED, "num_local_experts": 4},
    "qwen2": {"model_type": "qwen2", **GATED},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **GATED,
        **EXPERTS,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 192,
    },
    "qwen3": {"model_type": "qwen3", **HEADS_OF_32},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **HEADS_OF_32,
        **EXPERTS,
        "moe_intermediate_size": 96,
    },
    "glm": {"model_type": "glm", **HEADS_OF_32},
    "glm4": {"model_type": "glm4", **HEADS_OF_32},
    "smollm3": {"model_type": "smollm3", **GATED},
    "olmo": {"model_type": "olmo", **GATED},
    "olmo2": {"model_type": "olmo2", **GATED},
    "olmo3": {"model_type": "olmo3", **GATED, **ONE_IN_TWO},
    "olmoe": {"model_type": "olmoe", **GATED, **EXPERTS},
    "t5": {"model_type": "t5", **T5},
    "mt5": {"model_type": "mt5", **T5},
    "bart": {"model_type": "bart", **BART},
}
LORA = {"r": 8, "target_modules": "all-linear"}
# each family takes two of them, the next ones
LEVERS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("no lever", {}),
    ("checkpointing", {"training": CHECKPOINTING}),
    ("every 2 layers", {"training": every_n_layers(2)}),
    ("bf16 weights", {"model": HALF}),
    ("autocast", {"training": AUTOCAST}),
)
# What plain transformers and peft find in exports, a line of an export each: run as `python -c`,
# without our code.
LOADED = """
import json, sys, traceback
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

def loaded(source, export, is_encoder_decoder, is_lora):
    family = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    folder = source if is_lora else export
    network, said = family.from_pretrained(folder, output_loading_info=True, dtype="auto")
    problems = {key: sorted(map(str, value)) for key, value in said.items() if value}
    parameters, trained = sum(part.numel() for part in network.parameters()), 0
    if is_lora:
        network = PeftModel.from_pretrained(network, export)
        named = network.named_parameters()
        trained = sum(bool(part.any()) for name, part in named if "lora_B" in name)
    ids = torch.tensor([[5, 6, 7, 5, 6, 7]])
    loss = network(input_ids=ids, labels=ids).loss.item()
    ours = sorted(name for name in sys.modules if name.split(".")[0] in ("launch", "training"))
    return [problems, parameters, trained, loss, ours]

for line in sys.stdin:
    try:
        said = loaded(*json.loads(line))
    except Exception:
        said = traceback.format_exc()
    print(json.dumps(said), flush=True)
"""


@dataclass(frozen=True)
class Tools:
    """The programs and folders that all cases use."""

    counter: Path  # preloaded, it counts allocations
    loader: subprocess.Popen[str]  # plain_loader()


def cases() -> list[Case]:
    """Two of each family, the levers in turn: first one of each, then the others."""
    pairs = []
    for number, (family, config) in enumerate(FAMILIES.items()):
        pair = []
        for shift, (what, lora) in enumerate((("full", None), ("LoRA", LORA))):
            lever, sections = LEVERS[(number + 2 * shift) % len(LEVERS)]
            training = {"save_steps": CUT_AT, **sections.get("training", {})}
            pair.append(
                Case(
                    f"{family}, {what}, {lever}",
                    config,
                    length=128,
                    short_words=SHORT_WORDS,
                    steps=STEPS,
                    lora=lora,
                    training=training,
                    model=sections.get("model", {}),
                )
            )
        pairs.append(pair if number % 2 == 0 else pair[::-1])
    return [case for nth in zip(*pairs, strict=True) for case in nth]


def measured(case: Case, folder: Path, tools: Tools, row: Mapping[str, Any]) -> dict[str, Any]:
    """A row: what was predicted and counted; of a `row` that is measured, predicted again.
    AssertionError where the run, its resumption or its export is not what it should be."""
    os.environ["LOWMEM_ROOT"] = str(folder)
    recipe_file = cpu_memory.write_data(folder, case)
    choice = resolve(str(recipe_file), [])
    if row:
        with contextlib.redirect_stdout(io.StringIO()):
            builders.opened_run(choice)  # tokenises the rows
        facts = cpu_memory.at_length(case, choice)
        return {**row, **cpu_memory.predicted(case, facts, choice.plan.strategy)}
    attempt = cpu_memory.counted(choice, tools.counter)
    facts = cpu_memory.at_length(case, choice)
    predicted = cpu_memory.predicted(case, facts, choice.plan.strategy)
    first = exported(folder)
    run = layout.RunDir(attempt.root.parent.parent)
    shutil.rmtree(run.root / "checkpoints" / f"checkpoint-{STEPS:06}")
    shutil.rmtree(folder / "out")
    (attempt.root / "outcome.json").unlink()
    traces = {"LOWMEM_TRACES": os.environ["LOWMEM_TRACES"]}
    done = builders.launch(folder, "run", str(recipe_file), **traces)
    assert done.returncode == 0, done.stdout + done.stderr
    resumed = f"resuming from checkpoint-{CUT_AT:06}"
    assert resumed in done.stdout, f"no line {resumed!r} of the resumed run"
    assert exported(folder) == first, "other weights after a resumption"
    problems, parameters, adapters, loss, ours = loaded(case, folder, tools.loader)
    assert not problems and not ours, (problems, ours)
    assert parameters == choice.plan.shape.parameters, (parameters, choice.plan.shape.parameters)
    assert loss == loss and loss < 100, loss
    assert (adapters > 0) == (case.lora is not None), adapters
    return {
        "case": case.name,
        "parameters": parameters,
        "adapters": adapters,
        **predicted,
        **cpu_memory.counted_peaks(attempt),
    }


def exported(folder: Path) -> dict[str, str]:
    """The hashes of the weights that a run has exported."""
    files = sorted((folder / "out").glob("*.safetensors"))
    assert files, sorted((folder / "out").iterdir())
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def plain_loader(place: Path) -> subprocess.Popen[str]:
    """The process that loads exports without our code."""
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, "-P", "-c", LOADED],
        cwd=place,
        env={**env, "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def loaded(case: Case, folder: Path, loader: subprocess.Popen[str]) -> list[Any]:
    """The answer of LOADED: problems, parameters, trained adapters, a loss, modules of our code."""
    assert loader.stdin is not None and loader.stdout is not None
    facts = [str(folder / "model"), str(folder / "out"), case.is_encoder_decoder]
    loader.stdin.write(json.dumps([*facts, case.lora is not None]) + "\n")
    loader.stdin.flush()
    said = json.loads(loader.stdout.readline())
    assert isinstance(said, list), said
    return said


def code_hashes() -> dict[str, str]:
    """The hashes of today's code that a row names."""
    hashes = {}
    for key, named in CODE_OF.items():
        code = hashlib.sha256()
        for file in sources.files(named):
            if key == "predicted_code" or file.parent.name not in ("trace", "children"):
                code.update(sources.of_python(file.read_text(encoding="utf-8")).encode())
        hashes[key] = code.hexdigest()[:16]
    return hashes


def attempted(case: Case, place: Path, tools: Tools, row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a case; one with a `failure` where it does not do what it should. The model of
    another case of the family is not made again."""
    folder, source = place / "case", place / case.config["model_type"]
    folder.mkdir()
    if source.exists():
        shutil.copytree(source, folder, dirs_exist_ok=True)
    try:
        found = measured(case, folder, tools, row)
    # a fault of one family is a row, and the next family is measured
    except Exception as error:
        if "stopped by SIG" in str(error):  # with the campaign
            raise
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        found = {"case": case.name, "failure": f"{type(error).__name__}: {lines[-1]}"[:300]}
    made = (folder / part for part in ("model", "tokenizer", ".cache/model_parts"))
    for part in made if not source.exists() else ():
        if part.exists():
            shutil.copytree(part, source / part.relative_to(folder))
    shutil.rmtree(folder)
    return found


def outdated(
    every: Sequence[Case],
    rows: Mapping[str, Mapping[str, Any]],
    today: Mapping[str, str],
    again: bool,
) -> list[tuple[Case, Mapping[str, Any]]]:
    """The cases to be measured, then those to be predicted again, with their measured rows."""
    known = [(case, {} if again else rows.get(case.name, {})) for case in every]
    new = [(case, {}) for case, row in known if not row or "failure" in row]
    return [
        *new,
        *(
            (case, row)
            for case, row in known
            if row and "failure" not in row and row["predicted_code"] != today["predicted_code"]
        ),
    ]


def line(row: Mapping[str, Any]) -> str:
    if "failure" in row:
        return f"{row['case']}: {row['failure']}"
    return f"{row['case']}: {off(row, ''):+.3%}, {off(row, 'evaluation_'):+.3%}"


def text(rows: Sequence[Mapping[str, Any]], today: Mapping[str, str]) -> str:
    complete = [row for row in rows if "failure" not in row]
    lines = []
    for row in complete:
        cells = [row["case"], f"{row['parameters']:,}"]
        for what in ("", "evaluation_"):
            sizes = (row[f"{what}{side}_bytes"] / (1 << 20) for side in ("predicted", "measured"))
            cells += [*(f"{size:.2f}" for size in sizes), f"{off(row, what):+.3%}"]
        lines.append(cells)
    summary = []
    peaks = (("", "peak of a step"), ("evaluation_", "peak of an evaluation"))
    for what, words in peaks if complete else ():
        sizes = [abs(off(row, what)) for row in complete]
        goal = f" (goals {MEDIAN_GOAL:.1%} and {MOST_GOAL:.0%})" if not what else ""
        summary.append(
            f"{words}: median |error| {statistics.median(sizes):.3%}, max {max(sizes):.3%}{goal}"
        )
    failing = [f"- {line(row)}" for row in rows if "failure" in row]
    older = sum(row["measured_code"] != today["measured_code"] for row in complete)
    if older:
        summary.append(f"{older} rows were measured before the last change of training/")
    head = ["case", "parameters", "step, predicted MiB", "measured", "error"]
    head += ["evaluation, predicted", "measured", "error"]
    return (
        f"{len(FAMILIES)} families, {len(rows)} of {len(cases())} cases; {len(complete)} were"
        " trained, resumed to the same bytes, exported, and loaded by transformers and peft alone."
        f" {'; '.join(summary)}.\n\n"
        + (f"Failing:\n\n{chr(10).join(failing)}\n\n" if failing else "")
        + recording.table(head, lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose name holds this; nothing is recorded"
    )
    parser.add_argument(
        "--so-far", action="store_true", help="record the rows that are there; nothing is measured"
    )
    parser.add_argument("--again", action="store_true", help="measure rows that are there too")
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    today = code_hashes()
    every = [case for case in cases() if arguments.only in case.name]
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as place:
        os.environ["LOWMEM_TRACES"] = str(Path(place) / "traces")
        loader = plain_loader(Path(place))
        tools = Tools(cpu_memory.build_counter(Path(place)), loader)
        pending = outdated(every, rows, today, arguments.again)
        for case, row in () if arguments.so_far else pending:
            measured_code = {"measured_code": row.get("measured_code", today["measured_code"])}
            rows[case.name] = attempted(case, Path(place), tools, row) | today | measured_code
            STORE.parent.mkdir(exist_ok=True)
            STORE.write_text(json.dumps(rows, indent=1))
            print(line(rows[case.name]), flush=True)
        assert loader.stdin is not None
        loader.stdin.close()
        loader.wait()
    recorded = [rows[case.name] for case in every if case.name in rows]
    if arguments.only:
        print(text(recorded, today))
    else:
        recording.write("families", {"rows": recorded}, text(recorded, today))


if __name__ == "__main__":
    main()
