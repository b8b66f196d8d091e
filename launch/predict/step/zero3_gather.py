"""Rewrite a step with the weights that ZeRO's stage 3 has gathered at each moment.

A weight is gathered for the module that uses it, together with the weights of the next modules up
to a bucket, and dropped behind it, unless it is small or used again soon.
Source: deepspeed 0.19.8 runtime/zero/partitioned_param_coordinator.py, partition_parameters.py.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from launch.predict.step.rewrite_log import GATHERS, Landmarks, Rewriting, behind_logits
from launch.schema.plan import Strategy
from launch.schema.recorded_step import Layer

# elements; smaller weights stay gathered (DeepSpeedZeroConfig param_persistence_threshold)
PERSISTENT = 100_000
# elements used before the next use of a weight; a nearer weight stays gathered (max_reuse_distance)
MAX_REUSE = 1_000_000_000
_LIVE_BUCKETS = 2  # stage3_max_live_parameters in buckets, as launch/render/deepspeed.py writes it


@dataclass(frozen=True)
class Use:
    """The use of a weight by a module, from this position until the next use."""

    position: int
    weight: int  # index in Landmarks.weights


@dataclass
class _Bundle:
    """Several weights of the same all-gather."""

    block: int
    weights: set[int]  # not used yet


class _Gathered:
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
        self.stream = GATHERS if strategy.device == "cuda" else 0
        self.gathered: dict[int, int] = {}  # weight -> its block
        self.inflight: dict[int, _Bundle] = {}

    def record(self, uses: list[Use], end: int) -> None:
        """Write the collectives of the run's first forward, or backward, which records the order of
        modules: nothing is gathered ahead, and each use drops its weight."""
        for index, use in enumerate(uses):
            if self.sizes[use.weight] > PERSISTENT:
                self._fetch(use.weight, use.position)
                later = (each.position for each in uses[index + 1 :])
                behind = next((position for position in later if position > use.position), end)
                if use.weight in self.gathered:
                    self.rewriting.dies(self.gathered.pop(use.weight), behind)

    def run(self, uses: list[Use], expected: list[Use], end: int) -> None:
        """Write the collectives of these uses: of a forward and its backward, or of an evaluation.
        In an evaluation the backward is `expected` too, because the order of modules was recorded
        in training. What a card's rank has gathered for it stays until a checkpoint is saved."""
        num_uses, uses = len(uses), [*uses, *expected]
        queue = deque(range(len(uses)))
        fetched_for: dict[int, int] = {}  # weight -> the last use that a fetch has considered
        if uses:  # the model itself comes first, which has no weights of its own
            self._prefetch(uses, queue, fetched_for, uses[0].position)
        for index, use in enumerate(uses[:num_uses]):
            weight, position = use.weight, use.position
            if self.sizes[weight] > PERSISTENT:
                self._fetch(weight, position)
            if queue and queue[0] <= index:
                queue.popleft()
                fetched_for[weight] = index
            self._prefetch(uses, queue, fetched_for, position)
            later = (other.position for other in uses[index + 1 :] if other.position > position)
            if (
                weight in self.gathered
                and fetched_for.get(weight, -1) <= index
                and not self._is_near(uses, index)
            ):
                self.rewriting.dies(self.gathered.pop(weight), next(later, end))
        bundles = {bundle.block for bundle in self.inflight.values()}
        is_kept = expected and self.strategy.device == "cuda"
        for block in bundles if is_kept else {*self.gathered.values(), *bundles}:
            self.rewriting.dies(block, end)

    def _fetch(self, weight: int, position: int) -> None:
        """Gather a weight unless it is gathered, and copy the weights of its bundle out at the
        first use of any of them; the last use frees the bundle's buffer."""
        if weight not in self.gathered and weight not in self.inflight:
            self._gather([weight], position)
        if weight not in self.inflight:
            return
        bundle = self.inflight.pop(weight)
        for arrived in () if weight in self.gathered else sorted(bundle.weights):
            size = self.sizes[arrived] * self.element_bytes
            layer = self.weights[arrived].layer
            self.gathered[arrived] = self.rewriting.born(
                size, "communication", "whole weights", position, layer, self.stream
            )
        bundle.weights.discard(weight)
        if not bundle.weights:
            self.rewriting.dies(bundle.block, position)

    def _gather(self, weights: list[int], position: int) -> None:
        if self.strategy.num_processes == 1:
            # its part is the full weight, on the device or on the host
            for weight in weights if self.strategy.launch_mode.offloads else ():
                self.gathered[weight] = self.rewriting.born(
                    self.sizes[weight] * self.element_bytes,
                    "communication",
                    "weight from the host",
                    position,
                    self.weights[weight].layer,
                    self.stream,
                )
            return
        size = sum(self.sizes[weight] for weight in weights) * self.element_bytes
        if self.strategy.launch_mode.offloads:
            part = size / self.strategy.num_processes
            self.rewriting.passes(part, "part from the host", position, stream=self.stream)
        layer = self.weights[weights[0]].layer
        block = self.rewriting.born(
            size, "communication", "gathered weights", position, layer, self.stream
        )
        if self.strategy.backend == "gloo":
            # ProcessGroupGloo gathers into its own tensor
            self.rewriting.passes(size, "gloo all-gather", position, layer)
        if len(weights) == 1:
            self.gathered[weights[0]] = block
            return
        self.inflight |= dict.fromkeys(weights, _Bundle(block, set(weights)))

    def _prefetch(
        self, uses: list[Use], queue: deque[int], fetched_for: dict[int, int], position: int
    ) -> None:
        """Gather the next weights up to a bucket, as long as not too many are live."""
        live = {*self.gathered, *self.inflight}
        elements = sum(self.sizes[weight] for weight in live)
        most = elements + min(_LIVE_BUCKETS * self.bucket - elements, self.bucket)
        ahead: list[int] = []
        while queue and elements < most:
            index = queue.popleft()
            weight = uses[index].weight
            fetched_for[weight] = index
            if weight not in live and self.sizes[weight] > PERSISTENT:
                ahead.append(weight)
                live.add(weight)
                elements += self.sizes[weight]
        if ahead:
            self._gather(sorted(ahead), position)

    def _is_near(self, uses: list[Use], index: int) -> bool:
        """The weight of this use is used again before MAX_REUSE other elements."""
        elements = 0
        for use in uses[index + 1 :]:
            if elements >= MAX_REUSE or use.weight == uses[index].weight:
                return elements < MAX_REUSE
            elements += self.sizes[use.weight]
        return False


def rewrite(
    rewriting: Rewriting,
    marks: Landmarks,
    strategy: Strategy,
    element_bytes: int,
    bucket: int,
    is_first: bool,
) -> None:
    """Divide the weights, keep small weights gathered between the updates, and add the gathering of
    each micro-step. `is_first`: of the run's first step."""
    ranks = strategy.num_processes
    small = sum(
        weight.bytes for weight in marks.weights if weight.bytes // element_bytes <= PERSISTENT
    )
    for weight in marks.weights:
        rewriting.change(weight.block, fixed_bytes=-(-weight.bytes // ranks))
        if strategy.launch_mode.offloads:
            rewriting.drop(weight.block)
    if ranks > 1 or strategy.launch_mode.offloads:
        rewriting.dies(rewriting.born(small, "weights", "small weights", 0), marks.optimizer.start)
        rewriting.born(small, "weights", "small weights", marks.optimizer.stop)

    def gathered() -> _Gathered:
        return _Gathered(rewriting, marks, strategy, element_bytes, bucket)

    for micro_step, (forward, backward, (forwards, backwards)) in enumerate(
        zip(marks.forwards, marks.backwards, marks.spans, strict=True)
    ):
        uses = _forward(marks, forward, forwards)
        if is_first and micro_step == 0:
            log, layers_end = rewriting.log, max(use.position for use in uses)
            loss_end = min((span.start for span in backwards.values()), default=backward.stop)
            logits = behind_logits(log, range(layers_end, forward.stop), last=False)
            gathered().record(uses, logits)
            gradient = behind_logits(log, range(backward.start, loss_end), last=True)
            gathered().record(
                _backward(marks, range(gradient, backward.stop), backwards), backward.stop
            )
        else:
            gathered().run([*uses, *_backward(marks, backward, backwards)], [], backward.stop)
    phase, spans = marks.evaluation
    if phase:
        training = _backward(marks, marks.backwards[0], marks.spans[0][1])
        expected = [Use(phase.stop, use.weight) for use in training]
        gathered().run(_forward(marks, phase, spans), expected, phase.stop)


def _outer(marks: Landmarks) -> tuple[list[int], list[int]]:
    """Weights before the layers, and weights behind them; a tied embedding is both."""
    used = [index for index, weight in enumerate(marks.weights) if weight.used]
    outer = [index for index in used if marks.weights[index].layer is None]
    inputs = [index for index, place in zip(outer, used, strict=False) if index == place]
    return inputs, outer[len(inputs) :] + (inputs[:1] if marks.tied else [])


def _forward(marks: Landmarks, phase: range, spans: dict[Layer, range]) -> list[Use]:
    """The uses of embedding, layers, output layer."""
    inputs, outputs = _outer(marks)
    end = max((span.stop for span in spans.values()), default=phase.start)
    return [
        *(Use(phase.start, index) for index in inputs),
        *_evenly(marks, spans),
        *(Use(end, index) for index in outputs),
    ]


def _backward(marks: Landmarks, phase: range, spans: dict[Layer, range]) -> list[Use]:
    """The uses of the output layer, which is gathered during the loss, then of the other weights in
    reverse order."""
    inputs, outputs = _outer(marks)
    loss = min((span.start for span in spans.values()), default=phase.stop)
    end = max((span.stop for span in spans.values()), default=phase.start)
    return [
        *(Use(phase.start, index) for index in outputs[-1:]),
        *(Use(loss, index) for index in outputs[-2::-1]),
        *_evenly(marks, spans, backward=True),
        *(Use(end, index) for index in reversed(inputs)),
    ]


def _evenly(marks: Landmarks, spans: dict[Layer, range], backward: bool = False) -> Iterator[Use]:
    """The uses of the layers' weights, at even distances in the span of their layer."""
    for layer, span in spans.items():
        inside = [
            index
            for index, weight in enumerate(marks.weights)
            if weight.layer == layer and weight.used
        ]
        yield from (
            Use(span.start + len(span) * place // len(inside), index)
            for place, index in enumerate(reversed(inside) if backward else inside)
        )
