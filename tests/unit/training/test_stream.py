"""The order of a stream: each sequence once an epoch, and what is at a position depends on the
files and the seed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from launch.data.files import shards
from launch.data.sources import Source
from launch.data.token_cache import TokenCache
from launch.schema.model_sections import TokenizerSection
from launch.schema.plan import DataFormat
from tests import builders
from training.data import streaming, tokenise, tokenizer
from training.data.encode import EncoderSettings
from training.data.sample_order import SampleOrder
from training.data.tokenise import TokeniseJob

pytestmark = pytest.mark.unit

TEXTS = [
    " ".join(f"{number * step}" for step in range(1, 3 + number % 40)) for number in range(300)
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> tuple[TokeniseJob, Path, int]:
    """(job whose units are all there, their counts, sequences of an epoch)"""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    cut = tokenizer.train(iter(TEXTS[:50]), TokenizerSection(), 400)
    cut.save_pretrained(folder / "tokenizer")
    data_format = DataFormat("text", {"text": "text"}, "jsonl", "")
    job = TokeniseJob(
        *(folder, "train", (Source(folder / "a.jsonl", data_format),)),
        *(EncoderSettings(False, "pretrain", 64, True, own_call=False), True, 0, 3000),
    )
    total, _ = tokenise.tokenise_part(job, None, 1, lambda rows: None, print)
    assert len(job.units) % streaming.BLOCK_UNITS, (
        "the last block of an epoch should be a smaller one"
    )
    counts = [job.done(unit).counts.rows + 1 for unit in range(len(job.units))]
    (folder / "units.u32").write_bytes(np.array(counts, dtype="<u4").tobytes())
    return job, folder / "units.u32", total.rows


def rows_of(corpus: tuple[TokeniseJob, Path, int], seed: int = 7) -> streaming.StreamRows:
    job, counts, _ = corpus
    return streaming.StreamRows(job, counts, seed, 10_000, lambda: pytest.fail("it waits"))


def tokens(rows: streaming.StreamRows, positions: range) -> list[tuple[int, ...]]:
    return [tuple(row.input_ids.tolist()) for row in rows.__getitems__(positions)]


def test_an_epoch_of_a_stream_has_each_sequence_once_in_an_order_of_its_own(corpus):
    job, _, count = corpus
    rows = rows_of(corpus)
    first, second = tokens(rows, range(count)), tokens(rows, range(count, 2 * count))
    text = "".join(f"{text}<|end|>" for text in TEXTS)
    held = job.encoder.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert sorted(token for sequence in first for token in sequence) == sorted(held)
    assert sorted(first) == sorted(second)
    assert first != second
    assert tokens(rows_of(corpus, seed=8), range(count)) != first


def test_what_is_at_a_position_does_not_depend_on_where_a_run_began(corpus):
    count = corpus[2]
    whole = tokens(rows_of(corpus), range(3 * count))
    for start in (0, 1, count // 3, count, 2 * count + 5):
        assert tokens(rows_of(corpus), range(start, 3 * count)) == whole[start:]


def test_batches_are_cut_from_a_stream_as_from_any_order_and_it_takes_no_memory(corpus):
    def steps(
        order: type[SampleOrder], micro: int, accumulation: int, ranks: int
    ) -> list[list[int]]:
        orders = [order(1 << 30, micro, accumulation, ranks, rank, 7) for rank in range(ranks)]
        return [
            sorted(row for one in orders for row in one.rows_of(step, range(accumulation)))
            for step in (1, 2, 9)
        ]

    expected = [list(range(8 * step, 8 * step + 8)) for step in (0, 1, 8)]
    for cut in ((8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 1, 8)):
        assert steps(streaming.StreamOrder, *cut) == expected


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"task": "sft"}, "needs task: pretrain"),
        ({"data": {"packing": False}}, r"needs data\.packing: true"),
        ({"training": {"max_steps": -1}}, r"needs training\.max_steps"),
        ({"data": {"max_train_samples": 5}}, r"needs no data\.max_train_samples"),
        ({"training": {"dataloader_num_workers": 2}}, r"needs no training\.dataloader_num_workers"),
        (
            {"data": {"streaming": False, "shuffle_buffer_mib": 4}},
            r"shuffle_buffer_mib is for data\.streaming",
        ),
    ],
)
def test_what_cannot_be_streamed_is_refused_with_the_reason(sections, words):
    given = {
        "task": sections.get("task", "pretrain"),
        "data": {"streaming": True, "packing": True, **sections.get("data", {})},
        "training": {"max_steps": 5, **sections.get("training", {})},
    }
    with pytest.raises(ValidationError, match=words):
        builders.recipe_of(**given)


def test_of_a_stream_only_the_trained_rows_are_cut_into_small_units(corpus):
    cut, *_ = corpus
    recipe = builders.recipe_of()
    streamed = recipe.data.model_copy(update={"streaming": True})
    recipe = recipe.model_copy(update={"data": streamed})
    tokens = TokenCache(recipe, builders.plan().shape, cut.sources[0].data_format, {}, cut.folder)
    trained, held_out = (
        tokenise.job(tokens, cut.sources, cut.folder, part).unit_bytes
        for part in json.loads('["train", "validation"]')
    )
    assert (trained, held_out) == (streamed.stream_unit_bytes, shards.UNIT_BYTES)
