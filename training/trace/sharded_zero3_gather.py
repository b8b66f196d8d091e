"""Which weights ZeRO's stage 3 has gathered at each moment of a step.

A weight is gathered for the module that uses it, together with those of the next modules up to a
bucket, and dropped behind it, unless it is small or used again soon.
Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py, partition_parameters.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from launch.schema.plan import Strategy
from training.trace.recorder import Layer
from training.trace.rewrite_log import Landmarks, Rewriting

# elements; smaller weights stay whole (DeepSpeedZeroConfig param_persistence_threshold)
PERSISTENT = 100_000
# elements gone through before the next use; nearer ones are kept (max_reuse_distance)
MAX_REUSE = 1_000_000_000
LIVE_BUCKETS = 2  # stage3_max_live_parameters in buckets, as launch/render/deepspeed.py writes it


@dataclass(frozen=True)
class Use:
    """A module of the model uses a weight from here until the next use."""

    at: int
    weight: int  # index in Landmarks.weights


class Bundle:
    """Weights that one all-gather brings."""

    def __init__(self, block: int | None, weights: set[int]) -> None:
        self.block = block  # None: a single weight is its own buffer
        self.weights = weights  # not used yet
        self.arrived = False


class Gathered:
    """The coordinator of one rank, for one micro-step."""

    def __init__(
        self,
        rewriting: Rewriting,
        marks: Landmarks,
        strategy: Strategy,
        element_bytes: int,
        bucket: int,
    ) -> None:
        self.rewriting, self.weights, self.strategy = rewriting, marks.weights, strategy
        self.bucket = bucket  # elements
        self.sizes = [weight.bytes // element_bytes for weight in marks.weights]
        self.element_bytes = element_bytes
        self.whole: dict[int, int] = {}  # weight -> its block
        self.inflight: dict[int, Bundle] = {}

    def run(self, uses: list[Use], expected: list[Use], end: int) -> None:
        """Go through these uses: of a forward and its backward, or of an evaluation. There the
        backward is `expected` all the same, as the order of modules was recorded in training."""
        steps, uses = len(uses), [*uses, *expected]
        queue = deque(range(len(uses)))
        fetched_for: dict[int, int] = {}  # weight -> the last use that a fetch has looked at
        for step, use in enumerate(uses[:steps]):
            size = self.sizes[use.weight]
            if size > PERSISTENT:
                self._fetch(use)
            if queue and queue[0] <= step:
                queue.popleft()
                fetched_for[use.weight] = max(step, fetched_for.get(use.weight, -1))
            self._prefetch(uses, queue, fetched_for, use.at)
            behind = next((later.at for later in uses[step + 1 :] if later.at > use.at), end)
            if (
                use.weight in self.whole
                and fetched_for.get(use.weight, -1) <= step
                and not self._is_near(uses, step)
            ):
                self.rewriting.dies(self.whole.pop(use.weight), behind)
        self._leave(end)

    def _fetch(self, use: Use) -> None:
        if use.weight not in self.whole and use.weight not in self.inflight:
            self._gather([use.weight], use.at)
        if use.weight in self.inflight:
            self._arrive(use.weight, use.at)

    def _gather(self, weights: list[int], at: int) -> None:
        size = sum(self.sizes[weight] for weight in weights) * self.element_bytes
        if self.strategy.num_processes == 1 and not self.strategy.offloads:
            return  # the whole is the part
        if self.strategy.offloads:
            self.rewriting.passes(size / self.strategy.num_processes, "part from the host", at)
        layer = self.weights[weights[0]].layer
        block = self.rewriting.born(size, "communication", "gathered weights", at, layer)
        if self.strategy.backend == "gloo" and self.strategy.num_processes > 1:
            # ProcessGroupGloo gathers into its own tensor
            self.rewriting.passes(size, "gloo all-gather", at, layer)
        if len(weights) == 1:
            self.whole[weights[0]] = block
            return
        bundle = Bundle(block, set(weights))
        self.inflight |= dict.fromkeys(weights, bundle)

    def _arrive(self, weight: int, at: int) -> None:
        """The first use of a bundle copies all of it out; the last lets go of its buffer."""
        bundle = self.inflight.pop(weight)
        if not bundle.arrived:
            bundle.arrived = True
            for one in sorted(bundle.weights):
                size = self.sizes[one] * self.element_bytes
                self.whole[one] = self.rewriting.born(
                    size, "communication", "whole weights", at, self.weights[one].layer
                )
        bundle.weights.discard(weight)
        if not bundle.weights and bundle.block is not None:
            self.rewriting.dies(bundle.block, at)

    def _prefetch(
        self, uses: list[Use], queue: deque[int], fetched_for: dict[int, int], at: int
    ) -> None:
        """Gather the next weights up to a bucket, as long as not too many are live."""
        live = sum(self.sizes[weight] for weight in {*self.whole, *self.inflight})
        most = min(LIVE_BUCKETS * self.bucket - live, self.bucket)
        wanted: list[int] = []
        elements = 0
        while queue and elements < most:
            step = queue.popleft()
            weight = uses[step].weight
            fetched_for[weight] = max(step, fetched_for.get(weight, -1))
            known = weight in self.whole or weight in self.inflight or weight in wanted
            if not known and self.sizes[weight] > PERSISTENT:
                wanted.append(weight)
                elements += self.sizes[weight]
        if wanted:
            self._gather(sorted(wanted), at)

    def _is_near(self, uses: list[Use], step: int) -> bool:
        """Whether the weight is used again before MAX_REUSE elements have been gone through."""
        gone_through = 0
        for use in uses[step + 1 :]:
            if gone_through >= MAX_REUSE:
                return False
            if use.weight == uses[step].weight:
                return True
            gone_through += self.sizes[use.weight]
        return False

    def _leave(self, at: int) -> None:
        for block in {
            *self.whole.values(),
            *(one.block for one in self.inflight.values() if one.block is not None),
        }:
            self.rewriting.dies(block, at)


def rewrite(
    rewriting: Rewriting, marks: Landmarks, strategy: Strategy, element_bytes: int, bucket: int
) -> None:
    """Parts for weights, small ones whole between the updates, and what each micro-step gathers."""
    ranks = strategy.num_processes
    small = 0
    for weight in marks.weights:
        if weight.bytes // element_bytes <= PERSISTENT:
            small += weight.bytes
        rewriting.blocks[weight.block].fixed_bytes = -(-weight.bytes // ranks)
        if strategy.offloads:
            rewriting.drop(weight.block)
    if ranks > 1 or strategy.offloads:
        before = rewriting.born(small, "weights", "small weights", 0)
        rewriting.dies(before, marks.optimizer.start)
        rewriting.born(small, "weights", "small weights", marks.optimizer.stop)
    for micro_step, forward in enumerate(marks.forwards):
        spans, back = marks.spans[micro_step]
        backward = marks.backwards[micro_step]
        uses = [*_forward(marks, forward, spans), *_backward(marks, backward, back)]
        Gathered(rewriting, marks, strategy, element_bytes, bucket).run(uses, [], backward.stop)
    phase, spans = marks.evaluation
    if phase:
        expected = [
            Use(phase.stop, use.weight)
            for use in _backward(marks, marks.backwards[0], marks.spans[0][1])
        ]
        uses = list(_forward(marks, phase, spans))
        Gathered(rewriting, marks, strategy, element_bytes, bucket).run(uses, expected, phase.stop)


def _outer(marks: Landmarks) -> tuple[list[int], list[int]]:
    """Weights outside the layers, before them and behind; a tied embedding is both."""
    outer = [index for index, weight in enumerate(marks.weights) if weight.layer is None]
    first = next(
        (index for index, weight in enumerate(marks.weights) if weight.layer is not None),
        len(marks.weights),
    )
    inputs = [index for index in outer if index < first]
    return inputs, [index for index in outer if index > first] + (inputs[:1] if marks.tied else [])


def _forward(marks: Landmarks, phase: range, spans: dict[Layer, range]) -> Iterator[Use]:
    """Embedding, layers, output layer. The weights of a layer share its span out evenly."""
    inputs, outputs = _outer(marks)
    yield from (Use(phase.start, index) for index in inputs)
    for layer, span in spans.items():
        inside = [index for index, weight in enumerate(marks.weights) if weight.layer == layer]
        yield from _evenly(inside, span)
    end = max((span.stop for span in spans.values()), default=phase.start)
    yield from (Use(end, index) for index in outputs)


def _backward(marks: Landmarks, phase: range, spans: dict[Layer, range]) -> Iterator[Use]:
    """The output layer, which is whole while the loss is gone through; then the others in the other
    order."""
    inputs, outputs = _outer(marks)
    loss = min((span.start for span in spans.values()), default=phase.stop)
    for place, index in enumerate(reversed(outputs)):
        yield Use(loss if place else phase.start, index)
    for layer, span in spans.items():
        inside = [index for index, weight in enumerate(marks.weights) if weight.layer == layer]
        yield from _evenly(inside[::-1], span)
    end = max((span.stop for span in spans.values()), default=phase.start)
    yield from (Use(end, index) for index in reversed(inputs))


def _evenly(weights: Sequence[int], span: range) -> Iterator[Use]:
    for place, index in enumerate(weights):
        yield Use(span.start + len(span) * place // len(weights), index)
