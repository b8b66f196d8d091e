"""The order of samples of a training, and its division into steps, micro-batches and ranks: at
random, by lengths, or within a budget of tokens. No torch: a plan asks for it too
(training.data.largest_batches)."""

import itertools
import math
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

SORTED_TOGETHER = 50  # groups: as many as transformers' LengthGroupedSampler sorts at once
# the cost of starting a micro-step, in padding: a share of the tokens of a full micro-step
MICRO_STEP_SHARE = 1 / 8
# parts into which an epoch is divided at least, so that every epoch has other groups
LEAST_PARTS = 4


@dataclass(frozen=True)
class TokenBudget:
    """The limits of a rank's micro-batch: padded tokens of source and of target, each side by
    itself."""

    lengths: Callable[[], np.ndarray]  # lengths of all samples, as TokenRows.lengths gives them
    source: int
    target: int
    multiple: int = 1  # multiple to which the collator pads

    def split(
        self, step: np.ndarray, lengths: np.ndarray, world_size: int, most: int
    ) -> list[np.ndarray]:
        """Split the samples of an optimizer step into parts within the budget, the longest first.
        The ranks take the samples of a part by turns. There are as few parts as possible, and more,
        up to `most`, if that saves more padding than it costs.

        A sample that exceeds the budget is alone on its rank."""
        budget = np.array([self.source, self.target])
        rows = step[np.argsort(-(lengths[step] / budget).max(axis=1), kind="stable")]
        padded = -(-lengths[rows] // self.multiple) * self.multiple
        ends, end = [], 0
        while end < len(rows):
            widest = np.maximum.accumulate(padded[end:])
            # samples of rank 0 if this sample were the last of the part
            count = np.arange(len(widest))[:, None] // world_size + 1
            fits = np.all(count * widest <= budget, axis=1)
            fitting = max(int(fits.argmin()) // world_size, 1) * world_size
            end += len(fits) if fits.all() else fitting
            ends.append(end)
        worth = MICRO_STEP_SHARE * world_size * budget.sum()
        while len(ends) < most:
            parts = itertools.pairwise([0, *ends])
            saved, middle = max(_saved(padded, *part, world_size) for part in parts)
            if saved <= worth:
                break
            insort(ends, middle)
        return np.split(rows, ends[:-1])


def _saved(padded: np.ndarray, begin: int, end: int, world_size: int) -> tuple[int, int]:
    """(tokens of padding that are saved if these samples become two parts, the start of the second
    part)."""
    part = padded[begin:end]
    places = np.arange(world_size, len(part), world_size)
    if not len(places):
        return 0, end
    first = np.maximum.accumulate(part)[places - 1].sum(axis=1)
    second = np.maximum.accumulate(part[::-1])[::-1][places].sum(axis=1)
    computed = places * first + (len(part) - places) * second
    least = int(computed.argmin())
    return int(len(part) * part.max(axis=0).sum() - computed[least]), begin + int(places[least])


class SampleOrder:
    """Batch sampler for DataLoader: the samples of a rank in each micro-batch of an epoch.

    The order of samples depends on the seed and the epoch alone. Micro-batch, accumulation and
    ranks only divide it. An optimizer step covers the next effective_batch_size samples. The last
    step of an epoch covers the remaining samples in as few micro-steps as possible, so no sample is
    dropped or repeated. A rank without a sample in a micro-step gets []. A micro-step without any
    sample is None. Such micro-steps come first in a step, because the ranks reduce their gradients
    in its last micro-step.

    With `lengths` of all samples (TokenRows.lengths) the samples of a step have similar lengths,
    and those of a micro-batch even more so. The order then depends on `group_size` too, which is
    the effective batch of the run that made the order. A run that continues it with another
    effective batch keeps `group_size`, and so trains exactly the remaining samples.

    With a `budget` micro-batches are limited by tokens: a step has at most `accumulation`
    micro-batches if the budget covers `micro_batch` samples of any length.
    """

    def __init__(
        self,
        num_samples: int,
        micro_batch: int,
        accumulation: int,
        world_size: int,
        rank: int,
        seed: int,
        start: int = 0,
        lengths: Callable[[], np.ndarray] | None = None,
        group_size: int | None = None,
        budget: TokenBudget | None = None,
    ) -> None:
        self.num_samples, self.micro_batch, self.accumulation = (
            num_samples,
            micro_batch,
            accumulation,
        )
        self.world_size, self.rank, self.seed = world_size, rank, seed
        # samples of all epochs that an earlier run with another effective batch has trained
        self.start = start
        self.lengths = lengths  # None: the order is random
        self.group_size = group_size or self.effective_batch_size
        self.budget = budget  # None: every micro-batch has micro_batch samples
        self.epoch = 0

    @property
    def effective_batch_size(self) -> int:
        return self.micro_batch * self.accumulation * self.world_size

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_samples // self.effective_batch_size)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def first_step(self, epoch: int) -> tuple[int, int]:
        """(step, sample) of the epoch at which this run continues; (0, 0) except in the epoch of
        `start`."""
        if self.start == 0 or epoch != self.start // self.num_samples:
            return 0, 0
        offset = self.start % self.num_samples
        return (
            self.steps_per_epoch - -(-(self.num_samples - offset) // self.effective_batch_size),
            offset,
        )

    def samples_seen(self, step: int) -> int:
        """The number of samples of all epochs that are trained after `step` optimizer steps."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        first, offset = self.first_step(epoch)
        return epoch * self.num_samples + min(
            offset + max(step_in_epoch - first, 0) * self.effective_batch_size, self.num_samples
        )

    def rows_of(self, step: int, micro_batches: Iterable[int]) -> list[int]:
        """The rows of this rank in these micro-batches (from 0) of an optimizer step (from 1)."""
        epoch, step_in_epoch = divmod(step - 1, self.steps_per_epoch)
        first, _ = self.first_step(epoch)
        parts = next(itertools.islice(self._steps(epoch), step_in_epoch - first, None))
        selected = (parts[micro] for micro in micro_batches if micro < len(parts))
        return [int(row) for part in selected for row in part[self.rank :: self.world_size]]

    def _steps(self, epoch: int) -> Iterator[list[np.ndarray]]:
        """Yield the micro-batches, of all ranks together, of each remaining optimizer step of an
        epoch."""
        order, width = self._order(epoch), self.micro_batch * self.world_size
        lengths = self.budget.lengths() if self.budget else None
        for start in range(self.first_step(epoch)[1], self.num_samples, self.effective_batch_size):
            step = order[start : start + self.effective_batch_size]
            if self.budget and lengths is not None:
                yield self.budget.split(step, lengths, self.world_size, -(-len(step) // width))
            else:
                yield [step[begin : begin + width] for begin in range(0, len(step), width)]

    def micro_batches(self, epoch: int, num_steps: int) -> Iterator[np.ndarray]:
        """Yield the samples of the micro-batches of all ranks, (micro-batches, rows), in the first
        steps of an epoch that is not continued: those of as many rows together. There is no
        `budget`."""
        assert self.budget is None and self.start == 0
        order = self._order(epoch)[: num_steps * self.effective_batch_size]
        return in_turns(order, self.micro_batch, self.world_size)

    def _order(self, epoch: int) -> np.ndarray:
        # 4 bytes a row are all that a rank has in private memory
        random = np.random.default_rng([self.seed, epoch])
        order = random.permutation(np.arange(self.num_samples, dtype=np.int32))
        if self.lengths is not None:
            lengths = self.lengths()
            _group(order, lengths, self.group_size, random)
            # the longest first, so that the rows of a micro-batch have similar lengths
            longest_first = -lengths.sum(axis=1)
            _sort_each(order[self.first_step(epoch)[1] :], self.effective_batch_size, longest_first)
        return order

    def __len__(self) -> int:
        """The number of micro-batches of an epoch on a rank."""
        # the last step of the first epoch may be fuller than those of the others
        if self.start:
            return self.steps_per_epoch * self.accumulation
        full = self.steps_per_epoch - 1
        last = self.num_samples - full * self.effective_batch_size
        return full * self.accumulation + -(-last // (self.micro_batch * self.world_size))

    def __iter__(self) -> Iterator[list[int] | None]:
        first, _ = self.first_step(self.epoch)
        # these were trained before this run, and Trainer skips them
        yield from [None] * (first * self.accumulation)
        for step, parts in enumerate(self._steps(self.epoch), first):
            micro_steps = min(self.accumulation, len(self) - step * self.accumulation)
            yield from [None] * (micro_steps - len(parts))
            for part in parts:
                yield [int(row) for row in part[self.rank :: self.world_size]]


def in_turns(order: np.ndarray, micro_batch: int, world_size: int) -> Iterator[np.ndarray]:
    """Yield (micro-batches, rows) of as many rows together: a rank has every world_size-th row."""
    full = len(order) // (micro_batch * world_size) * micro_batch * world_size
    by_place = order[:full].reshape(-1, micro_batch, world_size)
    yield by_place.transpose(0, 2, 1).reshape(-1, micro_batch)
    for rank in range(min(world_size, len(order) - full)):
        yield order[full + rank :: world_size][None]


def _group(order: np.ndarray, lengths: np.ndarray, size: int, random: np.random.Generator) -> None:
    """Rearrange `order` in place, so that each `size` rows in turn have similar lengths and the
    groups have a random order.

    `lengths` (rows, 2): tokens of source and target. Random parts of the epoch are sorted by the
    target and, in strips, by the source. The few rows that fill no group stay last. The group of
    the longest row becomes the second group, because the second step is the first in the steady
    state and is compared with the plan.
    """
    count = len(order) // size
    if count == 0:
        return
    together = min(SORTED_TOGETHER, max(count // LEAST_PARTS, 1))
    # There are as many strips as groups in a strip, or twice as many
    strip = size * max(math.isqrt(together // 2), 1)
    grouped = order[: count * size]
    _sort_each(grouped, together * size, lengths[:, 1])
    for start in range(0, len(grouped), together * size):
        _sort_each(grouped[start : start + together * size], strip, lengths[:, 0])
    groups = grouped.reshape(count, size)
    groups[:] = groups[random.permutation(count)]
    second = min(1, count - 1)
    longest_group = int(lengths[grouped].sum(axis=1).argmax()) // size
    groups[[second, longest_group]] = groups[[longest_group, second]]


def _sort_each(order: np.ndarray, size: int, sort_keys: np.ndarray) -> None:
    """Sort each `size` rows in place by the keys of their numbers."""
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        rows[:] = rows[np.argsort(sort_keys[rows], kind="stable")]
