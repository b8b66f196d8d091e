"""Search for the fastest candidate that fits, and the order in which candidates are shown."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from launch.plan import candidates
from launch.plan.kernels import COMPILE_S
from launch.predict import budgets, estimate
from launch.predict.estimate import Judged
from launch.predict.facts import Facts
from launch.schema.levers import TRIED
from launch.schema.machine import Machine
from launch.schema.plan import Strategy as Candidate

_TABLE_ROWS = 10
_MOST_RANKED = 8

AS_FAST = 1.05  # smaller ratios of predicted seconds are no difference
# Compiled layers, of which few trainings were measured (benchmarks/results/seconds_of_cards.md),
# are chosen where a step without them takes so many times as long. Least share of it that is
# neither products nor communication.
_CLEARLY_FASTER, _FUSED_SHARE = 1.15, 0.25

# Least share of a step with checkpointing that remains without it. The repeated forward pass takes
# a third at most: where backward makes no gradients of weights, it takes as long as forward.
_NOT_RECOMPUTED = 2 / 3


def _verdict(loser: Judged, chosen: Judged | None) -> str:
    """The reason why a candidate was not chosen, or that it was."""
    if loser.misses or chosen is None:
        return f"does not fit: {loser.misses}"
    if loser is chosen:
        return "chosen"
    if not (loser.time and chosen.time):
        return "comes later"
    ratio = loser.seconds / chosen.seconds
    return f"slower: {ratio:.2f} x" if ratio > 1 else f"not clearly faster: {ratio:.2f} x"


def search(
    facts: Facts, possible: Sequence[Candidate]
) -> tuple[Judged | None, list[tuple[Judged, str]]]:
    """Choose the fastest of the choices for each number of ranks; of about equally fast choices the
    first. Returns it, and all that were looked at with a verdict."""
    chosen: Judged | None = None
    judged: list[Judged] = []
    for count in dict.fromkeys(candidate.num_processes for candidate in possible):
        if chosen is not None and not _may_be_faster(facts.machine, count, chosen):
            continue
        other, looked_at = fastest(
            facts, [candidate for candidate in possible if candidate.num_processes == count]
        )
        judged += looked_at
        if other is not None and (chosen is None or other.seconds * AS_FAST < chosen.seconds):
            chosen = other
    if chosen is not None:
        chosen = _compiled(facts, chosen, judged) or chosen
    return chosen, [(each, _verdict(each, chosen)) for each in judged]


def _compiled(facts: Facts, chosen: Judged, judged: list[Judged]) -> Judged | None:
    """The choice with compiled layers, where that is clearly faster and pays within the run. It is
    looked at, and added to `judged`, where other kernels than products, or the host, take enough of
    the step."""
    candidate, time = candidates.compiled(facts, chosen.candidate), chosen.time
    if not (candidate and time and time.memory_s + time.launch_s > _FUSED_SHARE * time.step_s):
        return None
    other, looked_at = fastest(facts, [candidate])
    judged += looked_at
    if other is None or other.seconds * _CLEARLY_FASTER > chosen.seconds:
        return None
    saved_s = facts.num_steps(candidate) * (chosen.seconds - other.seconds)
    return other if saved_s > COMPILE_S else None


def _may_be_faster(machine: Machine, num_processes: int, chosen: Judged) -> bool:
    """False if fewer ranks on even cards cannot be faster than the choice for more ranks: their
    products and kernels alone take longer. They are not traced then."""
    if candidates.uneven(machine.gpus) or chosen.time is None:
        return True
    busy_s = chosen.time.compute_s + chosen.time.memory_s
    if chosen.candidate.levers.every_n_layers:
        busy_s *= _NOT_RECOMPUTED
    return busy_s * chosen.candidate.num_processes / num_processes < chosen.seconds


def fastest(facts: Facts, possible: Sequence[Candidate]) -> tuple[Judged | None, list[Judged]]:
    """Choose the fastest way to run these candidates that fits: their batch in any split, with any
    levers that the recipe leaves open. Returns it, and all that were looked at.

    Without predicted times their order decides. Of candidates that are about equally fast the first
    wins, which is nearest to the recipe; if any batch will do (wishes.free_batch), one without
    checkpointing and chunks."""
    front = _Front(facts, possible)
    chosen = next(front.fitting(), None)
    return chosen, front.judged()


def streaming(facts: Facts, lost: Judged) -> Judged | None:
    """A candidate whose states do not fit, judged by them with as many streamed layers as make up
    for it; None: it can stream none."""
    candidate = candidates.with_states_that_fit(
        facts, lost.candidate, estimate.missing_bytes(facts, lost)
    )
    return candidate and estimate.by_states(facts, candidate)


def judge_most_frugal(facts: Facts, candidate: Candidate) -> Judged:
    """The candidate with every open lever at the value that saves most on a card, judged by the
    least that its step holds; of the host, by the least of no more streamed layers than it has."""
    frugal = candidates.most_frugal(facts, candidate)
    least = estimate.at_least(facts, frugal)
    if least.misses and budgets.misses_host(facts, frugal, least.memory):
        fewest = frugal.with_levers(streamed_layers=candidate.levers.streamed_layers)
        if least.memory.device_bytes <= least.budget_bytes and not budgets.misses_host(
            facts, fewest, estimate.at_least(facts, fewest).memory
        ):
            return replace(least, misses=None)
    return least


@dataclass
class _Open:
    """A candidate that may still be chosen."""

    candidate: Candidate  # candidate before its evaluation batch and workers are reduced
    place: tuple[Any, ...]  # rank in the order of nearness to the recipe
    preference: int
    judged: Judged
    num_recorded: int  # recorded steps when it was judged


@dataclass
class _Front:
    """The candidates that a search has come to. Each is judged by ever more: its price, its step, a
    replay of the allocator. Only the fastest is looked at more closely; one that does not fit is
    followed by those that save more memory by one lever's next value."""

    facts: Facts
    possible: Sequence[Candidate]
    _open: dict[Candidate, _Open] = field(default_factory=dict)
    _lost: dict[Candidate, Judged] = field(default_factory=dict)
    _own: set[Candidate] = field(default_factory=set)  # the recipe's steps, of rows sorted or not

    def __post_init__(self) -> None:
        self._own |= set(self.possible)
        for candidate in self.possible:
            by_states = estimate.by_states(self.facts, candidate)
            if by_states.misses:
                self._lost[candidate] = by_states
                by_states = streaming(self.facts, by_states) or by_states
            if by_states.misses:
                self._lost[by_states.candidate] = by_states
                continue
            in_order = list(candidates.sorted_splits(self.facts, by_states.candidate))
            self._own |= set(in_order)
            for split in (*candidates.splits(self.facts, by_states.candidate), *in_order):
                self._add(split, by_states)

    def _add(self, candidate: Candidate, of_less: Judged) -> None:
        """Add a candidate; until it is judged itself, it takes as long as one that saves less."""
        if candidate not in self._open:
            preference = candidates.preference(self.facts, candidate, candidate in self._own)
            judged = replace(of_less, candidate=candidate, misses=None, by="states")
            self._open[candidate] = _Open(candidate, self._place(candidate), preference, judged, -1)

    def _place(self, candidate: Candidate) -> tuple[Any, ...]:
        """The order of nearness to the recipe: by mode, transformers' modules, micro-batch, and
        levers."""
        chosen_mode = candidate.mode, candidate.num_processes
        modes = [(each.mode, each.num_processes) for each in self.possible]
        return (
            modes.index(chosen_mode),
            candidate.levers.use_liger_kernel,
            -candidate.per_device_train_batch_size,
            *(row.saved(row.read(candidate.levers)) for row in TRIED),
        )

    def judged(self) -> list[Judged]:
        """All that were looked at, each by the most that was."""
        open_ = (each.judged for each in self._open.values())
        return [
            *(each for each in open_ if each.by != "states" or each.misses or self._is_blind),
            *self._lost.values(),
        ]

    def fitting(self) -> Iterator[Judged]:
        """Yield those that fit, exactly predicted, the fastest first."""
        done: set[Candidate] = set()
        while (front := self._first(done)) is not None:
            if self._is_blind:
                front.judged = estimate.judge(self.facts, _evaluated(self.facts, front.candidate))
            if front.judged.by == "replay" or (self._is_blind and not front.judged.misses):
                done.add(front.candidate)
                yield front.judged
                continue
            if not self._is_blind:
                front.judged, front.num_recorded = self._closer(front)
            if front.judged.misses and self._may_fit_by_levers(front):
                missing = estimate.missing_bytes(self.facts, front.judged)
                if front.judged.by == "replay":  # with less, an allocator keeps less
                    missing //= 2
                for candidate in candidates.more_saving(self.facts, front.candidate, missing):
                    self._add(candidate, front.judged)

    @property
    def _is_blind(self) -> bool:
        """True if no step can be traced: states and the order decide."""
        return self.facts.traces is None or self.facts.traces.failure is not None

    def _may_fit_by_levers(self, front: _Open) -> bool:
        """True if levers may make a candidate fit that does not: they save a card's memory."""
        facts, lost = self.facts, front.judged
        on_card = lost.candidate.device == "cuda"
        if on_card and budgets.misses_host(facts, lost.candidate, lost.memory):
            return False
        least = judge_most_frugal(facts, front.candidate)
        if least.misses and least.candidate not in self._open:
            self._lost[least.candidate] = least
        return not least.misses

    def _first(self, done: set[Candidate]) -> _Open | None:
        """The fastest that may fit; once one is known to fit, of all that may be about as fast the
        nearest to the recipe."""
        open_ = [
            each
            for each in self._open.values()
            if not each.judged.misses and each.candidate not in done
        ]
        preference = min((each.preference for each in open_), default=0)
        open_ = [each for each in open_ if each.preference == preference]
        fastest_s = min(
            (each.judged.seconds for each in open_ if each.judged.by == "replay"), default=None
        )
        if fastest_s is None:
            return min(open_, key=lambda each: (each.judged.seconds, each.place), default=None)
        near = [each for each in open_ if each.judged.seconds <= AS_FAST * fastest_s]
        if self.facts.wishes.free_batch:
            return min(near, key=lambda each: (_is_indirect(each.candidate), each.judged.seconds))
        return min(near, key=lambda each: (each.place, each.judged.seconds))

    def _closer(self, front: _Open) -> tuple[Judged, int]:
        """Judge a candidate by more than before."""
        facts, candidate = self.facts, front.candidate
        traces = facts.traces
        assert traces is not None
        if front.judged.by == "step":
            return estimate.judge(facts, front.judged.candidate), len(traces.recorded)
        if front.num_recorded != len(traces.recorded):
            facts.order([candidate])
            judged = estimate.at_least(facts, candidate)
            if judged.by != "states" or judged.misses:
                return judged, len(traces.recorded)
        question = facts.question(candidate)
        if not traces.is_recorded(question):
            traces.record(question)
            return estimate.at_least(facts, candidate), len(traces.recorded)
        facts.fetch([candidate])
        if facts.trace(candidate) is None:
            return front.judged, len(traces.recorded)
        reduced = _with_fewer_workers(facts, _evaluated(facts, candidate))
        return estimate.judge(facts, reduced, exact=False), len(traces.recorded)


def _is_indirect(candidate: Candidate) -> bool:
    return any(row.read(candidate.levers) != row.plain for row in TRIED)


def _evaluated(facts: Facts, candidate: Candidate) -> Candidate:
    """Reduce the evaluation batch to one that takes no more memory than training; a batch of the
    recipe, to one that fits. Evaluation does not decide the weights, so it is reduced first."""
    count = candidate.per_device_eval_batch_size
    for event in facts.history.oom.ran_out:
        if event.section == "evaluation" and event.of != "pinned":
            count = max(1, min(count, event.candidate.per_device_eval_batch_size // 2))
    trace = facts.trace(candidate)
    if trace is None or not facts.recipe.data.holds_out:
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
    while fewer.dataloader_num_workers and budgets.misses_host(
        facts, fewer, estimate.judge(facts, fewer, exact=False).memory
    ):
        fewer = replace(fewer, dataloader_num_workers=fewer.dataloader_num_workers - 1)
    return fewer


def ranked(facts: Facts) -> list[Judged]:
    """The fastest splits of the effective batch that fit, the fastest first; none without
    traces."""
    facts = replace(facts, wishes=replace(facts.wishes, free_batch=True))
    possible, _ = candidates.possible(facts)
    if facts.traces is None:
        return []
    with facts.asking():
        fitting = list(islice(_Front(facts, possible).fitting(), _MOST_RANKED))
    return sorted((each for each in fitting if each.time), key=lambda each: each.seconds)


def table_order(judged: Sequence[tuple[Judged, str]]) -> list[tuple[Judged, str]]:
    """Put the chosen candidate first, then those that fit by time and the others by bytes; at most
    _TABLE_ROWS."""
    return sorted(
        judged,
        key=lambda pair: (
            pair[1] != "chosen",
            bool(pair[0].misses),
            pair[0].memory.device_bytes if pair[0].misses else pair[0].seconds,
        ),
    )[:_TABLE_ROWS]
