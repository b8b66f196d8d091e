"""Models of any family with many layers: traced with few of them, the middle ones repeated, to the
byte as with all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from benchmarks.families import BART, FAMILIES, T5
from launch.schema.plan import ModelSize, Plan
from launch.schema.recipe import Recipe
from tests.modes.trace.test_trace import LENGTH, extends_to_the_whole_model, recipe_of
from training.trace import layer_stacks
from training.trace.model_parts import model_parts

LORA = {"lora": {"r": 8}}
TURNS = {"layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 5}  # of 15 layers
HALF = {"model": {"dtype": "bfloat16"}}


def planned(config: dict[str, Any], **sections: Any) -> tuple[Recipe, Plan]:
    """A recipe and a plan for a model of this config."""
    recipe, plan = recipe_of("llama-tiny", **sections)
    parts = model_parts(config)
    size = ModelSize("deep", config, 0, 0, family=parts.family)
    targets = parts.family.linear if recipe.lora else ()
    attention = "sdpa" if parts.family.forward.has_sdpa else "eager"
    strategy = plan.strategy.with_levers(attn_implementation=attention)
    return recipe, replace(plan, shape=size, lora_targets=targets, strategy=strategy)


def checkpointing(n: int = 1) -> dict[str, Any]:
    kwargs = {"activation_checkpointing_kwargs": {"every_n_layers": n}} if n > 1 else {}
    return {"training": {"activation_checkpointing": True, **kwargs}}


@pytest.mark.parametrize(
    ("family", "depth", "sections", "few"),
    [
        ("gemma", {"num_hidden_layers": 7}, checkpointing(), 4),
        ("gemma3", {"num_hidden_layers": 15, **TURNS}, LORA, 12),
        ("phi", {"num_hidden_layers": 7}, {}, 4),
        ("opt", {"num_hidden_layers": 7}, HALF, 4),
        ("gpt_neox", {"num_hidden_layers": 9}, checkpointing(2), 7),
        ("bloom", {"num_hidden_layers": 7}, {}, 4),
        ("falcon", {"num_hidden_layers": 7}, LORA, 4),
        ("mixtral", {"num_hidden_layers": 7}, {}, 4),
        ("qwen3_moe", {"num_hidden_layers": 7}, HALF | checkpointing(), 4),
        ("glm4", {"num_hidden_layers": 7}, LORA, 4),
        ("smollm3", {"num_hidden_layers": 18}, checkpointing(), 14),
        ("olmo3", {"num_hidden_layers": 15, **TURNS}, checkpointing(), 12),
    ],
)
def test_a_decoder_of_many_layers_is_one_of_few_with_more_of_the_middle(
    family, depth, sections, few, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = {**FAMILIES[family], **depth}
    recipe, plan = planned(config, **sections)
    period = plan.shape.family.layer_period * (plan.strategy.levers.every_n_layers or 1)
    found = layer_stacks.shallow(config, plan.shape.family.depth_keys, period)
    assert found is not None
    (key,) = plan.shape.family.depth_keys
    assert (found.config[key], found.layers) == (few, (depth["num_hidden_layers"],))
    extends_to_the_whole_model(recipe, plan)


@pytest.mark.parametrize(
    ("config", "keys"),
    [
        ({"model_type": "mt5", **T5, "num_layers": 6}, ("num_layers", "num_decoder_layers")),
        ({"model_type": "bart", **BART, "encoder_layers": 7}, ("encoder_layers", "decoder_layers")),
    ],
)
def test_an_encoder_and_a_decoder_of_other_depths_are_both_repeated(
    config, keys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    recipe, plan = planned({**config, keys[1]: 5})
    assert plan.shape.family.depth_keys == keys
    extends_to_the_whole_model(recipe, plan)


def test_layers_in_no_period_are_all_traced():
    kinds = ["full_attention", *["sliding_attention"] * 4, "full_attention", "sliding_attention"]
    config = {**FAMILIES["gemma3"], "num_hidden_layers": 7, "layer_types": kinds}
    family = model_parts(config).family
    assert (family.depth_keys, family.layer_period) == ((), 0)


def test_layer_types_of_a_counted_family_decide_the_unit():
    config = {**FAMILIES["qwen2"], "use_sliding_window": True, "sliding_window": LENGTH}
    few = layer_stacks.shallow(
        {**config, "num_hidden_layers": 15, **TURNS}, ("num_hidden_layers",), 1
    )
    assert few is not None and few.period == 3
    assert few.config["layer_types"] == TURNS["layer_types"][:12]
    # layers from max_window_layers on slide
    late = {**config, "num_hidden_layers": 15, "max_window_layers": 10}
    assert layer_stacks.shallow(late, ("num_hidden_layers",), 1) is None
