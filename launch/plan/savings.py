"""Savings and costs of each way of saving memory: the chosen candidate beside those that differ
from it in one way."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from launch.base.text import size
from launch.predict import estimate
from launch.predict.estimate import Judged
from launch.predict.facts import Facts
from launch.schema.levers import ROWS, TRIED
from launch.schema.machine import MIB
from launch.schema.plan import Strategy

_SAID_BYTES = 64 * MIB  # least difference of host RAM that a line mentions
AT_TARGETS = ROWS["logits_at_targets"]


def savings(facts: Facts, chosen: Judged, judged: Sequence[Judged]) -> Iterator[str]:
    """Yield lines for each way: of the candidates that differ in it alone, the nearest that takes
    more memory, and the nearest that takes less. Of a way that the choice has, and without which
    nothing was traced, what it saves at least."""
    own = _ways(chosen.candidate)
    if chosen.time is None:
        return
    runs = chosen.candidate.levers
    without = {
        row.name: replace(chosen.candidate, levers=runs.without(row.name))
        for row in TRIED
        if row.saved(row.read(runs)) > row.saved(row.plain)
    }
    for way in own:
        others = [
            (_bytes(each) - _bytes(chosen), each)
            for each in judged
            if each.time
            and each.by != "price"
            and [name for name, of in _ways(each.candidate).items() if of != own[name]] == [way]
        ]
        more = min((pair for pair in others if pair[0] > 0), key=itemgetter(0), default=None)
        less = max((pair for pair in others if pair[0] < 0), key=itemgetter(0), default=None)
        yield from (_line(chosen, *pair, way) for pair in (more, less) if pair is not None)
        if more is None and way in without:
            yield from _of_one(facts, chosen, without[way], way)


def _of_one(facts: Facts, chosen: Judged, other: Strategy, way: str) -> Iterator[str]:
    """Yield the line of a way beside the same without it: by its trace, if one is stored, else by
    the least that it holds."""
    names = [_ways(each)[way] for each in (chosen.candidate, other)]
    if facts.trace(other) is not None:
        judged = estimate.judge(facts, other, exact=False)
        yield _line(chosen, _bytes(judged) - _bytes(chosen), judged, way, names)
    elif (least := estimate.at_least(facts, other)).by == "price":
        saved = _bytes(least) - _bytes(chosen)
        if saved > 0:
            yield f"{' instead of '.join(names)}: at least {size(saved)} less"


def of_targets(facts: Facts, chosen: Judged) -> Iterator[str]:
    """Yield a line on what the logits of positions with a target alone save, once the rows are
    tokenised: beside the same step with a target at every position."""
    candidate = chosen.candidate
    if not candidate.levers.logits_at_targets or facts.rows.counts is None or chosen.time is None:
        return
    everywhere = replace(facts, rows=replace(facts.rows, counts_targets=False))
    at_targets, at_all = (
        estimate.judge(each, candidate, exact=False) for each in (facts, everywhere)
    )
    names = AT_TARGETS.says(candidate.levers), AT_TARGETS.off
    yield _line(at_targets, _bytes(at_all) - _bytes(at_targets), at_all, AT_TARGETS.name, names)


def _line(chosen: Judged, saved: int, other: Judged, way: str, names: Sequence[str] = ()) -> str:
    slower = chosen.seconds / other.seconds - 1
    on_host = other.memory.host_bytes - chosen.memory.host_bytes
    parts = [
        f"{size(abs(saved))} {'less' if saved > 0 else 'more'}",
        f"{abs(slower):.0%} {'slower' if slower > 0 else 'faster'}",
    ]
    if chosen.candidate.device == "cuda" and abs(on_host) >= _SAID_BYTES:
        parts.append(f"{size(abs(on_host))} {'less' if on_host > 0 else 'more'} host RAM")
    names = names or [_ways(each.candidate)[way] for each in (chosen, other)]
    return f"{' instead of '.join(names)}: {', '.join(parts)}"


def _bytes(judged: Judged) -> int:
    return judged.memory.allocated_bytes


def _ways(candidate: Strategy) -> Mapping[str, str]:
    """The ways of saving memory in words, by name."""
    return {
        "mode": f"{candidate.mode} x{candidate.num_processes}",
        "micro-batch": f"{candidate.per_device_train_batch_size} at once",
        # memory is not predicted of compiled layers
        **{row.name: row.says(candidate.levers) for row in TRIED if row.name != "torch_compile"},
    }
