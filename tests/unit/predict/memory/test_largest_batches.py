"""The largest micro-batches are those that the trainer's order of rows gives its collator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.data.rows import IGNORED
from launch.predict.memory.largest_batches import LargestBatches
from launch.predict.traces import Traces
from launch.schema.rows import Division
from tests import builders
from training.data import largest_batches, stored_rows
from training.data.batches import TARGET_IDS, Collator, NumberedRows
from training.data.sample_order import SampleOrder

CUT = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))


@settings(max_examples=100, deadline=None)
@given(
    samples=st.integers(1, 60),
    cut=CUT,
    epoch=st.integers(0, 2),
    steps=st.integers(1, 70),
    grouped=st.booleans(),
)
def test_the_micro_batches_that_are_counted_are_those_of_the_ranks(
    samples, cut, epoch, steps, grouped
):
    lengths = np.random.default_rng(samples).integers(1, 100, (samples, 2), dtype=np.int32)

    def order(rank: int) -> SampleOrder:
        return SampleOrder(samples, *cut, rank, 7, lengths=(lambda: lengths) if grouped else None)

    trained = []
    for rank in range(cut[2]):
        ranks = order(rank)
        ranks.set_epoch(epoch)
        trained += [batch for batch in list(ranks)[: steps * cut[1]] if batch]
    counted = [row.tolist() for batches in order(0).micro_batches(epoch, steps) for row in batches]
    assert sorted(counted) == sorted(trained)


def write(
    folder: Path, part: str, count: int, seed: int, is_pair: bool, lengths: Sequence[int] = ()
) -> None:
    """Rows of many lengths, or of these, some of which begin with a target or have several spans of
    them."""
    random = np.random.default_rng(seed)
    rows = []
    for _ in range(count):
        length = int(random.choice(lengths) if lengths else random.integers(2, 90))
        ids = random.integers(0, 200, length)
        labels = np.where(random.random(length) < 0.4, ids, IGNORED)
        if is_pair:
            labels = random.integers(0, 200, int(random.integers(1, 60)))
        rows.append({"input_ids": ids, "labels": labels})
    schema = stored_rows.schema(255, is_pair, False)
    with pa.ipc.new_stream(folder / f"{part}.arrow", schema) as stream:
        for start in range(0, count, 40):  # batches of a file
            stream.write_batch(stored_rows.batch(rows[start : start + 40], schema))


def collated(folder: Path, division: Division, is_pair: bool) -> np.ndarray:
    """(micro-batches, 3) elements of the tensors and targets of each micro-batch of the run, and
    whether it is padded."""
    rows = NumberedRows(folder / f"{division.part}.arrow")
    collator = Collator(
        0,
        0 if is_pair else None,
        division.multiple,
        flattens=division.flattens,
        names_targets=True,
    )
    sizes = []
    for rank in range(division.world_size):
        order = SampleOrder(
            len(rows),
            division.micro_batch,
            division.accumulation,
            division.world_size,
            rank,
            division.seed,
            lengths=rows.lengths if division.groups_by_length else None,
        )
        for step in range(1, division.num_steps + 1):
            for micro in range(division.accumulation):
                if numbers := order.rows_of(step, [micro]):
                    batch = collator(rows.__getitems__(numbers))
                    tokens = batch["input_ids"].numel() + is_pair * batch["labels"].numel()
                    sizes.append((tokens, len(batch[TARGET_IDS]), batch.get("is_padded", False)))
    return np.array(sizes)


# an encoder-decoder's rows are never flattened
@pytest.mark.parametrize(("is_pair", "flattens"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("by_length", [False, True])
@pytest.mark.parametrize("ranks", [1, 2])
def test_no_micro_batch_of_the_run_is_larger(tmp_path, is_pair, by_length, flattens, ranks):
    write(tmp_path, "train", 150, 3, is_pair)
    # two epochs and the first step of the third
    steps = 2 * -(-150 // (4 * 3 * ranks)) + 1
    division = Division("train", 4, 3, ranks, by_length, 8, flattens, seed=11, num_steps=steps)
    found = LargestBatches(tmp_path, tmp_path / "kept", 150).get(division)
    assert found is not None
    trained = collated(tmp_path, division, is_pair).astype(float)
    sides = 1 if flattens or is_pair else 2  # a decoder's target is its source
    counted = np.array(
        [(size.tokens / sides, size.targets, size.is_padded) for size in found.sizes]
    )
    if is_pair:
        counted[:, 0] = [size.rows * (size.source + size.target) for size in found.sizes]
    if flattens:  # without masks
        counted[:, 2] = 0
    assert {*map(tuple, counted)} <= {*map(tuple, trained)}
    for is_padded in {*trained[:, 2]}:
        of_run = trained[trained[:, 2] == is_padded, :2]
        of_found = counted[counted[:, 2] == is_padded, :2]
        most = of_run.max(axis=0)
        for weight in np.linspace(0, 1, largest_batches.MIXTURES + 1):
            mixture = (1 - weight) / most[0], weight / most[1]
            assert (of_found @ mixture).max() == pytest.approx((of_run @ mixture).max())
        # and between the weights that were counted, it is almost the largest
        mixture = 0.53 / most[0], 0.47 / most[1]
        assert (of_found @ mixture).max() >= 0.99 * (of_run @ mixture).max()
    first = collated(tmp_path, replace(division, num_steps=1), is_pair)
    assert max(size.targets for size in found.first_step) == first[:, 1].max()


def test_the_largest_are_found_with_padding_and_without(tmp_path):
    write(tmp_path, "train", 60, 3, False, lengths=(24, 80))
    division = Division("train", 2, 2, 1, False, 8, False, seed=11, num_steps=15)
    found = LargestBatches(tmp_path, tmp_path / "kept", 60).get(division)
    assert found is not None
    trained = collated(tmp_path, division, False)
    for is_padded in (False, True):
        of_run = trained[trained[:, 2] == is_padded]
        assert len(of_run)
        sizes = [each for each in found.sizes if each.is_padded == is_padded]
        assert max(each.rows * each.source for each in sizes) == of_run[:, 0].max()
        assert max(each.targets for each in sizes) == of_run[:, 1].max()


def test_an_evaluation_takes_rows_in_their_order_or_by_length(tmp_path):
    write(tmp_path, "validation", 21, 5, False)
    rows = NumberedRows(tmp_path / "validation.arrow")
    lengths = rows.lengths()[:, 0]
    for by_length in (False, True):
        order = lengths.argsort(kind="stable") if by_length else np.arange(21)
        batches = [order[start : start + 8][rank::2] for start in (0, 8, 16) for rank in (0, 1)]
        division = Division("validation", 4, 1, 2, by_length, 1, False)
        found = LargestBatches(tmp_path, tmp_path / "kept", 150).get(division)
        assert found is not None
        widths = [int(lengths[batch].max()) for batch in batches if len(batch)]
        assert max(size.source for size in found.sizes) == max(widths)
        tokens = max(len(batch) * lengths[batch].max() for batch in batches if len(batch))
        assert max(size.rows * size.source for size in found.sizes) == tokens


def test_a_plan_counts_with_the_largest_micro_batches_of_evaluations(tmp_path):
    write(tmp_path, "train", 12, 1, False)
    write(tmp_path, "validation", 21, 5, False)
    recipe, on = builders.recipe_of(training={"num_train_epochs": 1}), builders.machine()
    candidate = replace(builders.plan(recipe, on).strategy, per_device_eval_batch_size=4)
    facts = builders.facts_of(recipe, on)
    facts = builders.changed(
        facts,
        counts={"rows": 12, "most_targets": []},
        eval_counts={"most_targets": []},
        held_out=21,
        largest_batches=LargestBatches(tmp_path, tmp_path / "kept", 12),
        traces=Traces(recipe, facts.model.size, facts.model.lora_targets, tmp_path / "traces"),
    )
    evaluated = facts.evaluated_targets(candidate, facts.question(candidate))
    assert set(evaluated.sizes) == {1, 2, 4}
    lengths = NumberedRows(tmp_path / "validation.arrow").lengths()[:, 0]
    assert max(size.source for size in evaluated.sizes[1]) == lengths.max()


def test_what_was_found_is_kept_and_rows_that_cannot_be_read_are_named(tmp_path):
    write(tmp_path, "train", 12, 1, False)
    division = Division("train", 2, 1, 1, False, 1, False, num_steps=6)
    first = LargestBatches(tmp_path, tmp_path / "kept", 150).get(division)
    (tmp_path / "train.arrow").write_bytes(b"no arrow")
    assert LargestBatches(tmp_path, tmp_path / "kept", 150).get(division) == first
    other = LargestBatches(tmp_path, tmp_path / "other", 150)
    assert other.get(division) is None
    assert other.failure is not None
    assert str(tmp_path) in other.failure


def test_an_order_of_very_many_epochs_is_not_made_while_a_plan_waits(tmp_path):
    write(tmp_path, "train", 12, 1, False)
    division = Division("train", 2, 1, 1, False, 1, False, num_steps=500 * 6)
    found = LargestBatches(tmp_path, tmp_path / "kept", 12)
    assert found.get(division) is not None and found.failure is None
    assert found.get(replace(division, num_steps=500 * 6 + 1)) is None
    assert found.failure is not None and "500 epochs" in found.failure
