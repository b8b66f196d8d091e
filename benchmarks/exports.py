"""Exported folders, loaded as a user loads them: every family of models, trained whole, as an
adapter and as a merged one, by plain transformers 5 and 4 and plain peft.

A base folder of each family, as the hub has them (export_folders.py), is trained twice on a CPU by
`python -m launch run`: all its weights, and LoRA on every linear layer, whose adapter `python -m
launch merge` merges. load_exports.py, which imports none of our code, loads each export with each
version of transformers. Compared with what was trained are the ids of the rows and prompts (the
run's tokenised rows), the logits (the last checkpoint's weights under the base folder's own
config.json), the end tokens, and the answers that the model has learned by heart: each has to stop
at its trained end token. Transformers 4 has an environment of its own (transformers4/).

Rows are kept in .cache/exports.json: a campaign that was cut off goes on there, with rows that are
missing or failed. Where training/ has changed since, the table says so; --again measures all.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import export_trainings, recording
from benchmarks.export_folders import FOLDERS, PAIRS
from benchmarks.export_trainings import ADAPTER, COMPARED_ROWS, FULL, KINDS, MERGED, Trained
from benchmarks.families import FAMILIES, code_hashes
from benchmarks.load_exports import Request

STORE = recording.CODE / ".cache" / "exports.json"
LOADER = recording.CODE / "benchmarks" / "load_exports.py"
PYTHONS = {
    "5.23": Path(sys.executable),
    "4.57": recording.CODE / ".cache" / "transformers4" / "bin" / "python",
}
# exports of a training, by whether it has LoRA
KINDS_OF = {False: (FULL,), True: (ADAPTER, MERGED)}
MOST_OFF = 1e-4  # the largest difference of two logits, as a part of the largest logit


class Loader:
    """A process that loads exports with one version of transformers, without our code."""

    def __init__(self, python: Path, place: Path) -> None:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.log = (place / f"loader-{time.monotonic_ns()}.log").open("wb")
        self.process = subprocess.Popen(
            [str(python), "-P", str(LOADER)],
            cwd=place,
            env={**env, "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        self.versions = self._answer()

    def ask(self, request: Request) -> dict[str, Any]:
        """What load_exports.found() says."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(request)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the loader ended: {Path(self.log.name).read_text()[-1000:]}"
        return json.loads(line)

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


def problems(case: Trained, kind: str, loader: Loader) -> tuple[list[str], float | None]:
    """What an export has other than what was trained, and how far its logits are off, as a part of
    the largest."""
    request = Request(
        export=str(case.folder / kind),
        base=str(case.folder / "base"),
        is_encoder_decoder=case.is_encoder_decoder,
        is_adapter=kind == ADAPTER,
        attention=FOLDERS[case.family].attention,
        pairs=PAIRS,
        inputs=case.inputs[:COMPARED_ROWS],
        labels=case.labels[:COMPARED_ROWS],
        logits_file=str(case.folder / "logits.pt"),
        prompts=[case.prompt(row) for row in case.known[:COMPARED_ROWS]],
    )
    file = Path(request.logits_file)
    file.unlink(missing_ok=True)
    said = loader.ask(request)
    assert not said["ours"], said["ours"]
    found = [*said["failures"], *of_files(case, kind)]
    if tokens := said.get("tokens"):
        expected = case.labels if case.is_encoder_decoder else case.inputs
        # the trainer adds an end token where a template ends no answer, as GLM's
        ended = [[*row, case.answer(number)[-1]] for number, row in enumerate(tokens["rows"])]
        rows = [
            with_end if with_end == trained else row
            for row, with_end, trained in zip(tokens["rows"], ended, expected, strict=True)
        ]
        found += differing("ids of rows", rows, expected)
        prompts = [case.prompt(row) for row in range(len(PAIRS))]
        found += differing("ids of prompts", tokens["prompts"], prompts)
    if said.get("loading"):
        found.append(f"loading: {said['loading']}")
    if "dtype" in said and said["dtype"] != case.dtype:
        found.append(f"dtype {said['dtype']}, the base has {case.dtype}")
    if said.get("use_cache") is False:
        found.append("use_cache false")
    off = None
    if file.exists():
        off = export_trainings.difference(torch.load(file), case.logits)
        if not off <= (max(MOST_OFF, 2 * case.rounded_off) if kind == MERGED else MOST_OFF):
            found.append(f"logits off by {off:.2g} of the largest")
    if "ends" in said:
        ends = said["ends"] if isinstance(said["ends"], list) else [said["ends"]]
        trained_ends = {case.answer(row)[-1] for row in range(len(PAIRS))}
        if missing := trained_ends - {*ends}:
            found.append(f"end tokens {ends} lack the trained {sorted(missing)}")
    for row, answer in zip(case.known, said.get("answers", ()), strict=False):
        if answer != case.answer(row):
            at = first_difference(answer, case.answer(row))
            went_on = "goes on after its end token" if at == len(case.answer(row)) else "differs"
            found.append(f"answer {row} {went_on}, at token {at} of {len(case.answer(row))}")
    return found, off


def of_files(case: Trained, kind: str) -> list[str]:
    """The files of the base folder's tokenizer that an export lacks."""
    names = [file.name for file in (case.folder / "base").glob("*.model")]
    return [f"{name} is lost" for name in names if not (case.folder / kind / name).exists()]


def differing(what: str, found: Sequence[list[int]], expected: Sequence[list[int]]) -> list[str]:
    """A line on the first row whose ids differ."""
    for row, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one != other:
            at = first_difference(one, other)
            there = f"{one[at : at + 3]}, trained {other[at : at + 3]}"
            return [f"{what}: row {row} differs at token {at}: {there}"]
    return []


def first_difference(one: list[int], other: list[int]) -> int:
    """The place of the first token that differs, or the end of the shorter list."""
    length = min(len(one), len(other))
    return next((at for at in range(length) if one[at] != other[at]), length)


def attempted(
    family: str, is_lora: bool, place: Path, loaders: Mapping[str, Loader]
) -> dict[str, dict[str, Any]]:
    """The rows of one training: of each of its exports with each version. A row has `problems`."""
    began = time.monotonic()
    case, failure = None, ""
    try:
        case = export_trainings.train(family, place, is_lora)
    # a fault of one family is a row, and the next family is measured
    except Exception as error:
        if "stopped by SIG" in str(error):  # with the campaign
            raise
        traceback.print_exc()
        lines = str(error).strip().splitlines() or [""]
        failure = f"training: {type(error).__name__}: {lines[0]}"[:300]
    seconds = round(time.monotonic() - began, 1)
    rows = {}
    for kind, version in itertools.product(KINDS_OF[is_lora], loaders):
        found, off = ([failure], None) if case is None else problems(case, kind, loaders[version])
        rows[name_of(family, kind, version)] = {
            **{"family": family, "export": kind, "transformers": version},
            **{"problems": found, "logits_off": off},
            "known_rows": len(case.known) if case else None,
            "training_s": seconds,
            "loaded_by": loaders[version].versions,
        }
    return rows


def name_of(family: str, kind: str, version: str) -> str:
    return f"{family}, {kind}, transformers {version}"


def line(row: Mapping[str, Any]) -> str:
    name = name_of(row["family"], row["export"], row["transformers"])
    return f"{name}: {'; '.join(row['problems']) or 'as trained'}"


def text(rows: Sequence[Mapping[str, Any]], today: str) -> str:
    failing = [f"- {line(row)}" for row in rows if row["problems"]]
    cells = {name_of(row["family"], row["export"], row["transformers"]): row for row in rows}

    def cell(family: str, kind: str, version: str) -> str:
        row = cells.get(name_of(family, kind, version))
        if row is None:
            return ""
        if row["problems"]:
            return "FAILS"
        return f"{row['logits_off']:.1e}"

    columns = [(kind, version) for version in PYTHONS for kind in KINDS]
    lines = [
        [
            *(family, FOLDERS[family].tokenizer_class, FOLDERS[family].dtype),
            *(cell(family, *column) for column in columns),
        ]
        for family in dict.fromkeys(row["family"] for row in rows)
    ]
    head = ["family", "tokenizer", "stored as"]
    head += [f"{kind}, {version}" for kind, version in columns]
    packages = {row["transformers"]: row["loaded_by"] for row in rows}.values()
    versions = "; ".join(
        ", ".join(f"{name} {version}" for name, version in loaded_by.items())
        for loaded_by in packages
    )
    older = sum(row["measured_code"] != today for row in rows)
    stale = f" {older} were measured before the last change of training/." if older else ""
    return (
        f"Loaded by {versions}.\n\n{len(FAMILIES)} families, {len(rows)} of"
        f" {len(FAMILIES) * len(columns)} exports and versions of transformers:"
        f" {len(rows) - len(failing)} are loaded with the trained ids, logits and end tokens, and"
        f" answers stop.{stale} A cell is the largest difference of two logits, as a part of the"
        " largest logit.\n\n"
        + (f"Failing:\n\n{chr(10).join(failing)}\n\n" if failing else "")
        + recording.table(head, lines)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="families, by commas; nothing is recorded")
    parser.add_argument("--so-far", action="store_true", help="record the rows that are there")
    parser.add_argument("--again", action="store_true", help="measure rows that are there too")
    arguments = parser.parse_args()
    only = [name for name in arguments.only.split(",") if name]
    families = [name for name in FAMILIES if not only or name.split()[0] in only]
    rows: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    today = code_hashes()["measured_code"]
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        loaders = {version: Loader(python, Path(place)) for version, python in PYTHONS.items()}
        for family in () if arguments.so_far else families:
            for is_lora in (False, True):
                names = [
                    name_of(family, *column)
                    for column in itertools.product(KINDS_OF[is_lora], PYTHONS)
                ]
                if not arguments.again and all(
                    name in rows and not rows[name]["problems"] for name in names
                ):
                    continue
                made = attempted(family, is_lora, Path(place) / "case", loaders)
                for name, row in made.items():
                    rows[name] = {**row, "measured_code": today}
                    print(line(row), flush=True)
                STORE.parent.mkdir(exist_ok=True)
                STORE.write_text(json.dumps(rows, indent=1))
            shutil.rmtree(Path(place) / "case", ignore_errors=True)
        for loader in loaders.values():
            loader.close()
    names = [name_of(*one) for one in itertools.product(families, KINDS, PYTHONS)]
    recorded = [rows[name] for name in names if name in rows]
    if only:
        print(text(recorded, today))
    else:
        recording.write("exports", {"rows": recorded}, text(recorded, today))


if __name__ == "__main__":
    main()
