"""Folders of compiled code. torch, Triton and DeepSpeed run the code that they find there, so only
the user may write to them."""

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
_OTHERS_WRITE = 0o022  # mode bits: group and others


def settle(environ: MutableMapping[str, str] = os.environ) -> None:
    """Point this process and its children to folders of compiled code that only this user can
    write to.

    A variable that the user set stays, and its folder is checked too. TMPDIR becomes a folder of
    ours among the temporary files, because torch keeps precompiled headers and pickles under TMPDIR
    whatever else is set (torch 2.13, default_cache_dir). The folders are not under LOWMEM_ROOT,
    whose name may contain a space: inductor's g++ command lines break at a space. Raises
    ResourceError for a folder that another user could have written to."""
    if (named := environ.get("TMPDIR")) and not Path(named).is_dir():
        raise ResourceError(f"TMPDIR {named}: there is no such folder; make it, or unset TMPDIR")
    try:
        temporary = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ResourceError(
            f"there is no folder for temporary files ({error.strerror}); set TMPDIR to a folder"
        ) from error
    name = f"lowmem-{os.geteuid()}"
    private_folder = temporary if temporary.name == name else temporary / name
    _make_private(private_folder, "TMPDIR")
    for variable, part in FOLDERS.items():
        folder = Path(environ.get(variable) or private_folder / part).absolute()
        _make_private(folder, variable)
        environ[variable] = str(folder)
    environ["TMPDIR"] = tempfile.tempdir = str(private_folder)


def noexec() -> str | None:
    """The reason why code that is compiled into the settled folders cannot be run there; None: it
    can."""
    for variable in ("TMPDIR", *FOLDERS):
        folder = os.environ.get(variable)
        if folder and os.statvfs(folder).f_flag & os.ST_NOEXEC:
            return (
                f"{variable} {folder} is mounted noexec; set {variable} to a folder"
                " elsewhere, or mount it with exec (docker: --tmpfs /tmp:exec)"
            )
    return None


def _make_private(folder: Path, variable: str) -> None:
    """Make the folder with mode 0700, or check that an existing folder belongs to this user and
    that nobody else can write to it."""
    fix = f"remove it, or set {variable} to a folder of your own"
    files.refuse_strangers(folder)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # owners of a symbolic link and of its target: either could exchange the folder
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
    if mode & _OTHERS_WRITE:
        raise ResourceError(
            f"{folder}: others may write to it (mode {stat.S_IMODE(mode):o}), and compiled code is"
            f" kept and run there; chmod go-w it, or set {variable} to a folder of your own"
        )
