"""Tokenise units of a corpus. A unit is committed by a rename, so an unfinished unit does not
count."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.base import files
from launch.base.errors import DataError
from launch.data import rows
from launch.data import sources as data_sources
from launch.data.files import shards
from launch.data.token_cache import TokenCache
from training.data import encode, tokenizer
from training.data import units as data_units
from training.data.packing import Packer

JOB = "job.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class TokenisedUnit:
    """The result of tokenising a unit, which is written beside its rows."""

    counts: encode.CacheCounts
    bad: list[str]  # rows that were left out
    error: str = ""  # why it failed


@dataclass(frozen=True)
class TokeniseJob:
    """The settings for tokenising a part, "train" or "validation", shared by all its processes."""

    folder: Path
    part: str
    sources: tuple[data_sources.Source, ...]
    settings: encode.EncoderSettings
    packing: bool
    max_bad_rows: int
    unit_bytes: int
    # number of the first row of each slice of each unit, if the part takes some rows only
    row_offsets: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def units(self) -> list[tuple[data_sources.Source, data_units.Unit]]:
        return data_units.of_sources(self.sources, self.unit_bytes)

    @property
    def full_units(self) -> int:
        """The number of units that the bytes of all sources would fill: small ones are not worth a
        process of their own."""
        stored = sum(shards.stored_bytes(source.path) for source in self.sources)
        return -(-stored // self.unit_bytes)

    @property
    def name(self) -> str:
        return data_sources.name(self.sources)

    @cached_property
    def encoder(self) -> encode.Encoder:
        return encode.Encoder(tokenizer.load(self.folder / TOKENIZER), self.settings)

    def rows_file(self, unit: int) -> Path:
        return self.folder / (
            f"{self.part}.arrow" if len(self.units) == 1 else f"{self.part}-{unit:05d}.arrow"
        )

    def counts_file(self, unit: int) -> Path:
        return self.folder / f"{self.part}-{unit:05d}.json"

    def write(self) -> None:
        """Write the job for its processes to read."""
        files.write_atomic(self.folder / JOB, TypeAdapter(TokeniseJob).dump_json(self).decode())

    def done(self, unit: int) -> TokenisedUnit | None:
        """The result of a unit; None if it has not been tokenised yet, or its file is damaged."""
        return files.read_or_none(self.counts_file(unit), TokenisedUnit)

    def failed(self, unit: int) -> TokenisedUnit | None:
        """The error of another process that could not tokenise a unit; None if there was none."""
        return files.read(self.counts_file(unit).with_suffix(".failed"), TokenisedUnit)

    def tokenise(
        self, unit: int, limit: int | None, progress: Callable[[int], Any]
    ) -> TokenisedUnit:
        """Write the rows of a unit, then its counts and bad rows; return these, or its error.

        An error is not stored: after the data was corrected, the unit is tokenised again."""
        source, slices = self.units[unit]
        bad = rows.BadRows(rows.UNLIMITED if source.is_repeat else self.max_bad_rows)
        row_offsets = self.row_offsets[unit] if self.row_offsets else (0,) * len(slices)
        rows_of_unit = chain.from_iterable(
            data_sources.samples_of(of, first, source, bad)
            for of, first in zip(slices, row_offsets, strict=True)
        )
        packer = (
            Packer(self.settings.max_length, self.settings.whole_texts) if self.packing else None
        )
        aside = self.rows_file(unit).with_suffix(".tmp")
        try:
            counts = encode.write_cache(
                rows_of_unit, self.encoder, aside, limit, progress, packer, bad
            )
        except DataError as error:
            aside.unlink()
            return TokenisedUnit(encode.CacheCounts(), bad.errors, str(error))
        files.sync(aside)
        aside.rename(self.rows_file(unit))
        tokenised = TokenisedUnit(counts, [] if source.is_repeat else bad.errors)
        files.write_json(self.counts_file(unit), tokenised)
        return tokenised


def job(
    tokens: TokenCache,
    sources: tuple[data_sources.Source, ...],
    folder: Path,
    part: data_sources.Part,
) -> TokeniseJob:
    """The job for the rows of a part of a recipe. A streamed corpus has small units."""
    data = tokens.recipe.data
    is_streamed = data.streaming and part == "train"
    unit_bytes = shards.unit_bytes(*(source.path for source in sources))
    return TokeniseJob(
        folder,
        part,
        sources,
        encode.EncoderSettings.of(tokens),
        data.packing,
        data.max_bad_rows,
        data.stream_unit_bytes if is_streamed else unit_bytes,
    )


def job_of_part(
    tokens: TokenCache, folder: Path, part: data_sources.Part, goes_on: Callable[[], None]
) -> TokeniseJob | None:
    """The job for a part of the tokenised rows; None if there are no such rows. `goes_on` is called
    while rows are counted."""
    sources = tokens.of_part(part)
    if not sources:
        return None
    planned = job(tokens, sources, folder, part)
    if sources[0].choice is None:
        return planned
    return replace(planned, row_offsets=data_units.row_offsets(planned.units, goes_on))
