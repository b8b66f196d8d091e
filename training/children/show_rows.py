"""Encode some rows as training does, and print a ShownRows as JSON:
`python -m training.children.show_rows NUM_ROWS LINE NUM_READ FILE...` with a TokenCache as its
input. A mistake in the data is printed instead."""

from __future__ import annotations

import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.base import processes
from launch.base.errors import DataError, LaunchError
from launch.data import shards, sources, token_hashes
from launch.data.conversation import Conversation, Sample
from launch.data.row_choice import RowChoice
from launch.data.rows import IGNORED, BadRows, Slice, numbered_samples
from launch.data.token_cache import TokenCache
from launch.schema.shown_rows import ShownPart, ShownRow, ShownRows
from training.data import prepare, tokenizer
from training.data.encode import CacheCounts, Encoder, Row
from training.data.tokenise import TOKENIZER

UNLIMITED = 1 << 40  # tokens


class RowSummary:
    """Encodes samples, counts them, and keeps those that are shown."""

    def __init__(self, tokens: TokenCache) -> None:
        self._recipe, self._is_pair = tokens.recipe, tokens.model.is_encoder_decoder
        max_length = tokens.recipe.data.max_length
        self.tokenizer = _tokenizer(tokens)
        self._encoder = Encoder(
            self.tokenizer,
            self._is_pair,
            tokens.recipe.task,
            max_length,
            truncation_side=tokens.recipe.data.truncation_side,
            split_special_tokens=tokens.recipe.tokenizer.split_special_tokens,
        )
        self.bad = BadRows(tokens.recipe.data.max_bad_rows)
        self.rows: list[ShownRow] = []
        self.num_held_out = 0
        self.counts, self.lengths = CacheCounts(), array("q")
        self.left_out, self.methods, self.contents = Counter[str](), Counter[str](), Counter[str]()

    def add(
        self, sample: Sample, place: str, is_shown: bool, is_held_out: bool, times: int
    ) -> None:
        max_length = self._recipe.data.max_length
        self.num_held_out += is_held_out
        for encoded in self._encoder.encode([sample], self.bad):  # none of a bad row
            self.counts.add(encoded, max_length)
            self.lengths.extend(map(self._num_tokens, encoded))
            reason = "" if encoded else self._reason(sample)
            if reason:
                self.left_out[reason] += 1
            if is_shown:
                rows = [self._shown(row, place, max_length) for row in encoded]
                rows = rows or [ShownRow(place, [], left_out=reason)]
                self.rows += [replace(row, is_held_out=is_held_out, times=times) for row in rows]
            if isinstance(sample, Conversation):
                self.contents.update(_contents(sample))
                if not self._is_pair and self._recipe.task == "sft":
                    render = self._encoder.renderer.render
                    rendered = render(sample.messages, sample.tools, place=place)
                    self.methods.update(talk.method for talk in rendered[:1])

    def _reason(self, sample: Sample) -> str:
        """The reason why a sample is left out."""
        if replace(self._encoder, max_length=UNLIMITED).encode([sample])[0]:
            return f"its prompt fills data.max_length {self._recipe.data.max_length}"
        return "no answer in it has a loss"

    def _shown(self, row: Row, place: str, max_length: int) -> ShownRow:
        ids, labels = row["input_ids"], row["labels"]
        decode = self.tokenizer.decode
        if self._is_pair:
            parts = [ShownPart(decode(ids), False), ShownPart(decode(labels), True)]
        else:
            parts = [
                ShownPart(decode([token for token, _ in group]), is_target)
                for is_target, group in groupby(
                    zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED
                )
            ]
        num_targets = sum(label != IGNORED for label in labels)
        is_truncated = max(len(ids), len(labels)) >= max_length
        return ShownRow(place, parts, self._num_tokens(row), num_targets, is_truncated)

    def _num_tokens(self, row: Row) -> int:
        """Tokens of the input, and of a T5's target."""
        return len(row["input_ids"]) + (len(row["labels"]) if self._is_pair else 0)


def _tokenizer(tokens: TokenCache) -> Any:
    """The tokenizer of the tokenised rows, if they are there, or the one that they would get."""
    if tokens.folder.exists() and not token_hashes.fault(tokens.folder):
        return tokenizer.load(tokens.folder / TOKENIZER)
    return prepare.tokenizer_of(tokens, partial(print, file=sys.stderr))


def shown_rows(
    tokens: TokenCache, num_rows: int, line: int | None, num_read: int, files: Sequence[Path]
) -> ShownRows:
    """The first rows of the files, or the row at a line. Raises DataError and ResourceError."""
    summary = RowSummary(tokens)
    for file in files:
        number, passes = 0, _passes(tokens, file)
        data_format = sources.format_of(tokens.recipe.data, tokens.data_format, file)
        numbered = numbered_samples(Slice(file), data_format, summary.bad)
        for number, (row, sample) in enumerate(numbered, 1):
            is_talk = isinstance(sample, Conversation)
            place = str(sample.place) if is_talk else f"{file}:{number}"
            is_shown = place.endswith(f":{line}") if line else len(summary.rows) < num_rows
            times = sum(choice.takes(first + row) for first, choice in passes) if passes else 1
            is_held_out = bool(passes) and passes[0][1].held_out.holds(passes[0][0] + row)
            summary.add(sample, place, is_shown, is_held_out, times)
            if number >= num_read and (summary.rows or not line):
                break
        if line and not summary.rows:
            raise DataError(f"{file}: found no row at line {line}; it has {number:,} rows")
    return ShownRows(
        tokens.data_format.template,
        summary.rows,
        summary.counts.samples,
        dict(summary.left_out),
        summary.counts.truncated,
        summary.counts.target_tokens,
        summary.lengths.tolist(),
        dict(summary.methods),
        dict(summary.contents),
        summary.bad.errors,
        summary.num_held_out,
    )


def _passes(tokens: TokenCache, file: Path) -> list[tuple[int, RowChoice]]:
    """(number of the file's first row, the rows that are taken) of each pass over a file of
    data.train_file; none if all of its rows are trained once."""
    data = tokens.recipe.data
    named = sources.of_part(data, tokens.data_format, tokens.row_counts, "train")
    return [
        (source.row_offsets[shards.of(source.path).index(file)], source.choice)
        for source in named
        if source.choice is not None and file in shards.of(source.path)
    ]


def _contents(talk: Conversation) -> Iterator[str]:
    for message in talk.messages:
        yield f"{message['role']} messages"
        yield from (key for key in message if key not in ("role", "content", "weight"))
        if message.get("weight") == 0:
            yield "weight 0"
    if talk.tools:
        yield "rows with tools"


def main(argv: Sequence[str]) -> int:
    processes.settle_process()
    num_rows, line, num_read = map(int, argv[:3])
    try:
        tokens = TypeAdapter(TokenCache).validate_json(sys.stdin.buffer.read())
        files = [Path(file) for file in argv[3:]]
        shown = shown_rows(tokens, num_rows, line or None, num_read, files)
    except LaunchError as error:
        sys.stdout.buffer.write(str(error).encode())
        return error.exit_code
    sys.stdout.buffer.write(TypeAdapter(ShownRows).dump_json(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
