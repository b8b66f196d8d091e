"""Tokenise a run's data once: `python -m training.prepare --run-dir DIR`, a child of the launcher, before any rank."""

from __future__ import annotations

import argparse
import fcntl
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import rundir
from launch.errors import DataError, LaunchError
from launch.rundir import RunDir
from launch.schema import Plan, Recipe
from training.control import Control, Halted
from training.heartbeat import Heartbeat


def ensure(
    recipe: Recipe, plan: Plan, cache: Path, say: Callable[[str], None], goes_on: Callable[[], None] = lambda: None
) -> Path:
    """The folder with train.arrow, validation.arrow, tokenizer/ and counts.json; made once, under a lock.

    `goes_on` is called every thousand rows."""
    identity = rundir.token_identity(cache, recipe, plan.shape, plan.data_format)
    folder = rundir.token_folder(cache, identity)
    if (folder / rundir.TOKENS_READY).exists():
        rundir.note_made_of(folder, identity)
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / rundir.TOKENS_READY).exists():
            for left in folder.parent.glob(f".{folder.name}.*.tmp"):  # of a start that was killed
                shutil.rmtree(left, ignore_errors=True)
            aside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
            aside.mkdir()
            try:
                _write(recipe, plan, identity, aside, say, goes_on)
                shutil.rmtree(folder, ignore_errors=True)
                aside.rename(folder)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
    return folder


def _write(
    recipe: Recipe,
    plan: Plan,
    identity: dict[str, Any],
    folder: Path,
    say: Callable[[str], None],
    goes_on: Callable[[], None],
) -> None:
    from training import data, packing, rows, tokenizer

    source, section = recipe.data, recipe.tokenizer
    train_file = Path(source.train_file)
    local = section.path or recipe.model.path
    if local:
        chosen = tokenizer.load(Path(local))
    else:
        size = section.vocab_size or plan.shape.config["vocab_size"]
        say(f"training a tokenizer of at most {size:,} tokens on {train_file.name}")
        texts = rows.samples(train_file, plan.data_format, rows.BadRows(source.max_bad_rows))
        chosen = tokenizer.train(map(rows.text_of, texts), section, size)
    chosen.save_pretrained(folder / "tokenizer")
    is_cut = source.packing and recipe.task == "pretrain"
    encoder = data.Encoder(chosen, plan.shape.is_encoder_decoder, recipe.task, source.max_length, is_cut)
    counts = {}
    parts = [("train", source.train_file, source.max_train_samples)]
    if source.validation_file:
        parts.append(("validation", source.validation_file, source.max_validation_samples))
    for part, file, limit in parts:
        with _progress(f"tokenising {Path(file).name}", goes_on) as advance:
            bad = rows.BadRows(source.max_bad_rows)
            source_rows = rows.samples(Path(file), plan.data_format, bad)
            packer = packing.Packer(source.max_length, is_cut) if source.packing else None
            found = data.write_cache(source_rows, encoder, folder / f"{part}.arrow", limit, advance, packer)
        found.bad = bad.count
        if not found.rows:
            raise DataError(
                f"{file}: 0 rows with something to learn ({found.samples:,} read, {found.dropped:,} without a target"
                f" within max_length {source.max_length}); check the columns and data.max_length"
            )
        counts[part] = asdict(found)
        say(summary(Path(file).name, counts[part], source.max_length))
        if bad.count:
            say(
                f"{Path(file).name}: {bad.count:,} bad rows left out (data.max_bad_rows {bad.limit}); first {bad.first}"
            )
    rundir.note_made_of(folder, identity)
    rundir.sync_all(folder)
    rundir.write_json(folder / rundir.TOKENS_READY, {**counts, "vocabulary": len(chosen)})


def summary(name: str, counts: dict[str, Any], max_length: int) -> str:
    """One line on a tokenised file."""
    mean = counts["tokens"] / counts["rows"]
    line = f"{name}: {counts['rows']:,} rows, {mean:.0f} tokens on average, longest {counts['longest']}"
    if counts["documents"]:
        each = counts["documents"] / counts["rows"]
        line = f"{name}: {counts['documents']:,} rows in {counts['rows']:,} sequences, {each:.1f} in each on average, "
        line += f"{mean / max_length:.1%} full"
    if counts["truncated"]:
        line += f", {counts['truncated']:,} cut at max_length {max_length}"
    if counts["dropped"]:
        line += f", {counts['dropped']:,} left out (nothing to learn from)"
    return line


def _progress(title: str, goes_on: Callable[[], None]) -> Any:
    from tqdm import tqdm

    class Advance(tqdm):
        def __call__(self, rows: int) -> None:
            self.update(rows)
            goes_on()

    return Advance(desc=title, unit=" rows", file=sys.stderr, disable=not sys.stderr.isatty(), leave=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--cache", type=Path, required=True)
    arguments = parser.parse_args()
    rundir.settle_process()
    run = RunDir(arguments.run_dir)
    heartbeat = Heartbeat(run.attempt(arguments.attempt).heartbeat_file(0))
    heartbeat.beat("tokenise")
    try:
        Control().listen()
        recipe, plan = run.read_recipe(), run.read_plan()
        folder = ensure(recipe, plan, arguments.cache, lambda line: print(line, flush=True), heartbeat.again)
    except Halted as halted:
        return halted.word.exit_code
    except LaunchError as error:
        run.attempt(arguments.attempt).leave_word(0, error)
        return error.exit_code
    except BaseException as error:
        run.attempt(arguments.attempt).leave_word(0, error)
        raise
    run.write_tokens(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
