"""Ways to fit, named with their numbers when no candidate does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import size
from launch.plan import candidates
from launch.plan import context as plan_context
from launch.plan.candidates import LaunchConstraints
from launch.plan.search import fastest
from launch.predict import parameters
from launch.predict.estimate import Judged, PlanContext, describe
from launch.predict.oom_history import CLEARLY_BELOW
from launch.schema.recipe import LoraSection, QuantizationSection

MAX_WAYS = 3  # offered where nothing fits; each may have to be traced


def does_not_fit_message(
    context: PlanContext,
    judged: Sequence[tuple[Judged, str]],
    refusals: Sequence[str],
    ways: Sequence[str] | None,
) -> str:
    shape, whole, recipe = context.shape, context.whole, context.recipe
    judged_by = "" if context.traces is not None else "By model states alone, "
    advice = (
        f". {judged_by}{'t' if judged_by else 'T'}his would fit: {'; '.join(ways)}"
        if ways
        else ". Use a smaller model (--model.shape=...)"
    )
    by_miss: dict[str | None, Judged] = {}  # of those that miss alike the first
    for one, _ in sorted(judged, key=lambda one: one[0].excess):
        by_miss.setdefault(one.misses, one)
    nearest = [f"{describe(one.candidate)}: {words}" for words, one in by_miss.items()][:3]
    exact = " with launch.exact_batch" if recipe.launch.exact_batch else ""
    return (
        f"{recipe.name}: {shape.name} ({shape.parameters:,} parameters,"
        f" {shape.trainable_parameters:,} trained) needs {size(whole.weights_bytes)} weights +"
        f" {size(whole.gradients_bytes)} gradients + {size(whole.optimizer_bytes)} optimizer before"
        f" any activation. Nothing fits{exact}. Nearest:"
        f" {'; '.join([*nearest, *refusals])}{'' if ways is None else advice}"
    )


def ways_to_fit(context: PlanContext, constraints: LaunchConstraints) -> Iterator[str]:
    """Flags with which a candidate fits, its bytes beside them; only what was computed to fit is
    offered."""
    recipe = context.recipe
    launch, model = recipe.launch, recipe.model
    places = [("", launch)]
    if launch.mode != "auto" and constraints.num_processes is None:
        places.append(("--launch.mode=auto ", launch.model_copy(update={"mode": "auto"})))
    free = [gpu.free_bytes for gpu in context.machine.gpus]
    is_uneven = (
        launch.num_processes is None and len(free) > 1 and min(free) < CLEARLY_BELOW * max(free)
    )
    if (
        ((launch.num_processes or 1) > 1 or is_uneven)
        and launch.nodes == 1
        and constraints.num_processes is None
    ):
        alone = launch.model_copy(update={"mode": "auto", "num_processes": 1})
        places.append(("--launch.mode=auto --launch.num_processes=1 ", alone))
    if launch.exact_batch:
        places.append(
            ("--launch.exact_batch=false ", launch.model_copy(update={"exact_batch": False}))
        )
    half = model.model_copy(update={"dtype": "bfloat16"})
    models = (
        [("", model), ("--model.dtype=bfloat16 ", half)]
        if model.dtype == "float32"
        else [("", model)]
    )
    lora_flag = "" if recipe.lora else "--lora.r=16 "
    adapters: list[tuple[str, LoraSection | None, QuantizationSection | None]]
    adapters = [("", recipe.lora, recipe.quantization)]
    if lora_flag:
        adapters.append((lora_flag, LoraSection(), None))
    if (
        recipe.quantization is None
        and context.shape.config["model_type"] in parameters.LORA_TARGETS
    ):
        four_bit = QuantizationSection(load_in_4bit=True)
        adapters.append(
            (
                f"{lora_flag}--quantization.load_in_4bit=true ",
                recipe.lora or LoraSection(),
                four_bit,
            )
        )
    offered = set()
    for states, section, lora, quantization, place_flag, place in (
        (adapter_flags + model_flag, section, lora, quantization, place_flag, place)
        for adapter_flags, lora, quantization in adapters
        for model_flag, section in models
        for place_flag, place in places
    ):
        # as it was typed; or it fits without another place
        if not states + place_flag or states in offered:
            continue
        update = {"model": section, "lora": lora, "quantization": quantization, "launch": place}
        variant = recipe.model_copy(update=update)
        other = plan_context.with_recipe(context, variant)
        try:
            possible, _ = candidates.possible(other, constraints)
        except (ConfigError, ResourceError):  # this machine cannot start it: no way out
            continue
        # of each the most frugal cut; a batch of one with its checkpointing settled has none
        frugal = (
            possible
            if other.traces is None
            else [[one, *candidates.cuts(other, one)][-1] for one in possible]
        )
        whole = [one for one in frugal if one.is_whole]
        chosen = fastest(other, whole, []) or fastest(
            other, [one for one in frugal if one not in whole], []
        )
        if chosen is not None:
            offered.add(states)
            yield (
                f"{states + place_flag}".strip()
                + f" ({chosen.candidate.mode}, {size(chosen.memory.device_bytes)})"
            )
