"""Predicted beside published seconds of an optimizer step, on cards that are only described.

Each row of tests/data/time_evidence/rows.json is a training that somebody measured, as a recipe of
ours: its split, its levers and its mode are fixed, so that what is judged is the seconds of that
very strategy. Ratios are predicted over measured seconds. No GPU is needed; steps that the folder
of traces ($LOWMEM_TRACES) lacks are traced. The exit code is 1 if a row could not be planned.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml

from benchmarks import recording
from launch.base.errors import LaunchError
from launch.base.workspace import FILES, Workspace
from launch.data.worker import WORKER
from launch.plan import candidates
from launch.plan import facts as plan_facts
from launch.plan.fit import ANY_FORMAT
from launch.predict import estimate, seconds_margins
from launch.predict.estimate import Judged
from launch.predict.facts import Facts, Installed, Rows
from launch.predict.models import model_config
from launch.predict.traces import Traces
from launch.probe import cards, described
from launch.probe.import_memory import ASSUMED_CUDA
from launch.recipe import load
from launch.schema.machine import CUDNN_LAST, CardFigures
from launch.schema.recipe import Recipe

EVIDENCE = recording.CODE / "tests/data/time_evidence/rows.json"
RESULT = "seconds_of_cards"
CLASSES = (*seconds_margins.CLASSES, "launch-bound", "compiled", "other")
DOUBTFUL = "doubtful"  # rows of which the training, or its figures, are not known well
# sentences that rows may have, and the titles of their tables
SAID = {"doubt": "Doubtful rows", "reason": "Rows that are no recipe"}
GOOD = (0.7, 1.4)  # ratios
CLEARLY = 1.1  # ratio of two measured seconds that are to be ordered as measured
ORDERED = 1.01  # and of two predicted ones, that says which is larger
# laid under each row's recipe, so that nothing is left to the planner; all were measured without
# kernels that plans fuse since
FIXED: Mapping[str, Mapping[str, Any]] = {
    "training": {
        "num_output_chunks": 1,
        "tiled_mlp_num_shards": 1,
        "use_liger_kernel": False,
        "fused_norms": False,
    },
    "lora": {"fused_adapters": False},
    "launch": {"assume_fits": True, "exact_batch": True},
}


def read_evidence() -> dict[str, Any]:
    return json.loads(EVIDENCE.read_text(encoding="utf-8"))


def recipe_of(
    row: Mapping[str, Any],
    model: str | Mapping[str, Any],
    folder: Path,
    fixed: Mapping[str, Mapping[str, Any]] = FIXED,
) -> Recipe:
    """The recipe of a row, as our loader reads it from a file; a model without a name gets a folder
    with its config. Raises ConfigError."""
    named = {"shape": model}
    if not isinstance(model, str):
        named = {"path": str(folder / "model")}
        (folder / "model").mkdir()
        (folder / "model/config.json").write_text(json.dumps(model), encoding="utf-8")
    asked: dict[str, Any] = row["recipe"]
    content = {"name": "measured", "output_dir": str(folder / "trained"), **asked}
    content["model"] = {**named, **asked["model"]}
    content["data"] = {"train_file": str(folder / "rows.jsonl"), **asked["data"]}
    content |= {key: {**values, **asked[key]} for key, values in fixed.items() if key in asked}
    file = folder / "recipe.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return load.load(str(file))[0]


def counts_of(mean_tokens: float, varied: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """The counts of tokenised rows with this mean length, every token a target."""
    lengths = [min(round(mean_tokens * share), longest) for share in varied["shares"]]
    tokens = round(mean_tokens * varied["rows"])
    return {
        "rows": varied["rows"],
        "documents": varied["rows"],
        "tokens": tokens,
        "target_tokens": tokens,
        "most_targets": sorted(lengths, reverse=True),
        "lengths": [[length, length] for length in lengths],
    }


def rows_of(row: Mapping[str, Any], recipe: Recipe, varied: Mapping[str, Any], rows: Rows) -> Rows:
    """The rows of a training: all of one length, of many, or packed."""
    if "rows_of" in row:
        return plan_facts.of_length(rows, recipe.data, row["rows_of"])
    if "lengths" not in row:
        return rows
    counts = counts_of(row["mean_tokens"], varied[row["lengths"]], recipe.data.max_length)
    longest = max(counts["most_targets"])
    return replace(rows, counts=counts, lengths=(longest, longest))


def judged(row: Mapping[str, Any], content: Mapping[str, Any], folder: Path) -> Judged:
    """The prediction for a row's own strategy, which is the only one that its recipe allows."""
    return only_one(facts_of(row, content, folder))


def facts_of(
    row: Mapping[str, Any],
    content: Mapping[str, Any],
    folder: Path,
    fixed: Mapping[str, Mapping[str, Any]] = FIXED,
) -> Facts:
    """The facts of a row's training."""
    recipe = recipe_of(row, content["models"][row["model"]], folder, fixed)
    machine = described.from_words(row["card"], row["cards"], row["ram_gib"])
    workspace = Workspace.here()
    config, parameters, family = model_config.read(recipe.model, root=FILES, cache=workspace.cache)
    facts = plan_facts.build(recipe, machine, config, parameters, family, ANY_FORMAT)
    facts = plan_facts.as_folder(facts)
    size, targets = facts.model.size, facts.model.lora_targets
    copies = row.get("host_device_gb_s", 0) * 1e9
    figures = CardFigures(machine.gpus[0].name, host_device_bytes_per_s=copies)
    return replace(
        facts,
        rows=rows_of(row, recipe, content["lengths"], facts.rows),
        installed=Installed(import_memory=replace(ASSUMED_CUDA, card=figures)),
        traces=Traces(recipe, size, targets, workspace.traces, lambda line: None),
    )


def only_one(facts: Facts) -> Judged:
    (candidate,), _ = candidates.possible(facts)
    facts.fetch([candidate])
    verdict = estimate.judge(facts, candidate, exact=False)
    assert facts.traces is not None
    if verdict.time is None:
        raise LaunchError(f"not traced: {facts.traces.failure}")
    return verdict


def class_of(row: Mapping[str, Any]) -> str:
    """The kind of training that a row is counted with."""
    marks = {
        DOUBTFUL: "doubt" in row,
        "compiled": row["recipe"]["training"].get("torch_compile"),
        "launch-bound": row.get("is_launch_bound"),
    }
    card = seconds_margins.class_of(cards.by_words(row["card"]).name)
    return next((name for name, is_marked in marks.items() if is_marked), card or "other")


def measured_rows(content: Mapping[str, Any], only: str, place: Path) -> Iterator[dict[str, Any]]:
    """Each row that is a recipe, and has these letters in its name, beside its prediction."""
    for number, row in enumerate(content["rows"]):
        if "recipe" not in row or only not in row["id"]:
            continue
        result: dict[str, Any] = {"case": row["id"], "measured_s": row["s_per_step"]}
        folder = place / str(number)
        folder.mkdir()
        try:
            time = judged(row, content, folder).time
        except LaunchError as error:
            yield result | {"failed": str(error)}
            continue
        assert time is not None
        yield result | {
            "class": class_of(row),
            "ratio": round(time.step_s / row["s_per_step"], 3),
            "tokens": tokens_of(row),
            "predicted": asdict(time),
        }


def tokens_of(row: Mapping[str, Any]) -> float:
    """Tokens of an optimizer step, without padding where the rows' own lengths are known."""
    recipe = row["recipe"]
    training = recipe["training"]
    samples = training["per_device_train_batch_size"] * training["gradient_accumulation_steps"]
    length = row.get("mean_tokens") or row.get("rows_of") or recipe["data"]["max_length"]
    return samples * row["cards"] * length


def pairs(
    content: Mapping[str, Any], rows: Mapping[str, Mapping[str, Any]]
) -> Iterator[dict[str, Any]]:
    """Pairs of rows that differ in one thing, by at least CLEARLY in their measured seconds of a
    token, with the ratio of the second to the first as measured and as predicted."""
    for pair in content["pairs"]:
        if not all("ratio" in rows.get(name, {}) for name in pair["ids"]):
            continue
        first, second = (rows[name] for name in pair["ids"])
        tokens = first["tokens"] / second["tokens"]
        measured = second["measured_s"] / first["measured_s"] * tokens
        if 1 / CLEARLY < measured < CLEARLY:
            continue
        predicted = second["predicted"]["step_s"] / first["predicted"]["step_s"] * tokens
        is_right = predicted > ORDERED if measured > 1 else predicted < 1 / ORDERED
        yield {**pair, "measured": measured, "predicted": predicted, "is_right": is_right}


def summary(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Of each class, and of all but doubtful rows: their number, the median error, the share of
    good ratios, the median ratio."""
    lines = []
    groups = {name: (name,) for name in (*CLASSES, DOUBTFUL)} | {f"all but {DOUBTFUL}": CLASSES}
    for name, classes in groups.items():
        ratios = [row["ratio"] for row in rows if row["class"] in classes]
        if not ratios:
            continue
        error = statistics.median(abs(ratio - 1) for ratio in ratios)
        good = sum(GOOD[0] <= ratio <= GOOD[1] for ratio in ratios)
        bias = statistics.median(ratios)
        figures = f"{error:.0%}", f"{good / len(ratios):.0%}", f"{bias:.2f}"
        lines.append([name, str(len(ratios)), *figures])
    return lines


def crossed(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Half of the rows that are not doubtful, each class over its median ratio in the other half:
    their number, the median error, the share of good ratios, the least and most median ratio of a
    class."""
    judged_rows = [row for row in rows if row["class"] in CLASSES]
    lines = []
    for name, first in (("odd", 0), ("even", 1)):
        fitted, others = judged_rows[first::2], judged_rows[1 - first :: 2]
        medians = {
            each: statistics.median([row["ratio"] for row in fitted if row["class"] == each] or [1])
            for each in CLASSES
        }
        ratios = [row["ratio"] / medians[row["class"]] for row in others]
        of_class = [
            statistics.median(found)
            for each in CLASSES
            if (found := [r for r, row in zip(ratios, others, strict=True) if row["class"] == each])
        ]
        error = statistics.median(abs(ratio - 1) for ratio in ratios)
        good = sum(GOOD[0] <= ratio <= GOOD[1] for ratio in ratios)
        spread = f"{min(of_class):.2f} to {max(of_class):.2f}"
        figures = f"{error:.0%}", f"{good / len(ratios):.0%}", spread
        lines.append([name, str(len(ratios)), *figures])
    return lines


def text(content: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    done = [row for row in rows if "ratio" in row]
    head = ["training", "class", "measured s", "predicted s", "ratio", "launches"]
    lines = [
        [
            row["case"],
            row["class"],
            f"{row['measured_s']:.4g}",
            f"{row['predicted']['step_s']:.4g}",
            f"{row['ratio']:.2f}",
            f"{row['predicted']['launch_s'] / row['predicted']['step_s']:.0%}",
        ]
        for row in done
    ]
    classes = ["class", "rows", "median error", "within 0.7 to 1.4", "median ratio"]
    beside = [
        [
            pair["differs"],
            *pair["ids"],
            f"{pair['measured']:.2f}",
            f"{pair['predicted']:.2f}",
            "yes" if pair["is_right"] else "no",
        ]
        for pair in pairs(content, {row["case"]: row for row in done})
    ]
    order = ["differs", "first", "second", "measured", "predicted", "ordered as measured"]
    said = {
        name: [[row["id"], row[name]] for row in content["rows"] if name in row] for name in SAID
    }
    failed = [f"- {row['case']}: {row['failed']}\n" for row in rows if "failed" in row]
    is_halved = sum(row["class"] in CLASSES for row in done) > 1
    return (
        recording.table(head, lines)
        + "\n"
        + recording.table(classes, summary(done))
        + (
            "\nHalves of the rows that are not doubtful, each class over its median ratio in the"
            " other half:\n\n"
            + recording.table(
                ["rows", "number", *classes[2:4], "median ratios of classes"], crossed(done)
            )
            if is_halved
            else ""
        )
        + "\nSeconds a token of the second over those of the first:\n\n"
        + recording.table(order, beside)
        + "".join(
            f"\n{title}:\n\n" + recording.table(["training", name], said[name])
            for name, title in SAID.items()
        )
        + ("\nNot planned:\n\n" + "".join(failed) if failed else "")
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="rows whose name contains this; not written")
    arguments = parser.parse_args()
    os.environ[CUDNN_LAST] = "1"  # all rows were measured so
    content, rows = read_evidence(), []
    with tempfile.TemporaryDirectory() as place, WORKER:
        for row in measured_rows(content, arguments.only, Path(place)):
            rows.append(row)
            print(row["case"], row.get("failed", row.get("ratio")), flush=True)
            if not arguments.only:
                recording.write(RESULT, {"rows": rows}, text(content, rows))
    if arguments.only:
        print("\n" + text(content, rows))
    return int(any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
