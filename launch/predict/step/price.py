"""The price of a step: its work, and the most bytes that it holds in each section, from what each
recorded layer leaves behind and holds at most, without the log of all layers.

What one way of a layer hands on to another is not matched, as composing does: what is not freed at
the end is taken off, so that a mixture never has more than its composed step. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from launch.predict.step.compose import Composer
from launch.predict.step.recorded import PASSES, NotComposed, Recorded, Run
from launch.predict.step.reduced import (
    NOTHING,
    OF_STEP,
    SECTIONS,
    PassRun,
    Sizes,
    passes_of_runs,
    plus,
)
from launch.predict.step.sources import Sources
from launch.schema.recorded_step import LOSS, Event, Layer, Passes, Question, RecordedStep

# Least share of a recorded step's seconds beside products that another step takes: where the
# recorded one computes in another precision; where one of them makes its logits at once, the other
# in parts; where their kernels differ
OTHER_CAST, _OTHER_LOSS, OTHER_KERNELS = 0.9, 0.8, 0.4
KERNELS = ("use_liger_kernel", "fused_norms", "fused_adapters")  # levers that save time


# bytes of a layer that a price counts; behind: those that it leaves behind
Part = Literal["all", "behind", "nothing"]


class Priced(NamedTuple):
    """The price of a step."""

    # sections, and bytes of which some are the most at any micro-batch; of those that are not known
    # there are none
    moments: list[tuple[str, Sizes]]
    passes: Passes
    least_share: float = 1.0  # share of the seconds beside products that the step takes at least
    of_each_sample: bool = False  # it is the work of a single one


class Unit(NamedTuple):
    """A run of a recorded layer: the bytes that it leaves behind, and the most inside it."""

    after: Sizes
    highest: list[Sizes]


class Price:
    """The price of the step that a composer would make. `with_states` False: without weights,
    gradients and states of the optimizer, which an engine shares out. `recorded` says what is of a
    layer: all, what it leaves behind, or nothing, which then counts nothing; `has_loss` whether
    those outside of layers are. `again` says how often a layer computes its activations more than
    its record does.

    `num_looked_at` counts the events and runs that it is made of; `units` are those of others."""

    def __init__(
        self,
        composer: Composer,
        with_states: bool = True,
        recorded: Callable[[Layer], Part] = lambda layer: "all",
        has_loss: bool = True,
        again: Callable[[Layer], int] = lambda layer: 0,
        units: dict[Any, Unit] | None = None,
    ) -> None:
        self._composer, self._with_states = composer, with_states
        self._recorded, self._has_loss, self._again = recorded, has_loss, again
        self._units: dict[Any, Unit] = {} if units is None else units
        self._of_rows: dict[tuple[int, bool], Sizes] = {}
        self.num_looked_at = 0

    def moments(self) -> list[tuple[str, Sizes]]:
        """The sections of a step, and bytes of which some are the most at any micro-batch."""
        highest: dict[str, set[Sizes]] = defaultdict(set)
        live = NOTHING
        for phase in self._composer.outer.events:
            tops = highest[phase.partition(":")[0]]
            for step in self._composer.steps(phase):
                self.num_looked_at += 1
                if isinstance(step, Event):
                    live = plus(live, self._outside(step))
                    if step.birth and self._has_loss:
                        tops.add(live)
                elif isinstance(step, list):
                    for source, block in step:
                        live = plus(live, self._freed(source, block, phase), -1)
                else:
                    unit = self._unit(*step)
                    tops.update(plus(live, top) for top in unit.highest)
                    live = plus(live, unit.after)
        fixed, sample, target = plus(live, self._lasting(), -1)
        excess = max(fixed, 0), max(sample, 0), max(target, 0)
        return [
            (section, plus(top, excess, -1))
            for section in SECTIONS
            for top in _undominated(highest.get(section, ()))
        ]

    def _unit(self, run: Run[Event], layer: Layer, source: Recorded) -> Unit:
        in_pass = layer[0] != LOSS and run.items[0].phase.startswith(PASSES)
        part = self._recorded(layer) if in_pass else "all"
        if part == "nothing" or (layer[0] == LOSS and not self._has_loss):
            return Unit(NOTHING, [])
        parts = self._composer.parts if layer[0] == LOSS else 0
        is_last = parts > 0 and layer[1] == parts - 1
        key = id(run), parts, is_last, self._with_states, part
        if key not in self._units:
            live, tops = NOTHING, {NOTHING}
            for event in run.items:
                size = self._size(source, event.block, is_last)
                live = plus(live, size, 1 if event.birth else -1)
                if event.birth and part == "all":
                    tops.add(live)
            self._units[key] = Unit(live, [*_undominated(tops)])
            self.num_looked_at += len(run.items)
        return self._units[key]

    def _outside(self, event: Event) -> Sizes:
        """The bytes that an event outside of layers adds; the end of a layer's block is that of
        each."""
        outer = self._composer.outer
        if event.birth:
            return self._size(outer, event.block)
        return plus(NOTHING, self._freed(outer, event.block, event.phase), -1)

    def _freed(self, source: Recorded, block: int, phase: str) -> Sizes:
        """The bytes of the blocks that one stands for and that end in this phase: in a pass, of
        layers of this way."""
        composer, (_, owner, _) = self._composer, source.place[block]
        if owner is None:
            return self._size(source, block)
        if owner[0] == LOSS and not self._has_loss:
            return NOTHING
        layers = composer.layers_of(owner)
        if owner[0] != LOSS and phase.startswith(PASSES):
            layers = [each for each in layers if composer.way_of(each) is source]
        if owner[0] != LOSS and source.place[block][0].startswith(PASSES):
            layers = [each for each in layers if self._recorded(each) != "nothing"]
        is_last = owner[0] == LOSS and owner[1] == source.recorded_layers[LOSS] - 1
        return plus(NOTHING, self._size(source, block, is_last), len(layers))

    def _lasting(self) -> Sizes:
        """The bytes of blocks that nothing frees."""
        total, outer = NOTHING, self._composer.outer
        for block in outer.place.keys() - outer.freed.keys():
            total = plus(total, self._freed(outer, block, ""))
        return total

    def _size(self, source: Recorded, block: int, is_last: bool = False) -> Sizes:
        """The bytes of a block; in a part of the logits, and outside of layers, of this number of
        parts."""
        row, sizes = source.log.blocks[block], self._composer.sizes
        phase, owner, _ = source.place[block]
        if not self._with_states and (
            phase.startswith("start")
            or (phase.startswith("backward") and source.freed.get(block, ("",))[0] != phase)
        ):
            return NOTHING
        if sizes is None or source is not self._composer.outer or (owner and owner[0] != LOSS):
            return row.sizes
        if (block, is_last) not in self._of_rows:
            row = row.of_layer(row.layer)
            if owner is not None:
                sizes.of_part(row, block, is_last)
            else:
                sizes.outside(row)
            self._of_rows[block, is_last] = row.sizes
        return self._of_rows[block, is_last]

    def passes(self) -> Passes:
        """The operators of the composed step, without an evaluation's."""
        return passes_of_runs(self._composer.operators, self._runs())

    def _runs(self) -> Iterator[PassRun]:
        # The record makes its logits in parts, once more in backward, and the step may not
        is_made_twice = not self._has_loss and self._composer.parts > 1
        timed = (phase for phase in self._composer.outer.calls if phase.startswith(OF_STEP))
        for phase in timed:
            for _, layer, numbers in self._composer.runs(phase):
                self.num_looked_at += 1
                times = 1
                if layer and phase.startswith("forward"):
                    times += -is_made_twice if layer[0] == LOSS else self._again(layer)
                yield from times * [(phase, numbers)]


class RecordedSteps:
    """The steps of a recipe that are recorded so far, and prices of others by what they tell."""

    def __init__(self) -> None:
        self._bases: dict[Question, Recorded] = {}
        self._units: dict[Any, Unit] = {}

    def __len__(self) -> int:
        return len(self._bases)

    def add(self, base: Question, step: RecordedStep) -> None:
        """Add a recorded step; not one of layers in turns, or of its own number of parts of the
        logits, which tell nothing of others."""
        if base.strategy.levers.every_n_layers > 1 or base.loss_parts > 1:
            return
        with suppress(NotComposed):
            self._bases.setdefault(base, Recorded(step))

    def indexed(self, base: Question, step: RecordedStep) -> Recorded:
        """The recorded step; of layers in turns it is not kept. Raises NotComposed."""
        return self._bases.get(base) or Recorded(step)

    def price(self, question: Question, sources: Sources) -> Priced | None:
        """The price of a step, by the recorded steps that are most like it; None where none is."""
        alike = self._alike(question, sources)
        levers = question.strategy.levers
        if not alike:
            return None
        outer = max(
            alike,
            key=lambda base: (
                base.loss_parts == sources.outer.loss_parts,
                _recomputes(base) == (levers.every_n_layers > 0),
            ),
        )
        ways = {
            way: max(alike, key=lambda base: (_recomputes(base) == way, base is outer))
            for way in (False, True)
        }
        for each in (ways, dict.fromkeys((False, True), outer)):
            with suppress(NotComposed):
                return self._priced(question, sources, outer, each)
        return None

    def _priced(
        self, question: Question, sources: Sources, outer: Question, ways: Mapping[bool, Question]
    ) -> Priced:
        """The price of a step whose layers are those of `ways`: that keep their activations, that
        compute them again. Raises NotComposed."""
        every = question.strategy.levers.every_n_layers
        recorded = {way: self._bases[base] for way, base in ways.items()}
        again = {way: way - _recomputes(base) for way, base in ways.items()}
        part = _part_alike(outer, question)
        has_loss = outer.loss_parts == sources.outer.loss_parts and not sources.why_whole

        def computes_again(layer: Layer) -> bool:
            return every > 0 and layer[1] % every == 0

        parts = sources.parts if has_loss else outer.strategy.levers.num_output_chunks
        composer = Composer(
            self._bases[outer],
            lambda layer: recorded[computes_again(layer)],
            parts,
            sources.positions,
        )
        price = Price(
            composer,
            question.strategy.launch_mode.is_whole,
            lambda layer: "nothing" if again[computes_again(layer)] else part,
            has_loss,
            lambda layer: again[computes_again(layer)],
            self._units,
        )
        of_samples = outer.is_single and not question.is_single
        same_cast = outer.cast == question.cast
        share = min(
            1.0 if same_cast else OTHER_CAST,
            1.0 if has_loss else _OTHER_LOSS,
            OTHER_KERNELS if _has_others_kernels(question, outer) else 1.0,
        )
        moments = price.moments() if same_cast and not of_samples else []
        of_step = price.passes()
        if not has_loss:  # targets are those of a part
            times = question.strategy.levers.num_output_chunks / parts
            of_step = of_step.with_operators(
                lambda operator: operator.with_parts(
                    lambda fixed, sample, target, of_all: (fixed, sample, times * target, of_all)
                )
            )
        return Priced(moments, of_step, share, of_samples)

    def _alike(self, question: Question, sources: Sources) -> list[Question]:
        """The records that tell most of a step, all of one kind. Those of a single sample tell
        nothing of the bytes of more, and those that accumulate gradients nothing of a step that
        does not."""
        levers = question.strategy.levers
        ways = {levers.every_n_layers > 0, levers.every_n_layers == 1}
        kinds: dict[tuple[Any, ...], list[Question]] = defaultdict(list)
        for base in self._bases:
            if base.accumulates <= question.accumulates:
                differs = base.cast != question.cast, _uncomposed(base) != _uncomposed(question)
                is_fewer = base.is_single and not question.is_single
                kinds[is_fewer, *differs, base.is_single, base.accumulates].append(base)

        def unknown(kind: tuple[Any, ...]) -> tuple[Any, ...]:
            bases = kinds[kind]
            of_ways = ways - {base.strategy.levers.every_n_layers > 0 for base in bases}
            of_loss = all(base.loss_parts != sources.outer.loss_parts for base in bases)
            other_rows = kind[3:] != (question.is_single, question.accumulates)
            return *kind[:3], len(of_ways) + of_loss, other_rows

        return kinds[min(kinds, key=unknown)] if kinds else []


def _has_others_kernels(question: Question, base: Question) -> bool:
    """True if a step has kernels that save time, and the record does not."""
    levers, recorded = question.strategy.levers.recorded, base.strategy.levers.recorded
    return any(levers[name] and not recorded[name] for name in KERNELS)


def _part_alike(base: Question, question: Question) -> Part:
    """The part of a layer's bytes that both have: MLPs in parts change what is inside it."""
    base_levers, question_levers = _uncomposed(base), _uncomposed(question)
    differing = {name for name in base_levers if base_levers[name] != question_levers[name]}
    return "nothing" if differing - {"tiled_mlp_num_shards"} else "behind" if differing else "all"


def _recomputes(base: Question) -> bool:
    return base.strategy.levers.every_n_layers > 0


def _uncomposed(question: Question) -> dict[str, Any]:
    """The levers that are not composed."""
    return replace(question.strategy.levers, every_n_layers=0, num_output_chunks=1).recorded


def _undominated(tops: Iterable[Sizes]) -> Iterator[Sizes]:
    """The sums of which no other has as much of everything."""
    highest: list[Sizes] = []
    for top in sorted(set(tops), key=sum, reverse=True):
        if not any(
            top[0] <= high[0] and top[1] <= high[1] and top[2] <= high[2] for high in highest
        ):
            highest.append(top)
            yield top
