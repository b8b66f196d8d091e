"""Which way to run a recipe on a machine: of all candidates the fastest that fits, and why the others do not.

Pure, but for the traces it asks for: values in, a Plan out. A user's batch is obeyed where it fits; else it is split at
the same effective batch, and the plan says so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from launch import candidates, estimate, predict, reasons
from launch.candidates import AS_ASKED, CHUNKED, Given
from launch.errors import ConfigError, DoesNotFit, ResourceError
from launch.estimate import CLEARLY_BELOW, Judged, Subject, describe, gib
from launch.schema import (
    Change,
    DataFormat,
    LaunchSection,
    LoraSection,
    Machine,
    ModelShape,
    Plan,
    QuantizationSection,
    Recipe,
    Rendezvous,
)
from launch.schema import Strategy as Candidate

TABLE_ROWS = 10
MAX_WAYS = 3  # offered where nothing fits; each may have to be traced
AS_FAST = 1.05  # predicted seconds that differ by less are not told apart
MUCH_SLOWER = 1.25  # times the quickest that was looked at, whether that fits or not


def model_shape(recipe: Recipe, config: dict[str, Any], parameters: predict.Shapes) -> ModelShape:
    """The model of a recipe, counted."""
    total, trainable, lora = predict.count(parameters, recipe.model.freeze, recipe.lora, config["model_type"])
    return ModelShape(recipe.model.shape or str(recipe.model.path), config, total, trainable, lora)


def subject(
    recipe: Recipe, machine: Machine, config: dict[str, Any], parameters: predict.Shapes, data_format: DataFormat
) -> Subject:
    """What all candidates have in common. Raises ConfigError for what no candidate can be."""
    model_type = config["model_type"]
    _check_length(recipe, config)
    _check_packing(recipe, model_type)
    _check_chunks(recipe, model_type)
    shape = model_shape(recipe, config, parameters)
    whole = predict.model_state(
        parameters,
        recipe.model.freeze,
        recipe.lora,
        model_type,
        recipe.training.optim,
        recipe.model.dtype,
        recipe.quantized(candidates.asked_precision(recipe)),
    )
    targets = _lora_targets(recipe, model_type, parameters)
    return Subject(recipe, machine, shape, parameters, whole, data_format, targets)


def choose(about: Subject, changes: Sequence[Change] = (), given: Given = AS_ASKED, rows: int | None = None) -> Plan:
    """The fastest candidate that fits. Raises DoesNotFit with the nearest misses, ConfigError for what cannot be."""
    about = replace(about, link=given.link, exceeded=given.exceeded, assume_fits=given.assume_fits)
    with about.asking():
        return _chosen(about, changes, given, rows)


def _chosen(about: Subject, changes: Sequence[Change], given: Given, rows: int | None) -> Plan:
    recipe = about.recipe
    possible, refusals = candidates.possible(about, given)
    judged: list[tuple[Judged, str]] = []
    chosen = _search(about, possible, given, judged)
    softer = ({"below": CLEARLY_BELOW}, {"is_last": False}, {"fewer_is_less": True})
    for change in softer if about.exceeded.ran_out else ():
        exceeded = replace(about.exceeded, **change)
        if chosen is None and exceeded != about.exceeded:
            about = replace(about, exceeded=exceeded)
            judged.clear()
            chosen = _search(about, possible, given, judged)
    if chosen is None:
        ways = list(islice(_ways(about, given), MAX_WAYS)) if given.offers_ways else None
        raise DoesNotFit(_does_not_fit(about, judged, refusals, ways))
    lost = (
        f"{one.candidate.mode} with {one.candidate.num_processes} process(es): {one.misses}"
        for one, _ in judged
        if one.misses and one.memory.peak is None
    )
    candidate = chosen.candidate
    return Plan(
        recipe_name=recipe.name,
        strategy=candidate,
        shape=about.shape,
        data_format=about.data_format,
        estimate=chosen.memory,
        budget_bytes=chosen.budget_bytes,
        rows=rows if rows is None else min(rows, recipe.data.max_train_samples or rows),
        lora_targets=about.lora_targets,
        why=reasons.why(about, chosen, given),
        switches=reasons.switches(about, candidate, given),
        changes=(*changes, *reasons.changes(about, candidate, judged, given)),
        rejected=(*refusals, *dict.fromkeys(lost)),
        table=tuple(estimate.table(_sorted(judged))) if chosen.memory.peak else (),
        step_s=chosen.time.step_s if chosen.time else None,
        lengths=about.question(candidate).lengths,
        rendezvous=_rendezvous(recipe.launch),
        link=given.link if candidate.device == "cuda" and candidate.processes_per_machine > 1 else None,
        packing=recipe.data.packing,
        by_tokens=recipe.data.batch_by_tokens,
        padding=about.padding(candidate),
        base_fingerprint=about.base_fingerprint,
        allocator_fraction=_allocator_fraction(recipe.launch),
    )


def _allocator_fraction(launch: LaunchSection) -> float:
    """A share that the recipe names binds the ranks too. The default binds planning only: what it leaves free is for a
    prediction that is too low. Only planning can tell them apart: a run's recipe.json has every default in it."""
    return launch.vram_fraction if "vram_fraction" in launch.model_fields_set else 1.0


def _behind(one: Judged, chosen: Judged) -> str:
    if not (one.time and chosen.time):
        return "comes later"
    ratio = one.seconds / chosen.seconds
    return f"slower: {ratio:.2f} x" if ratio > 1 else f"not clearly faster: {ratio:.2f} x"


def _search(
    about: Subject, possible: Sequence[Candidate], given: Given, judged: list[tuple[Judged, str]]
) -> Judged | None:
    """What the first wave with one that fits chooses; where whole copies fit in much slower pieces only, the faster of
    that and of copies shared out."""
    for wave in candidates.wanted(about, possible, given):
        chosen = _fastest(about, wave, judged, given.free_batch)
        if chosen is not None:
            break
    else:
        return None
    shared = candidates.shared_cuts(about, possible, given)
    quickest = min(one.seconds for one, _ in judged if one.time) if chosen.time else 0.0
    if not chosen.candidate.is_whole or chosen.seconds <= MUCH_SLOWER * quickest or not shared:
        return chosen
    others: list[tuple[Judged, str]] = []
    other = _fastest(about, shared, others, given.free_batch)
    best = other if other is not None and other.seconds * AS_FAST < chosen.seconds else chosen
    known = [*judged, *others]
    judged[:] = [
        (one, words if one.misses else "chosen" if one is best else _behind(one, best)) for one, words in known
    ]
    return best


def _fastest(
    about: Subject, wanted: Sequence[Candidate], judged: list[tuple[Judged, str]], is_free: bool = False
) -> Judged | None:
    """The fastest of these that fits; all are added to `judged` with why they won or lost.

    Where no time is predicted the order given counts. The allocator is replayed for those that may win only. Of those
    as fast as can be told apart the first of the order given wins, which is nearest to what was asked for; where any
    batch will do (`is_free`), one without checkpointing and chunks."""
    lost = {at: found for at, one in enumerate(wanted) if (found := estimate.hopeless(about, _evaluated(about, one)))}
    about.fetch(one for at, one in enumerate(wanted) if at not in lost)
    rough = [
        lost.get(at) or estimate.judge(about, _with_fewer_workers(about, _evaluated(about, one)), exact=False)
        for at, one in enumerate(wanted)
    ]
    order = sorted(range(len(rough)), key=lambda at: (rough[at].time is None, rough[at].seconds, at))
    fitting = [at for at in order if rough[at].misses is None]
    if fitting:
        near = [at for at in fitting if rough[at].seconds <= rough[fitting[0]].seconds * AS_FAST]
        if is_free:
            near.sort(key=lambda at: (_is_indirect(rough[at].candidate), rough[at].seconds))
        else:
            near.sort()
        order = [*near, *(at for at in order if at not in near)]
    chosen: Judged | None = None
    for at in order:
        one = rough[at]
        if one.misses is None and chosen is None:
            one = estimate.judge(about, one.candidate)
        if one.misses is not None:
            judged.append((one, f"does not fit: {one.misses}"))
        elif chosen is None:
            chosen = one
            judged.append((one, "chosen"))
        else:
            judged.append((one, _behind(one, chosen)))
    return chosen


def _is_indirect(candidate: Candidate) -> bool:
    return candidate.gradient_checkpointing or candidate.num_output_chunks > 1


def _evaluated(about: Subject, candidate: Candidate) -> Candidate:
    """The candidate with an evaluation batch that takes no more than training does; one that was asked for, no more
    than fits. Evaluation does not decide the weights, so it gives way first."""
    count = candidate.per_device_eval_batch_size
    for one in about.exceeded.ran_out:
        if one.section == "evaluation":
            count = max(1, min(count, one.candidate.per_device_eval_batch_size // 2))
    trace = about.trace(candidate)
    if trace is None or not about.recipe.evaluates:
        return replace(candidate, per_device_eval_batch_size=count)
    budget = estimate.budget_bytes(about.recipe, about.machine, candidate)
    is_asked = about.recipe.training.per_device_eval_batch_size is not None
    peaks = trace.peaks(candidate.per_device_train_batch_size, count)
    trains = max(peak.allocated_bytes for section, peak in peaks.items() if section != "evaluation")
    limit = budget if is_asked else min(trains, budget)
    while count > 1 and trace.peaks(1, count)["evaluation"].allocated_bytes > limit:
        count = max(1, count // 2)
    return replace(candidate, per_device_eval_batch_size=count)


def _with_fewer_workers(about: Subject, candidate: Candidate) -> Candidate:
    """The candidate with as many data workers as host RAM has room for, where their number was left to planning."""
    if about.recipe.training.dataloader_num_workers is not None:
        return candidate
    fewer = candidate
    while fewer.dataloader_num_workers:
        if estimate.misses_host(about, fewer, estimate.judge(about, fewer, exact=False).memory) is None:
            return fewer
        fewer = replace(fewer, dataloader_num_workers=fewer.dataloader_num_workers - 1)
    return fewer


def ranked(about: Subject, given: Given) -> list[Judged]:
    """Every way to cut the effective batch that fits, the fastest first; empty where nothing was traced."""
    about = replace(about, link=given.link)
    possible, _ = candidates.possible(about, given)
    if about.traces is None:
        return []
    with about.asking():
        for wave in candidates.free_waves(about, possible):
            judged: list[tuple[Judged, str]] = []
            if _fastest(about, wave, judged, is_free=True) is not None:
                fitting = [one for one, _ in judged if one.misses is None and one.time is not None]
                return sorted(fitting, key=lambda one: one.seconds)
    return []


def _sorted(judged: Sequence[tuple[Judged, str]]) -> list[tuple[Judged, str]]:
    """The chosen one first, then the nearest: what fits by time, what does not by bytes; no more than people read."""
    ranked = sorted(
        judged,
        key=lambda one: (
            one[1] != "chosen",
            bool(one[0].misses),
            one[0].seconds if not one[0].misses else one[0].memory.device_bytes,
        ),
    )
    return ranked[:TABLE_ROWS]


def _check_length(recipe: Recipe, config: dict[str, Any]) -> None:
    positions = config.get("n_positions") or config.get("max_position_embeddings")
    if config["model_type"] != "t5" and positions is not None and recipe.data.max_length > positions:
        raise ConfigError(
            f"data.max_length {recipe.data.max_length}, but the model has {positions} positions; lower it, or choose"
            " another model"
        )


def _check_packing(recipe: Recipe, model_type: str) -> None:
    if not recipe.data.packing:
        return
    if model_type == "t5":
        raise ConfigError(
            "data.packing: true, but the model is a T5: its encoder attends both ways and its decoder to all of the"
            " encoder's output, and transformers keeps documents apart in neither; use data.group_by_length or"
            " data.batch_by_tokens"
        )
    if recipe.training.extras.get("use_cache"):
        raise ConfigError(
            "training.use_cache: true, but transformers keeps packed documents apart only without a cache; leave it out"
            " (training has no use for one)"
        )


def _check_chunks(recipe: Recipe, model_type: str) -> None:
    asked = f"training.num_output_chunks: {recipe.training.num_output_chunks}"
    if (recipe.training.num_output_chunks or 1) == 1:
        return
    if model_type not in CHUNKED:
        raise ConfigError(f"{asked}, but the model is a {model_type}; logits in parts work for {', '.join(CHUNKED)}")
    if recipe.training.compiles:
        raise ConfigError(f"{asked} beside training.torch_compile, which would compile each part; leave one out")


def _rendezvous(launch: LaunchSection) -> Rendezvous | None:
    if launch.nodes == 1:
        return None
    assert launch.main_process_ip is not None  # the schema has checked it
    return Rendezvous(
        launch.machine_rank,
        launch.main_process_ip,
        launch.main_process_port,
        launch.network_interface,
        launch.join_timeout_s,
    )


def _lora_targets(recipe: Recipe, model_type: str, shapes: predict.Shapes) -> tuple[str, ...]:
    if recipe.lora is None:
        return ()
    targets = recipe.lora.target_modules or predict.LORA_TARGETS[model_type]
    return tuple(target for target in targets if any(name.endswith(f".{target}.weight") for name in shapes))


def _does_not_fit(
    about: Subject, judged: Sequence[tuple[Judged, str]], refusals: Sequence[str], ways: Sequence[str] | None
) -> str:
    shape, whole, recipe = about.shape, about.whole, about.recipe
    advice = f". This would fit: {'; '.join(ways)}" if ways else ". Use a smaller model (--model.shape=...)"
    by_miss: dict[str | None, Judged] = {}  # of those that miss alike the first
    for one, _ in sorted(judged, key=lambda one: one[0].excess):
        by_miss.setdefault(one.misses, one)
    nearest = [f"{describe(one.candidate)}: {words}" for words, one in by_miss.items()][:3]
    exact = " with launch.exact_batch" if recipe.launch.exact_batch else ""
    return (
        f"{recipe.name}: {shape.name} ({shape.parameters:,} parameters, {shape.trainable_parameters:,} trained) needs"
        f" {gib(whole.weights_bytes)} weights + {gib(whole.gradients_bytes)} gradients +"
        f" {gib(whole.optimizer_bytes)} optimizer before any activation. Nothing fits{exact}. Nearest:"
        f" {'; '.join([*nearest, *refusals])}{'' if ways is None else advice}"
    )


def _ways(about: Subject, given: Given) -> Iterator[str]:
    """Flags with which a candidate fits, its bytes beside them; only what was computed to fit is offered."""
    recipe = about.recipe
    launch, model = recipe.launch, recipe.model
    places = [("", launch)]
    if launch.mode != "auto" and given.num_processes is None:
        places.append(("--launch.mode=auto ", launch.model_copy(update={"mode": "auto"})))
    free = [gpu.free_bytes for gpu in about.machine.gpus]
    is_uneven = launch.num_processes is None and len(free) > 1 and min(free) < CLEARLY_BELOW * max(free)
    if ((launch.num_processes or 1) > 1 or is_uneven) and launch.nodes == 1 and given.num_processes is None:
        alone = launch.model_copy(update={"mode": "auto", "num_processes": 1})
        places.append(("--launch.mode=auto --launch.num_processes=1 ", alone))
    if launch.exact_batch:
        places.append(("--launch.exact_batch=false ", launch.model_copy(update={"exact_batch": False})))
    half = model.model_copy(update={"dtype": "bfloat16"})
    models = [("", model), ("--model.dtype=bfloat16 ", half)] if model.dtype == "float32" else [("", model)]
    lora_flag = "" if recipe.lora else "--lora.r=16 "
    adapters: list[tuple[str, LoraSection | None, QuantizationSection | None]]
    adapters = [("", recipe.lora, recipe.quantization)]
    if lora_flag:
        adapters.append((lora_flag, LoraSection(), None))
    if recipe.quantization is None and about.shape.config["model_type"] in predict.LORA_TARGETS:
        four_bit = QuantizationSection(load_in_4bit=True)
        adapters.append((f"{lora_flag}--quantization.load_in_4bit=true ", recipe.lora or LoraSection(), four_bit))
    offered = set()
    for states, section, lora, quantization, place_flag, place in (
        (adapter_flags + model_flag, section, lora, quantization, place_flag, place)
        for adapter_flags, lora, quantization in adapters
        for model_flag, section in models
        for place_flag, place in places
    ):
        if not states + place_flag or states in offered:  # as it was typed; or it fits without another place
            continue
        update = {"model": section, "lora": lora, "quantization": quantization, "launch": place}
        variant = recipe.model_copy(update=update)
        other = subject(variant, about.machine, dict(about.shape.config), about.parameters, about.data_format)
        traces = about.traces and about.traces.of(variant, other.shape, other.lora_targets)
        differs = {"whole": other.whole, "lora_targets": other.lora_targets, "traces": traces}
        other = replace(about, recipe=variant, shape=other.shape, **differs)
        try:
            possible, _ = candidates.possible(other, given)
        except (ConfigError, ResourceError):  # this machine cannot start it: no way out
            continue
        # of each the most frugal cut; a batch of one with its checkpointing settled has none
        frugal = possible if traces is None else [[one, *candidates.cuts(other, one)][-1] for one in possible]
        whole = [one for one in frugal if one.is_whole]
        chosen = _fastest(other, whole, []) or _fastest(other, [one for one in frugal if one not in whole], [])
        if chosen is not None:
            offered.add(states)
            yield f"{states + place_flag}".strip() + f" ({chosen.candidate.mode}, {gib(chosen.memory.device_bytes)})"
