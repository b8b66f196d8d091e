"""What models are worth that were trained by us and by plain Trainer: the same start, steps and
samples, three seeds.

    sample task: the share of 500 held-out prompts answered exactly (quick start's model, data and
    schedule) gsm8k, a decoder: held-out loss; ours cuts each step's rows by tokens, and packs them
    Chinese chat, a T5: held-out loss; ours cuts each step's rows by tokens

A seed sets the first weights and the order of the samples, which differs between the two: plain
Trainer draws at random as it does. The finished model folders are scored by one piece of code. Each
epoch has every row once; packed sequences hold about as many tokens a step as rows do otherwise.
Needs LOWMEM_REAL_DATA.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from benchmarks import padding, recording, trainings
from benchmarks.trainings import OPTIMIZER

DECODER = {**padding.DECODER, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3}
T5 = {
    **padding.T5,
    "d_model": 128,
    "d_ff": 384,
    "d_kv": 32,
    "num_layers": 2,
    "num_decoder_layers": 2,
}
PLAIN = "plain Trainer"
MINI_CHAT = recording.CODE / "configs/models/mini-chat.yaml"
WAYS = {
    "ours, data.batch_by_tokens": {"batch_by_tokens": True},
    "ours, data.packing": {"packing": True},
    PLAIN: {},  # last: it reads the rows that the first of ours has tokenised
}


@dataclass(frozen=True)
class Task:
    """One data set and model, and how its models are scored."""

    source: padding.Case
    rows: int  # to train on; the next ones are held out
    held_out: int
    batch: int  # rows a step
    parts: int  # most micro-batches of it, by tokens
    epochs: int
    ways: tuple[str, ...]
    training: Mapping[str, Any] = field(default_factory=dict)
    exact_match: bool = False  # else: held-out loss


def config_of(file: Path) -> dict[str, Any]:
    return {
        key: value
        for key, value in yaml.safe_load(file.read_text(encoding="utf-8")).items()
        if key != "vocab_size"
    }


def tasks(scale: float) -> list[Task]:
    """`scale`: of the rows that are trained on."""
    columns = ("prompt", "response")
    sample = padding.Case(
        "sample task",
        "sample.parquet",
        columns,
        config_of(MINI_CHAT),
        128,
        vocabulary=512,
        split="character",
    )
    gsm8k = padding.Case(
        "gsm8k", "gsm8k_train.jsonl", ("question", "answer"), DECODER, 512, vocabulary=2048
    )
    chat = padding.Case(
        "Chinese chat", "chatlm_sft_train_3k.parquet", columns, T5, 256, vocabulary=2048
    )
    by_tokens, packed, plain = WAYS
    slow = {"learning_rate": 2e-3, "warmup_steps": 20}
    return [
        Task(
            sample,
            round(5000 * scale),
            500,
            32,
            2,
            10,
            (by_tokens, plain),
            {"learning_rate": 2e-3, "warmup_steps": 100, "weight_decay": 0.01},
            True,
        ),
        Task(gsm8k, round(2400 * scale), 400, 16, 4, 1, (by_tokens, packed, plain), slow),
        Task(chat, round(2600 * scale), 400, 16, 4, 2, (by_tokens, plain), slow),
    ]


def sample_data(folder: Path) -> None:
    """Training and held-out rows of the sample data in one file."""
    script = recording.CODE / "scripts" / "make_sample_data.py"
    subprocess.run(
        [sys.executable, str(script), "--out-dir", str(folder)], check=True, capture_output=True
    )
    parts = [
        pq.read_table(folder / f"sft_train_small_{part}.parquet") for part in ("train", "valid")
    ]
    pq.write_table(pa.concat_tables(parts), folder / "sample.parquet")


def name_of(way: str) -> str:
    """Of the recipe."""
    return f"quality-{list(WAYS).index(way)}"


def trained(
    task: Task,
    way: str,
    seed: int,
    model: Path,
    rows: Path,
    packs: int,
    folder: Path,
    workspace: Path,
) -> Path:
    """The folder of a trained model."""
    folder.mkdir()
    given = {**OPTIMIZER, **task.training, "num_train_epochs": task.epochs, "seed": seed}
    parts = task.parts if WAYS[way].get("batch_by_tokens") else 1
    given["per_device_train_batch_size"] = (
        packs if WAYS[way].get("packing") else task.batch // parts
    )
    given["gradient_accumulation_steps"] = parts
    if way == PLAIN:
        tokens = trainings.tokens_of(trainings.attempt_of(name_of(task.ways[0]), workspace))
        argv = trainings.peer(folder, model, tokens, {**given, "logging_steps": 1000})
        recording.timed(argv, recording.environment(workspace), folder / "log.txt", wait=False)
    else:
        content = trainings.sft(name_of(way), model, rows, task.source.max_length, WAYS[way], given)
        trainings.run(content, folder, workspace)
    return folder / "trained"


def score(task: Task, model: Path, held_out: Sequence[Mapping[str, str]]) -> float:
    """Exact match, or the mean loss of the held-out targets."""
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    from launch.data.conversation import Conversation
    from launch.data.rows import IGNORED
    from training.data.batches import Collator, Row
    from training.data.encode import Encoder, EncoderSettings
    from training.levers.logits import target_loss_sum
    from training.loop import evaluate

    is_t5 = task.source.config["model_type"] == "t5"
    family = AutoModelForSeq2SeqLM if is_t5 else AutoModelForCausalLM
    network, cut = family.from_pretrained(model).eval(), AutoTokenizer.from_pretrained(model)
    talks = [
        [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        for row in held_out
    ]
    if task.exact_match:
        pairs = [(Conversation(talk[:1]), talk[1]["content"]) for talk in talks]
        found = evaluate.scores(network, cut, pairs, 32, torch.device("cpu"), lambda: None, 100)
        return found["exact_match"]
    encoder = Encoder(cut, EncoderSettings(is_t5, "sft", task.source.max_length))
    encoded = [
        one for many in encoder.encode([Conversation(talk) for talk in talks]) for one in many
    ]
    rows = [Row(np.array(one["input_ids"]), np.array(one["labels"])) for one in encoded]
    collate = Collator(cut.pad_token_id, network.config.decoder_start_token_id if is_t5 else None)
    total = targets = 0.0
    for at in range(0, len(rows), 16):
        batch = collate(rows[at : at + 16])
        labels, _ = batch.pop("labels"), batch.pop("is_padded")
        with torch.no_grad():
            total += float(target_loss_sum(network(**batch).logits, labels, shift=not is_t5))
        targets += int((labels != IGNORED).sum())
    return total / targets


def measured(task: Task, data: Path, seeds: Sequence[int], place: Path) -> dict[str, Any]:
    """The scores of every way, a seed each."""
    found: dict[str, list[float]] = {way: [] for way in task.ways}
    for seed in seeds:
        whole, model = padding.made(task.source, data, place / f"made{seed}", seed)
        table = pq.read_table(whole)
        rows = place / "rows.parquet"
        pq.write_table(table.slice(0, task.rows), rows)
        held_out = table.slice(len(table) - task.held_out).to_pylist()
        assert task.rows + task.held_out <= len(table)
        packs = padding.packs_of(rows, model, task.source, task.batch)
        for way in task.ways:
            folder = trained(
                task, way, seed, model, rows, packs, place / f"{way} {seed}", place / "workspace"
            )
            found[way].append(round(score(task, folder, held_out), 5))
            print(f"{task.source.name}  seed {seed}  {way}  {found[way][-1]}", flush=True)
    return {
        "task": task.source.name,
        "score": "exact match" if task.exact_match else "held-out loss",
        "epochs": task.epochs,
        "rows": task.rows,
        "scores": found,
    }


def verdict(task: Mapping[str, Any], way: str) -> dict[str, Any]:
    """How much better than plain Trainer, in the mean over the seeds, and how far seeds spread;
    `holds`: not worse by more than that."""
    mine, plain = task["scores"][way], task["scores"][PLAIN]
    sign = 1 if task["score"] == "exact match" else -1
    better = [sign * (a - b) for a, b in zip(mine, plain, strict=True)]
    spread = max(max(one) - min(one) for one in (mine, plain))
    return {
        "better": statistics.fmean(better),
        "spread": spread,
        "holds": statistics.fmean(better) >= -spread,
    }


def text_of(found: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for task in found:
        for way, scores in task["scores"].items():
            told = verdict(task, way)
            rows.append(
                [
                    f"{task['task']}, {task['score']}",
                    way,
                    f"{statistics.fmean(scores):.4f}",
                    " / ".join(f"{one:.4f}" for one in scores),
                    f"{told['better']:+.4f} ({told['spread']:.4f})" if way != PLAIN else "",
                    ("yes" if told["holds"] else "no") if way != PLAIN else "",
                ]
            )
    about = "; ".join(
        f"{task['task']}: {task['rows']:,} rows, {task['epochs']} epoch(s)" for task in found
    )
    head = [
        "task",
        "way",
        "mean",
        "a seed each",
        "better than plain Trainer by (spread of the seeds)",
        "no worse",
    ]
    return (
        f"{about}. No worse: the mean is not worse by more than the seeds spread.\n\n"
        + recording.table(head, rows)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--scale",
        type=float,
        default=1.0,
        help="of the rows; less than 1 only to try this benchmark",
    )
    arguments = parser.parse_args()
    data = padding.real_data()
    found = []
    for task in tasks(arguments.scale):
        with tempfile.TemporaryDirectory() as place:
            if task.exact_match:
                sample_data(Path(place))
            source = Path(place) if task.exact_match else data
            found.append(measured(task, source, range(1, arguments.seeds + 1), Path(place)))
    told = {
        f"{task['task']}, {way}": verdict(task, way)
        for task in found
        for way in task["scores"]
        if way != PLAIN
    }
    recording.write("quality", {"tasks": found, "verdicts": told}, text_of(found))
    print(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
