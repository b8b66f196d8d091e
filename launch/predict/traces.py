"""Traces of training steps, composed of what training.worker records and stored by content;
peaks at any micro-batch.

What a trace depends on is its name: model, precision, length, optimizer..., the versions of the
packages that run the step, and our own code. A stored trace is read in a millisecond; a new trace
takes a child some seconds.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from launch.base import files, leftovers
from launch.base.errors import LaunchError, ResourceError
from launch.base.workspace import code_digest
from launch.data.worker import WORKER, RecordSteps, WorkerEnded
from launch.predict.memory import loading
from launch.predict.memory.allocator import EMPTY_CACHE, FREED, STREAM, Event
from launch.predict.memory.loading import Births, Load
from launch.predict.memory.partial_sums import partial_sums_bytes
from launch.predict.sharding import BUCKET_ELEMENTS
from launch.predict.step import reduced, sharded, sources
from launch.predict.step.price import RecordedSteps
from launch.predict.step.recorded import NotComposed
from launch.predict.step.sources import Sources
from launch.predict.target_counts import NO_TARGETS, BatchCounts, MostTargets
from launch.probe import packages
from launch.schema.machine import cudnn_is_last
from launch.schema.phases import Phase
from launch.schema.plan import Born, ModelSize, Peak
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import affecting
from launch.schema.recorded_step import (
    STEP,
    Log,
    Operator,
    Passes,
    Question,
    RecordedStep,
    content_of,
    grouped,
    loaded,
    with_digest,
)

# A block: its fixed bytes, its bytes per sample, and when it is born; then None and its bytes per
# target of a part of the logits, if it grows with these. The buffer of a sum has rows in place of
# bytes, and in place of None the columns, multiprocessors and threads of partial_sums_bytes.
LoggedBlock = Sequence[Any]
DAMAGE = (OSError, ValueError)  # exceptions that a missing or changed file raises
# lifetimes until the run ends
LOADED: tuple[Born, ...] = ("trained", "slice", "packed", "scales", "start")
LASTING: tuple[Born, ...] = (*LOADED, "engine", "state", "paged", "workspace")
_EVALUATED: tuple[Born, ...] = ("evaluation", "kept")
# counts of a training micro-batch, and of an evaluation's
_Counts = tuple[BatchCounts, BatchCounts | None]
_LOGS_IN_RAM = 4  # a deep model's log takes some 20 MB
TIMEOUT_S = 300  # limit for one request
# The code that makes a trace: one of other code is another trace
_CODE = ("training", "launch/predict/step", "launch/schema/recorded_step.py")
PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed"),
    "liger-kernel",
)


@dataclass(frozen=True)
class Trace:
    """The peaks of one step as functions of its micro-batch, and its passes."""

    moments: tuple[Mapping[str, Any], ...]
    passes: Passes
    file: Path
    # targets of a training micro-batch, and of an evaluation's; a recorded trace has none
    targets: MostTargets = NO_TARGETS
    eval_targets: MostTargets = NO_TARGETS
    first: "Trace | None" = None  # the run's first step, if it was traced separately
    why_whole: str = ""  # why the step was not composed of others
    # share of the seconds beside products that the step takes at least, where the passes are
    # others'
    least_share: float = 1.0
    # composes the content of launch.predict.step.reduced once more, which a replay needs
    log: Callable[[], Mapping[str, Any]] = dict
    keeps_replays: bool = False  # replays are stored beside its file

    def peak(self, num_samples: int, eval_samples: int | None) -> Peak:
        """The highest moment at so many samples a micro-batch; `eval_samples` None: nothing is
        evaluated."""
        return max(
            self.peaks(num_samples, eval_samples).values(), key=lambda peak: peak.allocated_bytes
        )

    def peaks(self, num_samples: int, eval_samples: int | None) -> dict[str, Peak]:
        """The highest moment of each section that happens."""

        def peaks_of(moment: Mapping[str, Any]) -> list[Peak]:
            in_evaluation = moment["section"] == "evaluation"
            count = eval_samples if in_evaluation else num_samples
            most = self.eval_targets if in_evaluation else self.targets
            return [
                Peak(
                    moment["section"],
                    moment["op"],
                    {name: _grown(sizes, batch) for name, sizes in moment["parts"].items()},
                )
                for batch in (most.batches(count) if count is not None else ())
            ]

        peaks = grouped((peak.section, peak) for each in self.moments for peak in peaks_of(each))
        return {
            section: max(of_section, key=lambda peak: peak.allocated_bytes)
            for section, of_section in peaks.items()
        }

    def highest(self, batches: Sequence[BatchCounts], in_evaluation: bool = False) -> BatchCounts:
        """The micro-batch that takes the most memory."""
        if len(batches) == 1:
            return batches[0]
        return max(batches, key=lambda batch: self.peak_bytes(batch, in_evaluation))

    def peak_bytes(self, batch: BatchCounts, in_evaluation: bool = False) -> int:
        """The peak of a step, or of an evaluation, with this micro-batch."""
        return max(
            sum(_grown(sizes, batch) for sizes in moment["parts"].values())
            for moment in self.moments
            if (moment["section"] == "evaluation") == in_evaluation
        )

    def _counts(self, num_samples: int, eval_samples: int | None) -> _Counts:
        """Those of a training micro-batch, and of an evaluation's."""
        trained = self.highest(self.targets.batches(num_samples))
        if eval_samples is None:
            return trained, None
        return trained, self.highest(self.eval_targets.batches(eval_samples), in_evaluation=True)

    def run(
        self,
        num_samples: int,
        eval_samples: int | None,
        load: Load = loading.plain,
    ) -> list[tuple[Phase, list[Event]]]:
        """The events of a device's allocator by part: the load, the first step, the next step, an
        evaluation if there is one, a save, and the step after it. The cache is emptied before the
        first step, before and after an evaluation and before a save, as the trainer does. Paged
        states are not the allocator's.

        The optimizer makes its states in the update of the first step, between blocks of that step,
        where they keep whole segments from being given back. That step has its own rows, if they
        are known; all others have those that take the most memory. What an engine has gathered for
        an evaluation is there until a checkpoint is saved. `load`: the engine's own order of
        loading.
        """
        log = self.log()
        first, again = self.first_log(), log.get("turns", {}).get("after evaluation", log)
        of_first: Trace = self
        if self.first is not None and len(self.first.first_log()["blocks"]) == len(first["blocks"]):
            of_first, first = self.first, self.first.first_log()  # blocks have the same numbers
        evaluated = _first_of_evaluation(log) < len(log["events"]) and eval_samples is not None
        stride = max(len(each["blocks"]) for each in (log, first, again))
        counts = self._counts(num_samples, eval_samples)
        opened = of_first.highest(of_first.targets.batches_of_first_step(num_samples))
        steady, opening, last = (
            _Turn(log, 0, counts),
            _Turn(first, stride, (opened, counts[1])),
            _Turn(again if evaluated else log, 2 * stride, counts),
        )
        births = _births(opening, 3 * stride)
        evaluation = log["events"][_first_of_evaluation(log) :] if evaluated else []
        measured = [
            steady.born(number) if number >= 0 else steady.freed(~number) for number in evaluation
        ]
        ended_there = set(evaluation)
        lives_on = [number for number in evaluation if number >= 0 and ~number not in ended_there]
        until_save = [number for number in lives_on if steady.blocks[number][2] == "kept"]
        measured += [steady.freed(number) for number in lives_on if number not in until_save]
        return [
            ("load", [*load(births), EMPTY_CACHE]),
            ("first_step", opening.events(None, opening.select("state"))),
            ("step", [*opening.ended(), *steady.events(opening), EMPTY_CACHE]),
            *([("evaluation", [*measured, EMPTY_CACHE])] if evaluation else []),
            ("save", [steady.freed(number) for number in until_save]),
            ("step", [*steady.ended(), *last.events(steady)]),
        ]

    def of_run(self, num_samples: int, eval_samples: int | None) -> list[Any]:
        """All that the events of run() are made of, beside the order of loading."""
        first = self.first or self
        opened = first.highest(first.targets.batches_of_first_step(num_samples))
        batches = [*self._counts(num_samples, eval_samples), opened]
        return [self.file.stem, first.file.stem, *map(str, batches)]

    def first_log(self) -> Mapping[str, Any]:
        """The log of a run's first step."""
        log = self.log()
        return log.get("turns", {}).get("first", log)


class _Turn:
    """A step of a run, whose blocks have numbers of their own, from `offset` on. The numbers of
    blocks that last are those of every turn."""

    def __init__(self, log: Mapping[str, Any], offset: int, counts: _Counts) -> None:
        self.blocks: list[LoggedBlock] = log["blocks"]
        self.step: list[int] = log["events"][: _first_of_evaluation(log)]
        self._update: int = log["update"]
        self.layers: list[list[int]] = log.get("layers", [])
        self._offset, self._counts = offset, counts
        self._streams = {int(number): stream for number, stream in log["streams"].items()}
        self.lasting = {number for number, block in enumerate(self.blocks) if block[2] in LASTING}
        ends = {~number for number in self.step if number < 0}
        # blocks that live until the next turn begins
        self._remaining = [
            number
            for number in self.step
            if number >= 0 and number not in self.lasting and number not in ends
        ]
        # a block of the start that ends in the step -> the new block in its place
        self._successors: dict[int, int] = {}
        for number in sorted(ends & self.lasting):
            alike = (
                new for new in self._remaining if self.blocks[new][:2] == self.blocks[number][:2]
            )
            if (new := next(alike, None)) is not None:
                self._successors[number] = new
                self._remaining.remove(new)

    def select(self, *born: Born) -> list[int]:
        """The blocks that last and are allocated then, in their order."""
        return [
            number
            for number in self.step
            if number >= 0 and number in self.lasting and self.blocks[number][2] in born
        ]

    def _id(self, number: int) -> int:
        turns_id = number if number in self.lasting else number + self._offset
        return turns_id + self._streams.get(number, 0) * STREAM

    def born(self, number: int) -> Event:
        return self._id(number), _size(self.blocks[number], self._counts)

    def freed(self, number: int, before: "_Turn | None" = None) -> Event:
        """The end of a block; of a lasting block that was replaced in the turn `before`, the end of
        the new block in its place."""
        if before is not None and number in before._successors:
            return before._id(before._successors[number]), FREED
        return self._id(number), FREED

    def events(self, before: "_Turn | None", late: Sequence[int] = ()) -> list[Event]:
        """The step; without a turn `before` it is the first, in which `late` is born in the
        update."""
        events: list[Event] = []
        for index, number in enumerate(self.step):
            if index == self._update:
                events += map(self.born, late)
            is_new = number not in self.lasting or (
                before is None and self.blocks[number][2] == "workspace"
            )
            if number < 0:
                events.append(self.freed(~number, before))
            elif is_new:
                events.append(self.born(number))
        return events if self._update < len(self.step) else [*events, *map(self.born, late)]

    def ended(self) -> list[Event]:
        return [self.freed(number) for number in self._remaining]


def _births(turn: _Turn, first_free_id: int) -> Births:
    """The blocks that a run loads, in their order."""
    return Births(
        loaded=[turn.born(number) for number in turn.select(*LOADED)],
        engine=[turn.born(number) for number in turn.select("engine")],
        trained={turn.born(number)[0] for number in turn.select("trained")},
        slices={turn.born(number)[0] for number in turn.select("slice")},
        packed={turn.born(number)[0] for number in turn.select("packed")},
        scales={turn.born(number)[0] for number in turn.select("scales")},
        layers=[{turn.born(number)[0] for number in layer} for layer in turn.layers],
        first_free_id=first_free_id,
    )


def _first_of_evaluation(log: Mapping[str, Any]) -> int:
    """The index of the first event of the evaluation, or behind the last event."""
    blocks, events = log["blocks"], log["events"]
    births = (
        index
        for index, number in enumerate(events)
        if number >= 0 and blocks[number][2] in _EVALUATED
    )
    return next(births, len(events))


def _size(block: LoggedBlock, counts: _Counts) -> int:
    count = counts[block[2] in _EVALUATED]
    assert count is not None  # no evaluation happens without a micro-batch of it
    if len(block) == 3:
        return _grown(block[:2], count)
    size, of_sum = _grown((*block[:2], *block[4:]), count), block[3]
    return partial_sums_bytes(size, *of_sum) if of_sum else size


def _grown(sizes: Sequence[int], batch: BatchCounts) -> int:
    """Bytes of (fixed, per sample) or (fixed, per sample, per target)."""
    size, sample = sizes[0], sizes[1]
    if sample:  # integers alone: arithmetic of fractions takes most of a replay's time
        size += -(-batch.rows.numerator * sample // batch.rows.denominator)
    return size + batch.targets * sizes[2] if len(sizes) > 2 else size


class Traces:
    """The traces of one recipe's model, from the cache or made now."""

    def __init__(
        self,
        recipe: Recipe,
        model: ModelSize,
        lora_targets: Sequence[str],
        folder: Path,
        say: Any = lambda line: None,
    ) -> None:
        self._recipe, self._model, self._lora_targets = recipe, model, tuple(lora_targets)
        self._folder, self._say = folder, say
        values = recipe.model_dump(mode="json")
        self._deciding = {
            section: affecting(values[section], section, "memory")
            for section in ("model", "lora", "quantization", "training")
            if values[section] is not None
        }
        self._cached: dict[str, Trace] = {}
        self._bases: dict[str, RecordedStep] = {}
        self._logs: dict[str, Log] = {}  # newest logs of one process
        self._prices: dict[str, tuple[int, Trace | None]] = {}  # number of steps, and price
        self.recorded = RecordedSteps()
        # why a step could not be traced: its candidates are judged by states alone
        self.failure: str | None = None

    def for_recipe(self, recipe: Recipe, model: ModelSize, lora_targets: Sequence[str]) -> "Traces":
        """The traces of another recipe, kept in the same place."""
        return type(self)(recipe, model, lora_targets, self._folder, self._say)

    def fetch(self, questions: Sequence[Question]) -> None:
        """Have these steps traced, as far as their traces are not stored. Close when there are no
        more."""
        self._compose({self.name(each): each for each in questions if self.get(each) is None})

    def is_recorded(self, question: Question) -> bool:
        """True if all steps that this one is composed of are recorded."""
        return all(self._recorded(base) for base in self._sources(question).questions)

    def record(self, question: Question) -> None:
        """Have the steps recorded that this one is composed of."""
        self._record(self._sources(question).questions)

    def price(self, question: Question) -> Trace | None:
        """The work of a step, and what it holds at least, by the steps that are recorded so far,
        without composing it; None where none of them is like it."""
        name, number = self.name(question), len(self.recorded)
        if self._prices.get(name, (-1, None))[0] != number:
            priced = self.recorded.price(question, self._sources(question))
            price = None
            if priced is not None:
                moments = tuple(
                    {"section": section, "op": "", "parts": {"activations": sizes}}
                    for section, sizes in priced.moments
                )
                of_step = (
                    priced.passes.with_operators(_of_each_sample)
                    if priced.of_each_sample
                    else priced.passes
                )
                price = Trace(moments, of_step, self._folder, least_share=priced.least_share)
            self._prices[name] = number, price
        price = self._prices[name][1]
        return price and with_targets(price, of_any_rows(question))

    def _compose(self, waiting: dict[str, Question]) -> None:
        """Compose these steps of records, which are made where there are none, and store their
        traces."""
        composed_of = {name: self._sources(question) for name, question in waiting.items()}
        while waiting and not self.failure:
            self._record([base for name in waiting for base in composed_of[name].questions])
            if self.failure:
                return
            for name, question in list(waiting.items()):
                why_not = self._composed(name, question, composed_of[name])
                if why_not is None:
                    del waiting[name]
                    continue
                plain = _on_the_device(question)
                is_own = composed_of[name].outer == sources.alone(plain).outer
                composed_of[name] = sources.alone(plain, why_not, all_layers=is_own)

    def _sources(self, question: Question) -> Sources:
        return sources.choose_sources(
            _on_the_device(question),
            self._model.is_encoder_decoder,
            lambda base: self._recorded(base) is not None,
        )

    def _record(self, bases: Sequence[Question]) -> None:
        """Have these steps recorded, as far as they are not stored."""
        missing = {self._base_name(base): base for base in bases if self._recorded(base) is None}
        if not missing:
            return
        lengths = sorted({max(base.lengths) for base in missing.values()}, reverse=True)
        all_layers = not self._model.family.layer_period or any(
            base.all_layers for base in missing.values()
        )
        depth_words = " and with all layers, as they differ" if all_layers else ""
        self._say(
            f"tracing {len(missing)} step(s) of {self._model.name}, at"
            f" {', '.join(map(str, lengths))} tokens{depth_words}: kept for later plans"
        )
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            leftovers.sweep(self._folder)
            tempfile.TemporaryFile(dir=self._folder).close()
        except OSError as error:
            raise ResourceError(
                f"{self._folder}: cannot keep traces there ({error.strerror}); make it writable, or"
                " name another folder with LOWMEM_TRACES"
            ) from error
        try:
            WORKER.ask(
                RecordSteps(self._folder, self._recipe, self._model, self._lora_targets, missing),
                TIMEOUT_S,
            )
        except (WorkerEnded, LaunchError) as reason:
            self.failure = str(reason)
        for base in missing.values():
            self._recorded(base)

    def _recorded(self, base: Question) -> RecordedStep | None:
        """The recorded step, if it is stored."""
        name = self._base_name(base)
        if name not in self._bases:
            try:
                self._bases[name] = loaded(
                    files.regular_bytes(self._folder / f"{name}{STEP}").decode()
                )
            except DAMAGE:
                return None
            self.recorded.add(base, self._bases[name])
        return self._bases[name]

    def _composed(self, name: str, question: Question, composed_of: Sources) -> str | None:
        """Store the trace of a step; the reason if it is not made of these."""

        def recorded(base: Question) -> RecordedStep:
            step = self._recorded(base)
            if step is None:
                raise ResourceError(f"{self._folder}: the record of a step cannot be read there")
            return step

        try:
            log = composed_of.composed(
                recorded, lambda base: self.recorded.indexed(base, recorded(base))
            )
        except NotComposed as difference:
            return str(difference)
        if question.documents > 1:
            log = log.of_documents(question.documents)
        content = {
            "peaks": reduced.peaks(self._shared(question, log)),
            "passes": reduced.stored_passes(reduced.passes_of_log(log)),
            "why_whole": composed_of.why_whole,
        }
        files.write_atomic(self._folder / f"{name}.json", with_digest(json.dumps(content)))
        self._logs[name] = log
        while len(self._logs) > _LOGS_IN_RAM:
            del self._logs[next(iter(self._logs))]
        return None

    def _shared(self, question: Question, log: Log, turn: sharded.Turn = "steady") -> Log:
        """The log of one rank."""
        return sharded.shard_step(
            log,
            self._recipe,
            question.strategy,
            self._model.family.ties_head,
            BUCKET_ELEMENTS,
            turn,
        )

    def _content(self, question: Question) -> Mapping[str, Any]:
        """The logs of a step as a replay needs them."""
        name = self.name(question)
        if name not in self._logs:
            self._compose({name: question})
        if name not in self._logs:
            raise ResourceError(f"{self._folder}: a step cannot be traced again: {self.failure}")
        log = self._logs[name]
        of_turns = {
            turn: self._shared(question, log, turn)
            for turn in sharded.special_turns(question.strategy)
        }
        return reduced.replay_content(self._shared(question, log), of_turns)

    def get(self, question: Question) -> Trace | None:
        """The trace, if it is stored."""
        name = self.name(question)
        if name not in self._cached:
            file = self._folder / f"{name}.json"
            try:
                content = json.loads(content_of(files.regular_bytes(file).decode()))
                self._cached[name] = Trace(
                    tuple(content["peaks"]),
                    reduced.read_passes(content["passes"]),
                    file,
                    why_whole=str(content["why_whole"]),
                    log=partial(self._content, question),
                    keeps_replays=True,
                )
            except DAMAGE:
                return None
        return with_targets(self._cached[name], of_any_rows(question))

    def name(self, question: Question) -> str:
        """A hash of all that a trace depends on."""
        strategy = question.strategy
        return self._hashed(
            question,
            {
                "engine": [
                    strategy.launch_mode.engine,
                    strategy.launch_mode.zero_stage,
                    strategy.launch_mode.offloads,
                    strategy.num_processes,
                ],
                "documents": question.documents,
                "bucket_elements": BUCKET_ELEMENTS,
                "streamed_layers": strategy.levers.streamed_layers,
            },
        )

    def _base_name(self, base: Question) -> str:
        """A hash of all that a recorded step depends on."""
        kinds = min(base.documents, 1), base.parts_apart, base.all_layers
        return self._hashed(base, {"cast": base.cast, "recorded": kinds})

    def _hashed(self, question: Question, more: Mapping[str, Any]) -> str:
        recipe, strategy = self._recipe, question.strategy
        facts = {
            **self._deciding,
            **more,
            "config": dict(self._model.config),
            "lora_targets": self._lora_targets,
            "device": strategy.device,
            "gpu": [
                question.architecture,
                question.fused_attention,
                cudnn_is_last(question.few_shapes, os.environ),
            ],
            "mixed_precision": strategy.mixed_precision,
            "levers": strategy.levers.recorded,
            "lengths": question.lengths,
            "is_single": question.is_single,
            "is_padded": question.is_padded,
            "packing": recipe.data.packing,
            "accumulates": question.accumulates,
            "versions": _versions(),
            "code": code_digest(*_CODE),
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:24]


def with_targets(
    trace: Trace, targets: MostTargets, in_evaluation: MostTargets | None = None
) -> Trace:
    """The trace of micro-batches of these sizes."""
    return replace(trace, targets=targets, eval_targets=in_evaluation or targets)


def of_any_rows(question: Question) -> MostTargets:
    """Micro-batches of which nothing is known: all positions may have a target."""
    source, target = question.lengths
    return MostTargets(target, parts=question.strategy.levers.num_output_chunks, source=source)


def _on_the_device(question: Question) -> Question:
    """The step with all weights on the device, as steps are recorded (streamed.stream)."""
    return replace(question, strategy=question.strategy.with_levers(streamed_layers=0))


def _of_each_sample(operator: Operator) -> Operator:
    """The work for each sample, of an operator in a step of one."""
    return operator.with_parts(
        lambda fixed, sample, target, of_all: (0, fixed + sample, target, of_all)
    )


@cache
def _versions() -> dict[str, str]:
    return {package: packages.version(package) for package in PACKAGES}
