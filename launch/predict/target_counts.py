"""Positions with a target: where the output head computes logits for these alone, and how many of
them a micro-batch has. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from launch.schema.recipe import Recipe

# Their forward gives the output head's result on, position by position:
# tests/modes/compat/test_target_families.py compares each with the logits of all positions.
AT_TARGETS = (
    *("apertus", "arcee", "bart", "biogpt", "bitnet", "blenderbot", "bloom", "codegen"),
    *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm"),
    *("glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite"),
    *("granitemoe", "helium", "hunyuan_v1_dense", "llama", "longt5", "mbart", "minimax"),
    *("mistral", "mixtral", "mpt", "mt5", "nemotron", "olmo", "olmo2", "olmo3", "olmoe"),
    *("opt", "pegasus", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    *("switch_transformers", "t5", "umt5", "xglm"),
)


@dataclass(frozen=True)
class MostTargets:
    """The most targets of any micro-batch of some rows, whatever their order.

    `largest` are the most targets of a row, in descending order; (): not known, so that every
    position may have a target."""

    length: int  # positions of a row
    largest: tuple[int, ...] = ()
    parts: int = 1  # in which the head makes logits one after another

    @property
    def is_known(self) -> bool:
        return bool(self.largest)

    def of(self, num_samples: int) -> int:
        """Targets of a micro-batch of so many rows, at most."""
        positions = num_samples * self.length
        if not self.largest:
            return positions
        others = max(num_samples - len(self.largest), 0) * self.largest[-1]
        # of a micro-batch without a target one position is computed
        return max(min(sum(self.largest[:num_samples]) + others, positions), 1)

    def of_part(self, num_samples: int) -> int:
        """Positions of a part of the logits, at most."""
        return math.ceil(self.of(num_samples) / self.parts)


NO_TARGETS = MostTargets(0)


def at_targets(recipe: Recipe, model_type: str) -> bool:
    """True if logits are computed at positions with a target alone: as the recipe says, or unless
    there is a reason against it."""
    asked = recipe.training.logits_at_targets
    return no_logits_at_targets(recipe, model_type) is None if asked is None else asked


def no_logits_at_targets(recipe: Recipe, model_type: str) -> str | None:
    """The reason why the plan computes the logits of every position; None: it does not."""
    if model_type not in AT_TARGETS:
        return f"not tested with a {model_type}"
    if recipe.training.compiles:
        return "torch.compile would compile anew for each number of targets"
    if recipe.task == "pretrain" and recipe.data.packing:
        return "every position of packed texts has a target"
    return None


def vary(counts: Mapping[str, Any] | None) -> bool:
    """True if one micro-batch may have more targets than another with as many positions. `counts`
    are those of tokenising."""
    return counts is None or counts["target_tokens"] < counts["rows"] * counts["most_targets"][0]
