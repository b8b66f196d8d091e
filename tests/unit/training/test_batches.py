"""Every sample once an epoch, in one order, however it is cut."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.data.rows import IGNORED
from launch.schema.model_sections import ModelSection
from tests import builders
from training.compat import transformers_private
from training.data.batches import NOTHING, TARGET_POSITIONS, TARGET_TENSORS, Collator, Row
from training.data.sample_order import SampleOrder, TokenBudget
from training.model import build

flat = chain.from_iterable
CUT = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))
GROUPED = st.none() | st.integers(1, 9)  # rows of a group, if rows of about one length go together
LONGEST = 100  # tokens


def lengths_of(samples: int) -> np.ndarray:
    """Tokens of source and target of so many rows, very different ones."""
    return np.random.default_rng(samples).integers(1, LONGEST + 1, (samples, 2), dtype=np.int32)


def order_of(
    samples: int,
    cut: tuple[int, int, int],
    rank: int,
    group: int | None,
    start: int = 0,
    by_tokens: bool = False,
) -> SampleOrder:
    lengths = (lambda: lengths_of(samples)) if group else None
    limit = cut[0] * LONGEST
    budget = (
        TokenBudget(lambda: lengths_of(samples), limit, limit, multiple=4) if by_tokens else None
    )
    return SampleOrder(
        samples, *cut, rank, seed=7, start=start, lengths=lengths, group_size=group, budget=budget
    )


def epoch(
    samples: int,
    cut: tuple[int, int, int],
    number: int,
    group: int | None = None,
    start: int = 0,
    by_tokens: bool = False,
) -> list[list[int]]:
    """The samples of each micro-batch of an epoch, all ranks together."""
    micro, _, ranks = cut
    per_rank, idle = [], []
    for rank in range(ranks):
        order = order_of(samples, cut, rank, group, start, by_tokens)
        order.set_epoch(number)
        computed = list(order)
        assert len(computed) == len(order)
        batches = [batch or [] for batch in computed]
        if by_tokens:
            padded = -(-lengths_of(samples) // 4) * 4
            for batch in filter(None, batches):
                assert (len(batch) * padded[batch].max(axis=0) <= micro * LONGEST).all()
        else:
            assert all(len(batch) <= micro for batch in batches)
        per_rank.append(batches)
        idle.append([batch is None for batch in computed])
    assert len({len(batches) for batches in per_rank}) == 1, "a rank would wait for ever"
    assert idle.count(idle[0]) == ranks, "a rank would wait for the others"
    for at in range(0, len(idle[0]), cut[1]):
        skipped = idle[0][at : at + cut[1]]
        assert skipped == sorted(skipped, reverse=True), (
            "the last micro-step of a step is when gradients are reduced"
        )
    return [sorted(flat(together)) for together in zip(*per_rank, strict=True)]


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 60),
    cut=CUT,
    number=st.integers(0, 3),
    group=GROUPED,
    by_tokens=st.booleans(),
)
def test_each_sample_is_seen_once_an_epoch(samples, cut, number, group, by_tokens):
    assert sorted(flat(epoch(samples, cut, number, group, by_tokens=by_tokens))) == list(
        range(samples)
    )


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 60),
    factors=st.permutations([2, 3, 2]),
    number=st.integers(0, 3),
    group=GROUPED,
)
def test_steps_cover_the_same_samples_whatever_the_cut_of_an_effective_batch(
    samples, factors, number, group
):
    def steps(cut: tuple[int, int, int], by_tokens: bool = False) -> list[list[int]]:
        batches = epoch(samples, cut, number, group, by_tokens=by_tokens)
        return [sorted(flat(batches[at : at + cut[1]])) for at in range(0, len(batches), cut[1])]

    assert steps(tuple(factors)) == steps((12, 1, 1)) == steps(tuple(factors), by_tokens=True)


@settings(max_examples=100, deadline=None)
@given(samples=st.integers(1, 60), cut=CUT, step=st.integers(1, 40), by_tokens=st.booleans())
def test_the_rows_of_a_step_are_those_that_were_trained_in_it(samples, cut, step, by_tokens):
    order = order_of(samples, cut, cut[2] - 1, None, by_tokens=by_tokens)
    number, at = divmod(step - 1, order.steps_per_epoch)
    order.set_epoch(number)
    trained = [batch for batch in list(order)[at * cut[1] : (at + 1) * cut[1]] if batch is not None]
    assert [order.rows_of(step, [micro]) for micro in range(cut[1])][: len(trained)] == trained
    assert order.rows_of(step, range(cut[1])) == list(flat(trained))


def test_by_tokens_short_rows_share_a_micro_batch_and_a_long_one_is_with_few():
    lengths = np.repeat(np.array([400] * 4 + [10] * 28, dtype=np.int32)[:, None], 2, axis=1)
    budget = TokenBudget(lambda: lengths, 2 * 400, 2 * 400)
    order = SampleOrder(32, 2, 16, 1, 0, seed=1, budget=budget)
    taken = [batch for batch in order if batch is not None]
    assert [len(batch) for batch in taken] == [2, 2, 28]
    assert len(list(order)) == 16
    assert order.rows_of(1, [2]) == taken[2]


def test_more_micro_batches_than_needed_are_made_where_they_save_much_padding():
    def taken(*tokens: int) -> list[int]:
        lengths = np.repeat(np.array(tokens, dtype=np.int32)[:, None], 2, axis=1)
        order = SampleOrder(8, 4, 2, 1, 0, seed=1, budget=TokenBudget(lambda: lengths, 400, 400))
        return [len(batch) for batch in order if batch is not None]

    assert taken(*[50] * 8) == [8]
    assert taken(50, *[45] * 7) == [8]
    assert taken(50, 50, *[10] * 6) == [2, 6]


@settings(max_examples=150, deadline=None)
@given(
    samples=st.integers(1, 60),
    cut=CUT,
    earlier=CUT,
    share=st.floats(0, 2.99),
    group=GROUPED,
    by_tokens=st.tuples(st.booleans(), st.booleans()),
)
def test_a_run_that_takes_over_in_the_middle_sees_exactly_what_was_left(
    samples, cut, earlier, share, group, by_tokens
):
    number, step = divmod(share, 1)
    first_run = order_of(samples, earlier, 0, group)
    start = first_run.samples_seen(int((number + step) * first_run.steps_per_epoch))
    number, offset = divmod(start, samples)
    order = order_of(samples, cut, 0, group, start)
    first, at = order.first_step(number) if start else (0, 0)
    assert at == (offset if start else 0)
    batches = epoch(samples, cut, number, group, start, by_tokens[0])
    assert batches[: first * cut[1]] == [[]] * (first * cut[1])
    earlier_batches = epoch(samples, earlier, number, group, by_tokens=by_tokens[1])
    seen = list(flat(earlier_batches))[:offset]  # whole steps of the earlier run
    assert sorted([*seen, *flat(batches)]) == list(range(samples))
    assert order.samples_seen(number * order.steps_per_epoch + first) == start
    assert order.samples_seen((number + 1) * order.steps_per_epoch) == (number + 1) * samples


@settings(max_examples=50, deadline=None)
@given(samples=st.integers(60, 200), factors=st.permutations([1, 2, 3]), number=st.integers(0, 3))
def test_grouped_by_length_the_longest_row_is_in_the_second_step(samples, factors, number):
    lengths = lengths_of(samples).sum(axis=1)
    batches = epoch(samples, tuple(factors), number, group=6)
    steps = [list(flat(batches[at : at + factors[1]])) for at in range(0, len(batches), factors[1])]
    in_groups = list(flat(steps))[: samples // 6 * 6]
    assert lengths[steps[1]].max() == lengths[in_groups].max()


def test_grouped_by_length_micro_batches_hold_rows_of_about_one_length_and_steps_are_shuffled():
    def batches(lengths: np.ndarray, grouped: bool, number: int = 0) -> list[list[int]]:
        order = SampleOrder(
            6000, 8, 4, 1, 0, seed=7, lengths=(lambda: lengths) if grouped else None
        )
        order.set_epoch(number)
        return list(order)

    def padded(lengths: np.ndarray, grouped: bool) -> float:
        """Tokens that are computed, padding and all, over tokens of rows."""
        return (
            sum(lengths[one].max(axis=0).sum() * len(one) for one in batches(lengths, grouped))
            / lengths.sum()
        )

    pairs = lengths_of(6000)
    alike = np.repeat(pairs[:, :1], 2, axis=1)  # a decoder's
    for lengths, limit in ((alike, 1.03), (pairs, 1.3)):
        assert padded(lengths, True) < limit < 1.6 < padded(lengths, False)
    steps = [sorted(flat(batches(alike, True)[at : at + 4])) for at in range(0, 750, 4)]
    others = [sorted(flat(batches(alike, True, number=1)[at : at + 4])) for at in range(0, 750, 4)]
    assert not [step for step in steps if step in others], "an epoch repeats another one's steps"
    means = [alike[step].mean() for step in steps]
    assert np.abs(np.diff(means)).mean() > 20, "a step's length tells the next one's"


def rows(*lengths: int) -> list[Row]:
    return [
        Row(np.arange(1, n + 1, dtype=np.int32), np.arange(1, n + 1, dtype=np.int32))
        for n in lengths
    ]


def test_padding_is_on_the_right_masked_and_no_target():
    batch = Collator(pad_token_id=0, multiple=4)(rows(3, 5))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert batch["labels"].tolist()[0] == [1, 2, 3] + [IGNORED] * 5


def test_the_batch_says_whether_its_mask_hides_anything():
    for lengths, is_padded in (((4, 4), False), ((3, 3), True), ((3, 4), True)):
        batch = Collator(pad_token_id=0, multiple=4)(rows(*lengths))
        assert batch["is_padded"] is is_padded is not bool(batch["attention_mask"].all())


def test_tokens_and_samples_are_those_of_rows_with_targets():
    without = Row(np.arange(3), np.full(3, IGNORED), number=5)
    batch = Collator(pad_token_id=0)([rows(4)[0]._replace(number=2), without])
    assert (batch["num_tokens"], batch["num_samples"]) == (4, 1)


@pytest.mark.parametrize("lengths", [(9, 9), (5, 9)])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("shape", ["gpt2-tiny", "llama-tiny", "t5-tiny"])
def test_a_step_has_the_same_bits_without_asking_the_device_for_padding(shape, attention, lengths):
    plan = builders.plan(builders.recipe_of(model={"shape": shape}))
    batch = Collator(pad_token_id=0, decoder_start_token_id=0 if shape == "t5-tiny" else None)(
        rows(*lengths)
    )
    is_padded = batch.pop("is_padded")
    gradients = []
    for context in (nullcontext(), transformers_private.known_padding(is_padded)):
        torch.manual_seed(0)
        model = build.from_shape(ModelSection(shape=shape), plan.shape, attention=attention)
        with context:
            model(**batch).loss.backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_t5_reads_its_targets_shifted_by_one_behind_the_start_token():
    batch = Collator(pad_token_id=0, decoder_start_token_id=9)(rows(2, 3))
    assert batch["decoder_input_ids"].tolist() == [[9, 1, 2], [9, 1, 2]]


def test_a_rank_without_samples_gets_a_row_without_targets():
    batch = Collator(pad_token_id=0)([])
    assert (batch["labels"] == IGNORED).all()
    assert batch["attention_mask"].all(), "a fully masked row would be NaN in attention"
    assert batch["input_ids"].dtype == torch.int64


def test_what_no_rank_computes_is_an_empty_batch():
    assert Collator(pad_token_id=0)(NOTHING) == {}


def test_positions_start_again_with_each_document_and_with_the_padding():
    packed = [
        Row(np.arange(1, 6), np.arange(1, 6), np.array([2, 3]), 7),
        Row(np.arange(1, 7), np.arange(1, 7), np.array([6]), 3),
    ]
    batch = Collator(pad_token_id=0, multiple=4, is_packed=True)(packed)
    assert "attention_mask" not in batch, "with a mask transformers no longer tells documents apart"
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 4, 5, 0, 1]]
    assert (batch["sample_ids"].tolist(), batch["num_tokens"]) == ([7, 3], 11)
    filler = Collator(pad_token_id=0, is_packed=True)([])
    assert filler["position_ids"].tolist() == [[0, 1]]
    assert (filler["labels"] == IGNORED).all()
    assert filler.keys() <= batch.keys()


def named(batch: dict[str, Any], shift: bool = True) -> list[tuple[int, int]]:
    """(position, token) of each target that a batch names."""
    ids, positions = (batch[name].tolist() for name in TARGET_TENSORS)
    labels = batch["labels"].flatten()
    assert ids == labels[batch[TARGET_POSITIONS] + shift].tolist()
    return list(zip(positions, ids, strict=True))


def test_targets_are_named_in_order_over_the_whole_batch():
    prompts = [row._replace(labels=row.labels.copy()) for row in rows(3, 5)]
    prompts[1].labels[:2] = IGNORED
    batch = Collator(pad_token_id=0, multiple=4, names_targets=True)(prompts)
    # the first token follows from nothing; padding and the prompt have no loss
    assert named(batch) == [(0, 2), (1, 3), (9, 3), (10, 4), (11, 5)]
    pairs = Collator(pad_token_id=0, decoder_start_token_id=9, names_targets=True)(rows(2, 3))
    assert named(pairs, shift=False) == [(0, 1), (1, 2), (3, 1), (4, 2), (5, 3)]


@pytest.mark.parametrize("flattens", [False, True])
def test_no_document_predicts_the_first_token_of_the_next(flattens):
    labels = np.array([IGNORED, 2, IGNORED, 4, 5])
    packed = [Row(np.arange(1, 6), labels, np.array([2, 3]), 7)] * 2
    collate = Collator(
        pad_token_id=0, multiple=4, is_packed=True, flattens=flattens, names_targets=True
    )
    width = 5 if flattens else 8  # of a row
    targets = [(0, 2), (2, 4), (3, 5)]
    assert named(collate(packed)) == [
        *targets,
        *((position + width, token) for position, token in targets),
    ]


def test_a_batch_without_a_target_names_a_position_without_a_loss():
    for batch in (
        Collator(pad_token_id=0, names_targets=True)([]),
        Collator(pad_token_id=0, names_targets=True)([Row(np.arange(3), np.full(3, IGNORED))]),
    ):
        assert [batch[name].tolist() for name in TARGET_TENSORS] == [[IGNORED], [0]]
