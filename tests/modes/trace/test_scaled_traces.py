"""Traces of long rows in proportion to a trace of short rows, beside traces of the rows
themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.plan import candidates, fit
from launch.plan import facts as plan_facts
from launch.predict import estimate
from launch.predict.models import model_config
from launch.predict.scaled_traces import ScaledTraces
from launch.predict.traces import Traces
from launch.probe import described
from tests import builders

TRACES = Path(builders.TRACES["LOWMEM_TRACES"])


LENGTH = 2048


@pytest.mark.parametrize(
    ("card", "shape", "method"),
    [
        pytest.param("RTX 4090", "minigpt-medium", "full", marks=pytest.mark.campaign),
        ("RTX 4090", "minigpt-medium", "qlora"),
        ("T4", "qwen2.5-0.5b", "lora"),  # no fused attention of grouped heads: layers store scores
    ],
)
def test_a_scaled_trace_predicts_what_a_trace_of_that_length_does(card, shape, method):
    recipe = fit.recipe_of(shape, method, LENGTH, half=False)
    config, parameters, family = model_config.read(
        recipe.model, root=builders.CODE, cache=builders.CACHE
    )
    machine = described.from_words(card, 1, 64)
    facts = plan_facts.build(recipe, machine, config, parameters, family, fit.ANY_FORMAT)
    facts = builders.changed(facts, rows=plan_facts.of_length(facts.rows, recipe.data, LENGTH))
    possible, _ = candidates.possible(facts)
    alone = next(each for each in possible if each.mode == "single_gpu")
    frugal = alone.with_levers(every_n_layers=1, num_output_chunks=8)
    judged = []
    for kind in (ScaledTraces, Traces):
        traces = kind(recipe, facts.model.size, facts.model.lora_targets, TRACES)
        with_traces = builders.changed(facts, traces=traces)
        with with_traces.asking():
            with_traces.fetch([alone, frugal])
            assert traces.failure is None
            judged.append([estimate.judge(with_traces, each) for each in (alone, frugal)])
    for scaled, traced in zip(*judged, strict=True):
        assert traced.memory.peak is not None
        assert traced.time is not None
        assert scaled.memory.device_bytes == pytest.approx(traced.memory.device_bytes, rel=0.01)
        assert scaled.seconds == pytest.approx(traced.seconds, rel=0.02)
