"""The largest micro-batches that a run will have: a child finds them in the order of the tokenised
rows, once for each division of these."""

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from launch.base import files
from launch.base.workspace import code_digest
from launch.data.worker import WORKER, FindLargest, WorkerEnded
from launch.schema.rows import Division, LargestMicroBatches

# Limits for an order that is made while a plan waits: two seconds
_MOST_EPOCHS, MOST_ROWS = 500, 2_000_000


class LargestBatches:
    """The largest micro-batches of a token cache, from a folder or found now. `num_rows`: those
    that are trained."""

    def __init__(self, tokens: Path, folder: Path, num_rows: int) -> None:
        self._tokens, self._folder, self._num_rows = tokens, folder, num_rows
        self._largest: dict[Division, LargestMicroBatches] = {}
        self.failure: str | None = None  # why the rows could not be read

    def fetch(self, divisions: Iterable[Division]) -> None:
        """Have these found, as far as they are not."""
        missing = [each for each in dict.fromkeys(divisions) if self._stored(each) is None]
        if not missing or self.failure:
            return
        rows = max(
            each.num_steps * each.micro_batch * each.accumulation * each.world_size
            for each in missing
        )
        if rows > min(_MOST_EPOCHS * self._num_rows, MOST_ROWS):
            self.failure = (
                f"an order of more than {_MOST_EPOCHS} epochs, or {MOST_ROWS:,} rows, is not made"
                " in advance"
            )
            return
        try:
            reply = WORKER.ask(FindLargest(self._tokens, tuple(missing)))
        except WorkerEnded as ended:
            self.failure = f"the tokenised rows in {self._tokens} could not be read: {ended}"
            return
        for division, largest in zip(missing, json.loads(reply), strict=True):
            files.store_json(self._file(division), largest)

    def get(self, division: Division) -> LargestMicroBatches | None:
        """The largest of this division; None if the rows could not be read."""
        self.fetch([division])
        return self._stored(division)

    def _stored(self, division: Division) -> LargestMicroBatches | None:
        largest = self._largest.get(division) or files.read_or_none(
            self._file(division), LargestMicroBatches
        )
        if largest is not None:
            self._largest[division] = largest
        return largest

    def _file(self, division: Division) -> Path:
        facts = [self._tokens.name, asdict(division), code_digest("training/data")]
        return self._folder / f"{files.digest(facts)}.json"
