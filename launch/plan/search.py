"""Search for the fastest candidate that fits, and the order in which candidates are shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from launch.plan import candidates
from launch.plan.candidates import LaunchConstraints
from launch.predict import estimate
from launch.predict.estimate import Judged, PlanContext
from launch.schema.plan import Strategy as Candidate

TABLE_ROWS = 10

AS_FAST = 1.05  # predicted seconds that differ by less are not told apart

MUCH_SLOWER = 1.25  # times the quickest that was looked at, whether that fits or not


def _behind(one: Judged, chosen: Judged) -> str:
    if not (one.time and chosen.time):
        return "comes later"
    ratio = one.seconds / chosen.seconds
    return f"slower: {ratio:.2f} x" if ratio > 1 else f"not clearly faster: {ratio:.2f} x"


def search_waves(
    context: PlanContext,
    possible: Sequence[Candidate],
    constraints: LaunchConstraints,
    judged: list[tuple[Judged, str]],
) -> Judged | None:
    """What the first wave with one that fits chooses; where whole copies fit in much slower pieces
    only, the faster of that and of copies shared out."""
    for wave in candidates.wanted(context, possible, constraints):
        chosen = fastest(context, wave, judged, constraints.free_batch)
        if chosen is not None:
            break
    else:
        return None
    shared = candidates.shared_cuts(context, possible, constraints)
    quickest = min(one.seconds for one, _ in judged if one.time) if chosen.time else 0.0
    if not chosen.candidate.is_whole or chosen.seconds <= MUCH_SLOWER * quickest or not shared:
        return chosen
    others: list[tuple[Judged, str]] = []
    other = fastest(context, shared, others, constraints.free_batch)
    best = other if other is not None and other.seconds * AS_FAST < chosen.seconds else chosen
    known = [*judged, *others]
    judged[:] = [
        (one, words if one.misses else "chosen" if one is best else _behind(one, best))
        for one, words in known
    ]
    return best


def fastest(
    context: PlanContext,
    wanted: Sequence[Candidate],
    judged: list[tuple[Judged, str]],
    is_free: bool = False,
) -> Judged | None:
    """The fastest of these that fits; all are added to `judged` with why they won or lost.

    Where no time is predicted the order given counts. The allocator is replayed for those that may
    win only. Of those as fast as can be told apart the first of the order given wins, which is
    nearest to what was asked for; where any batch will do (`is_free`), one without checkpointing
    and chunks."""
    lost = {
        at: found
        for at, one in enumerate(wanted)
        if (found := estimate.hopeless(context, _evaluated(context, one)))
    }
    context.fetch(one for at, one in enumerate(wanted) if at not in lost)
    rough = [
        lost.get(at)
        or estimate.judge(
            context, _with_fewer_workers(context, _evaluated(context, one)), exact=False
        )
        for at, one in enumerate(wanted)
    ]
    order = sorted(
        range(len(rough)), key=lambda at: (rough[at].time is None, rough[at].seconds, at)
    )
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
            one = estimate.judge(context, one.candidate)
        if one.misses is not None:
            judged.append((one, f"does not fit: {one.misses}"))
        elif chosen is None:
            chosen = one
            judged.append((one, "chosen"))
        else:
            judged.append((one, _behind(one, chosen)))
    return chosen


def _is_indirect(candidate: Candidate) -> bool:
    return candidate.activation_checkpointing or candidate.num_output_chunks > 1


def _evaluated(context: PlanContext, candidate: Candidate) -> Candidate:
    """The candidate with an evaluation batch that takes no more than training does; one that was
    asked for, no more than fits. Evaluation does not decide the weights, so it gives way first."""
    count = candidate.per_device_eval_batch_size
    for one in context.oom_history.ran_out:
        if one.section == "evaluation":
            count = max(1, min(count, one.candidate.per_device_eval_batch_size // 2))
    trace = context.trace(candidate)
    if trace is None or not context.recipe.evaluates:
        return replace(candidate, per_device_eval_batch_size=count)
    budget = estimate.budget_bytes(context.recipe, context.machine, candidate)
    is_asked = context.recipe.training.per_device_eval_batch_size is not None
    peaks = trace.peaks(candidate.per_device_train_batch_size, count)
    trains = max(peak.allocated_bytes for section, peak in peaks.items() if section != "evaluation")
    limit = budget if is_asked else min(trains, budget)
    while count > 1 and trace.peaks(1, count)["evaluation"].allocated_bytes > limit:
        count = max(1, count // 2)
    return replace(candidate, per_device_eval_batch_size=count)


def _with_fewer_workers(context: PlanContext, candidate: Candidate) -> Candidate:
    """The candidate with as many data workers as host RAM has room for, where their number was left
    to planning."""
    if context.recipe.training.dataloader_num_workers is not None:
        return candidate
    fewer = candidate
    while fewer.dataloader_num_workers:
        if (
            estimate.misses_host(context, fewer, estimate.judge(context, fewer, exact=False).memory)
            is None
        ):
            return fewer
        fewer = replace(fewer, dataloader_num_workers=fewer.dataloader_num_workers - 1)
    return fewer


def ranked(context: PlanContext, constraints: LaunchConstraints) -> list[Judged]:
    """Every way to cut the effective batch that fits, the fastest first; empty where nothing was
    traced."""
    context = replace(context, link=constraints.link)
    possible, _ = candidates.possible(context, constraints)
    if context.traces is None:
        return []
    with context.asking():
        for wave in candidates.free_waves(context, possible):
            judged: list[tuple[Judged, str]] = []
            if fastest(context, wave, judged, is_free=True) is not None:
                fitting = [one for one, _ in judged if one.misses is None and one.time is not None]
                return sorted(fitting, key=lambda one: one.seconds)
    return []


def table_order(judged: Sequence[tuple[Judged, str]]) -> list[tuple[Judged, str]]:
    """The chosen one first, then the nearest: what fits by time, what does not by bytes; no more
    than people read."""
    ranked = sorted(
        judged,
        key=lambda one: (
            one[1] != "chosen",
            bool(one[0].misses),
            one[0].seconds if not one[0].misses else one[0].memory.device_bytes,
        ),
    )
    return ranked[:TABLE_ROWS]
