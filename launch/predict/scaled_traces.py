"""Traces of unpadded rows of any length, from a step with short rows: more rows instead of longer
ones.

Without padding and with fused attention a step's bytes depend on the number of tokens of its
micro-batch, not on the rows that they are divided into; of its work, only attention does. So many
lengths need one trace. tests/modes/trace/test_scaled_traces.py compares with traces of the length
itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launch.predict.traces import Trace, Traces, of_any_rows, with_targets
from launch.schema.plan import Strategy
from launch.schema.recorded_step import Operator, Parts, Question

_TRACED_LENGTH = 512  # tokens of a row
_TRACED_ROWS = 2  # fewest rows: a single row is traced for itself


class ScaledTraces(Traces):
    """Traces of _TRACED_LENGTH, and of its multiples in proportion."""

    def fetch(self, questions: Sequence[Question]) -> None:
        for _ in ("short rows", "those that do not stand for longer ones"):
            super().fetch([self._asked(question) for question in questions])

    def is_recorded(self, question: Question) -> bool:
        return super().is_recorded(self._asked(question))

    def record(self, question: Question) -> None:
        for _ in ("short rows", "those that do not stand for longer ones"):
            super().record(self._asked(question))

    def get(self, question: Question) -> Trace | None:
        asked = self._asked(question)
        return _longer(question, asked, super().get(asked))

    def price(self, question: Question) -> Trace | None:
        asked = self._asked(question)
        return _longer(question, asked, super().price(asked))

    def _asked(self, question: Question) -> Question:
        """The question of short rows, but where their step has no kernel of fused attention: it
        stores scores, which grow with the square of the length."""
        short = _traced(question)
        trace = super().get(short) or super().price(short)
        is_fused = trace is None or any(
            operator.kind == "attention" for operator in trace.passes.operators
        )
        return short if is_fused else question


def _longer(question: Question, asked: Question, trace: Trace | None) -> Trace | None:
    """The trace of a question, by that of the step in its place."""
    factor = question.lengths[0] // asked.lengths[0]
    if trace is None or factor == 1:
        return trace
    return with_targets(_scaled(trace, factor), of_any_rows(question))


def _traced(question: Question) -> Question:
    """The step that is traced in place of this one; the same where lengths matter otherwise."""
    source, target = question.lengths
    depends = question.is_padded or question.documents or source != target
    if (
        depends
        or source % _TRACED_LENGTH
        or not (question.fused_attention and question.architecture)
    ):
        return question
    rows = max(question.strategy.per_device_train_batch_size, _TRACED_ROWS)
    strategy: Strategy = replace(question.strategy, per_device_train_batch_size=rows)
    return replace(question, strategy=strategy, lengths=(_TRACED_LENGTH, _TRACED_LENGTH))


@dataclass(frozen=True)
class _ScaledTrace(Trace):
    factor: int = 1  # times the length of the traced rows

    def of_run(self, num_samples: int, eval_samples: int | None) -> list[Any]:
        return [*super().of_run(num_samples, eval_samples), self.factor]


def _scaled(trace: Trace, factor: int) -> Trace:
    """The trace of rows `factor` times as long."""
    return _ScaledTrace(
        tuple(
            {
                **moment,
                "parts": {
                    name: (fixed, factor * sample, *rest)
                    for name, (fixed, sample, *rest) in moment["parts"].items()
                },
            }
            for moment in trace.moments
        ),
        trace.passes.with_operators(lambda operator: _of_longer(operator, factor)),
        trace.file,
        log=partial(_longer_log, trace, factor),
        keeps_replays=trace.keeps_replays,
        factor=factor,
    )


def _longer_log(trace: Trace, factor: int) -> dict[str, Any]:
    log = trace.log()
    return {
        **log,
        "blocks": [[fixed, factor * sample, *rest] for fixed, sample, *rest in log["blocks"]],
    }


def _of_longer(operator: Operator, factor: int) -> Operator:
    """The work for rows `factor` times as long; attention's grows with the square."""

    def longer(parts: Parts, power: int = 1) -> Parts:
        fixed, sample, target, of_all = parts
        return fixed, factor**power * sample, target, of_all

    flops = longer(operator.flops, 2 if operator.kind == "attention" else 1)
    return replace(operator, flops=flops, bytes=longer(operator.bytes))
