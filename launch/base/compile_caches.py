"""Folders of compiled code: torch, Triton and DeepSpeed run what they find there, so each is its
user's alone."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

from launch.base import files
from launch.base.errors import ResourceError

FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "TORCH_EXTENSIONS_DIR": "extensions",
}
OTHERS_WRITE = 0o022  # mode bits: group and others


def settle(environ: MutableMapping[str, str] = os.environ) -> None:
    """Lead this process and its children to folders of compiled code that only this user writes to.

    A variable that the user set stays, and its folder is checked as ours are. TMPDIR becomes our
    folder in the one for temporary files: torch keeps precompiled headers and pickles in a folder
    of which only that is asked (torch 2.13, default_cache_dir). Not under LOWMEM_ROOT, which may
    have a space in its name: inductor's g++ lines break at one. Raises ResourceError for a folder
    that somebody else could have written to."""
    if (named := environ.get("TMPDIR")) and not Path(named).is_dir():
        raise ResourceError(f"TMPDIR {named}: there is no such folder; make it, or unset TMPDIR")
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ResourceError(
            f"there is no folder for temporary files ({error.strerror}); set TMPDIR to one"
        ) from error
    name = f"lowmem-{os.geteuid()}"
    own = temporary if temporary.name == name else temporary / name
    _make_private(own, "TMPDIR")
    for variable, part in FOLDERS.items():
        folder = Path(environ.get(variable) or own / part).absolute()
        _make_private(folder, variable)
        environ[variable] = str(folder)
    environ["TMPDIR"] = tempfile.tempdir = str(own)


def _make_private(folder: Path, variable: str) -> None:
    """Make the folder, mode 0700, or check the one that is there: its user is this one, and only
    they write to it."""
    fix = f"remove it, or set {variable} to a folder of your own"
    files.refuse_strangers(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # of a link and its target
        owners, mode = {folder.lstat().st_uid, folder.stat().st_uid}, folder.stat().st_mode
    except OSError as error:
        raise ResourceError(
            f"{folder}: compiled code cannot be kept there ({error.strerror}); {fix}"
        ) from error
    if strangers := owners - {os.geteuid()}:
        raise ResourceError(
            f"{folder}: belongs to user {strangers.pop()}, expected {os.geteuid()}, for compiled"
            f" code is kept and run there; {fix}"
        )
    if mode & OTHERS_WRITE:
        raise ResourceError(
            f"{folder}: others may write to it (mode {stat.S_IMODE(mode):o}), and compiled code is"
            f" kept and run there; chmod go-w it, or set {variable} to a folder of your own"
        )
