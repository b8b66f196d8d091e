"""The private name of Python's multiprocessing (3.11 to 3.14) that data workers replace."""

from __future__ import annotations

import os
import traceback
from multiprocessing import queues
from typing import Any


def end_what_cannot_send(worker: int) -> None:
    """For a data worker's start: one that cannot hand a batch over, as with /dev/shm full, ends,
    and so does its rank.

    multiprocessing prints the error and drops the batch, for which the rank waits for ever.
    """

    def ends(error: Exception, _: Any) -> None:
        traceback.print_exception(error)
        os._exit(1)

    queues.Queue._on_queue_feeder_error = staticmethod(ends)  # pyright: ignore
