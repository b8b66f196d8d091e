"""MLPs that compute a part of the tokens at a time: the models that can, and what it saves at
most. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launch.base.errors import ConfigError
from launch.predict import estimate, sharding
from launch.predict.estimate import WIDTH_NAMES, Judged
from launch.predict.facts import Facts
from launch.schema.plan import Peak
from launch.schema.plan import Strategy as Candidate
from launch.schema.recipe import Recipe

# The MLPs of their layers are modules that make a token's output of the token's input alone:
# tests/modes/compat/test_tiled_families.py compares each with the MLP of all tokens at once.
TILED = (
    *("apertus", "arcee", "bitnet", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "llama", "longt5"),
    *("mistral", "mt5", "nemotron", "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3"),
    *("qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "t5", "umt5"),
)
# of a config: features inside an MLP
INNER_NAMES = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size")
# tensors of that width that forward and backward of one MLP hold at once, at most: GPT-2's
# activation function alone makes seven
INNER_TENSORS = 16
# Parts where the plan decides. More save little: then attention takes as much as an MLP.
NUM_SHARDS = (8, 4, 2)
LEAST_TOKENS = 1024  # of a part: a card computes smaller products at a lower rate


def check(recipe: Recipe, model_type: str) -> None:
    """Raise ConfigError for parts that this training cannot have."""
    asked = recipe.training.tiled_mlp_num_shards
    reason = refusal(recipe, model_type)
    if (asked or 1) > 1 and reason:
        raise ConfigError(f"training.tiled_mlp_num_shards: {asked}, but {reason}")


def refusal(recipe: Recipe, model_type: str) -> str | None:
    """The reason why MLPs cannot compute in parts, or None."""
    if model_type not in TILED:
        return (
            f"the model is a {model_type}, of which no part of the tokens can go through an MLP by"
            f" itself (a mixture of experts, or an MLP that is no module); it works for"
            f" {', '.join(TILED)}"
        )
    if recipe.training.compiles:
        return "torch.compile would compile each part; leave one out"
    return None


def tiled(facts: Facts, untiled: Judged) -> Candidate | None:
    """The candidate with MLPs in parts; None where the recipe or the model does not allow it, and
    where it cannot help: rows are short, a smaller micro-batch is left to try, or another part of a
    step takes more than that saves."""
    candidate, recipe = untiled.candidate, facts.recipe
    peak = untiled.memory.peak
    if (
        peak is None
        or peak.section not in ("forward", "backward")
        or peak.parts.get("logits")  # at which no MLP computes
        or recipe.training.tiled_mlp_num_shards is not None
        or not candidate.activation_checkpointing
        or (candidate.per_device_train_batch_size > 1 and not recipe.launch.exact_batch)
        or candidate.launch_mode.shards_parameters
        or refusal(recipe, facts.model.size.config["model_type"])
    ):
        return None
    tokens = candidate.per_device_train_batch_size * max(facts.question(candidate).lengths)
    fitting = (count for count in NUM_SHARDS if tokens // count >= LEAST_TOKENS)
    if (num_shards := next(fitting, None)) is None:
        return None
    element_bytes = sharding.computed_element_bytes(recipe.model, candidate)
    config = facts.model.size.config
    inner = tokens * inner_size(config) * element_bytes
    saved_bytes = int(INNER_TENSORS * inner * (1 - 1 / num_shards))
    if candidate.every_n_layers == 1:  # all that an MLP makes is of the layer that computes
        made_bytes = _made_bytes(config, peak, tokens * element_bytes)
        saved_bytes = min(saved_bytes, made_bytes + untiled.memory.fragmentation_bytes)
    if estimate.missing_bytes(facts, untiled) > saved_bytes:
        return None
    return replace(candidate, tiled_mlp_num_shards=num_shards)


def _made_bytes(config: Mapping[str, Any], peak: Peak, feature_bytes: int) -> int:
    """The most that a checkpointed layer's MLP makes at the peak, of all that the layer has made:
    in backward, what it keeps outside the MLP is there too."""
    made_bytes = peak.parts.get("temporaries", 0)
    if peak.section == "backward":
        tensors = estimate.KEPT_TENSORS_A_LAYER - estimate.INSIDE_MLP
        made_bytes -= tensors * _width(config) * feature_bytes
    return made_bytes


def inner_size(config: Mapping[str, Any]) -> int:
    """The features inside an MLP of a config."""
    inner = (config[name] for name in INNER_NAMES if config.get(name))
    return next(inner, 4 * _width(config))


def _width(config: Mapping[str, Any]) -> int:
    return next((config[name] for name in WIDTH_NAMES if config.get(name)), 0)
