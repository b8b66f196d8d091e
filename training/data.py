"""From a data file to the batches a rank trains on: rows, the tokenised Arrow cache, the order of samples, padding.

The cache is written once, before the launch, and mapped by every rank; a rank holds no row in private memory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.data import DataLoader, Dataset

from launch.errors import DataError
from launch.schema import DataFormat

IGNORED = -100  # label of a token that is not a target, torch's own default
FILLER_LENGTH = 2  # tokens of the row that keeps a rank in step when it has no sample; it has no target
Message = dict[str, str]
Sample = list[Message] | str  # a conversation, or a text

ROLE_NAMES = {"human": "user", "prompter": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


# ---- rows ----------------------------------------------------------------------------------------------------------


def read_rows(path: Path, file_type: str, columns: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, the named columns) of a file, one batch in memory at a time."""
    if file_type == "parquet":
        number = 0
        for batch in pq.ParquetFile(path).iter_batches(batch_size=1000, columns=list(columns)):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    elif file_type == "json":
        for number, row in enumerate(json.loads(path.read_text(encoding="utf-8-sig")), start=1):
            if not isinstance(row, dict):
                raise DataError(f"{path}: element {number}: found {type(row).__name__}, expected an object")
            yield number, row
    else:
        yield from _read_lines(path, file_type)


def _read_lines(path: Path, file_type: str) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path}:{number}: byte {error.start} of the line is not UTF-8; convert the file to UTF-8"
                ) from error
            if not line:
                continue
            if file_type == "text":
                yield number, {"text": line}
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(
                    f"{path}:{number}: not valid JSON ({error.msg} at character {error.pos}); mend or remove the line"
                ) from error
            if not isinstance(row, dict):
                raise DataError(f"{path}:{number}: found {type(row).__name__}, expected one JSON object a line")
            yield number, row


def samples(path: Path, data_format: DataFormat) -> Iterator[Sample]:
    """The file's rows as conversations or texts."""
    columns = data_format.columns
    rows = read_rows(path, data_format.file_type, list(columns.values()))
    if data_format.kind == "oasst":
        yield from _paired_turns(path, rows, columns["text"], columns["role"])
        return
    for number, row in rows:
        if data_format.kind == "messages":
            yield _messages(row, columns["messages"], f"{path}:{number}")
        elif data_format.kind == "text":
            yield _string(row, columns["text"], f"{path}:{number}")
        else:
            prompt = _string(row, columns["prompt"], f"{path}:{number}")
            if "context" in columns and row.get(columns["context"]):
                prompt += "\n" + _string(row, columns["context"], f"{path}:{number}")
            response = _string(row, columns["response"], f"{path}:{number}")
            yield [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _string(row: dict[str, Any], column: str, where: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        found = "no such key" if column not in row else type(value).__name__
        raise DataError(f"{where}: column '{column}': found {found}, expected text; mend or remove the row")
    return value


def _messages(row: dict[str, Any], column: str, where: str) -> list[Message]:
    turns = row.get(column)
    if not isinstance(turns, list) or not turns:
        raise DataError(f"{where}: column '{column}': found {type(turns).__name__}, expected a list of messages")
    messages = []
    for turn in turns:
        role = turn.get("role") or turn.get("from")
        content = turn.get("content") if "content" in turn else turn.get("value")
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(f"{where}: column '{column}': a message needs text in role and content (or from and value)")
        messages.append({"role": ROLE_NAMES.get(role, role), "content": content})
    return messages


def _paired_turns(
    path: Path, rows: Iterator[tuple[int, dict[str, Any]]], text: str, role: str
) -> Iterator[list[Message]]:
    """oasst: consecutive rows of a conversation; a row by the user starts a new pair."""
    prompt: str | None = None
    for number, row in rows:
        where = f"{path}:{number}"
        speaker = _string(row, role, where)
        if ROLE_NAMES.get(speaker, speaker) == "user":
            prompt = _string(row, text, where)
        elif prompt is not None:
            answer = _string(row, text, where)
            yield [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
            prompt = None


def text_of(sample: Sample) -> str:
    """All the text of a sample; a tokenizer is trained on it."""
    return sample if isinstance(sample, str) else "\n".join(message["content"] for message in sample)


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

CACHE_SCHEMA = pa.schema([("input_ids", pa.list_(pa.int32())), ("labels", pa.list_(pa.int32()))])


@dataclass
class CacheCounts:
    """What tokenising a file gave; written beside it, read by the plan and the report."""

    samples: int = 0  # rows of the file
    rows: int = 0  # rows of the cache
    dropped: int = 0  # samples without a target (an empty response, or a prompt that fills max_length)
    truncated: int = 0  # rows that reached max_length and were cut
    tokens: int = 0
    target_tokens: int = 0
    longest: int = 0

    def add(self, rows: list[dict[str, list[int]]], max_length: int) -> None:
        self.samples += 1
        self.dropped += not rows
        for row in rows:
            self.rows += 1
            length = len(row["input_ids"])
            self.tokens += length
            self.target_tokens += sum(label != IGNORED for label in row["labels"])
            self.longest = max(self.longest, length, len(row["labels"]))
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


class TokenRows(Dataset):
    """The cache file, memory-mapped; rows are (input_ids, labels) as int32 arrays."""

    def __init__(self, path: Path) -> None:
        import datasets

        self.rows = datasets.Dataset.from_file(str(path)).with_format("arrow")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        if not len(indices):
            return []
        table = self.rows[list(map(int, indices))]
        columns = [table.column(name).combine_chunks() for name in ("input_ids", "labels")]
        return [tuple(column[i].values.to_numpy() for column in columns) for i in range(len(indices))]


# ---- order and batches ---------------------------------------------------------------------------------------------


class SampleOrder:
    """Which samples a rank takes in each micro-batch of an epoch: a batch sampler for DataLoader.

    The order of samples depends on the seed and the epoch alone; micro-batch, accumulation and ranks only cut it. An
    optimizer step covers the next effective_batch_size samples; the last step of an epoch covers what is left, in as
    few micro-steps as hold it, so no sample is dropped or repeated. A rank without a sample in a micro-step gets [].
    """

    def __init__(
        self, samples: int, micro_batch: int, accumulation: int, world_size: int, rank: int, seed: int, start: int = 0
    ) -> None:
        self.samples, self.micro_batch, self.accumulation = samples, micro_batch, accumulation
        self.world_size, self.rank, self.seed = world_size, rank, seed
        self.start = start  # samples of all epochs that an earlier run with another effective batch has trained
        self.epoch = 0

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.effective_batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def first_step(self, epoch: int) -> tuple[int, int]:
        """(step, sample) of the epoch at which this run takes over; (0, 0) except in the epoch of `start`."""
        if self.start == 0 or epoch != self.start // self.samples:
            return 0, 0
        offset = self.start % self.samples
        return self.steps_per_epoch - -(-(self.samples - offset) // self.effective_batch_size), offset

    def samples_seen(self, step: int) -> int:
        """Samples of all epochs that are trained after `step` optimizer steps."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first, offset = self.first_step(epoch)
        return epoch * self.samples + min(
            offset + max(step_in_epoch - first, 0) * self.effective_batch_size, self.samples
        )

    def __len__(self) -> int:
        """Micro-batches of one epoch on one rank."""
        if self.start:  # the first epoch's last step may be fuller than the others': room for it in all of them
            return self.steps_per_epoch * self.accumulation
        full = self.steps_per_epoch - 1
        last = self.samples - full * self.effective_batch_size
        return full * self.accumulation + -(-last // (self.micro_batch * self.world_size))

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)
        first, offset = self.first_step(self.epoch)
        yielded = first * self.accumulation
        for _ in range(yielded):  # trained before this run; Trainer skips them
            yield []
        width = self.micro_batch * self.world_size
        for at in range(offset, self.samples, width):
            yielded += 1
            yield order[at : at + width][self.rank :: self.world_size].tolist()
        for _ in range(len(self) - yielded):
            yield []


class EpochLoader(DataLoader):
    """A DataLoader that tells its batch sampler the epoch, as Trainer asks of it."""

    def set_epoch(self, epoch: int) -> None:
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


@dataclass(frozen=True)
class Collator:
    """Pads rows on the right to the longest of the micro-batch, rounded up to `multiple`.

    Gives input_ids, attention_mask, labels (batch, seq) and for T5 decoder_input_ids (batch, target seq). No rows give
    one filler row whose labels are all IGNORED: its loss and its gradient are exactly zero.
    """

    pad_token_id: int
    decoder_start_token_id: int | None = None  # given: T5
    multiple: int = 1

    def __call__(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
        if not rows:
            pads = np.full(FILLER_LENGTH, self.pad_token_id), np.full(FILLER_LENGTH, IGNORED)
            return self._tensors([pads])
        return self._tensors(rows)

    def _tensors(self, rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, torch.Tensor]:
        inputs = self._padded([row[0] for row in rows], self.pad_token_id)
        mask = self._padded([np.ones(len(row[0])) for row in rows], 0)
        labels = self._padded([row[1] for row in rows], IGNORED)
        batch = {"input_ids": inputs, "attention_mask": mask, "labels": labels}
        if self.decoder_start_token_id is not None:
            shifted = torch.full_like(labels, self.pad_token_id)
            shifted[:, 1:] = labels[:, :-1].masked_fill(labels[:, :-1] == IGNORED, self.pad_token_id)
            shifted[:, 0] = self.decoder_start_token_id
            batch["decoder_input_ids"] = shifted
        return batch

    def _padded(self, arrays: Sequence[np.ndarray], value: int) -> torch.Tensor:
        width = -(-max(len(array) for array in arrays) // self.multiple) * self.multiple
        padded = np.full((len(arrays), width), value, dtype=np.int64)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        return torch.from_numpy(padded)
