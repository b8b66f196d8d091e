"""Ways in which a recipe would fit when no candidate does: relaxations that its `allow:` permits,
which change the training result, unlike a plan; and flags that are offered, with their bytes."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import duration, size
from launch.plan import candidates
from launch.plan import facts as plan_facts
from launch.plan.search import fastest
from launch.predict import budgets, optimizers
from launch.predict.estimate import Judged, describe
from launch.predict.facts import Facts
from launch.predict.parameters import Shapes
from launch.predict.trained_parameters import trainable_shapes
from launch.schema import levers
from launch.schema.machine import GIB, Machine
from launch.schema.model_sections import LoraSection, QuantizationSection
from launch.schema.modes import LAUNCH_MODES, Mode
from launch.schema.plan import Change, ModelFamily
from launch.schema.recipe import Recipe
from launch.schema.run_sections import LaunchSection

MAX_WAYS = 3  # each may have to be traced
_TENTH = GIB // 10
# optimizer -> the same one with states of 8 bits, then with such states in managed memory
_SMALLER_STATES = {
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), ("adamw_8bit", "paged_adamw_8bit")),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), ("paged_adamw_8bit",)),
    "paged_adamw_32bit": ("paged_adamw_8bit",),
    "lion_32bit": ("lion_8bit", "paged_lion_8bit"),
    **dict.fromkeys(("lion_8bit", "paged_lion_32bit"), ("paged_lion_8bit",)),
}
_LEAST_R = 4
_LEAST_LENGTH = 64
_LENGTH_SHARES = (0.75, 0.5, 0.375, 0.25)
_RELAXED = "nothing else fits, and allow: says so; this changes the result"


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
    return "\n".join(
        [
            f"{recipe.name}: {model.name} ({model.parameters:,} parameters,"
            f" {model.trainable_parameters:,} trained) needs {size(states.weights_bytes)} weights +"
            f" {size(states.gradients_bytes)} gradients + {size(states.optimizer_bytes)} optimizer"
            f" before any activation. Nothing fits{exact}. Nearest:",
            *nearest,
            *(f"  {line}" for line in refusals if candidates.CANNOT_RUN in line),
            *advice,
            *filter(None, [fullest]),
        ]
    )


def shortage(recipe: Recipe, machine: Machine, loser: Judged) -> tuple[int, str]:
    """The bytes that a candidate misses a budget by, and which; 0 if it ran out of memory
    before."""
    on_device = loser.memory.device_bytes - loser.budget_bytes
    if on_device > 0 and loser.candidate.device == "cuda":
        return on_device, "on the card"
    return max(_host_shortage(recipe, machine, loser), 0), "of host RAM"


def _host_shortage(recipe: Recipe, machine: Machine, loser: Judged) -> int:
    return budgets.host_bytes(loser.candidate, loser.memory) - budgets.host_budget_bytes(
        recipe, machine
    )


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
    models = [("", model)]
    if model.dtype == "float32":
        models.append(("--model.dtype=bfloat16 ", model.model_copy(update={"dtype": "bfloat16"})))
    adapters = [("", recipe.lora, recipe.quantization)]
    if with_other_adapters:
        adapters += _other_adapters(facts)
    # Optimizers count where all weights are trained: the states of an adapter are small
    optims = [("", recipe.training)]
    on_gpu = bool(facts.machine.gpus) and launch.device != "cpu"
    if on_gpu and (names := _smaller_states(recipe, launch.mode)):
        training = recipe.training.model_copy(update={"optim": names[0]})
        optims.append((f"--training.optim={names[0]} ", training))
    for (adapter_flags, adapter, quantization), (model_flag, section), (optim_flag, training) in (
        way for way in itertools.product(adapters, models, optims) if not (way[0][1] and way[2][0])
    ):
        for place_flag, place in _places(facts):
            flags = adapter_flags + model_flag + optim_flag + place_flag
            update = {
                **{"model": section, "lora": adapter, "quantization": quantization},
                **{"training": training, "launch": place},
            }
            chosen = _most_frugal_fit(facts, recipe.model_copy(update=update)) if flags else None
            if chosen is not None:
                yield f"{flags.strip()} {_costs(chosen)}"
                break  # these states fit; another place adds nothing


def _places(facts: Facts) -> list[tuple[str, LaunchSection]]:
    """Flags with which a plan may be made elsewhere, and the section `launch` with them."""
    launch, starts_here = facts.recipe.launch, facts.wishes.num_processes is None
    several = starts_here and launch.nodes == 1 and (launch.num_processes or 1) > 1
    return [
        (flags, launch.model_copy(update=update))
        for flags, update, helps in (
            ("", {}, True),
            ("--launch.mode=auto ", {"mode": "auto"}, launch.mode != "auto" and starts_here),
            (
                "--launch.mode=auto --launch.num_processes=1 ",
                {"mode": "auto", "num_processes": 1},
                several,
            ),
            ("--launch.exact_batch=false ", {"exact_batch": False}, launch.exact_batch),
        )
        if helps
    ]


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
        yield (
            f"{lora_flag}--quantization.load_in_4bit=true ",
            lora,
            QuantizationSection(load_in_4bit=True),
        )


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
    return fastest(facts, possible)[0]


# ---- relaxations


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
    for relaxed, changes in itertools.chain(
        [(recipe, ())], _lowered(recipe, tensor_shapes, family)
    ):
        if changes:
            yield relaxed, changes
        for optim in (
            _smaller_states(recipe, mode) if on_gpu and "optimizer" in recipe.allow else ()
        ):
            training = relaxed.training.model_copy(update={"optim": optim})
            change = Change("training.optim", recipe.training.optim, optim, _RELAXED)
            yield relaxed.model_copy(update={"training": training}), (change, *changes)


def _smaller_states(recipe: Recipe, mode: Mode | Literal["auto"]) -> Sequence[str]:
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
            given_up[key] = Change(key, first, str(after), _RELAXED)
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
        if shorter >= _LEAST_LENGTH:
            data = recipe.data.model_copy(update={"max_length": shorter})
            yield lower({"data": data}, ("data.max_length", recipe.data.max_length, shorter))
