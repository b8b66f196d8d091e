"""MLPs that compute a part of the tokens at a time: the models that can, and what it saves at
most. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launch.predict import estimate, sharding
from launch.predict.estimate import WIDTH_NAMES, Judged
from launch.predict.facts import Facts
from launch.schema.levers import ROWS
from launch.schema.plan import Peak
from launch.schema.plan import Strategy as Candidate

# of a config: features inside an MLP
INNER_NAMES = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size")
# tensors of that width that forward and backward of one MLP hold at once, at most: GPT-2's
# activation function alone makes seven
INNER_TENSORS = 16
PARTS = ROWS["tiled_mlp_num_shards"]
LEAST_TOKENS = 1024  # of a part: a card computes smaller products at a lower rate


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
        or PARTS.asked(recipe) is not None
        or not candidate.levers.every_n_layers
        or (candidate.per_device_train_batch_size > 1 and not recipe.launch.exact_batch)
        or candidate.launch_mode.shards_parameters
        or PARTS.refusal(candidate.levers, facts.model.size.family)
    ):
        return None
    tokens = candidate.per_device_train_batch_size * max(facts.question(candidate).lengths)
    fitting = (count for count in reversed(PARTS.tried[1:]) if tokens // count >= LEAST_TOKENS)
    if (num_shards := next(fitting, None)) is None:
        return None
    element_bytes = sharding.computed_element_bytes(recipe.model, candidate)
    config = facts.model.size.config
    inner = tokens * inner_size(config) * element_bytes
    saved_bytes = int(INNER_TENSORS * inner * (1 - 1 / num_shards))
    if candidate.levers.every_n_layers == 1:  # all that an MLP makes is of the layer that computes
        made_bytes = _made_bytes(config, peak, tokens * element_bytes)
        saved_bytes = min(saved_bytes, made_bytes + untiled.memory.fragmentation_bytes)
    if estimate.missing_bytes(facts, untiled) > saved_bytes:
        return None
    return candidate.with_levers(tiled_mlp_num_shards=num_shards)


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
