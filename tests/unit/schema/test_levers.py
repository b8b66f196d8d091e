"""Every lever has a row, a module and a line in docs/kernels.md; each row agrees with itself."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from launch.schema import levers
from launch.schema.levers import LEVERS, PLAIN, ROWS, Around, Levers
from launch.schema.modes import LAUNCH_MODES
from launch.schema.plan import ForwardFacts, ModelFamily, Strategy
from launch.schema.recipe_keys import affected_by
from tests.builders import plan, recipe_of

ROOT = Path(__file__).resolve().parents[3]
LLAMA = ModelFamily("llama", forward=ForwardFacts("unchanged", tiles_mlp=True))
STRATEGY = replace(plan().strategy, levers=PLAIN)


def test_each_value_has_a_row():
    assert [row.name for row in LEVERS] == [each.name for each in fields(Levers)] == [*ROWS]


@pytest.mark.parametrize("row", LEVERS, ids=lambda row: row.name)
def test_a_row_agrees_with_itself(row):
    assert "planned" in affected_by(row.key) or row.name == "optim"
    assert not row.tried or row.tried[0] == row.plain
    assert all(row.same(value) for value in row.tried if value)
    assert [row.saved(value) for value in row.tried] == sorted(map(row.saved, row.tried))
    assert row.plain in (
        row.requested(recipe_of()),
        levers.requested(recipe_of()).__dict__[row.name],
    )
    if row.module:
        module = import_module(f"training.levers.{row.module}")
        assert hasattr(module, "apply")
    if row.tried:
        texts = {row.says(replace(PLAIN, **{row.name: value})) for value in row.tried}
        assert len(texts) == len(row.tried)


@pytest.mark.parametrize("row", LEVERS, ids=lambda row: row.name)
def test_the_page_of_kernels_names_its_class(row):
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    lines = [line for line in page.splitlines() if line.startswith("| `")]
    (line,) = (line for line in lines if f"{row.key}.".startswith(f"{line.split('`')[1]}."))
    assert line.endswith(f" {row.exactness} |")


@pytest.mark.parametrize(
    ("written", "is_read"),
    [
        ({"activation_checkpointing": False, "every_n_layers": 1}, PLAIN),
        ({"activation_checkpointing": False, "every_n_layers": 4}, PLAIN),
        ({"activation_checkpointing": True}, Levers(every_n_layers=1)),
        (
            {"activation_checkpointing": True, "every_n_layers": 2, "num_output_chunks": 8},
            Levers(every_n_layers=2, num_output_chunks=8),
        ),
    ],
)
def test_a_strategy_of_an_older_version_is_read(written, is_read):
    values = asdict(STRATEGY)
    del values["levers"]
    strategy = TypeAdapter(Strategy).validate_python({**values, **written})
    assert strategy == replace(STRATEGY, levers=is_read)
    assert TypeAdapter(Strategy).validate_python(asdict(strategy)) == strategy


def test_without_checkpointing_nothing_is_kept_on_the_host():
    on_host = Levers(every_n_layers=1, activation_offloading=True, num_output_chunks=8)
    assert on_host.without("every_n_layers") == Levers(num_output_chunks=8)
    assert on_host.without("num_output_chunks").activation_offloading


def test_one_that_saves_less_in_any_way_does_not_save_as_much():
    half = Levers(every_n_layers=2, tiled_mlp_num_shards=4)
    assert half.saves_as_much_as(half)
    assert replace(half, every_n_layers=1).saves_as_much_as(half)
    for less in ({"every_n_layers": 4}, {"every_n_layers": 0}, {"tiled_mlp_num_shards": 2}):
        assert not replace(half, **less).saves_as_much_as(half)


def test_the_keys_that_ask_for_values_are_those_of_a_recipe():
    chosen = Levers(every_n_layers=2, activation_offloading=True, num_output_chunks=8)
    keys = levers.typed(chosen)
    assert keys[levers.KWARGS] == {"every_n_layers": 2, "offload": True}
    training = {key.removeprefix("training."): value for key, value in keys.items()}
    asked = levers.requested(recipe_of(training=training))
    assert asked == chosen


def test_what_a_training_cannot_have_is_refused_by_the_key_that_asks_for_it():
    asks = recipe_of(training={"tiled_mlp_num_shards": 4, "torch_compile": True})
    (line,) = levers.refused(asks, LLAMA)
    assert line == (
        "training.tiled_mlp_num_shards: 4, but torch.compile compiles layers, of which this has not"
        " been tested; leave one out"
    )
    assert list(levers.refused(recipe_of(), LLAMA)) == []
    asks = recipe_of(training={"num_output_chunks": 4, "tiled_mlp_num_shards": 2})
    assert list(levers.refused(asks, LLAMA)) == []
    scaled = ModelFamily("cohere", forward=ForwardFacts("by position", tiles_mlp=False))
    assert [line.partition(" (")[0] for line in levers.refused(asks, scaled)] == [
        "training.tiled_mlp_num_shards: 2, but the model is a cohere, of which no part of the"
        " tokens can go through an MLP by itself",
        "training.num_output_chunks: 4, but the model is a cohere, whose forward pass computes with"
        " the logits, scales them or caps them, and so cannot return the loss of their parts",
    ]
    refuse = ROWS["tiled_mlp_num_shards"].mode_refusal
    refusing = {name for name, mode in LAUNCH_MODES.items() if refuse(mode, 2)}
    assert refusing == {"deepspeed_zero3", "deepspeed_zero3_offload", "fsdp2"}


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_layers_are_checkpointed_one_by_one_only_where_transformers_can(device):
    def tried(name: str, refusal: str | None) -> list[object]:
        around = Around(device, 4, 512, False, refusal)
        row = ROWS[name]
        return [value for value in row.tried if row.tries(value, Levers(every_n_layers=1), around)]

    assert tried("every_n_layers", None) == [0, 4, 2, 1]
    assert tried("every_n_layers", "it is old") == [0, 1]
    assert tried("activation_offloading", None) == ([False, True] if device == "cuda" else [])
    assert tried("activation_offloading", "it is old") == []
