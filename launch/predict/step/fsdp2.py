"""Rewrite a step as one rank of FSDP2 holds it.

Every layer is a group of parameters: gathered when the layer begins, dropped when it ends, in
forward and again in backward. Embedding, final norm and output layer are groups of their own, as
Accelerate makes them. Source: torch 2.13 fsdp/_fully_shard (_fsdp_param_group.py,
_fsdp_collectives.py); accelerate fsdp2_prepare_model.
"""

from dataclasses import dataclass, field

from launch.predict.step.rewrite_log import (
    GATHERS,
    REDUCES,
    SCALAR_BYTES,
    Gradient,
    Landmarks,
    Rewriting,
    Weight,
    behind_logits,
    embedding_gradient,
    input_embedding,
    later_gradients,
)
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import Strategy
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import Layer


@dataclass(eq=False)
class Group:
    """Parameters that are gathered together. Bytes are those of all ranks' parts."""

    layer: Layer | None
    bytes: int = 0  # bytes in the precision of the computation
    cast_bytes: int = 0  # of these, those that the ranks keep in another precision
    last_bytes: int = 0  # gradient of its last trained parameter
    gradients: list[Gradient] = field(default_factory=list)


@dataclass
class _Groups:
    """The groups of a model. The outer group stays gathered after forward; a tied embedding belongs
    to it."""

    layers: dict[Layer, Group]
    embedding: Group  # empty if it is tied
    outer: Group


class Ranks:
    """The collectives of a step, written into a log."""

    def __init__(self, rewriting: Rewriting, strategy: Strategy) -> None:
        self.rewriting, self.num_processes = rewriting, strategy.num_processes
        self.gloo = strategy.backend == "gloo"
        self.has_streams = strategy.device == "cuda"
        self.wider = _wider(strategy)
        self.gathered: dict[Group, int] = {}  # group -> its all-gathered block, not copied out yet
        self.unsharded: dict[Group, int] = {}  # group -> its full parameters
        # gradient -> its float32 sum over micro-steps, until ranks reduce it
        self.accumulated: dict[Gradient, int] = {}
        # blocks that outlive their use: "all-gather", until forward's next copy; "reduce-scatter",
        # until the next group reduces; "gloo", until its thread's next collective
        self._lagging: dict[str, int] = {}

    def gather(self, group: Group, position: int) -> None:
        """All-gather into a single block. What is cast of the rank's part is copied first."""
        if group in self.gathered or group in self.unsharded or not group.bytes:
            return
        rewriting, part = self.rewriting, group.cast_bytes / self.num_processes
        if part:
            self._lagging["cast"] = self._born(part, "all-gather input", position, group, GATHERS)
        self.gathered[group] = self._born(group.bytes, "all-gather", position, group, GATHERS)
        if self.gloo:  # ProcessGroupGloo gathers into a tensor of its own and copies
            rewriting.passes(group.bytes, "gloo all-gather", position, group.layer)
            self.release("gloo", position)
        self.release("cast", position)

    def unshard(self, group: Group, position: int, forward: bool) -> None:
        """Gather unless that was done before, then copy out into full parameters."""
        if group in self.unsharded or not group.bytes:
            return
        self.gather(group, position)
        if forward:
            self.release("all-gather", position)
        self.unsharded[group] = self._born(group.bytes, "whole weights", position, group)
        gathered = self.gathered.pop(group)
        if forward:
            self._lagging["all-gather"] = gathered
        else:
            self.rewriting.dies(gathered, position)

    def leave(self, group: Group, position: int) -> None:
        """Drop a group's full parameters."""
        if group in self.unsharded:
            self.rewriting.dies(self.unsharded.pop(group), position)

    def leave_backward(self, group: Group, position: int, micro_step: range, reduces: bool) -> None:
        """Drop a group's full parameters; then add its gradients up, or reduce-scatter them."""
        if group not in self.unsharded:
            return
        if self.accumulated.keys() & group.gradients:
            # own gradients of a later micro-step, which the plain step adds at once
            for block in later_gradients(self.rewriting.log, group.gradients, micro_step):
                self.rewriting.dies(block, position)
        self.leave(group, position)
        if reduces:
            self.release("reduce-scatter", position)
            if group.gradients:
                self._reduce(group, position)
        elif self.wider > 1:
            self._accumulate(group, position)

    def _accumulate(self, group: Group, position: int) -> None:
        """Keep gradients between micro-steps in the precision in which ranks reduce."""
        for gradient in group.gradients:
            self.rewriting.change(gradient.block, kind="gradients")
            self.accumulated[gradient] = self.rewriting.born(
                self.wider * gradient.bytes, "gradients", "accumulated", position, group.layer
            )
            self.rewriting.dies(gradient.block, position)

    def _reduce(self, group: Group, position: int) -> None:
        """Copy gradients into a single block of the parameters' own precision, free them, and keep
        a part of that block."""
        rewriting = self.rewriting
        last = next(  # the gradient of the last parameter, by a variable of the loop over them
            (each for each in group.gradients if each.bytes == group.last_bytes), None
        )
        total = self.wider * sum(gradient.bytes for gradient in group.gradients)
        self._lagging["reduce-scatter"] = self._born(total, "reduce-scatter input", position, group)
        for gradient in group.gradients:
            rewriting.change(gradient.block, kind="gradients")
            if gradient is not last:
                rewriting.dies(self.accumulated.pop(gradient, gradient.block), position)
        shard = self._born(
            total / self.num_processes, "reduce-scatter", position, group, REDUCES, "gradients"
        )
        if self.gloo:  # ProcessGroupGloo all-reduces a copy
            self.release("gloo", position)
            self._lagging["gloo"] = self._born(total, "gloo reduce-scatter", position, group)
        if last is not None:
            rewriting.dies(self.accumulated.pop(last, last.block), position)
        rewriting.dies(shard, max(gradient.dies for gradient in group.gradients))

    def _born(
        self,
        size: float,
        op: str,
        position: int,
        group: Group,
        stream: int = 0,
        kind: str = "communication",
    ) -> int:
        return self.rewriting.born(
            size, kind, op, position, group.layer, stream if self.has_streams else 0
        )

    def release(self, use: str, position: int) -> None:
        """Free the block of this use that has outlived it, if there is such a block."""
        if use in self._lagging:
            self.rewriting.dies(self._lagging.pop(use), position)

    def end(self, position: int) -> None:
        """Free the blocks of a backward, as the callback behind it does."""
        self.release("reduce-scatter", position)
        self.release("gloo", position)
        for gathered in self.gathered.values():
            self.rewriting.dies(gathered, position)
        self.gathered.clear()


def rewrite(
    rewriting: Rewriting,
    marks: Landmarks,
    recipe: Recipe,
    strategy: Strategy,
    is_after_evaluation: bool,
) -> None:
    """Replace states by shards, and add the collectives of every forward and backward. The last
    backward reduces gradients. A card's rank keeps the outer group whole behind an evaluation,
    until the next backward is over."""
    _shards(rewriting, marks, recipe, strategy)
    groups, ranks = _groups(marks, recipe, strategy), Ranks(rewriting, strategy)
    if is_after_evaluation:
        ranks.unsharded[groups.outer] = rewriting.born(
            groups.outer.bytes, "communication", "whole weights", marks.forwards[0].start
        )
    for micro_step, phase in enumerate(marks.forwards):
        _forward(ranks, groups, phase, marks.spans[micro_step][0])
        _backward(ranks, marks, groups, micro_step, is_after_evaluation and micro_step == 0)
    phase, spans = marks.evaluation
    if phase:
        _forward(ranks, groups, phase, spans)
        if not ranks.has_streams:
            ranks.leave(groups.outer, phase.stop)


def _wider(strategy: Strategy) -> int:
    """Bytes kept per byte of the computation: float32 is kept under mixed precision."""
    return 1 if strategy.mixed_precision == "no" else 2


def _held_bytes(weight: Weight, recipe: Recipe, strategy: Strategy) -> int:
    """Bytes of a parameter as the ranks keep it: under mixed precision a trained parameter is
    float32, and another one has its loaded type."""
    if weight.packed:
        return weight.bytes
    if strategy.mixed_precision == "no" or weight.trained:
        return weight.bytes * _wider(strategy)
    return weight.bytes // 2 * DTYPE_BYTES[recipe.model.dtype]


def _shards(rewriting: Rewriting, marks: Landmarks, recipe: Recipe, strategy: Strategy) -> None:
    """Divide parameters and their states along dimension 0. The rows that pad the last part are
    left out."""
    ranks = strategy.num_processes
    for number, block in enumerate(rewriting.log.blocks):
        if block.born in ("start:optimizer", "optimizer") and block.fixed_bytes > SCALAR_BYTES:
            rewriting.change(number, fixed_bytes=-(-block.fixed_bytes * _wider(strategy) // ranks))
    for weight in marks.weights:
        held_bytes = _held_bytes(weight, recipe, strategy)
        rewriting.change(weight.block, fixed_bytes=-(-held_bytes // ranks))


def _groups(marks: Landmarks, recipe: Recipe, strategy: Strategy) -> _Groups:
    groups = _Groups({}, Group(None), Group(None))
    of_embedding = None if marks.tied else embedding_gradient(marks)
    embedding = input_embedding(marks).block  # the copy comes behind the original
    for weight in marks.weights:
        is_embedding = weight.block <= embedding and not marks.tied
        group = groups.embedding if is_embedding else groups.outer
        if weight.layer is not None:
            group = groups.layers.setdefault(weight.layer, Group(weight.layer))
        group.bytes += weight.bytes
        if _held_bytes(weight, recipe, strategy) != weight.bytes:
            group.cast_bytes += weight.bytes
        group.last_bytes = weight.bytes if weight.trained else group.last_bytes
    for gradient in marks.gradients:
        group = groups.embedding if gradient is of_embedding else groups.outer
        if gradient.layer is not None:
            group = groups.layers[gradient.layer]
        group.gradients.append(gradient)
    return groups


def _forward(ranks: Ranks, groups: _Groups, phase: range, spans: dict[Layer, range]) -> None:
    ranks.unshard(
        groups.embedding if groups.embedding.bytes else groups.outer, phase.start, forward=True
    )
    end = phase.start  # end of the layers' forward pass
    for layer, span in spans.items():
        ranks.leave(groups.embedding, span.start)
        ranks.unshard(groups.layers[layer], span.start, forward=True)
        ranks.leave(groups.layers[layer], span.stop)
        end = span.stop
    ranks.unshard(groups.outer, end, forward=True)
    ranks.release(
        "all-gather", behind_logits(ranks.rewriting.log, range(end, phase.stop), last=False)
    )


def _backward(
    ranks: Ranks, marks: Landmarks, groups: _Groups, micro_step: int, is_after_evaluation: bool
) -> None:
    """Gather each group while the group before it, in backward's order, computes.

    Each group gathers the one whose forward ended before its own. Behind an evaluation the first
    group has such a neighbour too: the evaluation's last, which nobody uses."""
    phase, (forwards, backwards) = marks.backwards[micro_step], marks.spans[micro_step]
    reduces = micro_step == len(marks.backwards) - 1
    order = [groups.embedding, *(groups.layers[layer] for layer in forwards)]
    loss = range(phase.start, min((span.start for span in backwards.values()), default=phase.stop))
    ranks.gather(order[-1], behind_logits(ranks.rewriting.log, loss, last=True))
    for layer, span in backwards.items():
        group = groups.layers[layer]
        if not marks.tied:  # the gradient of the final norm's input is complete
            ranks.leave_backward(groups.outer, span.start, phase, reduces)
        ranks.unshard(group, span.start, forward=False)
        ranks.gather(order[order.index(group) - 1], span.start)
        ranks.leave_backward(group, span.stop, span, reduces)
    if groups.embedding.gradients:
        end = max((span.stop for span in backwards.values()), default=phase.start)
        ranks.unshard(groups.embedding, end, forward=False)
        if is_after_evaluation:
            ranks.gather(groups.outer, end)
    ranks.leave_backward(groups.outer, phase.stop, phase, reduces)
    ranks.leave_backward(groups.embedding, phase.stop, phase, reduces)
    ranks.end(phase.stop)
