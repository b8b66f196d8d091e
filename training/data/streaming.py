"""Streaming of a corpus whose tokens are never all on the disk: units are tokenised a little before
the step that trains them, once for all ranks, and deleted after it.

A position counts the packed sequences since the start of the run. The sequence at a position
depends on the files and the seed alone: an epoch takes the units (training/data/units.py) in an
order that the seed decides, and the sequences of BLOCK_UNITS units in turn at random. So a stream
is divided into batches like any other order, and a continued run needs only the number of trained
sequences. The number of sequences of each unit is stored beside the tokenizer, so that no unit is
tokenised again to count them.
"""

import shutil
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from torch.utils.data import Dataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from launch.base import files
from launch.base.errors import DataError
from launch.data.files import shards
from training.data import tokenise
from training.data.batches import NOTHING, Row, TokenRows
from training.data.sample_order import SampleOrder

BLOCK_UNITS = 4  # DataSection.stream_unit_bytes knows it
POLL_S = 0.02
WINDOW, FAILED = "stream", "failed.json"
# File beside the tokenizer: for each unit the number of its sequences plus 1, little-endian
COUNTS, _COUNT_BYTES = "units.u32", 4
Result = TypeVar("Result")


class _Layout:
    """The unit and its row at each position, as far as the units have been counted."""

    def __init__(self, counts: Path, num_units: int, seed: int) -> None:
        self._counts, self._num_units, self._seed = counts, num_units, seed
        # position of each block that is known, and behind the last of them
        self.begins: list[int] = [0]
        self._epoch_order: tuple[int, np.ndarray] = (-1, np.empty(0, dtype=np.int64))

    def rows_of(self, unit: int) -> int | None:
        """The number of sequences of a unit; None if it has not been counted."""
        if not self._counts.exists():
            return None
        stored = np.fromfile(self._counts, "<u4", count=1, offset=_COUNT_BYTES * unit)
        # a count that was never written reads as 0, or as nothing behind the file's end
        return int(stored[0]) - 1 if stored.any() else None

    def units(self, block: int) -> list[int]:
        """The units of a block. The last block of an epoch may have fewer units."""
        epoch, index = divmod(block, -(-self._num_units // BLOCK_UNITS))
        if self._epoch_order[0] != epoch:
            random = np.random.default_rng([self._seed, epoch])
            self._epoch_order = epoch, random.permutation(self._num_units)
        return self._epoch_order[1][index * BLOCK_UNITS : (index + 1) * BLOCK_UNITS].tolist()

    def block(self, position: int) -> int | None:
        """The block that contains a position; None while it is not known."""
        while self.begins[-1] <= position:
            block = len(self.begins) - 1
            if block == -(-self._num_units // BLOCK_UNITS) and not self.begins[-1]:
                raise DataError("the corpus has 0 rows with something to learn")
            counts = [self.rows_of(unit) for unit in self.units(block)]
            if None in counts:
                return None
            self.begins.append(self.begins[-1] + sum(count or 0 for count in counts))
        return bisect_right(self.begins, position) - 1


class StreamRows(Dataset):
    """The sequences by their positions, for a rank. It waits for sequences that do not exist
    yet."""

    def __init__(
        self,
        job: tokenise.TokeniseJob,
        counts: Path,
        seed: int,
        num_samples: int,
        goes_on: Callable[[], None],
    ) -> None:
        """`goes_on` is called while the rank waits for a sequence."""
        self._job, self._seed, self._num_samples, self._goes_on = job, seed, num_samples, goes_on
        self._layout = _Layout(counts, len(job.units), seed)
        self._block: tuple[int, np.ndarray, dict[int, TokenRows]] = (
            -1,
            np.empty((0, 2), dtype=np.int64),
            {},
        )

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, index: int) -> Row:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | None) -> list[Row]:
        if indices is None:
            return NOTHING
        return [self._row(index)._replace(number=index) for index in indices]

    def _row(self, position: int) -> Row:
        block = self._waited(lambda: self._layout.block(position))
        if self._block[0] != block:
            self._block = block, self._places(block), {}
        unit, row = self._block[1][position - self._layout.begins[block]].tolist()
        if unit not in self._block[2]:
            file = self._job.rows_file(unit)
            self._block[2][unit] = self._waited(lambda: TokenRows(file) if file.exists() else None)
        return self._block[2][unit][row]

    def _places(self, block: int) -> np.ndarray:
        """(unit, row) of each sequence of a block, shuffled."""
        places = [
            (unit, row)
            for unit in self._layout.units(block)
            for row in range(self._layout.rows_of(unit) or 0)
        ]
        return np.random.default_rng([self._seed, block, 1]).permutation(np.array(places))

    def _waited(self, ready: Callable[[], Result | None]) -> Result:
        while (result := ready()) is None:
            if failed := files.read(self._job.folder / FAILED, dict[str, str]):
                raise DataError(failed["error"])
            self._goes_on()
            time.sleep(POLL_S)
        return result


class StreamOrder(SampleOrder):
    """Positions in their order, all in one epoch: the stream is shuffled already."""

    def _order(self, epoch: int) -> Any:
        # like an array, but without its memory
        return range(self.num_samples)


class Feeder(TrainerCallback):
    """Callback on rank 0 that lets units be tokenised for the current block and the next block, and
    deletes earlier units.

    When a step has ended every rank has its sequences, so earlier sequences are not needed."""

    def __init__(self, job: tokenise.TokeniseJob, counts: Path, order: SampleOrder) -> None:
        self._job, self._counts, self._order = job, counts, order
        self._layout = _Layout(counts, len(job.units), order.seed)
        self._position = 0
        self._is_over = threading.Event()
        # its children end with it
        self._thread = threading.Thread(target=self._feed, name="feeder", daemon=True)
        self._bad: dict[int, int] = {}  # unit -> rows left out since this start

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._position = self._order.samples_seen(state.global_step)
        # Attempts that were killed have left their windows
        for leftover in self._job.folder.parent.parent.glob(f"*/{WINDOW}"):
            shutil.rmtree(leftover)
        self._counts.touch()
        self._job.folder.mkdir()
        shutil.copytree(
            self._counts.parent / tokenise.TOKENIZER, self._job.folder / tokenise.TOKENIZER
        )
        files.write_json(self._job.folder / tokenise.JOB, self._job)
        self._thread.start()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._position = self._order.samples_seen(state.global_step)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: object,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        shutil.rmtree(self._job.folder)

    def _feed(self) -> None:
        try:
            self._deal()
        except Exception as error:
            # ranks that wait for rows must end after any error
            files.write_json(self._job.folder / FAILED, {"error": str(error)})
            if not isinstance(error, DataError):
                raise

    def _deal(self) -> None:
        num_processes = min(shards.STREAM_PROCESSES, len(self._job.units))
        with tokenise.child_processes(self._job.folder, num_processes) as selector:
            busy: dict[tokenise.Child, int | None] = {
                key.data: None for key in selector.get_map().values()
            }
            while not self._is_over.is_set():
                missing = [
                    unit
                    for unit in self._needed()
                    if unit not in busy.values()
                    and not (self._job.rows_file(unit).exists() and self._job.done(unit))
                ]
                for child in [child for child, unit in busy.items() if unit is None][
                    : len(missing)
                ]:
                    unit = busy[child] = missing.pop(0)
                    child.give(unit)
                for key, _ in selector.select(timeout=POLL_S):
                    for unit in key.data.finished(lambda rows: None):
                        busy[key.data] = None
                        self._finished(unit)

    def _needed(self) -> list[int]:
        """The units of this block and the next in their order. Files of other units are deleted."""
        block = self._layout.block(self._position)
        block = len(self._layout.begins) - 1 if block is None else block
        needed = list(dict.fromkeys([*self._layout.units(block), *self._layout.units(block + 1)]))
        for file in self._job.folder.glob(f"{self._job.part}*.arrow"):
            name = file.stem.rpartition("-")[2]
            if name.isdigit() and int(name) not in needed:
                file.unlink()
        return needed

    def _finished(self, unit: int) -> None:
        tokenised = self._job.failed(unit) or self._job.done(unit)
        if tokenised.error:
            raise DataError(tokenised.error)
        with self._counts.open("r+b") as file:
            file.seek(_COUNT_BYTES * unit)
            file.write((tokenised.counts.rows + 1).to_bytes(_COUNT_BYTES, "little"))
        self._bad[unit] = len(tokenised.bad)
        if sum(self._bad.values()) > self._job.max_bad_rows:
            raise DataError(
                f"{tokenised.bad[-1]}; data.max_bad_rows allows {self._job.max_bad_rows}"
            )
