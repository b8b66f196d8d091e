"""The steps that are traced for a candidate: those of its micro-batches that the highest peak may
be of."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from launch.predict.facts import Facts
from launch.predict.traces import Trace, with_targets
from launch.schema.data_section import DataSection
from launch.schema.plan import MULTIPLE, Strategy
from launch.schema.recorded_step import Question
from launch.schema.rows import MicroBatchSize

_LEAST_LENGTH = 8  # tokens of a row that is worth a trace


class _TracedStep(NamedTuple):
    """A step that a peak may be of."""

    question: Question
    rows: int  # samples of its micro-batch
    sizes: tuple[MicroBatchSize, ...] = ()  # sizes that its micro-batch can have; (): not known
    # the run's first step, if its rows are no fraction of these: source and target differ
    first: Question | None = None


def list_steps(facts: Facts, candidate: Strategy) -> list[_TracedStep]:
    """All steps that the highest peak may be of. If the order of rows is known: of the micro-batch
    that takes most, and of the longest rows. Else of the longest rows.

    By tokens also the most rows that such a budget can hold, which are a whole step's. Between the
    two no part of a peak is higher than at one of them: at so many padded tokens what grows with
    them is the same, attention's squares fall with the length, what a row takes by itself grows
    with the rows. Flattened rows are one row of so many tokens, which may be more documents and
    have more targets."""
    question, rows = facts.question(candidate), candidate.per_device_train_batch_size
    parts = candidate.gradient_accumulation_steps
    if sizes := facts.largest(candidate).sizes:
        return _of_sizes(facts, question, sizes)
    if not candidate.levers.batch_by_tokens or parts == 1 or facts.rows.rows_of is not None:
        return [_TracedStep(question, rows)]
    multiple = MULTIPLE[candidate.device]
    shorter = tuple(
        max(length // parts // multiple * multiple, _LEAST_LENGTH) for length in question.lengths
    )
    in_budget = (
        rows * length // short for length, short in zip(question.lengths, shorter, strict=True)
    )
    most = max(min(rows * parts, *in_budget), 1)
    short = replace(
        question,
        strategy=replace(candidate, per_device_train_batch_size=most),
        lengths=shorter,
        is_padded=True,
    )
    if not candidate.levers.flattens:
        return [_TracedStep(question, rows), _TracedStep(short, most)]
    source, target = question.lengths
    dense = replace(question, documents=max(question.documents, -(-most // rows)))
    targets = max(
        facts.targets(each, facts.rows.counts, {}).count(each.strategy.per_device_train_batch_size)
        for each in (question, short)
    )
    size = MicroBatchSize(rows, source, target, rows * source, targets, is_padded=False)
    return [_TracedStep(dense, rows, (size,))]


def trace(facts: Facts, step: _TracedStep, candidate: Strategy) -> Trace | None:
    """The trace of one of the candidate's steps, if it is stored."""
    stored = facts.traces.get(step.question) if facts.traces is not None else None
    if stored is None:
        return None
    first_step = facts.largest(candidate).first_step
    if _masks_padding(facts.recipe.data, facts.question(candidate)):
        alike = [each for each in first_step if each.is_padded == step.question.is_padded]
        first_step = alike or first_step
    sizes = {step.rows: step.sizes} if step.sizes else {}
    most = facts.targets(step.question, facts.rows.counts, sizes, first_step)
    of_step = with_targets(stored, most, facts.evaluated_targets(candidate, step.question))
    first = facts.traces.get(step.first) if facts.traces is not None and step.first else None
    if first is None or step.first is None:
        return of_step
    most = facts.targets(step.first, facts.rows.counts, {}, first_step)
    return replace(of_step, first=with_targets(first, most))


def _of_sizes(
    facts: Facts, question: Question, sizes: Sequence[MicroBatchSize]
) -> list[_TracedStep]:
    """The steps of the micro-batch that takes most by the trace of the longest rows, and of that
    with the longest rows, with padding and without."""
    candidate, multiple = question.strategy, MULTIPLE[question.strategy.device]
    if question.documents and facts.recipe.data.packing:  # sequences of about one length
        return [_TracedStep(question, candidate.per_device_train_batch_size, tuple(sizes))]
    chosen: dict[MicroBatchSize, None] = {}
    masks_padding = _masks_padding(facts.recipe.data, question)
    longest_trace = facts.trace(candidate)
    for of_one_kind in _by_mask(longest_trace, sizes) if masks_padding else [sizes]:
        chosen |= dict.fromkeys(_most(longest_trace, candidate, of_one_kind))
    steps = []
    for batch in chosen:
        lengths = batch.source, batch.target
        if candidate.levers.flattens:
            mean = -(-batch.tokens // batch.rows // multiple) * multiple
            lengths = mean, mean
        traced = replace(
            question,
            strategy=replace(candidate, per_device_train_batch_size=batch.rows),
            lengths=lengths,
            is_padded=batch.is_padded if masks_padding else question.is_padded,
        )
        steps.append(_TracedStep(traced, batch.rows, (batch,), _first(facts, candidate, traced)))
    return steps


def _masks_padding(data: DataSection, question: Question) -> bool:
    """True if a micro-batch has a mask where its own rows are padded, and none elsewhere."""
    return question.is_padded and not question.documents and not data.packing


def _by_mask(
    longest_trace: Trace | None, sizes: Sequence[MicroBatchSize]
) -> list[Sequence[MicroBatchSize]]:
    """Micro-batches with padding, and those without that take more than these would with a mask of
    their own."""
    padded = [each for each in sizes if each.is_padded]
    unpadded = [each for each in sizes if not each.is_padded]
    if padded and longest_trace is not None:

        def peak_bytes(size: MicroBatchSize) -> int:
            return longest_trace.peak_bytes(longest_trace.targets.counts(size))

        most = max(map(peak_bytes, padded))
        length = max(each.source + each.target for each in padded)
        unpadded = [
            each
            for each in unpadded
            if peak_bytes(each) > most or each.source + each.target > length
        ]
    return [group for group in (padded, unpadded) if group]


def _most(
    longest_trace: Trace | None, candidate: Strategy, sizes: Sequence[MicroBatchSize]
) -> Iterable[MicroBatchSize]:
    """The micro-batch that takes most by the trace of the longest rows, and that with the longest
    rows."""
    in_length = max(sizes, key=lambda each: (each.source + each.target, each.rows, each.targets))
    if longest_trace is None:
        return [in_length]
    batches = list(map(longest_trace.targets.counts, sizes))
    most = sizes[batches.index(longest_trace.highest(batches))]
    return [most] if candidate.levers.flattens else dict.fromkeys((in_length, most))


def _first(facts: Facts, candidate: Strategy, question: Question) -> Question | None:
    """The run's first step in rows of its own lengths, of an encoder-decoder."""
    sizes = facts.largest(candidate).first_step
    if not facts.model.size.is_encoder_decoder or not sizes:
        return None
    largest = max(sizes, key=lambda each: each.rows * (each.source + each.target))
    return replace(question, lengths=(largest.source, largest.target))
