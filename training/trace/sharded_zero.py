"""What one rank of DeepSpeed's ZeRO holds on its device during a step.

Stages 1 and 2 keep all weights in one flat tensor and train a float32 slice of it; stage 3 keeps a
part of each weight (zero_gathered.py). Gradients are copied into a bucket of fixed size, which is
reduced when it is full. Source: deepspeed 0.19.8 runtime/zero/stage_1_and_2.py and stage3.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from launch.schema.plan import Strategy
from training.trace import sharded_zero3_gather
from training.trace.recorder import Log
from training.trace.rewrite_log import (
    SCALAR_BYTES,
    Gradient,
    Landmarks,
    Rewriting,
    landmarks,
    ready,
)

MASTER_BYTES = 4  # of an element of the float32 slice that is trained
NORM_BYTES = 8  # a gradient's norm is taken of a float64 copy


@dataclass(frozen=True)
class Share:
    """What falls to a rank. Sizes without unit are elements."""

    strategy: Strategy
    element_bytes: int  # of a weight and of its gradient
    trained: int
    widest: int  # the largest trained parameter
    bucket: int
    # a gradient's block -> where its parameter begins among the trained ones
    offsets: Mapping[int, int]

    @property
    def slice(self) -> int:
        return -(-self.trained // self.strategy.num_processes)

    @property
    def overlaps(self) -> bool:
        """Reduces while backward goes on, with a second bucket. As launch/render/deepspeed.py has
        it."""
        return self.strategy.device == "cuda"

    def parts(self, offset: int, size: int) -> list[int]:
        """What of a parameter falls to one rank after the other."""
        cuts = range(offset - offset % self.slice, offset + size, self.slice)
        return [min(cut + self.slice, offset + size) - max(cut, offset) for cut in cuts]


def share(marks: Landmarks, strategy: Strategy, bucket: int) -> Share:
    element_bytes = 4 if strategy.mixed_precision == "no" else 2
    offsets: dict[int, int] = {}
    left = list(marks.gradients)
    at = widest = 0
    for weight in (weight for weight in marks.weights if weight.trained):
        alike = [one for one in left if (one.layer, one.bytes) == (weight.layer, weight.bytes)]
        if alike:
            offsets[alike[-1].block] = at
            left.remove(alike[-1])
        at += weight.bytes // element_bytes
        widest = max(widest, weight.bytes // element_bytes)
    return Share(strategy, element_bytes, at, widest, bucket, offsets)


def rewrite(rewriting: Rewriting, marks: Landmarks, strategy: Strategy, bucket: int) -> None:
    """`bucket`: elements that are reduced, or gathered ahead, at once."""
    mine = share(marks, strategy, bucket)
    _states(rewriting, mine)
    if strategy.zero_stage == 3:
        rewriting.born(mine.bucket * mine.element_bytes, "communication", "reduce bucket", 0)
        if not strategy.offloads:
            rewriting.born(mine.slice * mine.element_bytes, "gradients", "gradient slices", 0)
    for gradient in marks.gradients:
        rewriting.blocks[gradient.block].kind = "gradients"
    kept = _reduced(rewriting, marks, mine)
    if strategy.zero_stage == 3:  # embeddings are dropped behind the last reduction
        sharded_zero3_gather.rewrite(rewriting, marks, strategy, mine.element_bytes, bucket)
    _update(rewriting, marks, mine, kept)


def host_bytes(log: Log, strategy: Strategy, tied: bool) -> int:
    """What an offloading rank keeps on the host for the whole run: the float32 slice, its gradient
    and states (two, as AdamW has), and stage 3's parts of weights and gradients, or what stages 1
    and 2 copy through and accumulate in."""
    marks = landmarks(log, tied)
    mine = share(marks, strategy, bucket=0)
    found = mine.slice * MASTER_BYTES * 4
    if strategy.zero_stage == 3:
        whole = sum(weight.bytes for weight in marks.weights)
        return found + mine.slice * mine.element_bytes + whole // strategy.num_processes
    accumulated = _in_slice(mine) if strategy.gradient_accumulation_steps > 1 else 0
    return found + (mine.slice + mine.widest + accumulated) * mine.element_bytes


def _states(rewriting: Rewriting, mine: Share) -> None:
    """The optimizer's states become those of a float32 slice that is kept beside the weights."""
    states = 0
    for number, block in enumerate(rewriting.log.blocks):
        if block.born in ("start:optimizer", "optimizer") and block.fixed_bytes > SCALAR_BYTES:
            states += block.fixed_bytes if block.born == "start:optimizer" else 0
            rewriting.drop(number)
    if not mine.strategy.offloads:
        state_bytes = states / mine.element_bytes / mine.trained * MASTER_BYTES
        rewriting.born(
            mine.slice * (MASTER_BYTES + state_bytes),
            "optimizer",
            "float32 slice and its states",
            0,
        )
    elif mine.strategy.zero_stage < 3:
        rewriting.born(
            mine.widest * mine.element_bytes, "communication", "gradient that goes to the host", 0
        )


def _in_slice(mine: Share) -> int:
    """Elements of all parameters of which a rank has some in its slice; of the rank that has
    most."""
    starts = sorted(mine.offsets.values())
    ends = [*starts[1:], mine.trained]
    return max(
        sum(
            end - start
            for start, end in zip(starts, ends, strict=True)
            if end > low and start < low + mine.slice
        )
        for low in range(0, mine.trained, mine.slice)
    )


def _reduced(rewriting: Rewriting, marks: Landmarks, mine: Share) -> list[int]:
    """The gradients' way through the bucket; what is left of them on the device.

    Stages 2 and 3 reduce in every backward, stage 1 in the last: there, where nothing overlaps,
    behind it."""
    stage, last = mine.strategy.zero_stage, len(marks.backwards) - 1
    kept: list[int] = []
    bucket: Bucket | None = None
    for micro_step, phase in enumerate(marks.backwards):
        order = [
            (ready(rewriting.log, marks, one, micro_step), at)
            for at, one in enumerate(marks.gradients)
        ]
        order.sort()
        if bucket is None:
            bucket = Bucket(rewriting, mine, order[0][0])
        if stage == 1 and micro_step < last:
            continue
        if stage == 1 and not mine.overlaps:
            in_order = sorted(marks.gradients, key=lambda one: mine.offsets.get(one.block, 0))
            order = [(phase.stop, marks.gradients.index(one)) for one in in_order]
        for at, index in order:
            bucket.add(marks.gradients[index], at, is_first=stage == 1 or micro_step == 0)
        bucket.reduce(phase.stop)
        if bucket.kept is not None and kept:
            rewriting.dies(bucket.kept, phase.stop)  # added to those of the backwards before
        elif bucket.kept is not None:
            kept = [bucket.kept]
        bucket.close(phase.stop)
        bucket = None
    return kept


class Bucket:
    """The reduce bucket during one backward; stage 3 has one for the whole run, so none is made for
    it here."""

    def __init__(self, rewriting: Rewriting, mine: Share, at: int) -> None:
        self.rewriting, self.mine, self.stage = rewriting, mine, mine.strategy.zero_stage
        self.kept: int | None = None  # the reduced gradients of this rank's slice
        self._filled: list[Gradient] = []
        self._alone: int | None = None  # a gradient that is larger than the bucket
        count = 0 if self.stage == 3 else 2 if mine.overlaps else 1
        size = mine.bucket * mine.element_bytes
        self._blocks = [
            rewriting.born(size, "communication", "reduce bucket", at) for _ in range(count)
        ]

    def add(self, gradient: Gradient, at: int, is_first: bool) -> None:
        """A gradient is complete: it moves into the bucket, and its own memory is free. `is_first`:
        the plain step has it until the update; otherwise it has been freed there."""
        size = gradient.bytes // self.mine.element_bytes
        if self._elements() + size > self.mine.bucket:
            self.reduce(at)
        self._filled.append(gradient)
        if size > self.mine.bucket:
            self._alone = gradient.block
            if not is_first:
                self._alone = self.rewriting.born(
                    gradient.bytes, "gradients", "gradient", at, gradient.layer
                )
        elif is_first:
            self.rewriting.dies(gradient.block, at)

    def _elements(self) -> int:
        return sum(gradient.bytes for gradient in self._filled) // self.mine.element_bytes

    def reduce(self, at: int) -> None:
        """Reduce what is in the bucket through a copy of it, and keep what falls to this rank."""
        if not self._filled:
            return
        rewriting, mine = self.rewriting, self.mine
        copy_bytes = self._copied() * mine.element_bytes
        copy = rewriting.born(copy_bytes, "communication", "gradients to reduce", at)
        if mine.strategy.backend != "gloo":
            rewriting.dies(copy, at)
        elif self.stage == 3:  # ProcessGroupGloo all-reduces a copy
            rewriting.passes(self._elements() * mine.element_bytes, "gloo reduce-scatter", at)
        if mine.strategy.offloads:
            rewriting.passes(self._largest_part() * NORM_BYTES, "gradient norm", at)
        elif self.kept is None and self.stage < 3:
            self.kept = rewriting.born(
                _in_slice(mine) * mine.element_bytes, "gradients", "gradients of the slice", at
            )
        if mine.strategy.backend == "gloo":
            rewriting.dies(copy, at)  # its thread may hold it until here
        if self._alone is not None:
            rewriting.dies(self._alone, at)
        self._filled, self._alone = [], None

    def _largest_part(self) -> int:
        """Elements of one gradient that fall to this rank."""
        largest = max(gradient.bytes for gradient in self._filled) // self.mine.element_bytes
        return (
            -(-largest // self.mine.strategy.num_processes)
            if self.stage == 3
            else min(largest, self.mine.slice)
        )

    def _copied(self) -> int:
        """Elements that are flattened at once. One tensor that divides needs no copy in stage 3;
        one larger than the bucket is taken by ranks in stages 1 and 2."""
        ranks, elements = self.mine.strategy.num_processes, self._elements()
        if self.stage == 3:
            return 0 if len(self._filled) == 1 and elements % ranks == 0 else elements
        if self._alone is None:
            return elements
        most = taken = 0
        for part in self.mine.parts(self.mine.offsets.get(self._filled[0].block, 0), elements):
            taken += part
            most = max(most, taken)
            taken = 0 if taken > self.mine.bucket else taken
        return most

    def close(self, at: int) -> None:
        for block in self._blocks:
            self.rewriting.dies(block, at)


def _update(rewriting: Rewriting, marks: Landmarks, mine: Share, kept: list[int]) -> None:
    """Norm, a flat float32 copy of the slice's gradients, the update, and stages 1 and 2 gather the
    weights."""
    end, strategy = marks.optimizer.stop, mine.strategy
    at = min(marks.optimizer.start + 1, end)
    if not strategy.offloads:
        part = (
            math.ceil(mine.widest / strategy.num_processes)
            if strategy.zero_stage == 3
            else mine.widest
        )
        rewriting.passes(min(part, mine.slice) * NORM_BYTES, "gradient norm", at)
        flat = rewriting.born(mine.slice * mine.element_bytes, "gradients", "flat gradients", at)
        if mine.element_bytes < MASTER_BYTES:
            narrow, flat = (
                flat,
                rewriting.born(mine.slice * MASTER_BYTES, "gradients", "float32 gradients", at),
            )
            rewriting.dies(narrow, at)
        for block in kept:
            rewriting.dies(block, at)
        temporary_bytes = mine.slice * MASTER_BYTES * _temporaries(rewriting.log, mine)
        rewriting.dies(rewriting.born(temporary_bytes, "optimizer", "update", end), end)
        rewriting.dies(flat, end)
    # ProcessGroupGloo gathers into a tensor of its own
    if strategy.zero_stage < 3 and strategy.backend == "gloo":
        rewriting.passes(mine.trained * mine.element_bytes, "gloo all-gather", end)


def _temporaries(log: Log, mine: Share) -> float:
    """How many copies of what it updates at once the plain optimizer makes: of all weights, or of
    one at a time."""
    live = most = 0
    of_all = False
    for event in log.events:
        block = log.blocks[event.block]
        if block.born == "optimizer" and block.fixed_bytes > SCALAR_BYTES:
            live += block.fixed_bytes if event.birth else -block.fixed_bytes
            most, of_all = max(most, live), of_all or "_foreach" in block.op
    return most / mine.element_bytes / (mine.trained if of_all else mine.widest)
