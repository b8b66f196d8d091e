"""Downloads of models and data sets, each into a folder that counts as whole only once the hash of
every file is right."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from launch.base import files, locks
from launch.base.errors import DataError, Interrupted, LaunchError, LockHeld, ResourceError
from launch.base.text import duration, size
from launch.hub import choice, client, names
from launch.schema.result import DOWNLOADED, Downloaded

Say = Callable[[str], None]
_SPARE = 1.1  # disk space, as a multiple of the bytes to download
POLL_S = 0.5


def find(name: names.HubName, root: Path, say: Say | None) -> Path:
    """The folder of a name in a recipe. With `say` it is downloaded if it is not here; without, it
    is the folder that a model's name would be as a path. Raises DataError for a data set that is
    not here."""
    if folder := names.downloaded(name, root):
        names.check_sizes(name, folder)
        return folder
    if say is not None:
        return folder_of(name, root, say)
    if name.is_data:
        raise DataError(
            f"{name}: is not downloaded, and nothing is without --download: add it to this line, or"
            f" type python -m launch download {name}"
        )
    return Path.cwd() / str(name)


def folder_of(name: names.HubName, root: Path, say: Say, refresh: bool = False) -> Path:
    """The folder of a name's files. They are downloaded if they are not there, or, with `refresh`,
    if the revision has moved on. Of two starts at once one downloads, and the other waits."""
    folder, has_waited = name.folder(root), False
    files.refuse_strangers(folder)
    while True:
        try:
            with locks.lock(folder / "lock", f"the download of {name}"):
                here = names.downloaded(name, root)
                return here if here and (has_waited or not refresh) else _newest(name, root, say)
        except LockHeld as error:
            if not has_waited:
                say(f"waiting: {error}")
            has_waited = True
        except LaunchError:
            if [*folder.iterdir()] == [folder / "lock"]:  # of a name that is nowhere
                (folder / "lock").unlink()
                folder.rmdir()
                with suppress(OSError):
                    folder.parent.rmdir()
            raise
        time.sleep(POLL_S)


def _newest(name: names.HubName, root: Path, say: Say) -> Path:
    """The folder of a name's files as they are on the hub."""
    listing, part = client.listing(name), name.part
    if name.is_data:
        part, local = choice.of_data(name, [*listing.files], listing.card)
        selection = f"{name.repo_name}-{re.sub(r'[^A-Za-z0-9.+-]', '_', part)}-{name.split}"
    else:
        selection, local = part or name.repo_name, choice.of_model(name, [*listing.files])
    target = name.folder(root) / listing.commit / selection
    chosen = {here: listing.files[path] for here, path in local.items()}
    wrong = [file for file, remote in chosen.items() if not remote.is_in(target / file)]
    if wrong or not (target / DOWNLOADED).is_file():
        sizes = {file: remote.num_bytes for file, remote in chosen.items()}
        record = Downloaded(str(name), listing.commit, listing.licence, sizes)
        if target.is_dir():
            say(f"{target}: not what was downloaded, so fetched again: {', '.join(wrong)}")
            part = target.rename(_part(target))
            for file in wrong:
                (part / file).unlink(missing_ok=True)
        _download(name, record, chosen, target, say)
    names.remember(name, root, target, replace(name, part=part, revision=listing.commit))
    return target


def _part(target: Path) -> Path:
    """The folder of a download that is not finished."""
    return target.with_name(f"{target.name}.part")


def _download(
    name: names.HubName,
    record: Downloaded,
    chosen: Mapping[str, client.RemoteFile],
    target: Path,
    say: Say,
) -> None:
    """Write the chosen files, go on where an earlier start was cut off, and give the folder its
    name once all of them are right. Raises NetworkError and ResourceError."""
    began, part = time.monotonic(), _part(target)
    part.mkdir(parents=True, exist_ok=True)
    for file, remote in chosen.items():
        path = part / file
        if path.exists() and path.stat().st_size > remote.num_bytes:
            path.unlink()
    there = [path.stat().st_size for file in chosen if (path := part / file).exists()]
    _check_sizes(record, [*chosen.values()], sum(there), part, say)
    for file, remote in chosen.items():
        try:
            client.fetch(name, record.commit, remote, part / file)
        except Interrupted:
            say("the same line again goes on from the bytes that are here")
            raise
        if not remote.is_in(part / file):
            (part / file).unlink()
            raise ResourceError(
                f"{name}: {remote.path}: what came is not what the hub lists (its hash differs); it"
                " was removed: run the same line again"
            )
    files.write_json(part / DOWNLOADED, record)
    files.sync_all(part)
    part.rename(target)
    files.sync(target.parent)
    say(f"downloaded into {target} in {duration(time.monotonic() - began)}")


def _check_sizes(
    record: Downloaded,
    chosen: Sequence[client.RemoteFile],
    there_bytes: int,
    folder: Path,
    say: Say,
) -> None:
    """Show what is downloaded. Raises ResourceError for a file that is too large, and for more than
    the disk takes."""
    largest = max(chosen, key=lambda file: file.num_bytes)
    if largest.num_bytes > client.MOST_BYTES:
        raise ResourceError(
            f"{record.name}: {largest.path}: has {size(largest.num_bytes)}, and the hub sends such"
            " a file over Xet alone, which is not used: fetch it with `hf download`, and name its"
            " folder"
        )
    num_bytes = sum(file.num_bytes for file in chosen)
    missing_bytes, free_bytes = num_bytes - there_bytes, files.free_bytes(folder)
    say(
        f"downloading {record}: {len(chosen)} file{'' if len(chosen) == 1 else 's'},"
        f" {size(num_bytes)}, {size(missing_bytes)} to go; {size(free_bytes)} free"
    )
    if free_bytes < missing_bytes * _SPARE:
        raise ResourceError(
            f"{record.name}: {size(missing_bytes)} to download need"
            f" {size(int(missing_bytes * _SPARE))} (a tenth to spare), and {folder} has"
            f" {size(free_bytes)}; make room there, or set LOWMEM_ROOT to another disk"
        )
