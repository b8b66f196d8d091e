"""What one rank of FSDP2 holds during a step.

Every layer is a group of parameters, gathered when it is entered and dropped when it is left, in
forward and again in backward; embedding, final norm and output layer are groups of their own as
Accelerate makes them. Source: torch 2.13 fsdp/_fully_shard (_fsdp_param_group.py,
_fsdp_collectives.py); accelerate fsdp2_prepare_model.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from launch.schema.plan import Strategy
from launch.schema.recipe import DTYPE_BYTES, Recipe
from training.trace.recorder import Layer
from training.trace.rewrite_log import (
    SCALAR_BYTES,
    Gradient,
    Landmarks,
    Rewriting,
    Weight,
    embedding_gradient,
    later_gradients,
    next_birth,
)


@dataclass(eq=False)
class Group:
    """Parameters that are gathered together. Bytes are those of whole parameters."""

    layer: Layer | None
    bytes: int = 0  # as they are computed with
    held_bytes: int = 0  # as the ranks keep them, all together
    gradients: list[Gradient] = field(default_factory=list)


@dataclass
class Groups:
    """The groups of a model. The outer one stays whole after forward; a tied embedding belongs to
    it."""

    layers: dict[Layer, Group]
    embedding: Group  # empty where it is tied
    outer: Group
    tied: bool


class Ranks:
    """The collectives of a step, put into a rewritten log."""

    def __init__(self, rewriting: Rewriting, strategy: Strategy) -> None:
        self.rewriting, self.num_processes = rewriting, strategy.num_processes
        self.gloo = strategy.backend == "gloo"
        self.wider = _wider(strategy)
        self.gathered: dict[Group, int] = {}  # group -> its all-gathered block, not copied out yet
        self.whole: dict[Group, int] = {}  # group -> its whole parameters
        # -> its float32 sum over micro-steps, until ranks reduce it
        self.accumulated: dict[Gradient, int] = {}
        # forward keeps the last gathered block until the next copy
        self._deferred: int | None = None
        self._lagging: int | None = None  # Gloo's copy
        # the input of a reduce-scatter is kept until the next group reduces
        self._reduced: int | None = None

    def gather(self, group: Group, at: int) -> None:
        """All-gather into one block; the rank's part, where it has to be cast, is copied first."""
        if group in self.gathered or group in self.whole or not group.bytes:
            return
        rewriting, part = self.rewriting, group.bytes / self.num_processes
        casts = group.held_bytes != group.bytes
        cast = (
            rewriting.born(part, "communication", "all-gather input", at, group.layer)
            if casts
            else None
        )
        self.gathered[group] = rewriting.born(
            group.bytes, "communication", "all-gather", at, group.layer
        )
        if self.gloo:  # ProcessGroupGloo gathers into a tensor of its own and copies
            rewriting.passes(group.bytes, "gloo all-gather", at, group.layer)
            self._let_go(at)
        if cast is not None:
            rewriting.dies(cast, at)

    def unshard(self, group: Group, at: int, forward: bool) -> None:
        """Gather unless that was done ahead, then copy out into whole parameters."""
        if group in self.whole or not group.bytes:
            return
        self.gather(group, at)
        if forward:
            self.flush(at)
        self.whole[group] = self.rewriting.born(
            group.bytes, "communication", "whole weights", at, group.layer
        )
        gathered = self.gathered.pop(group)
        if forward:
            self._deferred = gathered
        else:
            self.rewriting.dies(gathered, at)

    def flush(self, at: int) -> None:
        if self._deferred is not None:
            self.rewriting.dies(self._deferred, at)
            self._deferred = None

    def leave(self, group: Group, at: int) -> None:
        """Drop a group's whole parameters."""
        if group in self.whole:
            self.rewriting.dies(self.whole.pop(group), at)

    def leave_backward(self, group: Group, at: int, micro_step: range, reduces: bool) -> None:
        """Drop a group's whole parameters; then add its gradients up, or reduce-scatter them."""
        if group not in self.whole:
            return
        if self.accumulated.keys() & group.gradients:
            self._delay(group, at, micro_step)
        self.leave(group, at)
        if reduces:
            self.release(at)
            if group.gradients:
                self._reduce(group, at)
        elif self.wider > 1:
            self._accumulate(group, at)

    def _accumulate(self, group: Group, at: int) -> None:
        """Between micro-steps a gradient is kept in the precision in which ranks reduce."""
        for gradient in group.gradients:
            self.rewriting.blocks[gradient.block].kind = "gradients"
            wide = self.rewriting.born(
                self.wider * gradient.bytes, "gradients", "accumulated", at, group.layer
            )
            self.accumulated[gradient] = wide
            self.rewriting.dies(gradient.block, at)

    def _delay(self, group: Group, at: int, micro_step: range) -> None:
        """A later micro-step's own gradients stay until their group is left; the plain step adds
        each at once."""
        for block in later_gradients(self.rewriting.log, group.gradients, micro_step):
            self.rewriting.dies(block, at)

    def _reduce(self, group: Group, at: int) -> None:
        """Gradients are copied into one block of the parameters' own precision, and freed; a part
        of it is kept."""
        rewriting, layer = self.rewriting, group.layer
        total = self.wider * sum(gradient.bytes for gradient in group.gradients)
        self._reduced = rewriting.born(total, "communication", "reduce-scatter input", at, layer)
        for gradient in group.gradients:
            rewriting.blocks[gradient.block].kind = "gradients"
            rewriting.dies(self.accumulated.pop(gradient, gradient.block), at)
        kept = rewriting.born(total / self.num_processes, "gradients", "reduce-scatter", at, layer)
        # ProcessGroupGloo all-reduces a copy, which its thread may still hold at the next
        # collective
        if self.gloo:
            self._let_go(at)
            self._lagging = rewriting.born(total, "communication", "gloo reduce-scatter", at, layer)
        rewriting.dies(kept, max(gradient.dies for gradient in group.gradients))

    def release(self, at: int) -> None:
        if self._reduced is not None:
            self.rewriting.dies(self._reduced, at)
            self._reduced = None

    def _let_go(self, at: int) -> None:
        if self._lagging is not None:
            self.rewriting.dies(self._lagging, at)
            self._lagging = None

    def end(self, at: int) -> None:
        """The callback behind a backward: nothing is kept from it."""
        self.release(at)
        self._let_go(at)
        for gathered in self.gathered.values():
            self.rewriting.dies(gathered, at)
        self.gathered.clear()


def rewrite(rewriting: Rewriting, marks: Landmarks, recipe: Recipe, strategy: Strategy) -> None:
    """Shards for states, and the collectives of every forward and backward; gradients are reduced
    in the last one."""
    _shards(rewriting, marks, recipe, strategy)
    groups, ranks = _groups(marks, recipe, strategy), Ranks(rewriting, strategy)
    for micro_step, phase in enumerate(marks.forwards):
        _forward(ranks, groups, phase, marks.spans[micro_step][0])
        _backward(ranks, marks, groups, micro_step)
    phase, spans = marks.evaluation
    if phase:
        _forward(ranks, groups, phase, spans)
        ranks.leave(groups.outer, phase.stop)


def _wider(strategy: Strategy) -> int:
    """Bytes that are kept per byte computed with: float32 under mixed precision."""
    return 1 if strategy.mixed_precision == "no" else 2


def _held_bytes(weight: Weight, recipe: Recipe, strategy: Strategy) -> int:
    """Bytes of a parameter as the ranks keep it: under mixed precision trained ones in float32,
    others as loaded."""
    if strategy.mixed_precision == "no" or weight.trained:
        return weight.bytes * _wider(strategy)
    return weight.bytes // 2 * DTYPE_BYTES[recipe.model.dtype]


def _shards(rewriting: Rewriting, marks: Landmarks, recipe: Recipe, strategy: Strategy) -> None:
    """A parameter and its states are cut along dimension 0; rows that fill up the last part are
    left out."""
    ranks = strategy.num_processes
    for weight in marks.weights:
        rewriting.blocks[weight.block].fixed_bytes = -(
            -_held_bytes(weight, recipe, strategy) // ranks
        )
    for block in rewriting.blocks:
        if block.born in ("start:optimizer", "optimizer") and block.fixed_bytes > SCALAR_BYTES:
            block.fixed_bytes = -(-block.fixed_bytes * _wider(strategy) // ranks)


def _groups(marks: Landmarks, recipe: Recipe, strategy: Strategy) -> Groups:
    groups = Groups({}, Group(None), Group(None), marks.tied)
    of_embedding = None if marks.tied else embedding_gradient(marks)
    for weight in marks.weights:
        group = groups.embedding if weight is marks.weights[0] and not marks.tied else groups.outer
        if weight.layer is not None:
            group = groups.layers.setdefault(weight.layer, Group(weight.layer))
        group.bytes += weight.bytes
        group.held_bytes += _held_bytes(weight, recipe, strategy)
    for gradient in marks.gradients:
        group = groups.embedding if gradient is of_embedding else groups.outer
        (group if gradient.layer is None else groups.layers[gradient.layer]).gradients.append(
            gradient
        )
    return groups


def _forward(ranks: Ranks, groups: Groups, phase: range, spans: dict[Layer, range]) -> None:
    ranks.unshard(groups.outer if groups.tied else groups.embedding, phase.start, forward=True)
    end = phase.start
    for layer, span in spans.items():
        ranks.leave(groups.embedding, span.start)
        ranks.unshard(groups.layers[layer], span.start, forward=True)
        ranks.leave(groups.layers[layer], span.stop)
        end = span.stop
    ranks.unshard(groups.outer, end, forward=True)
    ranks.flush(_logits(ranks.rewriting, range(end, phase.stop), last=False))


def _backward(ranks: Ranks, marks: Landmarks, groups: Groups, micro_step: int) -> None:
    """A group is gathered while the one before it in this order is at work."""
    phase, (forwards, backwards) = marks.backwards[micro_step], marks.spans[micro_step]
    reduces = micro_step == len(marks.backwards) - 1
    order = [groups.embedding, *(groups.layers[layer] for layer in forwards)]
    loss = range(phase.start, min((span.start for span in backwards.values()), default=phase.stop))
    ranks.gather(order[-1], _logits(ranks.rewriting, loss, last=True))
    for layer, span in backwards.items():
        group = groups.layers[layer]
        if not groups.tied:  # the final norm's input has its gradient
            ranks.leave_backward(groups.outer, span.start, phase, reduces)
        ranks.unshard(group, span.start, forward=False)
        ranks.gather(order[order.index(group) - 1], span.start)
        ranks.leave_backward(group, span.stop, span, reduces)
    if groups.embedding.gradients:
        ranks.unshard(
            groups.embedding,
            max((span.stop for span in backwards.values()), default=phase.start),
            False,
        )
    ranks.leave_backward(groups.outer, phase.stop, phase, reduces)
    ranks.leave_backward(groups.embedding, phase.stop, phase, reduces)
    ranks.end(phase.stop)


def _logits(rewriting: Rewriting, positions: range, last: bool) -> int:
    """Where the output has been made, and what led to it freed; in a backward, where its last
    gradient has."""
    events, blocks = rewriting.log.events, rewriting.log.blocks
    wide = [
        at for at in positions if events[at].birth and blocks[events[at].block].kind == "logits"
    ]
    return (
        next_birth(rewriting.log, wide[-1 if last else 0], positions.stop)
        if wide
        else positions.stop
    )
