"""Prices of steps, from recorded layers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from benchmarks import composed
from launch.predict.step import reduced, sources
from launch.predict.step.compose import Composer
from launch.predict.step.price import OTHER_CAST, OTHER_KERNELS, Price, Priced, RecordedSteps
from launch.predict.step.recorded import Recorded
from launch.predict.step.reduced import Sizes
from launch.predict.traces import Traces
from launch.schema.recorded_step import BATCH, Layer, Log, Question, RecordedStep
from tests.unit.predict.step.test_compose import of_llama
from training.trace import step


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def question_of(**values: object) -> Question:
    return composed.case_of(of_llama(**values))[2]


@cache
def recorded(base: Question, mixture: composed.Mixture) -> RecordedStep:
    """One recording of each step for all tests, which only read it."""
    recipe, plan, _ = composed.case_of(mixture)
    kinds = base.parts_apart, base.all_layers
    batch = 1 if base.is_single else BATCH
    return step.record(recipe, plan, base.lengths, base.is_padded, batch, None, *kinds)


def steps_of(*ways: dict[str, object]) -> RecordedSteps:
    """Records of these steps."""
    steps = RecordedSteps()
    for values in ways:
        mixture = of_llama(**values)
        composed_of = sources.choose_sources(
            composed.case_of(mixture)[2], False, lambda base: False
        )
        steps.add(composed_of.outer, recorded(composed_of.outer, mixture))
    return steps


def price_of(steps: RecordedSteps, **values: object) -> Priced | None:
    question = question_of(**values)
    return steps.price(question, sources.choose_sources(question, False, lambda base: False))


def highest(moments: Sequence[tuple[str, Sizes]], rows: int = 4, targets: int = 8) -> int:
    return max(
        fixed + rows * sample + targets * target
        for section, (fixed, sample, target) in moments
        if section != "evaluation"
    )


def test_a_price_looks_at_units_and_not_at_the_events_of_all_layers():
    numbers = {}
    for layers in (7, 80):
        ways = [of_llama(every_n_layers=n, layers=layers) for n in (0, 1)]
        kept, again = (Recorded(recorded(composed.case_of(way)[2], way)) for way in ways)
        ways_of = {True: kept, False: again}

        def way_of(layer: Layer, ways_of: dict[bool, Recorded] = ways_of) -> Recorded:
            return ways_of[layer[1] % 4 > 0]

        composer = Composer(again, way_of, 1, 0)
        price, log = Price(composer), composer.log()
        moments = price.moments()
        assert highest(moments) == pytest.approx(_bytes(log), rel=1e-4)
        own, work = composed.work_of(price.passes()), composed.work_of(reduced.passes_of_log(log))
        assert own.keys() == work.keys()
        assert all(own[name] == pytest.approx(work[name]) for name in work)
        numbers[layers] = price.num_looked_at, len(log.events)
    assert numbers[80][0] < numbers[80][1] / 10
    assert numbers[80][0] < 2 * numbers[7][0]


def _bytes(log: Log) -> int:
    return max(
        sum(fixed + 4 * sample + 8 * target for fixed, sample, target in moment["parts"].values())
        for moment in reduced.peaks(log)
        if moment["section"] != "evaluation"
    )


def test_of_layers_that_are_not_recorded_the_seconds_are_known_and_bytes_are_bounds():
    kept, both = steps_of({"every_n_layers": 0}), steps_of({"every_n_layers": 0}, {})
    of_kept = [price_of(kept, every_n_layers=n) for n in (0, 2, 1)]
    of_both = [price_of(both, every_n_layers=n) for n in (0, 2, 1)]
    assert all(of_kept)
    assert all(of_both)
    for bound, price in zip(of_kept, of_both, strict=True):
        assert bound is not None and price is not None
        assert highest(bound.moments) <= highest(price.moments)
        flops = [composed.work_of(each.passes)["product bfloat16"][1] for each in (bound, price)]
        assert flops[0] == pytest.approx(flops[1], rel=0.01)
    assert of_kept[0] == of_both[0]


def test_logits_in_parts_that_are_not_recorded_have_the_work_of_those_at_once():
    steps = steps_of({})
    at_once, in_parts = price_of(steps), price_of(steps, parts=8)
    assert at_once is not None and in_parts is not None
    assert highest(in_parts.moments) <= highest(at_once.moments)
    works = [composed.work_of(each.passes) for each in (at_once, in_parts)]
    of_target = [work["product bfloat16"][2] for work in works]
    assert of_target[1] == pytest.approx(8 * of_target[0])  # an eighth of the targets is in each


def test_logits_at_once_that_are_not_recorded_have_no_more_work_than_their_own_record_says():
    in_parts, own = steps_of({"parts": 4}), steps_of({})
    bound, price = price_of(in_parts), price_of(own)
    assert bound is not None and price is not None
    of_target = [composed.work_of(each.passes)["product bfloat16"][2] for each in (bound, price)]
    assert 0 < of_target[0] <= of_target[1]


def test_other_kernels_say_nothing_of_bytes_and_little_of_the_time_of_faster_ones():
    kernels = {"fused_norms": True}
    plain = question_of()
    fused = replace(plain, strategy=plain.strategy.with_levers(**kernels))
    steps = steps_of({})
    priced = steps.price(fused, sources.choose_sources(fused, False, lambda base: False))
    assert priced is not None
    assert priced.least_share == OTHER_KERNELS
    (own,) = steps._bases.items()
    steps._bases = {replace(own[0], strategy=own[0].strategy.with_levers(**kernels)): own[1]}
    slower = price_of(steps)
    assert slower is not None
    assert slower.least_share == 1.0


def test_another_precision_and_more_samples_say_nothing_of_bytes():
    steps = steps_of({"rows": 1})
    single, more = price_of(steps, rows=1), price_of(steps, rows=4)
    sharded = price_of(steps, rows=1, mode="deepspeed_zero2")
    assert single is not None and more is not None and sharded is not None
    assert single.moments
    assert not more.moments
    assert more.of_each_sample
    assert not sharded.moments
    assert sharded.least_share == OTHER_CAST
    assert price_of(RecordedSteps()) is None


def test_layers_in_turns_are_no_record_of_others():
    steps = RecordedSteps()
    mixture = of_llama(every_n_layers=2)
    base = sources.alone(composed.case_of(mixture)[2]).outer
    steps.add(base, recorded(base, mixture))
    assert len(steps) == 0


def test_the_first_recorded_step_already_has_a_price(tmp_path):
    recipe, plan, question = composed.case_of(of_llama())
    traces = Traces(recipe, plan.shape, (), tmp_path / "traces")
    traces.recorded = steps_of({})
    assert traces.price(question) is not None
