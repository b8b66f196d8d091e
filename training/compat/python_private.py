"""The private name of Python's multiprocessing (3.11 to 3.14) that data workers replace."""

from __future__ import annotations

import os
import traceback
from multiprocessing import queues
from typing import Any


def end_what_cannot_send(worker: int) -> None:
    """Let a data worker end, and with it its rank, if it cannot send a batch, as with a full
    /dev/shm. The worker calls this at its start.

    multiprocessing prints the error and drops the batch; the rank would wait for it without end.
    """

    def ends(error: Exception, _: Any) -> None:
        traceback.print_exception(error)
        os._exit(1)

    queues.Queue._on_queue_feeder_error = staticmethod(ends)  # pyright: ignore
