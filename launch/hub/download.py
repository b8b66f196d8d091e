"""Downloads of models and data sets, each into a folder that counts as whole only once the hash of
every file is right."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from launch.base import files, locks
from launch.base.errors import DataError, LockHeld, ResourceError
from launch.base.text import duration, size
from launch.hub import choice, client, names
from launch.hub.client import Listing, RemoteFile
from launch.hub.names import HubName
from launch.schema.result import DOWNLOADED, NO_LICENCE, Downloaded

Say = Callable[[str], None]
SPARE = 1.1  # disk space, as a multiple of the bytes to download
POLL_S = 0.5


def find(name: HubName, root: Path, say: Say | None) -> Path | None:
    """The folder of a name in a recipe. With `say` it is downloaded if it is not here; without, the
    model is None. Raises DataError for a data set that is not here."""
    if folder := names.downloaded(name, root):
        return folder
    if say is not None:
        return folder_of(name, root, say)
    if name.is_data:
        raise DataError(
            f"{name}: is not downloaded, and nothing is without --download: add it to this line, or"
            f" type python -m launch download {name}"
        )
    return None


def folder_of(name: HubName, root: Path, say: Say, refresh: bool = False) -> Path:
    """The folder of a name's files. They are downloaded if they are not there, or, with `refresh`,
    if the revision has moved on. Of two starts at once one downloads, and the other waits."""
    with _lock(name, root, say) as has_waited:
        folder = names.downloaded(name, root)
        if folder is not None and (has_waited or not refresh):
            return folder
        listing, part = client.listing(name), name.part
        if name.is_data:
            part, local = choice.of_data(name, [*listing.files], listing.card)
            selection = f"{name.repo_name}-{re.sub(r'[^A-Za-z0-9.+-]', '_', part)}-{name.split}"
        else:
            selection, local = part or name.repo_name, choice.of_model(name, [*listing.files])
        target = name.folder(root) / listing.commit / selection
        if not (target / DOWNLOADED).is_file():
            chosen = {here: listing.files[path] for here, path in local.items()}
            _download(name, listing, chosen, target, say)
        names.remember(name, root, target, replace(name, part=part, revision=listing.commit))
        return target


@contextmanager
def _lock(name: HubName, root: Path, say: Say) -> Iterator[bool]:
    """Hold the lock of a repository's folder; True if another start had it before."""
    folder = name.folder(root)
    files.refuse_strangers(folder)
    has_waited = False
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locks.lock(folder / "lock", f"the download of {name}"))
                break
            except LockHeld as error:
                if not has_waited:
                    say(f"waiting: {error}")
                has_waited = True
                time.sleep(POLL_S)
        yield has_waited


def _download(
    name: HubName, listing: Listing, chosen: Mapping[str, RemoteFile], target: Path, say: Say
) -> None:
    """Write the chosen files, go on where an earlier start was cut off, and give the folder its
    name once all of them are right. Raises NetworkError and ResourceError."""
    began, part = time.monotonic(), target.with_name(f"{target.name}.part")
    part.mkdir(parents=True, exist_ok=True)
    here = {file: part / file for file in chosen}
    for file, path in here.items():
        if path.exists() and path.stat().st_size > chosen[file].num_bytes:
            path.unlink()
    there_bytes = sum(path.stat().st_size for path in here.values() if path.exists())
    _check_sizes(name, listing, [*chosen.values()], there_bytes, part, say)
    for file, path in here.items():
        client.fetch(name, listing.commit, chosen[file], path)
        if not chosen[file].is_in(path):
            path.unlink()
            raise ResourceError(
                f"{name}: {chosen[file].path}: what came is not what the hub lists (its hash"
                " differs); it was removed: run the same line again"
            )
    digests = {file.path: file.digest for file in chosen.values()}
    record = Downloaded(str(name), listing.commit, listing.licence, digests)
    files.write_json(part / DOWNLOADED, record)
    files.sync_all(part)
    part.rename(target)
    files.sync(target.parent)
    say(f"downloaded into {target} in {duration(time.monotonic() - began)}")


def _check_sizes(
    name: HubName,
    listing: Listing,
    chosen: Sequence[RemoteFile],
    there_bytes: int,
    folder: Path,
    say: Say,
) -> None:
    """Show what is downloaded. Raises ResourceError for a file that is too large, and for more than
    the disk takes."""
    largest = max(chosen, key=lambda file: file.num_bytes)
    if largest.num_bytes > client.MOST_BYTES:
        raise ResourceError(
            f"{name}: {largest.path}: has {size(largest.num_bytes)}, and the hub sends such a file"
            " over Xet alone, which is not used: fetch it with `hf download`, and name its folder"
        )
    num_bytes = sum(file.num_bytes for file in chosen)
    missing_bytes, free_bytes = num_bytes - there_bytes, files.free_bytes(folder)
    say(
        f"downloading {name} at {listing.commit[:12]}, licence: {listing.licence or NO_LICENCE}:"
        f" {len(chosen)} file{'' if len(chosen) == 1 else 's'}, {size(num_bytes)},"
        f" {size(missing_bytes)} to go; {size(free_bytes)} free"
    )
    if free_bytes < missing_bytes * SPARE:
        raise ResourceError(
            f"{name}: {size(missing_bytes)} to download need {size(int(missing_bytes * SPARE))}"
            f" (a tenth to spare), and {folder} has {size(free_bytes)}; make room there, or set"
            " LOWMEM_ROOT to another disk"
        )
