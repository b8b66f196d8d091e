"""Tokenise units of a corpus: `python -m training.data.tokenise FOLDER`, a child of
training.data.prepare.

Reads the numbers of units, one a line; says in a line of JSON how many rows it has read, and when a
unit's files are there. A unit is committed by a rename, so one that was begun and not finished is
none.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.base import files, processes
from launch.base.errors import DataError
from launch.data import rows, shards
from launch.schema.plan import DataFormat, ModelSize
from launch.schema.recipe import Recipe
from training.data import encode, tokenizer
from training.data import packing as data_packing
from training.data import units as data_units

JOB = "job.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Job:
    """What every process knows that tokenises a part, "train" or "validation", into a folder."""

    folder: Path
    part: str
    source: Path  # data.train_file or data.validation_file
    data_format: DataFormat
    encoder_decoder: bool
    task: str
    max_length: int
    packing: bool
    max_bad_rows: int
    unit_bytes: int

    @cached_property
    def units(self) -> list[data_units.Unit]:
        return data_units.cut(shards.of(self.source), self.data_format, self.unit_bytes)

    @cached_property
    def encoder(self) -> encode.Encoder:
        cut = tokenizer.load(self.folder / TOKENIZER)
        return encode.Encoder(cut, self.encoder_decoder, self.task, self.max_length, self._is_cut)

    @property
    def _is_cut(self) -> bool:
        """Texts follow one another in full sequences."""
        return self.packing and self.task == "pretrain"

    def rows_file(self, unit: int) -> Path:
        return self.folder / (
            f"{self.part}.arrow" if len(self.units) == 1 else f"{self.part}-{unit:05d}.arrow"
        )

    def counts_file(self, unit: int) -> Path:
        return self.folder / f"{self.part}-{unit:05d}.json"

    def write(self) -> None:
        """For the processes to read."""
        files.write_atomic(self.folder / JOB, TypeAdapter(Job).dump_json(self).decode())

    def done(self, unit: int) -> dict[str, Any] | None:
        """What a unit gave; None where it has not been tokenised yet."""
        return files.read_json(self.counts_file(unit))

    def failed(self, unit: int) -> dict[str, Any] | None:
        """Why another process could not tokenise a unit."""
        return files.read_json(self.counts_file(unit).with_suffix(".failed"))

    def tokenise(
        self, unit: int, limit: int | None, progress: Callable[[int], Any]
    ) -> dict[str, Any]:
        """Write a unit's rows and, last, what they are: its counts, the rows that were left out, or
        why it failed.

        A failure is not kept: with the data mended the unit is tokenised again."""
        bad = rows.BadRows(self.max_bad_rows)
        source = chain.from_iterable(
            rows.samples_of(of, self.data_format, bad) for of in self.units[unit]
        )
        packer = data_packing.Packer(self.max_length, self._is_cut) if self.packing else None
        aside = self.rows_file(unit).with_suffix(".tmp")
        try:
            counts = encode.write_cache(source, self.encoder, aside, limit, progress, packer)
        except DataError as error:
            aside.unlink()
            return {"error": str(error), "bad": bad.errors}
        files.sync(aside)
        aside.rename(self.rows_file(unit))
        found = {"counts": asdict(counts), "bad": bad.errors}
        files.write_json(self.counts_file(unit), found)
        return found


def job(recipe: Recipe, shape: ModelSize, data_format: DataFormat, folder: Path, part: str) -> Job:
    """The job of a recipe's "train" or "validation"; units of what is streamed are small."""
    data = recipe.data
    source = Path(data.train_file if part == "train" else str(data.validation_file))
    is_streamed = data.streaming and part == "train"
    return Job(
        folder,
        part,
        source,
        data_format,
        shape.is_encoder_decoder,
        recipe.task,
        data.max_length,
        data.packing,
        data.max_bad_rows,
        data.stream_unit_bytes if is_streamed else shards.unit_bytes(source),
    )


def main() -> None:
    processes.settle_process()
    told = TypeAdapter(Job).validate_json((Path(sys.argv[1]) / JOB).read_bytes())

    def say(**words: Any) -> None:
        # shorter than a pipe's buffer: whole, whoever else writes
        os.write(1, (json.dumps(words) + "\n").encode())

    for line in sys.stdin:
        found = told.tokenise(int(line), None, lambda count: say(rows=count))
        if "error" in found:
            files.write_json(told.counts_file(int(line)).with_suffix(".failed"), found)
        say(unit=int(line))


if __name__ == "__main__":
    main()
