"""Rewrite a step as one rank of DeepSpeed's ZeRO holds it on its device.

Stages 1 and 2 keep all weights in a flat tensor and train a float32 slice of it; stage 3 keeps a
part of each weight (zero3_gather.py). Gradients are copied into a bucket of fixed size,
which is reduced when it is full. Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py and
stage3.py.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

from launch.predict.step import zero3_gather
from launch.predict.step.rewrite_log import (
    FLAT,
    GRADIENTS,
    REDUCES,
    SCALAR_BYTES,
    SLICE,
    Gradient,
    Landmarks,
    Rewriting,
    ready,
)
from launch.schema.plan import Strategy
from launch.schema.recorded_step import Log, grouped

MASTER_BYTES = 4  # a float32 element of the slice that is trained
_NORM_BYTES = 8  # a float64 element of the copy from which a gradient's norm is computed


@dataclass(frozen=True)
class Share:
    """The part of the states that a rank has. Sizes without unit are elements."""

    strategy: Strategy
    element_bytes: int  # size of an element of weights and of gradients
    trained: int
    widest: int  # the largest trained parameter
    bucket: int
    # a gradient's block -> the first element of its parameter in the flat tensor
    offsets: Mapping[int, int]

    @property
    def slice(self) -> int:
        return -(-self.trained // self.strategy.num_processes)

    @property
    def overlaps(self) -> bool:
        """Reduces while backward goes on, with a second bucket, as launch/render/deepspeed.py sets
        it."""
        return self.strategy.device == "cuda"

    @property
    def stream(self) -> int:
        """The stream on which gradients are reduced."""
        return REDUCES if self.overlaps else 0

    def parts(self, offset: int, size: int) -> list[int]:
        """Sizes of a parameter's parts on successive ranks."""
        starts = range(offset - offset % self.slice, offset + size, self.slice)
        return [min(start + self.slice, offset + size) - max(start, offset) for start in starts]


def _share_of(marks: Landmarks, strategy: Strategy, bucket: int) -> Share:
    element_bytes = 4 if strategy.mixed_precision == "no" else 2
    offsets: dict[int, int] = {}
    unmatched = grouped(((each.layer, each.bytes), each) for each in marks.gradients)
    offset = widest = 0
    for weight in (weight for weight in marks.weights if weight.trained):
        if alike := unmatched.get((weight.layer, weight.bytes)):
            offsets[alike.pop().block] = offset
        offset += weight.bytes // element_bytes
        widest = max(widest, weight.bytes // element_bytes)
    return Share(strategy, element_bytes, offset, widest, bucket, offsets)


def rewrite(
    rewriting: Rewriting, marks: Landmarks, strategy: Strategy, bucket: int, is_first: bool
) -> None:
    """Replace states by this rank's share, and add the buffers of the collectives. `bucket`:
    elements that are reduced, or gathered ahead, at once. `is_first`: the run's first step."""
    share = _share_of(marks, strategy, bucket)
    _states(rewriting, marks, share)
    if strategy.launch_mode.zero_stage == 3:
        rewriting.born(share.bucket * share.element_bytes, "communication", "reduce bucket", 0)
        if not strategy.launch_mode.offloads:
            rewriting.born(share.slice * share.element_bytes, "gradients", GRADIENTS, 0)
    for gradient in marks.gradients:
        rewriting.change(gradient.block, kind="gradients")
    slice_gradients = _reduced(rewriting, marks, share)
    if (
        strategy.launch_mode.zero_stage == 3
    ):  # the last reduction comes before embeddings are dropped
        zero3_gather.rewrite(rewriting, marks, strategy, share.element_bytes, bucket, is_first)
    _update(rewriting, marks, share, slice_gradients)


def _states(rewriting: Rewriting, marks: Landmarks, share: Share) -> None:
    """Replace the optimizer's states by those of a float32 slice, which is kept beside the
    weights. The first update makes them."""
    states, phases = 0, [event.phase for event in rewriting.log.events]
    for number, block in enumerate(rewriting.log.blocks):
        if block.born in ("start:optimizer", "optimizer") and block.fixed_bytes > SCALAR_BYTES:
            states += block.fixed_bytes if block.born == "start:optimizer" else 0
            rewriting.drop(number)
    if share.strategy.launch_mode.zero_stage < 3:
        for weight in (weight for weight in marks.weights if weight.trained):
            rewriting.drop(weight.block)
        rewriting.born(share.trained * share.element_bytes, "weights", FLAT, 0)
    if not share.strategy.launch_mode.offloads:
        rewriting.born(share.slice * MASTER_BYTES, "optimizer", SLICE, 0)
        of_weight = states / share.element_bytes / share.trained  # states, as multiples of a weight
        for _ in range(round(of_weight)):
            size = share.slice * MASTER_BYTES * of_weight / round(of_weight)
            rewriting.born(size, "optimizer", "state", phases.index("start:optimizer"))
    elif share.strategy.launch_mode.zero_stage < 3:
        rewriting.born(
            share.widest * share.element_bytes, "communication", "gradient that goes to the host", 0
        )


def _in_slice(share: Share) -> int:
    """Elements of all parameters that overlap the slice of a rank; the largest sum of all ranks."""
    starts = sorted(share.offsets.values())
    ends = [*starts[1:], share.trained]
    return max(
        sum(
            end - start
            for start, end in zip(starts, ends, strict=True)
            if end > low and start < low + share.slice
        )
        for low in range(0, share.trained, share.slice)
    )


def _reduced(rewriting: Rewriting, marks: Landmarks, share: Share) -> list[int]:
    """Move the gradients through the bucket. Returns their blocks that stay on the device.

    Stages 2 and 3 reduce in every backward. Stage 1 reduces in the last backward, or behind it if
    nothing overlaps."""
    stage, last = share.strategy.launch_mode.zero_stage, len(marks.backwards) - 1
    slice_gradients: list[int] = []
    bucket: _Bucket | None = None
    for micro_step, phase in enumerate(marks.backwards):
        order = sorted(
            (ready(rewriting.log, marks, gradient, micro_step), index)
            for index, gradient in enumerate(marks.gradients)
        )
        bucket = bucket or _Bucket(rewriting, share, order[0][0])
        if stage == 1 and micro_step < last:
            continue
        if stage == 1 and not share.overlaps:
            in_order = sorted(
                marks.gradients, key=lambda gradient: share.offsets.get(gradient.block, 0)
            )
            order = [(phase.stop, marks.gradients.index(gradient)) for gradient in in_order]
        for position, index in order:
            bucket.add(marks.gradients[index], position, is_first=stage == 1 or micro_step == 0)
        bucket.reduce(phase.stop)
        if bucket.slice_gradients is not None and slice_gradients:
            # added to those of earlier backwards
            rewriting.dies(bucket.slice_gradients, phase.stop)
        elif bucket.slice_gradients is not None:
            slice_gradients = [bucket.slice_gradients]
        bucket.close(phase.stop)
        bucket = None
    return slice_gradients


class _Bucket:
    """The reduce bucket during one backward. Stage 3 has a bucket for the whole run, so no bucket
    is made for it here."""

    def __init__(self, rewriting: Rewriting, share: Share, position: int) -> None:
        self.rewriting, self.share, self.stage = (
            rewriting,
            share,
            share.strategy.launch_mode.zero_stage,
        )
        self.slice_gradients: int | None = None  # the reduced gradients of this rank's slice
        self._filled: list[Gradient] = []
        self._alone: int | None = None  # a gradient that is larger than the bucket
        count = 0 if self.stage == 3 else 2 if share.overlaps else 1
        size = share.bucket * share.element_bytes
        self._blocks = [
            rewriting.born(size, "communication", "reduce bucket", position) for _ in range(count)
        ]

    def add(self, gradient: Gradient, position: int, is_first: bool) -> None:
        """Move a complete gradient into the bucket, and free its own memory. `is_first`: the plain
        step keeps it until the update; otherwise it has been freed there."""
        size = gradient.bytes // self.share.element_bytes
        if self._elements() + size > self.share.bucket:
            self.reduce(position)
        self._filled.append(gradient)
        if size > self.share.bucket:
            self._alone = (
                gradient.block
                if is_first
                else self.rewriting.born(
                    gradient.bytes, "gradients", "gradient", position, gradient.layer
                )
            )
        elif is_first:
            self.rewriting.dies(gradient.block, position)

    def _elements(self) -> int:
        return sum(each.bytes for each in self._filled) // self.share.element_bytes

    def reduce(self, position: int) -> None:
        """Reduce the bucket's gradients through a copy, and keep this rank's part of them."""
        if not self._filled:
            return
        rewriting, share = self.rewriting, self.share
        copy_bytes = self._copied() * share.element_bytes
        copy = rewriting.born(
            copy_bytes, "communication", "gradients to reduce", position, stream=share.stream
        )
        # the parts of stage 3 are views of it; Gloo's thread may hold it
        outlives_parts = self.stage == 3 or share.strategy.backend == "gloo"
        if not outlives_parts:
            rewriting.dies(copy, position)
        elif share.strategy.backend == "gloo" and self.stage == 3:  # all-reduces a copy
            rewriting.passes(
                self._elements() * share.element_bytes, "gloo reduce-scatter", position
            )
        if share.strategy.launch_mode.offloads:
            for gradient in self._filled:
                self._to_host(self._part(gradient), position)
        elif self.slice_gradients is None and self.stage < 3:
            self.slice_gradients = rewriting.born(
                _in_slice(share) * share.element_bytes,
                "gradients",
                "gradients of the slice",
                position,
                stream=share.stream,
            )
        if outlives_parts:
            rewriting.dies(copy, position)
        if self._alone is not None:
            rewriting.dies(self._alone, position)
        self._filled, self._alone = [], None

    def _part(self, gradient: Gradient) -> int:
        """Elements of a gradient that this rank keeps."""
        elements = gradient.bytes // self.share.element_bytes
        if self.stage == 3:
            return -(-elements // self.share.strategy.num_processes)
        return min(elements, self.share.slice)

    def _to_host(self, elements: int, position: int) -> None:
        """Copy a part of a gradient for its norm, then in float32 for the host. Stage 3 first
        copies it back from the buffer on the host."""
        stream, element_bytes = self.share.stream, self.share.element_bytes
        back = (
            self.rewriting.born(
                elements * element_bytes, "gradients", "gradient part", position, stream=stream
            )
            if self.stage == 3
            else None
        )
        for size, op in ((_NORM_BYTES, "gradient norm"), (MASTER_BYTES, "float32 gradient")):
            if size != element_bytes:
                self.rewriting.passes(elements * size, op, position, stream=stream)
        if back is not None:
            self.rewriting.dies(back, position)

    def _copied(self) -> int:
        """Elements that are flattened at once. In stage 3 a single tensor that divides needs no
        copy; in stages 1 and 2 neighbours of the same rank are one tensor, and so does it."""
        elements = self._elements()
        if self.stage == 3:
            divides = elements % self.share.strategy.num_processes == 0
            return 0 if len(self._filled) == 1 and divides else elements
        most = total = count = 0
        for _, group in groupby(self._slices(), key=itemgetter(0)):
            total, count = total + sum(size for _, size in group), count + 1
            most = max(most, total if count > 1 else 0)
            if total > self.share.bucket:
                total = count = 0
        return most

    def _slices(self) -> Iterator[tuple[int, int]]:
        """The rank that keeps them, and elements, of each part of the bucket."""
        for gradient in self._filled:
            offset = self.share.offsets.get(gradient.block, 0)
            sizes = self.share.parts(offset, gradient.bytes // self.share.element_bytes)
            yield from enumerate(sizes, offset // self.share.slice)

    def close(self, position: int) -> None:
        for block in self._blocks:
            self.rewriting.dies(block, position)


def _update(
    rewriting: Rewriting, marks: Landmarks, share: Share, slice_gradients: list[int]
) -> None:
    """Add the norm, a flat float32 copy of the slice's gradients, the update, and the gathering of
    weights in stages 1 and 2."""
    end, strategy = marks.optimizer.stop, share.strategy
    position = min(marks.optimizer.start + 1, end)
    if not strategy.launch_mode.offloads:
        part = (
            math.ceil(share.widest / strategy.num_processes)
            if strategy.launch_mode.zero_stage == 3
            else share.widest
        )
        rewriting.passes(min(part, share.slice) * _NORM_BYTES, "gradient norm", position)
        flat = rewriting.born(
            share.slice * share.element_bytes, "gradients", "flat gradients", position
        )
        if share.element_bytes < MASTER_BYTES:
            narrow, flat = (
                flat,
                rewriting.born(
                    share.slice * MASTER_BYTES, "gradients", "float32 gradients", position
                ),
            )
            rewriting.dies(narrow, position)
        for block in () if share.overlaps else slice_gradients:
            rewriting.dies(block, position)
        temporary_bytes = share.slice * MASTER_BYTES * _temporaries(rewriting.log, share)
        rewriting.dies(rewriting.born(temporary_bytes, "optimizer", "update", end), end)
        rewriting.dies(flat, end)
        for block in slice_gradients if share.overlaps else ():
            rewriting.dies(block, end)  # the first step makes its states beside them
    # ProcessGroupGloo gathers into a tensor of its own
    if strategy.launch_mode.zero_stage < 3 and strategy.backend == "gloo":
        rewriting.passes(share.trained * share.element_bytes, "gloo all-gather", end)


def _temporaries(log: Log, share: Share) -> float:
    """Copies of the updated weights that the plain optimizer makes, as a multiple: of all weights,
    or of the largest weight if it updates them one by one."""
    live = most = 0
    of_all = False
    for event in log.events:
        block = log.blocks[event.block]
        if block.born == "optimizer" and block.fixed_bytes > SCALAR_BYTES:
            live += block.fixed_bytes if event.birth else -block.fixed_bytes
            most, of_all = max(most, live), of_all or "_foreach" in block.op
    return most / share.element_bytes / (share.trained if of_all else share.widest)
