"""Relaxations of a recipe when nothing else fits, limited to its `allow:`. They change the training
result, unlike a plan."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from launch.predict import optimizers
from launch.predict.parameters import Shapes
from launch.predict.trained_parameters import trainable_shapes
from launch.schema.model_sections import LoraSection, QuantizationSection
from launch.schema.modes import LAUNCH_MODES, Mode
from launch.schema.plan import Change, ModelFamily
from launch.schema.recipe import Recipe

# optimizer -> the same one with states of 8 bits, then with such states in managed memory
_SMALLER_STATES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), ("adamw_8bit", "paged_adamw_8bit")),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), ("paged_adamw_8bit",)),
    "paged_adamw_32bit": ("paged_adamw_8bit",),
    "lion_32bit": ("lion_8bit", "paged_lion_8bit"),
    **dict.fromkeys(("lion_8bit", "paged_lion_32bit"), ("paged_lion_8bit",)),
}
_LEAST_R = 4
LEAST_LENGTH = 64
_LENGTH_SHARES = (0.75, 0.5, 0.375, 0.25)
REASON = "nothing else fits, and allow: says so; this changes the result"


def relaxations(
    recipe: Recipe,
    tensor_shapes: Shapes,
    family: ModelFamily,
    on_gpu: bool,
    mode: Mode | Literal["auto"],
) -> Iterator[tuple[Recipe, tuple[Change, ...]]]:
    """Yield recipes, each with more relaxed than the one before, and their changes so far: 4 bits,
    then lower ranks, then shorter rows. Each is followed by itself with smaller optimizer states,
    which engines that share states out cannot have."""
    lowered = _lowered(recipe, tensor_shapes, family)
    for relaxed, changes in itertools.chain([(recipe, ())], lowered):
        if changes:
            yield relaxed, changes
        for optim in smaller_states(recipe, mode) if on_gpu and "optimizer" in recipe.allow else ():
            training = relaxed.training.model_copy(update={"optim": optim})
            change = Change("training.optim", recipe.training.optim, optim, REASON)
            yield relaxed.model_copy(update={"training": training}), (change, *changes)


def smaller_states(recipe: Recipe, mode: Mode | Literal["auto"]) -> Sequence[str]:
    """The recipe's optimizer with smaller states; none in a mode that refuses it."""
    is_refused = mode != "auto" and "optimizers of whole tensors" in LAUNCH_MODES[mode].refuses
    return () if is_refused else _SMALLER_STATES.get(recipe.training.optim, ())


def _lowered(
    recipe: Recipe, tensor_shapes: Shapes, family: ModelFamily
) -> Iterator[tuple[Recipe, tuple[Change, ...]]]:
    given_up: dict[str, Change] = {}

    def lower(
        update: dict[str, Any], *changes: tuple[str, Any, Any]
    ) -> tuple[Recipe, tuple[Change, ...]]:
        nonlocal recipe
        recipe = recipe.model_copy(update=update)
        for key, before, after in changes:
            first = given_up[key].requested if key in given_up else str(before)
            given_up[key] = Change(key, first, str(after), REASON)
        return recipe, tuple(given_up.values())

    adapter = recipe.lora
    if (
        "quantization" in recipe.allow
        and adapter
        and not recipe.quantization
        and not optimizers.unquantizable(
            trainable_shapes(tensor_shapes, (), adapter, family), family
        )
    ):
        yield lower(
            {"quantization": QuantizationSection(load_in_4bit=True)},
            ("quantization.load_in_4bit", "false", "true"),
        )
    while "lora.r" in recipe.allow and adapter and adapter.r >= 2 * _LEAST_R:
        rank, alpha = adapter.r // 2, max(adapter.lora_alpha // 2, 1)  # the same lora_alpha / r
        halved = LoraSection(**{**adapter.model_dump(), "r": rank, "lora_alpha": alpha})
        yield lower(
            {"lora": halved},
            ("lora.r", adapter.r, rank),
            ("lora.lora_alpha", adapter.lora_alpha, alpha),
        )
        adapter = halved
    max_length = recipe.data.max_length
    for share in _LENGTH_SHARES if "data.max_length" in recipe.allow else ():
        shorter = int(max_length * share) // 8 * 8
        if shorter >= LEAST_LENGTH:
            data = recipe.data.model_copy(update={"max_length": shorter})
            yield lower({"data": data}, ("data.max_length", recipe.data.max_length, shorter))
