"""Encode samples as token ids and write the Arrow cache. No torch: this runs before any rank."""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from operator import neg
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import pyarrow as pa

from launch.base.errors import DataError
from launch.data import chat_templates
from launch.data.conversation import Conversation, Sample, text_of
from launch.data.rows import IGNORED, BadRows
from launch.data.token_cache import BESIDE_CONFIG, NUM_MOST_TARGETS, TokenCache
from training.data import stored_rows, tokenizer
from training.data.chat import rendering
from training.data.chat.loss_spans import ConversationRenderer, Rendered
from training.data.chat.span_tokens import SpanEncoder
from training.data.packing import Packer

Row = dict[str, Any]  # input_ids, labels, and TRUNCATED of a row that has lost tokens
TRUNCATED = "truncated"
T = TypeVar("T")


@dataclass(frozen=True)
class _Pair:
    """The texts that a T5 reads and writes."""

    source: str
    target: str
    is_text: bool = False  # the halves of a text


# a text; the samples of a conversation; None if a T5 has nothing to answer
RenderedSample = str | list[Rendered] | _Pair | None

# ---- tokens
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class EncoderSettings:
    """The choices of a recipe and its model that decide the rows of a sample."""

    encoder_decoder: bool
    task: str
    max_length: int
    # a pretraining text is one row of any length: packing splits it
    whole_texts: bool = False
    truncation_side: Literal["right", "left"] = "right"
    # None: of conversations, but not of rows that are one text
    split_special_tokens: bool | None = None
    template_name: str = rendering.NAME  # name in errors
    tokenizer_name: str = tokenizer.NAME  # name in errors
    # pairs get the tokens of the tokenizer's own call, and not an end token alone
    own_call: bool = True

    @classmethod
    def of(cls, tokens: TokenCache) -> "EncoderSettings":
        """The settings for the tokenised rows of a recipe."""
        recipe, data = tokens.recipe, tokens.recipe.data
        return cls(
            tokens.model.is_encoder_decoder,
            recipe.task,
            data.max_length,
            data.packing and recipe.task == "pretrain",
            data.truncation_side,
            recipe.tokenizer.split_special_tokens,
            chat_templates.name_of(recipe),
            tokenizer.name_of(recipe),
            BESIDE_CONFIG in tokens.identity,
        )


@dataclass(frozen=True)
class Encoder:
    """Turns samples into token ids. A sample without targets becomes no row and is counted.

    Decoder: one sequence, labels IGNORED outside the targets. T5: input_ids for the encoder, labels
    for the decoder.
    """

    tokenizer: Any  # a transformers tokenizer with chat_template, eos and pad
    settings: EncoderSettings

    @cached_property
    def largest_id(self) -> int:
        return max(self.tokenizer.get_vocab().values())

    def encode(self, batch: Sequence[Sample], bad: BadRows | None = None) -> list[list[Row]]:
        """Encode each sample of the batch as no row, one row, or several rows (long pretraining
        texts, conversations that need a row for each answer).

        Samples that the chat template does not take are counted as bad rows, and left out."""
        bad = bad or BadRows()
        rendered: list[RenderedSample] = []
        for sample in batch:
            try:
                rendered.append(self.render(sample))
            except DataError as error:
                bad.add(error)
        return self.encode_rendered(rendered)

    def _ids(
        self, texts: list[str], splits_special_tokens: bool, argument: str = "text"
    ) -> list[list[int]]:
        if not texts:
            return []
        call = partial(
            self.tokenizer,
            **{argument: texts},
            add_special_tokens=False,
            split_special_tokens=splits_special_tokens,
        )
        is_fast = self.tokenizer.is_fast
        character_s = tokenizer.CHARACTER_S if is_fast else tokenizer.SLOW_CHARACTER_S
        return tokenizer.called(call, texts, self.settings.tokenizer_name, character_s)["input_ids"]

    def render(self, sample: Sample) -> RenderedSample:
        """The texts that a sample is trained as. Raises DataError for a bad row."""
        if self.settings.encoder_decoder:
            return source_and_target(sample)
        if isinstance(sample, str):
            return sample
        if self.settings.task == "pretrain":
            return [self.renderer.whole_text(sample.messages, sample.tools, place=sample.place)]
        return self.renderer.render(sample.messages, sample.tools, place=sample.place)

    def encode_rendered(self, rendered: Sequence[RenderedSample]) -> list[list[Row]]:
        """The rows of each rendered sample."""
        if self.settings.encoder_decoder:
            return self._pairs([pair if isinstance(pair, _Pair) else None for pair in rendered])
        texts = [sample for sample in rendered if isinstance(sample, str)]
        tokens = iter(self._ids(texts, bool(self.settings.split_special_tokens)))
        talks = [text for sample in rendered if isinstance(sample, list) for text in sample]
        labelled = self._spans.encode(talks) if talks else iter(())
        return [
            [row for text in sample for row in self._rows(*next(labelled), text.ends)]
            if isinstance(sample, list)
            else self._text_rows(next(tokens))
            for sample in rendered
        ]

    def leaves_messages_out(self, sample: Sample) -> bool:
        """True for a conversation whose last messages a T5 has no use for."""
        return (
            self.settings.encoder_decoder
            and isinstance(sample, Conversation)
            and sample.messages[-1]["role"] != "assistant"
        )

    @cached_property
    def renderer(self) -> ConversationRenderer:
        splits = self.settings.split_special_tokens is not False
        return ConversationRenderer(self.tokenizer, splits, self.settings.template_name)

    @cached_property
    def _spans(self) -> SpanEncoder:
        return SpanEncoder(self.tokenizer, self.renderer.protected, self.settings.tokenizer_name)

    @cached_property
    def _beginning(self) -> list[int]:
        """The tokens that the tokenizer's own call puts before a text, e.g. BOS."""
        return tokenizer.around(self.tokenizer)[0]

    @cached_property
    def _around(self) -> tuple[list[int], list[int], list[int], list[int]]:
        """The tokens before and behind a pair's source, and before and behind its target."""
        if not self.settings.own_call:
            eos = [self.tokenizer.eos_token_id]
            return [], eos, [], eos
        return (
            *tokenizer.around_source(self.tokenizer),
            *tokenizer.around_target(self.tokenizer),
        )

    def _text_rows(self, ids: list[int]) -> list[Row]:
        ids = [*self._beginning, *ids] if ids else []
        return self._rows(ids, list(ids), ends=False)

    def _pairs(self, parts: Sequence[_Pair | None]) -> list[list[Row]]:
        """The rows of a T5."""
        pairs = [part for part in parts if part]
        splits_special_tokens = self.settings.split_special_tokens
        if splits_special_tokens is None:
            splits_special_tokens = not any(pair.is_text for pair in pairs)
        sources = self._ids([pair.source for pair in pairs], splits_special_tokens)
        targets = self._ids([pair.target for pair in pairs], splits_special_tokens, "text_target")
        rows = map(self._pair, sources, targets)
        return [next(rows) if part else [] for part in parts]

    def _pair(self, source: list[int], target: list[int]) -> list[Row]:
        """The row of a pair. What is truncated keeps the tokens around a source, and those before a
        target, whose end would teach an answer to stop where it was cut."""
        before, behind, first, last = self._around
        most = self.settings.max_length - len(before) - len(behind)
        labels = [*first, *target, *last]
        is_cut = len(source) > most or len(labels) > self.settings.max_length
        source = source[-most:] if self.settings.truncation_side == "left" else source[:most]
        if len(labels) > self.settings.max_length:
            labels = [*first, *target][: self.settings.max_length]
        row = {"input_ids": [*before, *source, *behind], "labels": labels}
        return [row | {TRUNCATED: True} if is_cut else row] if target else []

    def _rows(self, ids: list[int], labels: list[int], ends: bool) -> list[Row]:
        """The rows of a decoder's text. If nothing `ends` it, the end token is appended."""
        eos = self.tokenizer.eos_token_id
        if not ends and ids and ids[-1] != eos:
            ids, labels = [*ids, eos], [*labels, eos]
        labels[:1] = [IGNORED] * len(labels[:1])
        row = {"input_ids": ids, "labels": labels}
        if self.settings.task == "pretrain":
            return (
                [row]
                if self.settings.whole_texts and len(ids) > 1
                else list(pieces(row, self.settings.max_length))
            )
        row = self._truncated(row)
        no_content = {IGNORED, *self.renderer.end_ids}
        return [row] if not no_content.issuperset(row["labels"]) else []

    def _truncated(self, row: Row) -> Row:
        """The row with at most max_length tokens. From the left, BOS stays."""
        ids, labels = row["input_ids"], row["labels"]
        if len(ids) <= self.settings.max_length:
            return row
        if self.settings.truncation_side == "left":
            first = ids[:1] if ids[0] == self.tokenizer.bos_token_id else []
            start = len(ids) - self.settings.max_length + len(first)
            ids = [*first, *ids[start:]]
            labels = [*[IGNORED] * (len(first) + 1), *labels[start + 1 :]]
        ids, labels = ids[: self.settings.max_length], labels[: self.settings.max_length]
        return {"input_ids": ids, "labels": labels, TRUNCATED: True}


def source_and_target(sample: Sample) -> _Pair | None:
    """The texts that a T5 reads and writes; None if nothing is answered."""
    if isinstance(sample, str):
        middle = len(sample) // 2  # prefix language modelling: the second half given the first
        return _Pair(sample[:middle], sample[middle:], is_text=True)
    messages = sample.messages
    other_keys = {
        key
        for message in messages
        for key, value in message.items()
        if value is not None and key not in ("role", "content", "weight")
    }
    if sample.tools or other_keys or any(message["role"] == "tool" for message in messages):
        other_keys |= {"tools"} if sample.tools else set()
        raise DataError(
            f"{sample.place}: found {', '.join(sorted(other_keys)) or 'a message of a tool'}, but a"
            " T5 is trained on the content of messages only; leave the row out, or train a decoder"
        )
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=None)
    if last is None or messages[last].get("weight") == 0 or not messages[last]["content"].strip():
        return None
    if last == 0:
        raise DataError(
            f"{sample.place}: the first message is the only answer, but a T5 reads the messages"
            " before it; leave the row out, or train a decoder"
        )
    source = "\n".join(message["content"] for message in messages[:last])
    return _Pair(source, messages[last]["content"])


def pieces(row: Row, max_length: int) -> Iterator[Row]:
    """Split a decoder's row into pieces of at most `max_length`, without a last piece of one
    token."""
    ids, labels = row["input_ids"], row["labels"]
    for start in range(0, len(ids), max_length):
        if len(ids) - start > 1:
            end = start + max_length
            yield row | {"input_ids": ids[start:end], "labels": [IGNORED, *labels[start + 1 : end]]}


# ---- the cache
# ---------------------------------------------------------------------------

_COUNTED_BEFORE = {
    "samples",
    "dropped",
    "truncated",
    "split",
    "lengths",
    "stride",
}  # rows are packed
_SUMMED = (
    *("samples", "rows", "bad", "dropped", "truncated", "split", "unread"),
    *("tokens", "target_tokens", "documents"),
)
LARGEST = ("longest", "longest_input", "longest_target")
# fewer than 1,000 long samples are tokenised at once, because a token takes 200 bytes meanwhile
BATCH_CHARACTERS = 1 << 20
# the least number of rows whose lengths are stored; the plan computes padding from them
_LENGTHS_KEPT = 2048


@dataclass
class CacheCounts:
    """Counts of a tokenised file, written beside it and read by the plan and the report."""

    samples: int = 0  # rows of the file
    rows: int = 0  # rows of the cache
    bad: int = 0  # rows of the file that cannot be read, left out (data.max_bad_rows)
    # samples without a target (an empty response, or a prompt that fills max_length)
    dropped: int = 0
    truncated: int = 0  # rows that were truncated at max_length
    split: int = 0  # conversations that are a row for each answer
    unread: int = 0  # conversations of a T5 with messages behind the last answer
    tokens: int = 0
    target_tokens: int = 0
    longest: int = 0
    longest_input: int = 0
    shortest_input: int = 0
    longest_target: int = 0  # labels; as long as the input, except for T5
    # tokens of input and labels of every stride-th row
    lengths: list[tuple[int, int]] = field(default_factory=list)
    stride: int = 1

    documents: int = 0  # documents in packed sequences; 0 if rows are not packed
    # tokens with a loss of the rows that have most of them, in descending order
    most_targets: list[int] = field(default_factory=list)

    def add(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Count the rows of one sample."""
        self.samples += 1
        self.dropped += not rows
        for row in rows:
            length = len(row["input_ids"])
            if self.rows % self.stride == 0:
                self.lengths.append((length, len(row["labels"])))
                if len(self.lengths) == 2 * _LENGTHS_KEPT:
                    self.lengths, self.stride = self.lengths[::2], 2 * self.stride
            self.rows += 1
            self.tokens += length
            targets = len(row["labels"]) - _count(row["labels"], IGNORED)
            self.target_tokens += targets
            insort(self.most_targets, targets, key=neg)
            del self.most_targets[NUM_MOST_TARGETS:]
            self.longest_input = max(self.longest_input, length)
            self.shortest_input = min(self.shortest_input or length, length)
            self.longest_target = max(self.longest_target, len(row["labels"]))
            self.longest = max(self.longest_input, self.longest_target)
            self.truncated += TRUNCATED in row

    def join(self, others: "Iterable[CacheCounts]") -> "CacheCounts":
        """Add the counts of the rows that follow."""
        summands = [self, *others]
        stride = max(counts.stride for counts in summands)
        lengths = [
            pair for counts in summands for pair in counts.lengths[:: stride // counts.stride]
        ]
        while len(lengths) >= 2 * _LENGTHS_KEPT:
            lengths, stride = lengths[::2], 2 * stride
        summed = {name: sum(getattr(counts, name) for counts in summands) for name in _SUMMED}
        largest = {name: max(getattr(counts, name) for counts in summands) for name in LARGEST}
        shortest = min((counts.shortest_input for counts in summands if counts.rows), default=0)
        return CacheCounts(
            **summed,
            **largest,
            shortest_input=shortest,
            lengths=lengths,
            stride=stride,
            most_targets=sorted(
                (n for counts in summands for n in counts.most_targets), reverse=True
            )[:NUM_MOST_TARGETS],
        )


def _count(values: Sequence[int], value: int) -> int:
    return (
        values.count(value)
        if isinstance(values, list)
        else int(np.count_nonzero(np.asarray(values) == value))
    )


def write_cache(
    source: Iterator[Sample],
    encoder: Encoder,
    path: Path,
    limit: int | None,
    progress: Any,
    packer: Packer | None,
    bad: BadRows | None = None,
) -> CacheCounts:
    """Tokenise `source` into the Arrow stream file `path`.

    At most 1,000 samples are in memory at a time, and with a `packer` its window. The lengths of
    packed rows, and the numbers of read, dropped and truncated rows, are counted before packing."""
    counts, packed = CacheCounts(), CacheCounts()
    schema = stored_rows.schema(
        encoder.largest_id, encoder.settings.encoder_decoder, packer is not None
    )
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, schema) as writer:

        def write(rows: Iterable[Mapping[str, Any]]) -> None:
            source_rows = iter(rows)
            while some := list(islice(source_rows, 1000)):
                writer.write_batch(stored_rows.batch(some, schema))
                if packer:
                    packed.add(some)

        for batch, _ in batches(islice(source, limit), 1000, text_of):
            rows: list[Row] = []
            counts.unread += sum(map(encoder.leaves_messages_out, batch))
            for encoded in encoder.encode(batch, bad):
                counts.split += encoder.settings.task == "sft" and len(encoded) > 1
                split = (
                    [piece for row in encoded for piece in pieces(row, encoder.settings.max_length)]
                    if packer
                    else encoded
                )
                counts.add(split)
                rows += encoded
            write(packer.add(rows) if packer else rows)
            progress(len(batch))
        if packer:
            write(packer.finish())
    if packer is None:
        return counts
    before = {name: getattr(counts, name) for name in _COUNTED_BEFORE}
    return replace(packed, **before, documents=packer.documents)


def batches(
    source: Iterable[T], size: int, text: Callable[[T], str]
) -> Iterator[tuple[list[T], int]]:
    """(as many in a row as `size` and BATCH_CHARACTERS allow, the characters of their texts)."""
    batch: list[T] = []
    characters = 0
    for each in source:
        batch.append(each)
        characters += len(text(each))
        if len(batch) == size or characters >= BATCH_CHARACTERS:
            yield batch, characters
            batch, characters = [], 0
    if batch:
        yield batch, characters
