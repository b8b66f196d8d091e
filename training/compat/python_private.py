"""Private names of Python's multiprocessing (3.11 to 3.14)."""

import os
import shutil
import tempfile
import traceback
from multiprocessing import process, queues
from typing import Any

_LONGEST_SOCKET = 107  # bytes of a path, of unix(7): sun_path has one more, for its end


def end_what_cannot_send(worker: int) -> None:
    """Let a data worker end, and with it its rank, if it cannot send a batch, as with a full
    /dev/shm. The worker calls this at its start.

    multiprocessing prints the error and drops the batch; the rank would wait for it without end.
    """

    def ends(error: Exception, _: Any) -> None:
        traceback.print_exception(error)
        os._exit(1)

    queues.Queue._on_queue_feeder_error = staticmethod(ends)  # pyright: ignore


def shorten_socket_folder() -> None:
    """Put the sockets of this process's data workers below /tmp, where TMPDIR is too long for
    one."""
    socket = "/pymp-......../listener-........"
    if len(os.fsencode(tempfile.gettempdir() + socket)) > _LONGEST_SOCKET:
        folder = tempfile.mkdtemp(prefix="pymp-", dir="/tmp")
        process.current_process()._config["tempdir"] = folder  # pyright: ignore


def remove_socket_folder() -> None:
    """Remove the folder for sockets of this process's data workers, as its exit would do if it were
    no os._exit()."""
    folder = process.current_process()._config.get("tempdir")  # pyright: ignore
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)  # a worker that ends now removes its socket too
