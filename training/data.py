"""From samples to token ids: the encoder and the tokenised Arrow cache. No torch: it runs before any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from launch.errors import DataError
from training.rows import Message, Sample

IGNORED = -100  # label of a token that is not a target, torch's own default
# ---- tokens --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Encoder:
    """Turns samples into token ids. Raises nothing: a sample without targets becomes None and is counted.

    Decoder: one sequence, labels IGNORED outside the targets. T5: input_ids for the encoder, labels for the decoder.
    """

    tokenizer: Any  # a transformers tokenizer with chat_template, eos and pad
    encoder_decoder: bool
    task: str
    max_length: int

    def segments(self, sample: Sample) -> list[tuple[str, bool]]:
        """(text, is it a target) in order; each is tokenised alone, as generation will see the prompt alone."""
        if isinstance(sample, str):
            if not self.encoder_decoder:
                return [(sample, True)]
            middle = len(sample) // 2  # prefix language modelling: the second half given the first
            return [(sample[:middle], False), (sample[middle:], True)]
        if self.encoder_decoder:
            last = max((i for i, m in enumerate(sample) if m["role"] == "assistant"), default=None)
            if last is None:
                return []
            return [("\n".join(m["content"] for m in sample[:last]), False), (sample[last]["content"], True)]
        if self.task == "pretrain":
            return [(self._rendered(sample, False), True)]
        parts: list[tuple[str, bool]] = []
        done = ""
        for i, message in enumerate(sample):
            if message["role"] != "assistant":
                continue
            prompt = self._rendered(sample[:i], True)
            answered = self._rendered(sample[: i + 1], False)
            if not (prompt.startswith(done) and answered.startswith(prompt)):
                raise DataError(
                    "the tokenizer's chat_template renders a conversation differently once it is answered, so the"
                    " response cannot be told from the prompt; use a tokenizer with a plain chat_template"
                )
            parts += [(prompt[len(done) :], False), (answered[len(prompt) :], True)]
            done = answered
        return parts

    def _rendered(self, messages: list[Message], add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)

    def encode(self, batch: Sequence[Sample]) -> list[list[dict[str, list[int]]]]:
        """The rows that each sample of the batch becomes: none, one, or (long pretraining texts) several."""
        parts = [self.segments(sample) for sample in batch]
        texts = [text for part in parts for text, _ in part]
        ids = iter(self.tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else [])
        tokens = [[(next(ids), target) for _, target in part] for part in parts]
        return [self._rows(part) if part else [] for part in tokens]

    def _rows(self, part: list[tuple[list[int], bool]]) -> list[dict[str, list[int]]]:
        eos = self.tokenizer.eos_token_id
        if self.encoder_decoder:
            source, target = part[0][0][: self.max_length - 1], part[1][0]
            target = [*target, eos] if target and len(target) < self.max_length else target[: self.max_length]
            return [{"input_ids": [*source, eos], "labels": target}] if target else []
        if self.task == "pretrain":
            ids = [*part[0][0], eos] if part[0][0] else []
            pieces = [ids[at : at + self.max_length] for at in range(0, len(ids), self.max_length)]
            return [{"input_ids": piece, "labels": [IGNORED, *piece[1:]]} for piece in pieces if len(piece) > 1]
        if part[-1][0] and part[-1][0][-1] != eos:
            part[-1][0].append(eos)
        input_ids = [token for ids, _ in part for token in ids][: self.max_length]
        labels = [token if target else IGNORED for ids, target in part for token in ids][: self.max_length]
        labels[:1] = [IGNORED] * len(labels[:1])
        says_something = any(label not in (IGNORED, eos) for label in labels)
        return [{"input_ids": input_ids, "labels": labels}] if says_something else []


# ---- the cache -----------------------------------------------------------------------------------------------------

LENGTHS_KEPT = 2048  # at least, of as many rows: from them the plan says how much of a step is padding
CACHE_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])


@dataclass
class CacheCounts:
    """What tokenising a file gave; written beside it, read by the plan and the report."""

    samples: int = 0  # rows of the file
    rows: int = 0  # rows of the cache
    bad: int = 0  # rows of the file that could not be read, and were left out (data.max_bad_rows)
    dropped: int = 0  # samples without a target (an empty response, or a prompt that fills max_length)
    truncated: int = 0  # rows that reached max_length and were cut
    tokens: int = 0
    target_tokens: int = 0
    longest: int = 0
    longest_input: int = 0
    shortest_input: int = 0
    longest_target: int = 0  # labels, which are as long as the input but for T5
    lengths: list[tuple[int, int]] = field(default_factory=list)  # tokens of input and labels of every stride-th row
    stride: int = 1

    def add(self, rows: list[dict[str, list[int]]], max_length: int) -> None:
        self.samples += 1
        self.dropped += not rows
        for row in rows:
            length = len(row["input_ids"])
            if self.rows % self.stride == 0:
                self.lengths.append((length, len(row["labels"])))
                if len(self.lengths) == 2 * LENGTHS_KEPT:
                    self.lengths, self.stride = self.lengths[::2], 2 * self.stride
            self.rows += 1
            self.tokens += length
            self.target_tokens += sum(label != IGNORED for label in row["labels"])
            self.longest_input = max(self.longest_input, length)
            self.shortest_input = min(self.shortest_input or length, length)
            self.longest_target = max(self.longest_target, len(row["labels"]))
            self.longest = max(self.longest_input, self.longest_target)
            self.truncated += max(length, len(row["labels"])) >= max_length


def write_cache(
    source: Iterator[Sample], encoder: Encoder, path: Path, limit: int | None, progress: Any
) -> CacheCounts:
    """Tokenise `source` into the Arrow stream file `path`, 1,000 samples in memory at a time."""
    counts = CacheCounts()
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, CACHE_SCHEMA) as writer:
        for batch in _batches(source, 1000, limit):
            rows = []
            for encoded in encoder.encode(batch):
                counts.add(encoded, encoder.max_length)
                rows += encoded
            writer.write_batch(pa.RecordBatch.from_pylist(rows, schema=CACHE_SCHEMA))
            progress(len(batch))
    return counts


def _batches(source: Iterator[Sample], size: int, limit: int | None) -> Iterator[list[Sample]]:
    batch: list[Sample] = []
    for number, sample in enumerate(source):
        if limit is not None and number >= limit:
            break
        batch.append(sample)
        if len(batch) == size:
            yield batch
            batch = []
    if batch:
        yield batch
