"""Ours beside transformers.Trainer and TRL's SFTTrainer at their best documented settings: tokens a
second and memory.

    pip install --no-deps --target FOLDER trl==1.16.0
    LOWMEM_REAL_DATA=DATA python -m benchmarks.peers --trl FOLDER [--trl ANOTHER]

TRL is no package of ours, and is imported from its own folder; several versions may be given. All
ways of a case train one model folder on the same tokens: same effective batch, AdamW, schedule,
precision and attention (sdpa). They take turns, round after round, each round with a seed of its
own for the order of the rows. Plain Trainer and TRL get rows that are tokenised already; TRL packs
them itself (bfd). Its packed batch is one flat sequence, whose attention is that much longer: so
packed ones run in micro-batches of one too. On a CPU all have one thread.

Tokens are those that are no padding; seconds those between the ends of steps, the first left out.
Memory of the rank is the most that was ever resident, until its last step; that of the job is PSS
with all launchers. Where there is a GPU its cases run instead, and memory is what torch has
reserved.

Before that all train some steps on the same rows in the same order: the losses of each step have to
agree.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import padding, rank_memory, recording, trainings
from benchmarks.padding import SEED, WARM_UP
from benchmarks.trainings import ONE_THREAD, OPTIMIZER
from launch.run_folder.steps import events

AGREES = 1e-3  # of a loss, relative
GOAL = 1.0
QWEN = recording.CODE / "configs/models/qwen2-0.5b.yaml"


@dataclass(frozen=True)
class Case:
    """One data set, model and way of cutting the padding."""

    name: str
    source: padding.Case
    batch: int  # rows, or packed sequences, in a step
    packs: bool = False
    trl: bool = True  # TRL trains such a model
    on_gpu: bool = False
    training: Mapping[str, Any] = field(default_factory=dict)


GSM8K, CHAT = padding.CASES[0], replace(padding.CASES[1], max_length=256)
CASES = (
    Case("gsm8k, decoder, rows of one length", GSM8K, 8),
    Case("gsm8k, decoder, packed", GSM8K, 4, packs=True),
    Case("Chinese chat, T5, rows of one length", CHAT, 16, trl=False),
    Case(
        "gsm8k, Qwen2 0.5B, bf16, rows of one length",
        GSM8K,
        32,
        on_gpu=True,
        training={"bf16": True},
    ),
    Case(
        "gsm8k, Qwen2 0.5B, bf16, packed",
        GSM8K,
        16,
        packs=True,
        on_gpu=True,
        training={"bf16": True},
    ),
    Case(
        "Chinese chat, T5, bf16, rows of one length",
        CHAT,
        64,
        trl=False,
        on_gpu=True,
        training={"bf16": True},
    ),
)


@dataclass(frozen=True)
class Way:
    """A trainer and how it is set."""

    name: str
    trl: Path | None = None  # the folder of its package
    micro_batch: int | None = None  # None: the whole batch

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ours")

    def cut(self, case: Case) -> dict[str, int]:
        """What TrainingArguments and our recipes call it."""
        micro_batch = self.micro_batch or case.batch
        return {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": case.batch // micro_batch,
        }


@dataclass(frozen=True)
class Made:
    """What all ways of a case train on."""

    rows: Path  # parquet
    model: Path
    tokens: Path  # Arrow, from our cache, not packed
    workspace: Path


def version_of(folder: Path) -> str:
    """TRL's, of the package in this folder; whoever gave another folder is told."""
    found = list(folder.glob("trl-*.dist-info"))
    if not found or not (folder / "trl").is_dir():
        sys.exit(
            f"--trl {folder}: no TRL is there (expected trl/ and"
            f" trl-VERSION.dist-info/).\n{__doc__}"
        )
    return found[0].name.removeprefix("trl-").removesuffix(".dist-info")


def ways_of(case: Case, folders: Sequence[Path]) -> list[Way]:
    """Those that can train the case, each whole batch at once; packed ones in micro-batches of one
    sequence too."""
    found = [] if case.packs else [Way("plain Trainer")]
    found += [Way(f"TRL {version_of(folder)}", folder) for folder in folders if case.trl]
    ways = [*found, Way("ours")]
    if case.packs:
        ways += [
            replace(way, name=f"{way.name}, {case.batch} micro-batches", micro_batch=1)
            for way in ways
        ]
    return ways


def ours(
    case: Case, data: Mapping[str, Any], training: Mapping[str, Any], made: Made
) -> trainings.Content:
    given = {**OPTIMIZER, **case.training, **Way("ours").cut(case), "seed": SEED, **training}
    mode = "single_gpu" if case.on_gpu else "cpu"
    return trainings.sft("peers", made.model, made.rows, case.source.max_length, data, given, mode)


def prepared(case: Case, data: Path, place: Path) -> Made:
    """Rows, model, tokens; plans and token caches of both our ways are warm."""
    source = case.source
    if case.on_gpu and source is GSM8K:
        config = yaml.safe_load(QWEN.read_text(encoding="utf-8"))
        source = replace(
            source, config={key: value for key, value in config.items() if key != "vocab_size"}
        )
    rows, model = padding.made(source, data, place / "made")
    made = Made(rows, model, place / "train.arrow", place / "workspace")
    for way in [{}, {"packing": True}] if case.packs else [{}, {"group_by_length": True}]:
        attempt = trainings.run(
            ours(case, way, {"max_steps": 2}, made), place, made.workspace, environment(case)
        )
        if not way:
            shutil.copy(trainings.tokens_of(attempt), made.tokens)  # TRL writes beside it
    return made


def environment(case: Case) -> dict[str, str]:
    return {} if case.on_gpu else ONE_THREAD


def peer(
    case: Case,
    way: Way,
    made: Made,
    training: Mapping[str, Any],
    folder: Path,
    order: list[int] | None = None,
) -> list[str]:
    """The line that starts it."""
    arguments = {
        **way.cut(case),
        "seed": SEED,
        **OPTIMIZER,
        **case.training,
        **training,
        **({} if order or case.packs else {"train_sampling_strategy": "group_by_length"}),
    }
    sft = {"max_length": case.source.max_length, "packing": case.packs} if way.trl else None
    return trainings.peer(folder, made.model, made.tokens, arguments, order, sft, case.on_gpu)


def env_of(case: Case, way: Way, made: Made) -> dict[str, str]:
    found = {**recording.environment(made.workspace), **environment(case)}
    if way.trl:
        found["PYTHONPATH"] += f":{way.trl}"
    return found


def repetition(
    case: Case, way: Way, made: Made, steps: int, seed: int, folder: Path
) -> dict[str, Any]:
    """One training; its speed, memory and mean loss."""
    folder.mkdir()
    load = round(os.getloadavg()[0], 2)
    training = {"max_steps": steps, "logging_steps": steps, "seed": seed}
    data = {"packing": True} if case.packs else {"group_by_length": True}
    content = ours(case, data, {**training, **way.cut(case)}, made)
    argv = (
        trainings.argv(content, folder) if way.is_ours else peer(case, way, made, training, folder)
    )
    seen = rank_memory.tree(argv, env_of(case, way, made), folder / "log.txt")
    if way.is_ours:
        said = events(trainings.attempt_of(content["name"], made.workspace))
        times, tokens = [one.time for one in said], [one.tokens for one in said]
        loss, vram_bytes = statistics.fmean(one.loss for one in said), said[-1].vram_reserved_bytes
    else:
        lines = trainings.steps_of(folder)
        sums = [0, *(line["tokens"] for line in lines)]
        times, tokens = (
            [line["time"] for line in lines],
            [b - a for a, b in itertools.pairwise(sums)],
        )
        found = json.loads((folder / "losses.json").read_text(encoding="utf-8"))
        (loss,), vram_bytes = found["losses"], found["vram_bytes"]
    assert len(times) == steps, (way, len(times))
    trained = [one for one in seen if times[0] <= one.time <= times[-1]]
    return {
        "tokens_per_s": round(sum(tokens[WARM_UP:]) / (times[-1] - times[WARM_UP - 1]), 1),
        "tokens_a_step": round(statistics.fmean(tokens[WARM_UP:]), 1),
        "rank_bytes": max(one.peak_bytes for one in trained),
        "job_bytes": max(one.job_bytes for one in trained),
        "vram_bytes": vram_bytes,
        "mean_loss": round(loss, 4),
        "load": load,
    }


def same_losses(
    case: Case, ways: Sequence[Way], made: Made, steps: int, place: Path
) -> dict[str, list[float]]:
    """The loss of every step of every way on the rows of our order, not packed."""
    from training.data.batches import TokenRows
    from training.data.sample_order import SampleOrder

    case = replace(case, packs=False)
    order = SampleOrder(len(TokenRows(made.tokens)), case.batch, 1, 1, 0, SEED)
    rows = [row for step in range(1, steps + 1) for row in order.rows_of(step, [0])]
    content = ours(case, {}, {"max_steps": steps}, made)
    attempt = trainings.run(content, place, made.workspace, environment(case))
    found = {"ours": [one.loss for one in events(attempt)]}
    for way in ways:
        if not way.is_ours and way.micro_batch is None:
            folder = place / f"check {way.name}"
            folder.mkdir()
            argv = peer(case, way, made, {"max_steps": steps, "logging_steps": 1}, folder, rows)
            recording.timed(argv, env_of(case, way, made), folder / "log.txt", wait=False)
            found[way.name] = trainings.losses_of(folder)
    return found


def apart(losses: Mapping[str, Sequence[float]]) -> float:
    """The largest relative difference of a step's loss from ours."""
    pairs = (pair for name in losses for pair in zip(losses[name], losses["ours"], strict=True))
    return max(abs(a / b - 1) for a, b in pairs)


def measured(
    case: Case, folders: Sequence[Path], data: Path, steps: int, rounds: int, place: Path
) -> dict[str, Any]:
    made, ways = prepared(case, data, place), ways_of(case, folders)
    losses = same_losses(case, ways, made, 8, place)
    print(f"{case.name}: losses of 8 steps are at most {apart(losses):.1e} apart", flush=True)
    found: dict[str, list[dict[str, Any]]] = {way.name: [] for way in ways}
    for turn in range(rounds):
        for way in ways:
            one = repetition(case, way, made, steps, SEED + turn, place / f"{way.name} {turn}")
            print(f"{case.name}  {way.name}  {one}", flush=True)
            found[way.name].append(one)
    return {
        "case": case.name,
        "on_gpu": case.on_gpu,
        "losses": losses,
        "apart": apart(losses),
        "ways": found,
    }


def rows_of(case: Mapping[str, Any]) -> list[list[str]]:
    """A line for each way of a case; ours, cut in the same way, is divided by each."""
    memory, found = "vram_bytes" if case["on_gpu"] else "rank_bytes", []
    for way, runs in case["ways"].items():
        _, comma, cut = way.partition(", ")
        pairs = list(zip(case["ways"][f"ours{comma}{cut}"], runs, strict=True))
        speeds = [mine["tokens_per_s"] / theirs["tokens_per_s"] for mine, theirs in pairs]
        held = [mine[memory] / theirs[memory] for mine, theirs in pairs]

        def median(key: str, runs: Sequence[Mapping[str, Any]] = runs) -> float:
            return statistics.median(one[key] for one in runs)

        spread = [
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
            for ratios in (speeds, held)
        ]
        found.append(
            [
                case["case"],
                way,
                f"{median('tokens_a_step'):,.0f}",
                f"{median('tokens_per_s'):,.0f}",
                spread[0] if not way.startswith("ours") else "",
                f"{median(memory) / 1e6:,.0f}",
                spread[1] if not way.startswith("ours") else "",
                f"{median('job_bytes') / 1e6:,.0f}",
                f"{median('mean_loss'):.3f}",
                " / ".join(f"{one['load']:.1f}" for one in runs),
            ]
        )
    return found


def text_of(cases: Sequence[Mapping[str, Any]], steps: int, unrun: str) -> str:
    head = [
        "case",
        "way",
        "tokens a step",
        "tokens/s",
        "ours over it",
        "peak of the rank, MB",
        "ours over it",
    ]
    head += ["job, MB", "mean loss", "load before"]
    worst = max(case["apart"] for case in cases)
    text = (
        f"{steps} steps, the first {WARM_UP} left out; medians of {len(cases[0]['ways']['ours'])}"
        f" rounds. Goal: ours at least {GOAL} times the tokens/s of each at equal or lower memory."
        f" On the same rows in the same order no loss of 8 steps is more than {worst:.1e} from ours"
        f" (relative; {AGREES:g} is allowed).\n\n"
    )
    return text + recording.table(head, [row for case in cases for row in rows_of(case)]) + unrun


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trl", type=Path, action="append", required=True, help="a folder with TRL, as shown above"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each run")
    parser.add_argument(
        "--case", type=int, action="append", choices=range(len(CASES)), help="only this one"
    )
    arguments = parser.parse_args()
    folders = [folder.resolve() for folder in arguments.trl]
    versions = [version_of(folder) for folder in folders]
    data = padding.real_data()
    from launch.probe import machine as probe_machine

    machine = probe_machine.machine()
    on_gpu = bool(machine.gpus)
    chosen = [
        CASES[number]
        for number in arguments.case or range(len(CASES))
        if CASES[number].on_gpu == on_gpu
    ]
    if not chosen:
        sys.exit(f"none of these cases runs here: {machine.gpus_reason}")
    cases = []
    for case in chosen:
        with tempfile.TemporaryDirectory() as place:
            cases.append(
                measured(case, folders, data, arguments.steps, arguments.rounds, Path(place))
            )
    left = [case.name for case in CASES if case.on_gpu and not on_gpu]
    unrun = (
        f"\nNot run: {machine.gpus_reason}. Written and never measured: {'; '.join(left)}.\n"
        if left
        else ""
    )
    measures = {"trl": versions, "goal": GOAL, "agrees": AGREES, "cases": cases, "not_run": left}
    recording.write(
        "peers_gpu" if on_gpu else "peers",
        measures,
        text_of(cases, arguments.steps, unrun),
        "peers",
    )
    worst = max(case["apart"] for case in cases)
    if not math.isfinite(worst) or worst > AGREES:
        sys.exit(f"the losses are {worst:.1e} apart: not one computation")


if __name__ == "__main__":
    main()
