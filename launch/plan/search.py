"""Search for the fastest candidate that fits, and the order in which candidates are shown."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby

from launch.plan import candidates, less_saving, tiled_mlp
from launch.plan.less_saving import NOT_RECOMPUTED
from launch.predict import budgets, estimate
from launch.predict.estimate import Judged
from launch.predict.facts import Facts
from launch.schema.levers import TRIED
from launch.schema.machine import Machine
from launch.schema.plan import Strategy as Candidate

TABLE_ROWS = 10

AS_FAST = 1.05  # smaller ratios of predicted seconds are no difference

MOST_TRACED = 3  # of the candidates that fit by interpolation, where the first of them do not

MUCH_SLOWER = 1.25  # times the quickest candidate, whether that fits or not


def _behind(loser: Judged, chosen: Judged) -> str:
    if not (loser.time and chosen.time):
        return "comes later"
    ratio = loser.seconds / chosen.seconds
    return f"slower: {ratio:.2f} x" if ratio > 1 else f"not clearly faster: {ratio:.2f} x"


def search(
    facts: Facts,
    possible: Sequence[Candidate],
    judged: list[tuple[Judged, str]],
) -> Judged | None:
    """Choose the fastest of the choices for each number of ranks; of about equally fast choices the
    first."""
    counts = dict.fromkeys(candidate.num_processes for candidate in possible)
    chosen: Judged | None = None
    for count in counts:
        if chosen is not None and not _may_be_faster(facts.machine, count, chosen):
            continue
        group = [candidate for candidate in possible if candidate.num_processes == count]
        verdicts: list[tuple[Judged, str]] = []
        other = search_waves(facts, group, verdicts)
        judged += verdicts
        if other is not None and (chosen is None or other.seconds * AS_FAST < chosen.seconds):
            chosen = other
    if len(counts) > 1 and chosen is not None:
        judged[:] = _verdicts(judged, chosen)
    return chosen


def _may_be_faster(machine: Machine, num_processes: int, chosen: Judged) -> bool:
    """False if fewer ranks on even cards cannot be faster than the choice for more ranks: their
    products and kernels alone take longer. They are not traced then."""
    if candidates.uneven(machine.gpus) or chosen.time is None:
        return True
    busy_s = chosen.time.compute_s + chosen.time.memory_s
    if chosen.candidate.levers.every_n_layers:
        busy_s *= NOT_RECOMPUTED
    return busy_s * chosen.candidate.num_processes / num_processes < chosen.seconds


def _verdicts(judged: Sequence[tuple[Judged, str]], chosen: Judged) -> Iterator[tuple[Judged, str]]:
    for each, verdict in judged:
        yield (
            each,
            verdict if each.misses else "chosen" if each is chosen else _behind(each, chosen),
        )


def search_waves(
    facts: Facts,
    possible: Sequence[Candidate],
    judged: list[tuple[Judged, str]],
) -> Judged | None:
    """Choose the fastest candidate of the first wave in which one fits. Where full copies fit only
    in much slower pieces, sharded candidates are of their wave."""
    sharded = candidates.sharded_splits(facts, possible)
    waves = candidates.waves(facts, possible)
    winners = (fastest(facts, wave, judged, sharded) for wave in waves)
    return next((winner for winner in winners if winner is not None), None)


def _is_much_slower(copy: Judged, judged: Sequence[Judged]) -> bool:
    """True if full copies that fit are much slower than the quickest candidate, whether that fits
    or not, or than themselves without recomputation, which may have been too large to be traced."""
    if copy.time is None:
        return True
    busy_s = copy.time.compute_s + copy.time.memory_s
    recomputed_s = (1 - NOT_RECOMPUTED) * copy.candidate.levers.checkpointed_share * busy_s
    traced_s = (loser.seconds for loser in judged if loser.time)
    return copy.seconds > MUCH_SLOWER * min(copy.seconds - recomputed_s, *traced_s)


def fastest(
    facts: Facts,
    wave: Sequence[Candidate],
    judged: list[tuple[Judged, str]],
    sharded: Sequence[Candidate] = (),
    alone: bool = False,
) -> Judged | None:
    """Choose the fastest of a wave that fits. All are added to `judged` with a verdict. The wave
    also has those that are `sharded` if its full copies are much slower than they could be.
    `alone`: no candidates are added that save less than those of the wave.

    Without predicted times the order of the wave decides. The allocator is replayed only for those
    that may win. Of candidates that are about equally fast the first of the wave wins, which is
    nearest to the recipe; if any batch will do (wishes.free_batch), one without checkpointing
    and chunks."""
    refuted: dict[Candidate, Judged] = {}  # by a replay of the allocator
    while True:
        needed = _needed(facts, wave, refuted)
        rough = _with_tiled_mlp(facts, needed, refuted)
        if not alone:
            rough = _with_less_saving(facts, wave, rough, refuted)
        order = _order(rough, facts.wishes.free_batch)
        first = next((each for each in order if each.misses is None), None)
        if first is None:
            judged += [(each, f"does not fit: {each.misses}") for each in order]
            return None
        if sharded and first.candidate.launch_mode.is_whole:
            losers = [each for each, _ in judged]
            if _is_much_slower(first, [*losers, *order]):
                wave, sharded = list(dict.fromkeys([*wave, *sharded])), ()
                continue
        chosen = estimate.judge(facts, first.candidate)
        if chosen.misses is None:
            break
        refuted[first.candidate] = chosen
    for each in order:
        if each is first:
            judged.append((chosen, "chosen"))
        elif each.misses is None:
            judged.append((each, _behind(each, chosen)))
        else:
            judged.append((each, f"does not fit: {each.misses}"))
    return chosen


def _order(rough: Sequence[Judged], free_batch: bool) -> list[Judged]:
    """The order in which candidates are taken: those that are about as fast as the fastest that
    fits, then the others by seconds."""
    order = sorted(rough, key=lambda each: (each.time is None, each.seconds))
    fitting = [each for each in order if each.misses is None]
    near = [each for each in fitting if each.seconds <= fitting[0].seconds * AS_FAST]
    if free_batch:
        near.sort(key=lambda each: (_is_indirect(each.candidate), each.seconds))
    else:
        near = [each for each in rough if each in near]
    return [*near, *(each for each in order if each not in near)]


def _needed(
    facts: Facts,
    wave: Sequence[Candidate],
    refuted: Mapping[Candidate, Judged],
) -> list[Judged]:
    """Judge a wave roughly, mode by mode, without those that would only be slower: a candidate that
    checkpoints, or makes logits in parts, where the same without it fits; and one of a mode whose
    communication alone keeps it from being chosen. They are not traced, nor are those whose least
    memory exceeds a budget."""
    judged: dict[Candidate, Judged] = {}
    place = {mode: number for number, mode in enumerate(dict.fromkeys(each.mode for each in wave))}

    def level_of(candidate: Candidate) -> tuple[int, int]:
        return place[candidate.mode], _savings(candidate)

    for _, level in groupby(sorted(wave, key=level_of), key=level_of):
        open_ = [
            candidate
            for candidate in level
            if not any(
                less in judged and judged[less].misses is None for less in _less_saving(candidate)
            )
            and not _is_slower(facts, candidate, judged)
        ]
        hopeless = {
            candidate: less_saving.hopeless(facts, _evaluated(facts, candidate))
            for candidate in open_
        }
        facts.fetch(candidate for candidate in open_ if hopeless[candidate] is None)
        for candidate in open_:
            each = hopeless[candidate] or _roughly(facts, candidate)
            judged[candidate] = refuted.get(each.candidate, each)
    return [judged[candidate] for candidate in wave if candidate in judged]


def _is_slower(
    facts: Facts,
    candidate: Candidate,
    judged: Mapping[Candidate, Judged],
) -> bool:
    """True if an untraced candidate cannot be chosen, whatever its trace says: it has the work of
    another mode of the same engine, of which recomputation is a part, and its own communication and
    offloading. By these it is slower than one that fits, or not clearly faster than one of a mode
    that comes before its own (if any batch will do, that one does not come before it)."""
    fitting = {other: each for other, each in judged.items() if each.time and each.misses is None}
    if not fitting or facts.trace(candidate) is not None:
        return False
    earlier = {other for other in fitting if other.mode != candidate.mode}
    limit_s = min(each.seconds * AS_FAST for each in fitting.values())
    if earlier and not facts.wishes.free_batch:
        limit_s = min(limit_s, min(fitting[other].seconds for other in earlier) / AS_FAST)
    engine = candidate.launch_mode.engine
    alike = [
        other
        for other, each in judged.items()
        if each.time and other.mode != candidate.mode and other.launch_mode.engine == engine
    ]
    at_least_s = (least_s(facts, candidate, other) for other in alike)
    return max(at_least_s, default=0.0) > limit_s


def least_s(facts: Facts, candidate: Candidate, other: Candidate) -> float:
    """Seconds of a step of an untraced candidate, at least, by the work of a traced one of the same
    engine, of which a part may be recomputation that the candidate does without."""
    if other.levers.every_n_layers and not candidate.levers.every_n_layers:
        return estimate.at_least_s(facts, candidate, other, NOT_RECOMPUTED)
    least = estimate.at_least_s(facts, candidate, other, 1)
    if other.levers.num_output_chunks > candidate.levers.num_output_chunks:
        least -= less_saving.logits_s(facts, candidate)
    return least


def _savings(candidate: Candidate) -> int:
    """The number of ways in which a candidate saves memory at the cost of time."""
    return (candidate.levers.every_n_layers > 0) + (candidate.levers.num_output_chunks > 1)


def _less_saving(candidate: Candidate) -> list[Candidate]:
    """The same candidate without one or both of those ways."""
    levers = candidate.levers
    pairs = itertools.product({0, levers.every_n_layers}, {1, levers.num_output_chunks})
    less = (candidate.with_levers(every_n_layers=n, num_output_chunks=parts) for n, parts in pairs)
    return [each for each in less if each != candidate]


def _roughly(facts: Facts, candidate: Candidate) -> Judged:
    """Judge a traced candidate without a replay of the allocator."""
    reduced = _with_fewer_workers(facts, _evaluated(facts, candidate))
    return estimate.judge(facts, reduced, exact=False)


def _with_tiled_mlp(
    facts: Facts, rough: Sequence[Judged], refuted: Mapping[Candidate, Judged]
) -> list[Judged]:
    """Add candidates whose MLPs compute a part of the tokens at a time, where the same without does
    not fit and nothing that fits is about as fast."""
    quickest = min((each.seconds for each in rough if each.misses is None), default=math.inf)
    added: dict[Candidate, Judged] = {}
    for untiled in sorted(rough, key=lambda each: each.seconds):
        if not untiled.misses or untiled.time is None or untiled.seconds * AS_FAST >= quickest:
            continue
        candidate = tiled_mlp.tiled(facts, untiled)
        if candidate is None:
            continue
        judged = _traced(facts, candidate, refuted)
        if judged is None:
            continue
        added[untiled.candidate] = judged
        if judged.misses is None:
            quickest = min(quickest, judged.seconds)
    pairs = ([each, added.get(each.candidate)] for each in rough)
    return [each for pair in pairs for each in pair if each is not None]


def _with_less_saving(
    facts: Facts,
    wave: Sequence[Candidate],
    rough: Sequence[Judged],
    refuted: Mapping[Candidate, Judged],
) -> list[Judged]:
    """Add candidates of single samples, and of fewer checkpointed layers, that by interpolation fit
    and are faster than what fits."""
    fitting = [each for each in rough if each.misses is None and each.time]
    quickest = min(fitting, key=lambda each: each.seconds, default=None)
    if quickest is None:
        return list(rough)
    most_rows = max(each.per_device_train_batch_size for each in wave)
    has_most = quickest.candidate.per_device_train_batch_size == most_rows
    if has_most and not _savings(quickest.candidate):
        return list(rough)
    added: list[Judged] = []
    below_s = quickest.seconds / AS_FAST
    between = less_saving.by_interpolation(facts, wave, below_s)
    num_traced = 0
    for candidate in between:
        if num_traced == MOST_TRACED:
            break
        num_traced += facts.trace(candidate) is None
        judged = _traced(facts, candidate, refuted)
        if judged is None:
            continue
        added.append(judged)
        if judged.misses is None:
            break
    return [*rough, *added]


def _traced(
    facts: Facts, candidate: Candidate, refuted: Mapping[Candidate, Judged]
) -> Judged | None:
    """Judge one more candidate roughly; None if its step cannot be traced."""
    facts.fetch([candidate])
    if facts.trace(candidate) is None:
        return None
    judged = _roughly(facts, candidate)
    return refuted.get(judged.candidate, judged)


def _is_indirect(candidate: Candidate) -> bool:
    return any(row.of(candidate.levers) != row.plain for row in TRIED)


def _evaluated(facts: Facts, candidate: Candidate) -> Candidate:
    """Reduce the evaluation batch to one that takes no more memory than training; a batch of the
    recipe, to one that fits. Evaluation does not decide the weights, so it is reduced first."""
    count = candidate.per_device_eval_batch_size
    for event in facts.history.oom.ran_out:
        if event.section == "evaluation" and event.of != "pinned":
            count = max(1, min(count, event.candidate.per_device_eval_batch_size // 2))
    trace = facts.trace(candidate)
    if trace is None or not facts.recipe.evaluates:
        return replace(candidate, per_device_eval_batch_size=count)
    budget = budgets.budget_bytes(facts, candidate)
    is_asked = facts.recipe.training.per_device_eval_batch_size is not None

    def evaluated(count: int) -> int:
        return facts.rows.evaluated_samples(replace(candidate, per_device_eval_batch_size=count))

    peaks = trace.peaks(candidate.per_device_train_batch_size, evaluated(count))
    trains = max(peak.allocated_bytes for section, peak in peaks.items() if section != "evaluation")
    limit = budget if is_asked else min(trains, budget)
    while count > 1 and trace.peaks(1, evaluated(count))["evaluation"].allocated_bytes > limit:
        count = max(1, count // 2)
    return replace(candidate, per_device_eval_batch_size=count)


def _with_fewer_workers(facts: Facts, candidate: Candidate) -> Candidate:
    """Reduce the number of data workers to what host RAM holds, unless the recipe names it."""
    if facts.recipe.training.dataloader_num_workers is not None:
        return candidate
    fewer = candidate
    while fewer.dataloader_num_workers:
        memory = estimate.judge(facts, fewer, exact=False).memory
        if budgets.misses_host(facts, fewer, memory) is None:
            break
        fewer = replace(fewer, dataloader_num_workers=fewer.dataloader_num_workers - 1)
    return fewer


def ranked(facts: Facts) -> list[Judged]:
    """Rank every split of the effective batch that fits, the fastest first; none without traces."""
    facts = replace(facts, wishes=replace(facts.wishes, free_batch=True))
    possible, _ = candidates.possible(facts)
    judged: list[tuple[Judged, str]] = []
    if facts.traces is None:
        return []
    with facts.asking():
        for wave in candidates.free_waves(facts.recipe, facts.model, possible):
            judged.clear()
            if fastest(facts, wave, judged) is not None:
                break
    fitting = [each for each, _ in judged if each.misses is None and each.time]
    return sorted(fitting, key=lambda each: each.seconds)


def table_order(judged: Sequence[tuple[Judged, str]]) -> list[tuple[Judged, str]]:
    """Put the chosen candidate first, then those that fit by time and the others by bytes; at most
    TABLE_ROWS."""
    ranked = sorted(
        judged,
        key=lambda pair: (
            pair[1] != "chosen",
            bool(pair[0].misses),
            pair[0].memory.device_bytes if pair[0].misses else pair[0].seconds,
        ),
    )
    return ranked[:TABLE_ROWS]
