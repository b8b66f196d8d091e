"""Files and folders that killed processes have left behind, removed at a later start."""

import re
import time
from contextlib import suppress
from pathlib import Path

from launch.base import files, processes

_MADE_BY = re.compile(r"\.(\d+)\.tmp\Z")  # the process, in a name of files.write_atomic()
UNTOUCHED_S = 60.0  # age: on a shared folder, a process of another machine may have made it
# Folders for sockets of Python's multiprocessing, whose names say nothing of their processes
_SOCKET_FOLDERS, _NO_SOCKET_S = "pymp-*", 3600.0
_UNIX_SOCKETS = Path("/proc/net/unix")


def sweep(folder: Path) -> None:
    """Remove what processes that are gone have left in a folder and in those below it."""
    for path in list(folder.rglob("*")):
        maker = _MADE_BY.search(path.name)
        if maker and not processes.is_alive(int(maker[1])):
            _remove(path, UNTOUCHED_S)


def sweep_socket_folders(folder: Path) -> None:
    """Remove the folders for sockets in which no process has a socket."""
    sockets = _UNIX_SOCKETS.read_text(encoding="utf-8", errors="replace")
    for path in folder.glob(_SOCKET_FOLDERS):
        if f"{path}/" not in sockets:
            _remove(path, _NO_SOCKET_S)


def _remove(path: Path, untouched_s: float) -> None:
    """Remove a file or a folder that was not changed for so long; another start may do so too."""
    with suppress(FileNotFoundError):
        if time.time() - path.lstat().st_mtime >= untouched_s:
            files.remove(path)
