"""Tokens that are no padding, per second of training on real text, with less and less padding. On
CPUs.

    A  plain: transformers.Trainer as the guides set it up, 16 rows x 2 (benchmarks/list_in_ram.py):
    a decoder's rows
       padded to max_length, the T5's to the longest of a micro-batch
    B  ours, 16 x 2, rows at random, padded to the longest of a micro-batch
    C  ours, 16 x 2, data.group_by_length
    D  ours, data.packing, as many sequences a step as hold about as many tokens (not for T5)
    E  ours, 16 x 2, data.batch_by_tokens: the rows of B's steps, sorted and cut in two
    F  ours, 4 x 8, data.batch_by_tokens: the same rows in up to eight micro-batches
    G  ours, 16 x 2 and no key: the plan chooses between B, E, F and their like

One model and tokenizer for all ways of a case; a step trains 32 rows in each. The ways take turns,
round after round. The first steps of a run are left out. Seconds are those between the ends of
steps, so that reading and padding rows count. All ways obey OMP_NUM_THREADS: one thread is
disturbed least by others. Needs LOWMEM_REAL_DATA, a folder with gsm8k_train.jsonl and
chatlm_sft_train_3k.parquet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks import recording, trainings
from launch.run_folder.steps import events

WARM_UP = 2  # steps
SEED = 5
VOCABULARY = 8192
DECODER = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
T5 = {
    "model_type": "t5",
    "d_model": 256,
    "d_ff": 768,
    "d_kv": 64,
    "num_heads": 4,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
WAYS = {
    "A": "plain Trainer, as the guide",
    "B": "ours, at random",
    "C": "ours, data.group_by_length",
    "D": "ours, data.packing",
    "E": "ours, data.batch_by_tokens, 16 x 2",
    "F": "ours, data.batch_by_tokens, 4 x 8",
    "G": "ours, planned",
}
BATCH, ACCUMULATION = 16, 2  # rows and micro-steps of a step
FINER = 4  # times as many parts in F


@dataclass(frozen=True)
class Case:
    """One data set and model."""

    name: str
    file: str
    columns: tuple[str, str]
    config: dict[str, Any]
    max_length: int
    ways: str = ""
    goal: float = 0.0  # of the best way over A
    pads_all: bool = True  # A, to max_length
    vocabulary: int = VOCABULARY
    split: Literal["word", "character"] = "word"


CASES = (
    Case(
        "gsm8k, decoder, 512",
        "gsm8k_train.jsonl",
        ("question", "answer"),
        DECODER,
        512,
        "ABCDEFG",
        3.0,
    ),
    Case(
        "Chinese chat, T5, 512",
        "chatlm_sft_train_3k.parquet",
        ("prompt", "response"),
        T5,
        512,
        "ABCEFG",
        1.8,
        False,
    ),
)


def real_data() -> Path:
    """The folder with real text; who has none is told."""
    folder = os.environ.get("LOWMEM_REAL_DATA")
    if not folder:
        sys.exit(
            "LOWMEM_REAL_DATA is not set: a folder with"
            f" {' and '.join(sorted({case.file for case in CASES}))}"
        )
    return Path(folder)


def made(case: Case, data: Path, folder: Path, seed: int = SEED) -> tuple[Path, Path]:
    """(rows as parquet with prompt and response, model folder with weights at random and a
    tokenizer of those rows)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    from launch.schema.model_sections import TokenizerSection
    from training.data import tokenizer

    source = data / case.file
    if source.suffix == ".parquet":
        table = pq.read_table(source)
    else:
        table = pa.Table.from_pylist(
            [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
        )
    table = table.select(list(case.columns)).rename_columns(["prompt", "response"])
    folder.mkdir()
    pq.write_table(table, folder / "rows.parquet")
    texts = (text for column in table.columns for text in column.to_pylist())
    cut = tokenizer.train(texts, TokenizerSection(split=case.split), case.vocabulary)
    torch.manual_seed(seed)
    config = AutoConfig.for_model(**case.config, vocab_size=case.vocabulary)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(config)
    for one in (model.config, model.generation_config):
        one.pad_token_id, one.eos_token_id, one.bos_token_id = (
            cut.pad_token_id,
            cut.eos_token_id,
            cut.bos_token_id,
        )
    model.save_pretrained(folder / "model")
    cut.save_pretrained(folder / "model")
    return folder / "rows.parquet", folder / "model"


def plain(case: Case, rows: Path, model: Path, steps: int, folder: Path) -> tuple[float, float]:
    """(tokens a second, tokens a step) of way A."""
    file = folder / "steps.jsonl"
    argv = [
        sys.executable,
        "-m",
        "benchmarks.list_in_ram",
        "--rows",
        str(rows),
        "--tokenizer",
        str(model),
    ]
    argv += ["--model", str(model), "--max-length", str(case.max_length), "--ranks", "1"]
    argv += ["--batch", str(BATCH), "--accumulation", str(ACCUMULATION)]
    argv += ["--steps", str(steps), "--seed", str(SEED), "--steps-file", str(file)]
    argv += ["--pad-to-max-length"] * case.pads_all
    recording.timed(
        argv, recording.environment(folder / "workspace"), folder / "log.txt", wait=False
    )
    said = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    first, last = said[WARM_UP - 1], said[-1]
    tokens = last["tokens"] - first["tokens"]
    return tokens / (last["time"] - first["time"]), tokens / (steps - WARM_UP)


def ours(
    case: Case,
    rows: Path,
    model: Path,
    cut: tuple[int, int],
    steps: int,
    data: dict[str, Any],
    folder: Path,
    workspace: Path,
) -> tuple[float, float]:
    """(tokens a second, tokens a step) of a way of ours, started by our launcher; `cut`: batch and
    accumulation."""
    training = {
        "per_device_train_batch_size": cut[0],
        "gradient_accumulation_steps": cut[1],
        "max_steps": steps,
        "learning_rate": 1e-3,
        "seed": SEED,
    }
    content = trainings.sft("padding", model, rows, case.max_length, data, training)
    launch = {**content["launch"], "exact_batch": bool(data)}
    attempt = trainings.run({**content, "launch": launch}, folder, workspace)
    said = events(attempt)
    assert len(said) == steps
    tokens = sum(event.tokens for event in said[WARM_UP:])
    return tokens / (said[-1].time - said[WARM_UP - 1].time), tokens / (steps - WARM_UP)


def packs_of(rows: Path, model: Path, case: Case, count: int) -> int:
    """Packed sequences with about as many tokens as so many rows."""
    from transformers import AutoTokenizer

    from benchmarks.list_in_ram import collate

    cut = AutoTokenizer.from_pretrained(model)
    mask = collate(pq.read_table(rows).to_pylist(), cut, case.max_length)["attention_mask"]
    return max(1, round(count * int(mask.sum()) / len(mask) / case.max_length))


def measured(case: Case, data: Path, steps: int, rounds: int, place: Path) -> dict[str, Any]:
    """Every repetition of every way of one case."""
    rows, model = made(case, data, place / "made")
    packs = packs_of(rows, model, case, BATCH * ACCUMULATION) if "D" in case.ways else 0
    as_asked = BATCH, ACCUMULATION
    by_tokens = {"batch_by_tokens": True}
    ways = {
        "B": (as_asked, {"batch_by_tokens": False}),
        "C": (as_asked, {"group_by_length": True, "batch_by_tokens": False}),
        "D": ((packs, 1), {"packing": True}),
        "E": (as_asked, by_tokens),
        "F": ((BATCH // FINER, ACCUMULATION * FINER), by_tokens),
        "G": (as_asked, {}),
    }
    found: dict[str, list[dict[str, float]]] = {way: [] for way in case.ways}
    for turn in range(rounds):
        for way in case.ways:
            folder = place / f"{way}{turn}"
            folder.mkdir()
            load = round(os.getloadavg()[0], 2)
            if way == "A":
                rate, tokens = plain(case, rows, model, steps, folder)
            else:
                cut, keys = ways[way]
                rate, tokens = ours(
                    case, rows, model, cut, steps, keys, folder, place / "workspace"
                )
            print(
                f"{case.name}  {way}  {rate:9,.0f} tokens/s  {tokens:7,.0f} tokens a step  load"
                f" {load}",
                flush=True,
            )
            found[way].append(
                {"tokens_per_s": round(rate, 1), "tokens_a_step": round(tokens, 1), "load": load}
            )
    return {"case": case.name, "goal": case.goal, "packed_sequences_a_step": packs, "ways": found}


def text_of(cases: list[dict[str, Any]], steps: int) -> str:
    rows = []
    for case in cases:
        medians = {
            way: statistics.median(one["tokens_per_s"] for one in runs)
            for way, runs in case["ways"].items()
        }
        for way, runs in case["ways"].items():
            ratios = [
                one["tokens_per_s"] / base["tokens_per_s"]
                for one, base in zip(runs, case["ways"]["A"], strict=True)
            ]
            rows.append(
                [
                    case["case"],
                    f"{way}: {WAYS[way]}",
                    f"{statistics.median(one['tokens_a_step'] for one in runs):,.0f}",
                    f"{medians[way]:,.0f}",
                    f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    " / ".join(f"{one['load']:.1f}" for one in runs),
                ]
            )
    goals = "; ".join(f"{case['case']}: at least {case['goal']}" for case in cases)
    head = [
        "case",
        "way",
        "tokens of text a step",
        "tokens of text a second",
        "over A, round by round",
        "load before",
    ]
    return (
        f"{BATCH * ACCUMULATION} rows a step, or as many packed sequences as hold about as many"
        f" tokens; {steps} steps, the first {WARM_UP} left out. A pads the decoder's rows to"
        " max_length, the T5's to the longest of 16. Medians. Goals of the best way over A:"
        f" {goals}.\n\n" + recording.table(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=9, help="optimizer steps of each run")
    parser.add_argument("--ways", default="ABCDEFG", help="only these; A is always run")
    parser.add_argument(
        "--case", type=int, action="append", choices=range(len(CASES)), help="only this one"
    )
    arguments = parser.parse_args()
    data = real_data()
    cases = []
    for number in arguments.case or range(len(CASES)):
        with tempfile.TemporaryDirectory() as place:
            wanted = "".join(way for way in CASES[number].ways if way in "A" + arguments.ways)
            case = replace(CASES[number], ways=wanted)
            cases.append(measured(case, data, arguments.steps, arguments.rounds, Path(place)))
    text = text_of(cases, arguments.steps)
    recording.write("padding", {"ways": WAYS, "cases": cases}, text)


if __name__ == "__main__":
    main()
