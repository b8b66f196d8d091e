"""Tokenise rendered conversations as a whole, with labels for the spans that have a loss."""

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property, partial
from typing import Any

from tokenizers import Tokenizer

from launch.base.errors import DataError
from launch.data.rows import IGNORED
from training.data.chat.loss_spans import Rendered, any_of
from training.data.chat.rendering import Span
from training.data.tokenizer import called

NAMES = 0xF0000  # private-use characters: names of special tokens that texts cannot hold


class SpanEncoder:
    """Turns texts into (input_ids, labels).

    The ids are those of tokenizer(text, add_special_tokens=False). A token is a target if one of
    its characters is in a span, so a token that spans the end of a prompt and the beginning of its
    answer is one."""

    def __init__(self, tokenizer: Any, protected: Collection[str], name: str) -> None:
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer is a {type(tokenizer).__name__}, which does not say which"
                " characters a token has; name a folder with a tokenizer.json with"
                " --tokenizer.path=FOLDER"
            )
        self._backend: Tokenizer = tokenizer.backend_tokenizer
        self._name = name  # name in errors
        vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._id_of = {content: vocabulary[content] for content in protected}
        self._special = set(self._id_of.values())

    def encode(self, rendered: Sequence[Rendered]) -> Iterator[tuple[list[int], list[int]]]:
        texts = [sample.text for sample in rendered if not sample.plain]
        encodings = iter(_encodings(self._backend, texts, self._name))
        for sample in rendered:
            if sample.plain:
                yield self._with_plain(sample)
            else:
                encoding = next(encodings)
                yield self._labelled(encoding.ids, encoding.offsets, sample.targets)

    def _with_plain(self, sample: Rendered) -> tuple[list[int], list[int]]:
        """Encode a text of which some special tokens are text: the others are written with the
        names that they have in a copy of the tokenizer."""
        copy, ids, names, pattern = self._renamed
        pieces: list[str] = []
        # the place in the text behind each name; what names are shorter by then
        ends, shifts = [0], [0]
        plain = {start for start, _ in sample.plain}
        for token in pattern.finditer(sample.text):
            if token.start() not in plain:
                pieces += [sample.text[ends[-1] : token.start()], names[token[0]]]
                ends.append(token.end())
                shifts.append(shifts[-1] + len(token[0]) - len(names[token[0]]))
        pieces.append(sample.text[ends[-1] :])
        targets = [
            (
                start - shifts[bisect_right(ends, start) - 1],
                end - shifts[bisect_right(ends, end) - 1],
            )
            for start, end in sample.targets
        ]
        (encoding,) = _encodings(copy, ["".join(pieces)], self._name)
        if any(token in self._special and token not in ids for token in encoding.ids):
            raise DataError(
                f"{sample.place}: a text of the row holds a special token, which this tokenizer"
                " makes of plain text too; remove it from the row"
            )
        tokens: list[int] = encoding.ids
        mapped = [ids.get(token, token) for token in tokens]
        return self._labelled(mapped, encoding.offsets, targets)

    def _labelled(
        self, ids: list[int], offsets: list[Span], targets: Sequence[Span]
    ) -> tuple[list[int], list[int]]:
        labels = [IGNORED] * len(ids)
        for start, end in targets:
            first = bisect_right(offsets, start, key=lambda offset: offset[1])
            last = bisect_left(offsets, end, key=lambda offset: offset[0])
            # Phi-3's tokens take the blanks behind them, which an answer may begin with
            if first < last and offsets[first][0] < start and ids[first] in self._special:
                first += 1
            labels[first:last] = ids[first:last]
        return ids, labels

    @cached_property
    def _renamed(self) -> tuple[Tokenizer, dict[int, int], dict[str, str], re.Pattern[str]]:
        """A copy of the tokenizer whose special tokens have other names: (it, the ids that its
        added tokens stand for, the names, a pattern of the tokens)."""
        described = json.loads(self._backend.to_str())
        names: dict[str, str] = {}
        added: dict[str, int] = {}
        for number, token in enumerate(described["added_tokens"]):
            if token["content"] in self._id_of:
                names[token["content"]] = token["content"] = chr(NAMES + number)
                token["normalized"] = False
            added[token["content"]] = token["id"]
        copy = Tokenizer.from_str(json.dumps({**described, "post_processor": None}))
        id_of = copy.get_vocab()
        ids = {id_of[content]: number for content, number in added.items()}
        return copy, ids, names, any_of(names)


def _encodings(backend: Tokenizer, texts: list[str], name: str) -> list[Any]:
    """Encode texts with all their characters: a post-processor takes blanks from a token's
    offsets."""
    post_processor = backend.post_processor
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    try:
        return called(partial(backend.encode_batch, texts, add_special_tokens=False), texts, name)
    finally:
        backend.post_processor = post_processor
