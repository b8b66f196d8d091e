"""The recorded steps of which a step is composed: of layers that keep their activations, and of
layers that compute them again, with the logits at once or in a few parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from launch.predict.step import part_sizes
from launch.predict.step.compose import Composer
from launch.predict.step.recorded import LEAST_PARTS, NotComposed, Recorded
from launch.schema.recorded_step import LOSS, PARTS, Log, Question, RecordedStep


@dataclass(frozen=True)
class Sources:
    """The records that a step is composed of."""

    outer: Question  # all but the layers that `inner` is of
    inner: Question | None = None  # layers between those that compute again, every n-th
    every_n_layers: int = 1
    parts: int = 1  # number of parts in which the logits are made
    positions: int = 0  # positions that these parts divide; 0: they divide targets
    why_whole: str = ""  # why a mixture is recorded with its own levers

    @property
    def questions(self) -> list[Question]:
        return [self.outer, *([self.inner] if self.inner is not None else [])]

    def composed(
        self,
        recorded: Callable[[Question], RecordedStep],
        indexed: Callable[[Question], Recorded] | None = None,
    ) -> Log:
        """The log of one process. Raises NotComposed."""
        step = recorded(self.outer)
        if not step.period and self.inner is None and not self.outer.parts_apart:
            return step.log
        return self.composer(indexed or (lambda base: Recorded(recorded(base)))).log()

    def composer(self, recorded: Callable[[Question], Recorded]) -> Composer:
        """The composer of such a step. Raises NotComposed."""
        outer, every = recorded(self.outer), self.every_n_layers
        inner = outer if self.inner is None else recorded(self.inner)
        if inner is not outer and len(outer.recorded_layers.keys() - {LOSS}) > 1:
            raise NotComposed("there are several stacks of layers")
        return Composer(
            outer,
            lambda layer: inner if layer[1] % every else outer,
            self.parts,
            self.positions,
        )


def alone(question: Question, why: str = "", all_layers: bool = False) -> Sources:
    """The step from a record of its own."""
    # more documents change sizes alone
    base = replace(question, documents=min(question.documents, 1), all_layers=all_layers)
    return Sources(base, why_whole=why)


def choose_sources(
    question: Question, has_encoder: bool, is_recorded: Callable[[Question], bool]
) -> Sources:
    """The records that the step can be composed of; those that there are come first.

    Of an encoder and a decoder every n-th layer is counted through both, and what they hand on to
    one another depends on it: such a step is recorded with its own levers."""
    base_question, levers = alone(question).outer, question.strategy.levers
    every = levers.every_n_layers
    parts, positions, recorded_parts = levers.num_output_chunks, 0, PARTS
    if not levers.logits_at_targets:
        shards = levers.tiled_mlp_num_shards  # the trace has a multiple of them
        positions = -(-question.lengths[1] // shards) * shards
        parts, recorded_parts = (
            part_sizes.made_parts(positions, parts),
            part_sizes.uneven_parts(positions),
        )
    divides_evenly = levers.flattens and positions > 0  # lengths are multiples of the parts
    is_repeated = parts >= LEAST_PARTS
    obstacles = (
        (
            is_repeated and (not recorded_parts or divides_evenly),
            f"logits in {parts} parts are not composed",
        ),
        (
            every > 1 and has_encoder,
            "layers of an encoder and a decoder in turns are not composed",
        ),
        (
            every > 1 and levers.activation_offloading,
            "layers in turns with inputs on the host are not composed",
        ),
    )
    if why := next((text for is_met, text in obstacles if is_met), ""):
        return alone(question, why)

    def base(every_n_layers: int, num_parts: int) -> Question:
        strategy = base_question.strategy.with_levers(
            every_n_layers=every_n_layers, num_output_chunks=num_parts
        )
        return replace(base_question, strategy=strategy, parts_apart=num_parts >= LEAST_PARTS)

    own_parts = recorded_parts if is_repeated else parts  # two are both ends: none is repeated
    outer = base(min(every, 1), own_parts)
    if every <= 1:
        return Sources(outer, parts=parts, positions=positions)
    other_parts = 1 if own_parts > 1 else recorded_parts
    alike = [base(0, own_parts), *([base(0, other_parts)] if other_parts else [])]
    inner = next((each for each in alike if is_recorded(each)), alike[0])
    return Sources(outer, inner, every, parts, positions)
