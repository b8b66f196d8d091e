"""Flags with which a recipe would fit, with their bytes, offered when no candidate fits."""

import itertools
from collections.abc import Iterator, Sequence

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import duration, size
from launch.plan import candidates
from launch.plan import facts as plan_facts
from launch.plan.relax import smaller_states
from launch.plan.search import fastest
from launch.predict import budgets, optimizers
from launch.predict.estimate import Judged, describe
from launch.predict.facts import Facts
from launch.predict.trained_parameters import trainable_shapes
from launch.schema import levers
from launch.schema.machine import GIB, Machine
from launch.schema.model_sections import LoraSection, QuantizationSection
from launch.schema.recipe import Recipe

MAX_WAYS = 3  # each may have to be traced
_TENTH = GIB // 10


def does_not_fit_message(
    facts: Facts,
    judged: Sequence[tuple[Judged, str]],
    refusals: Sequence[str],
    ways: Sequence[str] | None,
) -> str:
    """The refusal of a recipe: a line for the nearest candidate of each mode, then the ways out."""
    model, states, recipe = facts.model.size, facts.model.full_copy, facts.recipe
    of_mode: dict[str, Judged] = {}  # the nearest
    losers = sorted((loser for loser, _ in judged), key=lambda loser: loser.excess)
    for loser in losers:
        of_mode.setdefault(loser.candidate.mode, loser)
    nearest = []
    for loser in [*of_mode.values()][:3]:
        lacking, memory = shortage(recipe, facts.machine, loser)
        short = f"short by {size(lacking)} {memory}: " if lacking else ""
        nearest.append(f"  {describe(loser.candidate)}: {short}{loser.misses}")
    on_cards = any(loser.candidate.processes_per_machine > 1 for loser in losers)
    fullest = candidates.without_fullest(facts.machine.gpus) if on_cards else ""
    exact = " with launch.exact_batch" if recipe.launch.exact_batch else ""
    advice = ["Use a smaller model (--model.shape=...)"] if ways is not None else []
    if ways:
        judged_by = "By model states alone, this" if facts.traces is None else "This"
        advice = [f"{judged_by} would fit:", *(f"  {way}" for way in ways)]
    lines = [
        f"{recipe.name}: {model.name} ({model.parameters:,} parameters,"
        f" {model.trainable_parameters:,} trained) needs {size(states.weights_bytes)} weights +"
        f" {size(states.gradients_bytes)} gradients + {size(states.optimizer_bytes)} optimizer"
        f" before any activation. Nothing fits{exact}. Nearest:",
        *nearest,
        *(f"  {line}" for line in refusals if candidates.CANNOT_RUN in line),
        *advice,
        *filter(None, [fullest]),
    ]
    return "\n".join(lines)


def shortage(recipe: Recipe, machine: Machine, loser: Judged) -> tuple[int, str]:
    """The bytes that a candidate misses a budget by, and which; 0 if it ran out of memory
    before."""
    on_device = loser.memory.device_bytes - loser.budget_bytes
    if on_device > 0 and loser.candidate.device == "cuda":
        return on_device, "on the card"
    return max(_host_shortage(recipe, machine, loser), 0), "of host RAM"


def _host_shortage(recipe: Recipe, machine: Machine, loser: Judged) -> int:
    budget = budgets.host_budget_bytes(recipe, machine)
    return budgets.host_bytes(loser.candidate, loser.memory) - budget


def smaller_reserve(facts: Facts, judged: Sequence[Judged]) -> Iterator[str]:
    """Yield a launch.host_reserve_gib with which a candidate fits, if the nearest that lacks host
    RAM alone needs no more than the guard of host RAM lets it take."""
    recipe, machine = facts.recipe, facts.machine
    # The limit applies with any reserve
    if machine.host_available_reason.startswith(budgets.LIMIT):
        return
    launch, budget = recipe.launch, budgets.host_budget_bytes(recipe, machine)
    reserve = machine.host_available_bytes - budget
    guarded = int((1 - (launch.host_stop_fraction or 1)) * machine.host_limit_bytes)
    on_host = [each for each in judged if each.memory.device_bytes <= each.budget_bytes]
    for loser in sorted(on_host, key=lambda each: each.excess)[:1]:
        smaller = (reserve - _host_shortage(recipe, machine, loser)) // _TENTH * _TENTH
        if not max(guarded, _TENTH) <= smaller < reserve:
            continue
        gib = round(smaller / GIB, 1)
        place = launch.model_copy(update={"host_reserve_gib": gib})
        chosen = _most_frugal_fit(facts, recipe.model_copy(update={"launch": place}))
        if chosen is not None:
            needed = size(budgets.host_bytes(chosen.candidate, chosen.memory))
            yield f"--launch.host_reserve_gib={gib} {_costs(chosen, f'{needed} of host RAM')}"


def ways_to_fit(facts: Facts, with_other_adapters: bool = True) -> Iterator[str]:
    """Yield flags with which a candidate fits, and its bytes; each was computed to fit.
    `with_other_adapters`: LoRA and QLoRA, where the recipe has none, are among them."""
    recipe = facts.recipe
    launch, model = recipe.launch, recipe.model
    if typed := _typed_levers(recipe):
        others = recipe.training.model_dump(exclude_unset=True, exclude={*typed})
        opened = recipe.model_copy(update={"training": type(recipe.training)(**others)})
        if (chosen := _most_frugal_fit(facts, opened)) is not None:
            dotted = " ".join(f"training.{name}" for name in typed)
            yield f"without {dotted} {_costs(chosen)}"
    starts_here = facts.wishes.num_processes is None
    several = starts_here and launch.nodes == 1 and (launch.num_processes or 1) > 1
    on_one = "--launch.mode=auto --launch.num_processes=1 "
    places = [
        (flags, launch.model_copy(update=update))
        for flags, update, helps in (
            ("", {}, True),
            ("--launch.mode=auto ", {"mode": "auto"}, launch.mode != "auto" and starts_here),
            (on_one, {"mode": "auto", "num_processes": 1}, several),
            ("--launch.exact_batch=false ", {"exact_batch": False}, launch.exact_batch),
        )
        if helps
    ]
    models = [("", model)]
    if model.dtype == "float32":
        models.append(("--model.dtype=bfloat16 ", model.model_copy(update={"dtype": "bfloat16"})))
    adapters = [("", recipe.lora, recipe.quantization)]
    if with_other_adapters:
        adapters += _other_adapters(facts)
    # Optimizers count where all weights are trained: the states of an adapter are small
    optims = [("", recipe.training)]
    on_gpu = bool(facts.machine.gpus) and launch.device != "cpu"
    if on_gpu and (names := smaller_states(recipe, launch.mode)):
        training = recipe.training.model_copy(update={"optim": names[0]})
        optims.append((f"--training.optim={names[0]} ", training))
    ways = itertools.product(adapters, models, optims)
    for (adapter_flags, adapter, quantization), (model_flag, section), (optim_flag, training) in (
        way for way in ways if not (way[0][1] and way[2][0])
    ):
        for place_flag, place in places:
            flags = adapter_flags + model_flag + optim_flag + place_flag
            update = {
                **{"model": section, "lora": adapter, "quantization": quantization},
                **{"training": training, "launch": place},
            }
            other = recipe.model_copy(update=update)
            chosen = _most_frugal_fit(facts, other) if flags else None
            if chosen is not None:
                yield f"{flags.strip()} {_costs(chosen)}"
                break  # these states fit; another place adds nothing


def _typed_levers(recipe: Recipe) -> list[str]:
    """The keys of training that name a lever's value, and not the one that saves the most."""
    asked = [(row, row.requested(recipe)) for row in levers.LEVERS if row.tried]
    saving_less = {
        row.key.removeprefix("training.")
        for row, value in asked
        if value is not None and (row.tried_around or row.saved(value) < row.saved(row.tried[-1]))
    }
    return sorted(saving_less & recipe.training.model_fields_set)


def _costs(chosen: Judged, memory: str = "") -> str:
    """The mode, bytes and seconds of a candidate that fits; the plan is no slower."""
    seconds = f", at most {duration(chosen.seconds)} a step" if chosen.seconds else ""
    return f"({chosen.candidate.mode}, {memory or size(chosen.memory.device_bytes)}{seconds})"


def _other_adapters(
    facts: Facts,
) -> Iterator[tuple[str, LoraSection, QuantizationSection | None]]:
    """Yield flags, and the sections that they make, of adapters that take less."""
    recipe, family = facts.recipe, facts.model.size.family
    lora, lora_flag = recipe.lora or LoraSection(), "" if recipe.lora else "--lora.r=16 "
    if lora_flag:
        yield lora_flag, lora, None
    trainable = trainable_shapes(facts.model.parameters, (), lora, family)
    if recipe.quantization is None and not optimizers.unquantizable(trainable, family):
        four_bit = QuantizationSection(load_in_4bit=True)
        yield f"{lora_flag}--quantization.load_in_4bit=true ", lora, four_bit


def _most_frugal_fit(facts: Facts, recipe: Recipe) -> Judged | None:
    """The fastest candidate that fits in the smallest split of each, with what saves most on the
    device; full copies come first."""
    facts = plan_facts.with_recipe(facts, recipe)
    try:
        possible, _ = candidates.possible(facts)
    except (ConfigError, ResourceError):  # this machine cannot start it
        return None
    if facts.traces is not None:
        smallest = [candidates.smallest_split(facts, each) for each in possible]
        frugal = [candidates.most_frugal(facts, each) for each in smallest]
        # the search turns on itself what costs RAM of the host
        possible = [
            each.with_levers(
                activation_offloading=least.levers.activation_offloading,
                streamed_layers=least.levers.streamed_layers,
            )
            for each, least in zip(frugal, smallest, strict=True)
        ]
    return fastest(facts, possible, [])
