"""Encode some rows as training does, and print a ShownRows as JSON:
`python -m training.children.show_rows FILE NUM_ROWS LINE` with a TokenCache as its input."""

from __future__ import annotations

import sys
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
from launch.data import token_hashes
from launch.data.conversation import Conversation
from launch.data.rows import IGNORED, BadRows, read_samples
from launch.data.token_cache import TokenCache
from launch.schema.shown_rows import ShownPart, ShownRow, ShownRows
from training.data import prepare, tokenizer
from training.data.encode import CacheCounts, Encoder, Row
from training.data.tokenise import TOKENIZER

SAMPLED = 1000  # rows that are read for the counts
UNLIMITED = 1 << 40  # tokens


def shown_rows(tokens: TokenCache, file: Path, num_rows: int, line: int | None) -> ShownRows:
    """The first rows of a file, or the row at a line. Raises DataError and ResourceError."""
    data, is_pair = tokens.recipe.data, tokens.model.is_encoder_decoder
    are_tokenised = tokens.folder.exists() and not token_hashes.fault(tokens.folder)
    loaded = (
        tokenizer.load(tokens.folder / TOKENIZER)
        if are_tokenised
        else prepare.tokenizer_of(tokens, partial(print, file=sys.stderr))
    )
    encoder = Encoder(loaded, is_pair, tokens.recipe.task, data.max_length)
    unlimited = replace(encoder, max_length=UNLIMITED)
    counts, bad = CacheCounts(), BadRows(data.max_bad_rows)
    rows: list[ShownRow] = []
    lengths: list[int] = []
    rows_left_out: Counter[str] = Counter()
    methods: Counter[str] = Counter()
    contents: Counter[str] = Counter()
    for number, sample in enumerate(read_samples(file, tokens.data_format, bad), 1):
        is_talk = isinstance(sample, Conversation)
        place = str(sample.place) if is_talk else f"{file}:{number}"
        for encoded in encoder.encode([sample], bad):
            counts.add(encoded, data.max_length)
            lengths += [len(row["input_ids"]) for row in encoded]
            left_out = ""
            if not encoded:
                is_long = unlimited.encode([sample])[0]
                left_out = (
                    f"its prompt fills data.max_length {data.max_length}"
                    if is_long
                    else "no answer in it has a loss"
                )
                rows_left_out[left_out] += 1
            if is_talk:
                contents.update(_contents(sample))
                if not is_pair and tokens.recipe.task == "sft":
                    talk = encoder.renderer.render(sample.messages, sample.tools, place=place)
                    methods.update(rendered.method for rendered in talk[:1])
            if place.endswith(f":{line}") if line else len(rows) < num_rows:
                rows += [_shown(row, loaded, place, data.max_length, is_pair) for row in encoded]
                rows += [] if encoded else [ShownRow(place, [], left_out=left_out)]
        if counts.samples >= SAMPLED and (rows or not line):
            break
    if line and not rows:
        raise DataError(
            f"{file}: found no row at line {line}; its last is row {counts.samples:,}"
            if counts.samples
            else f"{file}: found no rows"
        )
    return ShownRows(
        _template(tokens, loaded.chat_template),
        rows,
        counts.samples,
        dict(rows_left_out),
        counts.truncated,
        counts.target_tokens,
        lengths,
        dict(methods),
        dict(contents),
        bad.errors,
    )


def _contents(talk: Conversation) -> Iterator[str]:
    for message in talk.messages:
        yield f"{message['role']} messages"
        yield from (key for key in message if key not in ("role", "content", "weight"))
        if message.get("weight") == 0:
            yield "weight 0"
    if talk.tools:
        yield "rows with tools"


def _shown(row: Row, loaded: Any, place: str, max_length: int, is_pair: bool) -> ShownRow:
    ids, labels = row["input_ids"], row["labels"]
    if is_pair:
        parts = [ShownPart(loaded.decode(ids), False), ShownPart(loaded.decode(labels), True)]
    else:
        parts = [
            ShownPart(loaded.decode([token for token, _ in group]), is_target)
            for is_target, group in groupby(
                zip(ids, labels, strict=True), key=lambda pair: pair[1] != IGNORED
            )
        ]
    num_targets = sum(label != IGNORED for label in labels)
    is_truncated = max(len(ids), len(labels)) >= max_length
    return ShownRow(place, parts, len(ids), num_targets, is_truncated)


def _template(tokens: TokenCache, template: Any) -> str:
    if tokens.recipe.task == "pretrain" and tokens.data_format.kind == "text":
        return "none: texts are trained as they are"
    if tokens.model.is_encoder_decoder:
        return "none: T5 reads the turns before the last answer, a line each"
    folder = tokens.recipe.tokenizer.path or tokens.recipe.model.path
    if folder is None:
        return "of the tokenizer that is trained on the data: a token for each role"
    if template.endswith(tokenizer.PLAIN_TEMPLATE):
        return f"{folder} has none: a line for each turn, an end token after each answer"
    return f"of {folder}"


def main(argv: Sequence[str]) -> int:
    processes.settle_process()
    file, num_rows, line = argv
    try:
        tokens = TypeAdapter(TokenCache).validate_json(sys.stdin.buffer.read())
        shown = shown_rows(tokens, Path(file), int(num_rows), int(line) or None)
    except LaunchError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    sys.stdout.buffer.write(TypeAdapter(ShownRows).dump_json(shown))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
