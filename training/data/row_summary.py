"""Rows as training encodes them, decoded for people, with counts of the rows that were read."""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, islice, takewhile
from pathlib import Path
from typing import Any

from launch.base.errors import DataError
from launch.data import sources
from launch.data.conversation import Conversation, Sample, text_of
from launch.data.files import shards
from launch.data.rows import IGNORED, BadRows, Place, Slice, placed_samples
from launch.data.token_cache import TokenCache
from launch.schema.plan import DataFormat
from launch.schema.rows import ShownPart, ShownRow, ShownRows
from training.data.encode import (
    TRUNCATED,
    CacheCounts,
    Encoder,
    EncoderSettings,
    RenderedSample,
    Row,
    batches,
)

UNLIMITED = 1 << 40  # tokens
MOST_CHARACTERS = 16 << 20  # text read of a file, which takes a few seconds of one CPU
_MOST_LENGTHS = 10_000  # pieces read of a file, where rows are split
# Limits of the report: rows of a source and of all sources, characters of a row, errors of bad rows
# and characters of an error
_REPORT_ROWS, _ALL_REPORT_ROWS, _REPORT_CHARACTERS, _REPORT_ERRORS, _ERROR_CHARACTERS = (
    *(5, 20, 2000, 3, 400),
)
NUM_READ = 1000  # rows
_NO_ANSWER = "no answer in it has a loss"  # the reason of a sample that is left out at any length
_ESCAPE = "\\"  # mark before a text that is written as a special token is


@dataclass(frozen=True)
class _Placed:
    """A row that is encoded with others of its batch."""

    place: str
    sample: Sample
    rendered: RenderedSample
    times: int  # repetitions in an epoch
    is_held_out: bool


class _BadOfFile(BadRows):
    """Bad rows of a file, each counted in its part; those of rows that no part takes are not."""

    def __init__(
        self, passes: list[tuple[int, sources.RowChoice]], trained: BadRows, held_out: BadRows
    ) -> None:
        super().__init__()
        self._passes, self._trained, self._held_out = passes, trained, held_out

    def add(self, error: DataError, number: int | None = None) -> None:
        times, is_held_out = (1, False) if number is None else _uses(number, self._passes)
        if is_held_out:
            self._held_out.add(error)
        elif times:
            self._trained.add(error)


class RowSummary:
    """Encodes samples, counts them, and keeps those that are shown."""

    def __init__(self, tokens: TokenCache, loaded: Any, max_bad_rows: int | None = None) -> None:
        self._tokens, self._recipe = tokens, tokens.recipe
        self._is_pair, self.tokenizer = tokens.model.is_encoder_decoder, loaded
        self._encoder = Encoder(loaded, replace(EncoderSettings.of(tokens), whole_texts=False))
        limit = tokens.recipe.data.max_bad_rows if max_bad_rows is None else max_bad_rows
        self.bad, self._bad_of_held_out = BadRows(limit), BadRows(limit)
        self.rows: list[ShownRow] = []
        self.counts, self._lengths = CacheCounts(), array("q")
        self._left_out, self._methods = Counter[str](), Counter[str]()
        self._contents, self._num_held_out, self._num_files = Counter[str](), 0, 0
        self._longest_prompt = 0  # tokens, of those that fill data.max_length

    def add_first(self, file: Path, num_read: int, num_shown: int) -> None:
        """Read the first rows of a file, no more than MOST_CHARACTERS of them."""
        num_shown, before = num_shown + len(self.rows), len(self._lengths)
        self._num_files += 1
        characters = 0
        placed = self._placed_rows(file, num_read)
        for batch, more in batches(placed, num_read, lambda row: text_of(row.sample)):
            self._add(batch, num_shown)
            characters += more
            if characters >= MOST_CHARACTERS or len(self._lengths) - before >= _MOST_LENGTHS:
                break

    def _placed_rows(self, file: Path, num_read: int) -> Iterator[_Placed]:
        passes = self._passes(file)
        bad = self._bad_of(file, passes)
        rows = placed_samples(Slice(file), self._format(file), bad)
        for number, place, sample in islice(rows, num_read):
            try:
                row = self._placed(place, sample, number, passes)
            except DataError as error:
                bad.add(error, number)
            else:
                yield row

    def add_line(self, file: Path, line: int) -> None:
        """Read the row at a line, or of a number. Bad rows before it are passed over."""
        nearest: Place | None = None
        bad_rows = BadRows(UNLIMITED)
        for number, place, sample in placed_samples(Slice(file), self._format(file), bad_rows):
            self._check_bad(bad_rows, file, line)
            if place.number == line:
                self._add([self._placed(place, sample, number, self._passes(file))], 1)
                return
            if isinstance(place.number, int) and place.number > line:
                nearest = nearest or place
                break
            nearest = place
        self._check_bad(bad_rows, file, line)
        if nearest is None:
            raise DataError(f"{file}: found no row that can be read")
        kind = "line" if nearest.is_line else "number"
        raise DataError(
            f"{file}: found no row of {kind} {line:,}; the nearest has {kind} {nearest.number}"
        )

    def _format(self, file: Path) -> DataFormat:
        return sources.format_of(self._recipe.data, self._tokens.data_format, file)

    def _bad_of(self, file: Path, passes: list[tuple[int, sources.RowChoice]]) -> BadRows:
        """The count of a file's bad rows, by their numbers."""
        held_out = self._recipe.data.validation_file
        if held_out is not None and file in shards.list_shards(Path(held_out)):
            return self._bad_of_held_out
        return _BadOfFile(passes, self.bad, self._bad_of_held_out)

    def _passes(self, file: Path) -> list[tuple[int, sources.RowChoice]]:
        """(number of the file's first row, the rows that are taken) of each pass over a file of
        data.train_file; none if all of its rows are trained once."""
        return [
            (source.row_offsets[shards.list_shards(source.path).index(file)], source.choice)
            for source in self._tokens.of_part("train")
            if source.choice is not None and file in shards.list_shards(source.path)
        ]

    def _placed(
        self, place: Place, sample: Sample, number: int, passes: list[tuple[int, sources.RowChoice]]
    ) -> _Placed:
        return _Placed(str(place), sample, self._encoder.render(sample), *_uses(number, passes))

    def _check_bad(self, bad_rows: BadRows, file: Path, line: int) -> None:
        """Raise the error of the row at the line."""
        for error in bad_rows.errors:
            if error.startswith((f"{file}:{line}:", f"{file}: element {line}:")):
                raise DataError(error)
        bad_rows.errors.clear()

    def _add(self, batch: Sequence[_Placed], num_shown: int) -> None:
        encoded = self._encoder.encode_rendered([placed.rendered for placed in batch])
        for placed, rows in zip(batch, encoded, strict=True):
            sample, rendered = placed.sample, placed.rendered
            self.counts.add(rows)
            self._lengths.extend(map(self._num_tokens, rows))
            reason = "" if rows else self._reason(sample)
            if reason:
                self._left_out[reason] += 1
            self._num_held_out += placed.is_held_out
            if len(self.rows) < num_shown:
                self.rows += [self._shown(row, placed) for row in rows] or [
                    ShownRow(
                        placed.place,
                        [],
                        left_out=reason,
                        is_held_out=placed.is_held_out,
                        times=placed.times,
                    )
                ]
            if isinstance(sample, Conversation):
                self._contents.update(map(self._label, _contents(sample)))
            if isinstance(rendered, list):
                self._methods.update(talk.method for talk in rendered[:1] if talk.method)

    def _label(self, content: str) -> str:
        """A key of messages, with a word if the template drops it."""
        is_dropped = content == "name" and not self._is_pair and self._encoder.renderer.drops_names
        return "name (not in the chat template: not trained)" if is_dropped else content

    def _reason(self, sample: Sample) -> str:
        """The reason why a sample is left out."""
        settings = self._encoder.settings
        unlimited = replace(self._encoder, settings=replace(settings, max_length=UNLIMITED))
        if rows := unlimited.encode([sample])[0]:
            prompt = takewhile(lambda label: label == IGNORED, rows[0]["labels"])
            self._longest_prompt = max(self._longest_prompt, len([*prompt]))
            return f"its prompt fills data.max_length {settings.max_length}"
        return _NO_ANSWER

    def _with_longest(self, reason: str) -> str:
        """A reason of many samples, with the longest of their prompts."""
        is_prompt = reason != _NO_ANSWER
        return f"{reason}, the longest has {self._longest_prompt:,} tokens" if is_prompt else reason

    def _shown(self, row: Row, placed: _Placed) -> ShownRow:
        ids, labels = row["input_ids"], row["labels"]
        if self._is_pair:
            parts = [ShownPart(self._text(ids), False), ShownPart(self._text(labels), True)]
        else:
            parts = [
                ShownPart(self._text([token for token, _ in group]), is_target)
                for is_target, group in groupby(
                    zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED
                )
            ]
        num_targets = sum(label != IGNORED for label in labels)
        return ShownRow(
            *(placed.place, parts, self._num_tokens(row), num_targets, TRUNCATED in row),
            has_escapes=any(
                _ESCAPE + name in part.text for part in parts for name in self._special
            ),
            is_held_out=placed.is_held_out,
            times=placed.times,
        )

    def _text(self, ids: list[int]) -> str:
        """The text of tokens. What only looks like a special token has an _ESCAPE before it."""
        text = self.tokenizer.decode(ids)
        names = [name for name in self._special if name in text]
        count = sum(token in self._special.values() for token in ids)
        if not names or sum(map(text.count, names)) <= count:
            return text
        pieces = []
        for is_special, group in groupby(ids, key=lambda token: token in self._special.values()):
            piece = self.tokenizer.decode(list(group))
            for name in () if is_special else names:
                piece = piece.replace(name, _ESCAPE + name)
            pieces.append(piece)
        return "".join(pieces)

    @cached_property
    def _special(self) -> dict[str, int]:
        """Name -> id of the tokens that a text of a row never becomes."""
        protected = () if self._is_pair else self._encoder.renderer.protected
        return {
            token.content: number
            for number, token in self.tokenizer.added_tokens_decoder.items()
            if token.special or token.content in protected
        }

    def _num_tokens(self, row: Row) -> int:
        """Tokens of the input, and of a T5's target."""
        return len(row["input_ids"]) + (len(row["labels"]) if self._is_pair else 0)

    def summary(self) -> ShownRows:
        return ShownRows(
            self._tokens.data_format.template,
            self.rows,
            self.counts.samples,
            {self._with_longest(reason): count for reason, count in self._left_out.items()},
            self.counts.truncated,
            self.counts.target_tokens,
            self._lengths.tolist(),
            dict(self._methods),
            dict(self._contents),
            [*self.bad.errors, *self._bad_of_held_out.errors],
            self.bad.count + self._bad_of_held_out.count,
            self._num_held_out,
            self._num_files,
        )


def _uses(number: int, passes: list[tuple[int, sources.RowChoice]]) -> tuple[int, bool]:
    """(times that an epoch trains a row of a file, True if the row is held out)."""
    if not passes:
        return 1, False
    first, choice = passes[0]
    times = sum(choice.takes(first + number) for first, choice in passes)
    return times, choice.held_out.holds(first + number)


def for_report(tokens: TokenCache, loaded: Any) -> ShownRows:
    """The first rows of each source of the training data, shortened: a file of at most about
    100 kB. Of more than _ALL_REPORT_ROWS sources, the first."""
    data = tokens.recipe.data
    # tokenising has counted bad rows, for each part alone
    summary = RowSummary(tokens, loaded, max_bad_rows=UNLIMITED)
    shown_sources = data.sources[:_ALL_REPORT_ROWS]
    num_shown = min(_REPORT_ROWS, _ALL_REPORT_ROWS // len(shown_sources))
    num_read = min(NUM_READ, data.max_train_samples or NUM_READ) // len(shown_sources) or 1
    for source in shown_sources:
        before = len(summary.rows)
        summary.add_first(shards.list_shards(Path(source.path))[0], num_read, num_shown)
        del summary.rows[before + num_shown :]  # a row can be trained as several
    rows = summary.summary()
    return replace(
        rows,
        rows=[_shortened(row) for row in rows.rows],
        bad=[error[:_ERROR_CHARACTERS] for error in rows.bad[:_REPORT_ERRORS]],
    )


def _shortened(row: ShownRow) -> ShownRow:
    """The row with the first characters of its text."""
    parts: list[ShownPart] = []
    free = _REPORT_CHARACTERS
    for part in row.parts:
        parts.append(replace(part, text=part.text[:free]))
        free -= len(parts[-1].text)
        if free <= 0:
            missing = sum(len(part.text) for part in row.parts) - _REPORT_CHARACTERS
            parts += [ShownPart(f" ... ({missing:,} more characters)", False)] if missing else []
            break
    return replace(row, place=row.place.rpartition("/")[2], parts=parts)


def _contents(talk: Conversation) -> Iterator[str]:
    for message in talk.messages:
        yield f"{message['role']} messages"
        for key in message:
            if key == "name" and message["role"] == "tool":
                yield "name of a tool"
            elif key not in ("role", "content", "weight"):
                yield key
        if message.get("weight") == 0:
            yield "without a loss (weight 0)"
    if talk.tools:
        yield "rows with tools"
