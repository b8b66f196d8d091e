"""Candidates that save less memory than those that fit: a single sample instead of more rows, and
checkpointing of some layers. Bytes and seconds of traced steps say for which of them a trace pays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from launch.plan import candidates, tiled_mlp
from launch.predict import budgets, estimate, sharding
from launch.predict.estimate import Judged
from launch.predict.facts import Facts, Model
from launch.predict.memory import context as memory_context
from launch.predict.time import rates, timing
from launch.predict.time.timing import LAUNCH_S
from launch.schema.levers import ROWS, TILED
from launch.schema.plan import MemoryEstimate, Peak, Strategy

# of a step with checkpointing: the forward pass that it repeats is a third at most, where backward
# makes no gradients of weights, and so takes as long as forward
NOT_RECOMPUTED = 2 / 3

# for backward, without checkpointing, beside what estimate counts outside an MLP: what its
# activation function takes, and in a gated one what that gives and what it is multiplied by
KEPT_INSIDE_MLP, KEPT_INSIDE_GATED = 1, 3
OF_A_LAYER = re.compile(r"(^|[. ])\d")  # in names of modules
# of a word of a position, when backward begins: its float32 logit, log-softmax and gradient
LOGIT_BYTES = 3 * 4
# that kernels read and write of a logit that is made again: its float32 copy and its log-softmax
REMADE_LOGIT_BYTES = 4 + 4 + 4 + 4 + 4

# layers of which one is checkpointed, the fastest first
EVERY_N_LAYERS = tuple(n for n in ROWS["every_n_layers"].tried if n > 1)

_Way = tuple[int, bool, int]  # rows at once, whether layers are checkpointed, parts of the logits


@dataclass(frozen=True)
class Step:
    """About the seconds of a step, and the device's bytes while it trains."""

    seconds: float
    device_bytes: float


# (processes, rows at once, whether activations are offloaded): without checkpointing, and with it
_Pairs = dict[tuple[int, int, bool], tuple[Step, Step]]


def hopeless(facts: Facts, candidate: Strategy) -> Judged | None:
    """The candidate judged by its states, or by the least that its device holds when backward
    begins, where that exceeds a budget."""
    if facts.traces is None:
        return estimate.hopeless(facts, candidate)
    judged = estimate.hopeless(facts, candidate, with_step=True)
    if judged is not None:
        by_states = estimate.hopeless(facts, candidate)
        return by_states or replace(judged, misses=f"at least {judged.misses}")
    if (memory := at_backward(facts, candidate)) is None:
        return None
    budget = budgets.budget_bytes(facts, candidate)
    misses = budgets.misses(facts, candidate, memory, budget)
    excess = memory.device_bytes / max(budget, 1)
    if misses is None:
        return None
    return Judged(candidate, memory, None, budget, f"at least {misses}", excess)


def at_backward(facts: Facts, candidate: Strategy) -> MemoryEstimate | None:
    """The least that a card holds when backward begins, with what each MLP keeps and the loss
    makes; None where that is not known. Of frozen layers nothing may be kept."""
    recipe, config = facts.recipe, facts.model.size.config
    if (
        config["model_type"] not in TILED
        or facts.model.size.is_encoder_decoder
        or candidate.device == "cpu"
        or candidate.levers.torch_compile
        or recipe.model.freeze
        or OF_A_LAYER.search(" ".join(facts.model.lora_targets))
    ):
        return None
    share, chunks = candidate.levers.checkpointed_share, candidate.levers.num_output_chunks
    width, layers = (
        next((config[name] for name in names if config.get(name)), 0)
        for names in (estimate.WIDTH_NAMES, estimate.LAYER_NAMES)
    )
    kept_inside = _kept_inside_mlp(facts.model)
    if not (width and layers and kept_inside):  # the defaults of the model's class
        return None
    features = width * (estimate.KEPT_TENSORS_A_LAYER - estimate.INSIDE_MLP)
    if candidate.levers.tiled_mlp_num_shards == 1:
        features += kept_inside * tiled_mlp.inner_size(config)
    checkpointed = 0 if candidate.levers.activation_offloading else share * width
    is_16_bit = candidate.mixed_precision != "no" or recipe.model.dtype != "float32"
    of_token = (checkpointed + (1 - share) * features) * layers * (2 if is_16_bit else 4)
    length = facts.question(candidate).lengths[1]
    of_position = config.get("vocab_size", 0) * LOGIT_BYTES
    of_step = max(
        batch.rows * length * of_token
        + of_position
        * (batch.targets if candidate.levers.logits_at_targets else batch.rows * length // chunks)
        for batch in facts.most_targets(candidate).batches(candidate.per_device_train_batch_size)
    )
    states = sharding.per_rank(
        facts.model.full_copy, facts.model.parameters, recipe, candidate, facts.model.size.family
    )
    state_bytes = states.model_state_bytes
    if candidate.gradient_accumulation_steps == 1:  # no gradients of a micro-batch before
        state_bytes -= states.gradients_bytes
    parts = {"states": state_bytes, "activations": int(of_step)}
    outside, _ = memory_context.context_bytes(
        facts.machine.gpus[0], facts.installed.import_memory.card
    )
    outside += estimate.NCCL_BYTES if candidate.backend == "nccl" else 0
    return replace(states, peak=Peak("backward", "", parts), outside_bytes=outside)


def logits_s(facts: Facts, candidate: Strategy) -> float:
    """Seconds, at most, in which a rank makes all logits of a step once more; inf where the size of
    the model is not in its config."""
    config, length = facts.model.size.config, facts.question(candidate).lengths[1]
    width = next((config[name] for name in estimate.WIDTH_NAMES if config.get(name)), None)
    if width is None:
        return math.inf
    num_samples = candidate.per_device_train_batch_size * candidate.gradient_accumulation_steps
    speed = timing.speed_of(
        candidate,
        rates.of(facts.machine, candidate),
        facts.installed.link,
        estimate.card_figures(facts.machine, facts.installed, candidate),
    )
    flops_per_s = min(speed.flops_per_s.values())  # of the slowest dtype
    of_logit_s = 2 * width / flops_per_s + REMADE_LOGIT_BYTES / speed.bytes_per_s
    return num_samples * length * config.get("vocab_size", 0) * of_logit_s


def _kept_inside_mlp(model: Model) -> int:
    """Tensors of an MLP's inner width. Two matrices of that width are into it and out of it, in a
    gated MLP a third is, or the one into it is twice as wide; 0: there are none such."""
    inner = tiled_mlp.inner_size(model.size.config)
    of_layer = (
        side // inner
        for name, sides in model.parameters.items()
        if ".0." in name and len(sides) == 2
        for side in set(sides) & {inner, 2 * inner}
    )
    return {2: KEPT_INSIDE_MLP, 3: KEPT_INSIDE_GATED}.get(sum(of_layer), 0)


def by_interpolation(
    facts: Facts,
    wave: Sequence[Strategy],
    below_s: float,
) -> list[Strategy]:
    """The candidates beside a wave's that by interpolation fit and take less than `below_s` a step,
    the fastest first."""

    def mode_of(candidate: Strategy) -> tuple[bool, str, int]:
        return not candidate.launch_mode.is_whole, candidate.mode, candidate.num_processes

    pairs: _Pairs = {}
    between = [
        (candidate, step)
        for _, group in groupby(sorted(wave, key=mode_of), key=mode_of)
        for candidate, step in _of_mode(facts, list(group), below_s, pairs)
        if step.seconds < below_s and step.device_bytes <= budgets.budget_bytes(facts, candidate)
    ]
    between.sort(key=lambda pair: pair[1].seconds)
    return [candidate for candidate, _ in between]


def _of_mode(
    facts: Facts,
    group: Sequence[Strategy],
    below_s: float,
    pairs: _Pairs,
) -> Iterator[tuple[Strategy, Step]]:
    """`pairs`: those of the modes before, to which this one's are added. What a layer's activations
    take does not depend on who holds the states."""
    is_open = ROWS["every_n_layers"].asked(facts.recipe) is None
    chooses_layers = is_open and facts.installed.no_every_n_layers is None
    most = max(group, key=lambda each: each.per_device_train_batch_size)
    is_tuned = facts.history.tuned is not None
    splits = () if is_tuned else candidates.splits(facts.recipe, facts.model, most)
    singles = [split for split in splits if split.per_device_train_batch_size == 1]
    offered = {_way(each) for each in group}
    # without checkpointing nothing goes to the host
    ways = {
        _way(each): each if each.levers.every_n_layers else without_checkpointing(each)
        for each in (*singles, *group)
    }
    if chooses_layers:
        for each in list(ways.values()):
            none = without_checkpointing(each)
            ways.setdefault(_way(none), none)
        if not any(_key(each) in pairs for each in _checkpointed(ways)):
            _trace_without_checkpointing(facts, ways, below_s)
        _trace_with_checkpointing(facts, ways, below_s)
    steps = _steps(facts, ways)
    for every in _checkpointed(ways):
        way, none = _way(every), _way(without_checkpointing(every))
        if pair := _pair(steps, every.per_device_train_batch_size):
            pairs.setdefault(_key(every), pair)
        elif way in steps and none in ways and (pair := pairs.get(_key(every))):
            steps[none] = Step(
                steps[way].seconds + pair[0].seconds - pair[1].seconds,
                steps[way].device_bytes + pair[0].device_bytes - pair[1].device_bytes,
            )
    for (rows, checkpoints, parts), without in steps.items():
        if checkpoints:
            continue
        candidate = ways[rows, False, parts]
        if rows == 1 and (rows, False, parts) not in offered:
            yield candidate, without
        every = ways.get((rows, True, parts))
        pair = _pair(steps, rows)
        if not (chooses_layers and every and pair):
            continue
        for n in EVERY_N_LAYERS:
            yield (
                every.with_levers(every_n_layers=n),
                Step(
                    without.seconds + (pair[1].seconds - pair[0].seconds) / n,
                    without.device_bytes + (pair[1].device_bytes - pair[0].device_bytes) / n,
                ),
            )


def without_checkpointing(candidate: Strategy) -> Strategy:
    """The candidate that keeps every activation on the device: offloading moves only what is
    checkpointed."""
    return replace(candidate, levers=candidate.levers.without("every_n_layers"))


def _way(candidate: Strategy) -> _Way:
    levers = candidate.levers
    checkpoints = levers.every_n_layers > 0
    return candidate.per_device_train_batch_size, checkpoints, levers.num_output_chunks


def _pair(steps: Mapping[_Way, Step], rows: int) -> tuple[Step, Step] | None:
    """The step of so many rows without checkpointing and with it, alike otherwise: what a layer
    saves does not depend on the parts of the logits."""
    pairs = (
        (steps[rows, False, parts], steps[rows, True, parts])
        for number, checkpoints, parts in steps
        if number == rows and checkpoints and (rows, False, parts) in steps
    )
    return min(pairs, key=lambda pair: pair[1].device_bytes, default=None)


def _key(every: Strategy) -> tuple[int, int, bool]:
    """That of _Pairs, of a candidate with checkpointing."""
    return (
        every.num_processes,
        every.per_device_train_batch_size,
        every.levers.activation_offloading,
    )


def _checkpointed(ways: Mapping[_Way, Strategy]) -> list[Strategy]:
    return [each for each in ways.values() if each.levers.every_n_layers]


def _traced(facts: Facts, way: _Way, ways: Mapping[_Way, Strategy]) -> Strategy | None:
    """The candidate whose trace says what a way takes."""
    candidate, (rows, *others) = ways[way], way
    alike = [candidate]
    if rows == 1:
        alike += [each for (number, *rest), each in ways.items() if number > 1 and rest == others]
    return next((each for each in alike if facts.trace(each) is not None), None)


def _step(facts: Facts, way: _Way, ways: Mapping[_Way, Strategy]) -> Step | None:
    """By its own trace, or, of a single sample, by that of more rows; None if there is neither."""
    candidate, rows = ways[way], way[0]
    traced = _traced(facts, way, ways)
    trace = traced and facts.trace(traced)
    if traced is None or trace is None:
        return None
    judged = estimate.judge(facts, traced, exact=False)
    peak_bytes = trace.peak(rows, None).allocated_bytes  # evaluation takes fewer rows, if need be
    device_bytes = judged.memory.device_bytes - judged.memory.allocated_bytes + peak_bytes
    if traced is candidate:
        return Step(judged.seconds, device_bytes)
    launches_s = LAUNCH_S * trace.work.num_kernels.total(rows)
    return Step(
        max(
            estimate.at_least_s(facts, candidate, traced, 1),
            candidate.gradient_accumulation_steps * launches_s,
        ),
        device_bytes,
    )


def _steps(facts: Facts, ways: Mapping[_Way, Strategy]) -> dict[_Way, Step]:
    return {way: step for way in ways if (step := _step(facts, way, ways)) is not None}


def _trace_without_checkpointing(
    facts: Facts, ways: Mapping[_Way, Strategy], below_s: float
) -> None:
    """Have a step without checkpointing traced, unless one is, or none can take less than
    `below_s`: of the most rows of which some layers may keep their activations, with logits in the
    most parts."""
    most_parts = max(parts for *_, parts in ways)
    if any(facts.trace(each) is not None for each in _without(ways, most_parts)):
        return
    for none in sorted(_without(ways, most_parts), key=lambda each: -_way(each)[0]):
        rows = none.per_device_train_batch_size
        checkpointed = (
            (traced, step)
            for way in ways
            if way[:2] == (rows, True)
            and (traced := _traced(facts, way, ways)) is not None
            and (step := _step(facts, way, ways)) is not None
        )
        every, step = next(checkpointed, (None, None))
        if every is None or step is None:
            continue
        if estimate.at_least_s(facts, none, every, NOT_RECOMPUTED) >= below_s:
            continue
        every_bytes = step.device_bytes
        least = hopeless(facts, none)
        least_bytes = least.memory.device_bytes if least else 0
        share = 1 - 1 / min(EVERY_N_LAYERS)
        if every_bytes + share * (least_bytes - every_bytes) <= budgets.budget_bytes(facts, none):
            facts.fetch([none])
            return


def _trace_with_checkpointing(facts: Facts, ways: Mapping[_Way, Strategy], below_s: float) -> None:
    """Have a step with checkpointing traced for rows of which one without is, and none with it has
    logits in as many parts; unless checkpointing of some layers cannot fit, or take less than
    `below_s`."""
    steps = _steps(facts, ways)
    for (rows, checkpoints, parts), step in steps.items():
        every = ways.get((rows, True, parts))
        if checkpoints or every is None or step.seconds >= below_s or _pair(steps, rows):
            continue
        states = estimate.judge(facts, every, exact=False).memory.model_state_bytes
        kept_bytes = step.device_bytes - (step.device_bytes - states) / min(EVERY_N_LAYERS)
        if kept_bytes <= budgets.budget_bytes(facts, every):
            facts.fetch([every])


def _without(ways: Mapping[_Way, Strategy], parts: int) -> list[Strategy]:
    return [each for way, each in ways.items() if way[1:] == (False, parts)]
