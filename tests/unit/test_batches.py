"""Every sample once an epoch, in one order, however it is cut."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.batches import Collator, SampleOrder
from training.data import IGNORED

flat = chain.from_iterable
CUT = st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3))


def epoch(samples: int, cut: tuple[int, int, int], number: int, start: int = 0) -> list[list[int]]:
    """The samples of each micro-batch of an epoch, all ranks together."""
    micro, accumulation, ranks = cut
    per_rank = []
    for rank in range(ranks):
        order = SampleOrder(samples, micro, accumulation, ranks, rank, seed=7, start=start)
        order.set_epoch(number)
        batches = list(order)
        assert len(batches) == len(order)
        assert all(len(batch) <= micro for batch in batches)
        per_rank.append(batches)
    assert len({len(batches) for batches in per_rank}) == 1, "a rank would wait for ever"
    return [sorted(flat(together)) for together in zip(*per_rank, strict=True)]


@settings(max_examples=150, deadline=None)
@given(samples=st.integers(1, 60), cut=CUT, number=st.integers(0, 3))
def test_each_sample_is_seen_once_an_epoch(samples, cut, number):
    assert sorted(flat(epoch(samples, cut, number))) == list(range(samples))


@settings(max_examples=150, deadline=None)
@given(samples=st.integers(1, 60), factors=st.permutations([2, 3, 2]), number=st.integers(0, 3))
def test_steps_cover_the_same_samples_whatever_the_cut_of_an_effective_batch(samples, factors, number):
    def steps(cut: tuple[int, int, int]) -> list[list[int]]:
        batches = epoch(samples, cut, number)
        return [sorted(flat(batches[at : at + cut[1]])) for at in range(0, len(batches), cut[1])]

    assert steps(tuple(factors)) == steps((12, 1, 1))


@settings(max_examples=150, deadline=None)
@given(samples=st.integers(1, 60), cut=CUT, share=st.floats(0, 2.99))
def test_a_run_that_takes_over_in_the_middle_sees_exactly_what_was_left(samples, cut, share):
    start = int(samples * share)
    number, offset = divmod(start, samples)
    order = SampleOrder(samples, *cut, rank=0, seed=7, start=start)
    first, at = order.first_step(number) if start else (0, 0)
    assert at == (offset if start else 0)
    batches = epoch(samples, cut, number, start)
    assert batches[: first * cut[1]] == [[]] * (first * cut[1])
    whole = list(flat(epoch(samples, (1, 1, 1), number)))
    assert sorted(flat(batches)) == sorted(whole[offset:])
    assert order.samples_seen(number * order.steps_per_epoch + first) == start
    assert order.samples_seen((number + 1) * order.steps_per_epoch) == (number + 1) * samples


def rows(*lengths: int) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.arange(1, n + 1, dtype=np.int32), np.arange(1, n + 1, dtype=np.int32)) for n in lengths]


def test_padding_is_on_the_right_masked_and_no_target():
    batch = Collator(pad_token_id=0, multiple=4)(rows(3, 5))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0, 0, 0]]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5]
    assert batch["labels"].tolist()[0] == [1, 2, 3] + [IGNORED] * 5


def test_t5_reads_its_targets_shifted_by_one_behind_the_start_token():
    batch = Collator(pad_token_id=0, decoder_start_token_id=9)(rows(2, 3))
    assert batch["decoder_input_ids"].tolist() == [[9, 1, 2], [9, 1, 2]]


def test_a_rank_without_samples_gets_a_row_without_targets():
    batch = Collator(pad_token_id=0)([])
    assert (batch["labels"] == IGNORED).all()
    assert batch["attention_mask"].all(), "a fully masked row would be NaN in attention"
    assert batch["input_ids"].dtype == torch.int64
