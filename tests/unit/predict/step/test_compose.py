"""Steps that are composed of recorded ones: event by event those that are recorded whole."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.metadata import version

import pytest

from benchmarks import composed
from launch.predict.models.model_families import COMMITTED
from launch.predict.step import sources
from launch.predict.step.compose import Composer
from launch.predict.step.recorded import NotComposed, Recorded
from launch.schema.recorded_step import BATCH, RecordedStep, dumped, loaded
from training.trace import step
from training.trace.cuda_semantics import Target

# of those that are composed; make composed has 300
TAKEN = (0, 1, 4, 6, 9, 11, 14)


@cache
def mixtures() -> list[composed.Mixture]:
    first = composed.mixtures(30)
    return [mixture for mixture in first if mixture.family not in ("t5", "mt5", "bart")]


@pytest.mark.parametrize("number", TAKEN)
def test_a_mixture_has_the_events_of_the_same_step_recorded_whole(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    row = composed.row_of(mixtures()[number])
    if version("transformers") in json.loads(COMMITTED.read_bytes())["transformers"]:
        assert composed.is_same(row), row
    else:  # rules are of one version: another one may have its casts in another order
        assert row["bytes"] == 0, row


def recorded(mixture: composed.Mixture, parts_apart: bool = False) -> RecordedStep:
    recipe, plan, question = composed.case_of(mixture)
    lengths = question.lengths
    return step.record(recipe, plan, lengths, True, BATCH, None, parts_apart=parts_apart)


def of_llama(**values: object) -> composed.Mixture:
    values = {"every_n_layers": 1, "parts": 1, "at_targets": True, "shards": 1, **values}
    own = {"seed": 0, "family": "llama (SmolLM)", "method": "lora", "precision": "autocast"}
    rows = {"mode": "cpu", "layers": 7, "rows": 4, "accumulation": 1, "is_padded": True}
    return composed.Mixture(**{**own, **rows, **values})  # pyright: ignore[reportArgumentType]


def test_a_file_has_all_of_a_recorded_step(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = recorded(of_llama(parts=4), parts_apart=True)
    text = dumped(own)
    assert loaded(text) == own
    for damaged in ("", text[:-1], text.replace("aten::mm", "aten::nm", 1), text[1:]):
        with pytest.raises(ValueError, match="another digest"):
            loaded(damaged)


def test_layers_in_turns_are_not_composed_of_ways_that_hand_on_other_blocks(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept, again = (Recorded(recorded(of_llama(every_n_layers=n))) for n in (0, 1))
    Composer(again, lambda layer: kept if layer[1] % 2 else again).log()
    made = kept.births["forward:0", (0, 1)]
    output = next(block for block in made if kept.reader(block) == "layer")
    kept.log.blocks[output].sample_bytes += 1
    with pytest.raises(NotComposed, match="make 1 and 0 blocks"):
        Composer(again, lambda layer: kept if layer[1] % 2 else again).log()


def test_inputs_on_their_way_to_the_host_are_freed_by_layers_behind(tmp_path, monkeypatch):
    """A layer waits for the copy of the one before the last."""
    monkeypatch.chdir(tmp_path)
    recipe, plan, question = composed.case_of(of_llama(mode="single_gpu", layers=9))
    strategy = question.strategy.with_levers(activation_offloading=True)
    target = Target(question.architecture)
    asked = recipe, replace(plan, strategy=strategy), question.lengths, True, BATCH, target
    few, expected = step.record(*asked), step.step(*asked)
    assert few.period == 1
    assert composed.difference(Composer(Recorded(few)).log(), expected) == ""


@pytest.mark.parametrize(
    ("values", "length", "why"),
    [
        ({"parts": 4, "at_targets": False}, 4, "logits in 4 parts"),
        ({"family": "t5", "every_n_layers": 2}, 64, "an encoder and a decoder"),
    ],
)
def test_what_is_not_composed_is_named(values, length, why):
    question = replace(composed.case_of(of_llama(**values))[2], lengths=(length, length))
    has_encoder = values.get("family") == "t5"
    assert why in sources.choose_sources(question, has_encoder, lambda base: False).why_whole


def test_of_records_that_are_there_none_is_made_again():
    question = composed.case_of(of_llama(every_n_layers=3))[2]
    at_once = sources.choose_sources(question, False, lambda base: False)
    assert at_once.inner is not None
    assert not at_once.inner.parts_apart
    in_parts = sources.choose_sources(question, False, lambda base: base.parts_apart)
    assert in_parts.inner is not None
    assert in_parts.inner.parts_apart
