"""Checkpoints, whole or not there: written aside by all ranks, hashed, synced, sealed, renamed;
then rotated by step.

What fails on one rank fails on all of them, with the same error; nothing of the unfinished
checkpoint stays."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import shutil
import stat
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.base import files as base_files
from launch.base.errors import StorageError
from launch.run_folder import manifest

STAGING = "tmp-"  # with a checkpoint's name behind it: not finished
TRASH = "tmp-trash-"  # being removed
CONVERTED = "tmp-converted-"  # for this start only
OURS = re.compile(rf"^({STAGING}|{TRASH}|{CONVERTED})checkpoint-\d{{6,}}$")
# a pickle of the arguments, tokens included; nothing of ours reads it
NOT_KEPT = "training_args.bin"
MIN_VERIFIED = 2  # so many good checkpoints are kept whatever the limit says: one can be damaged
ROOM_FACTOR = 1.1  # of the last checkpoint's size must be free before a save
# How the writers of torch, safetensors and tokenizers, which are not Python, say that a write
# failed.
WRITE_FAILED = re.compile(
    r"PytorchStreamWriter|inline_container|iostream error|unexpected pos|write\(\): fd|\(os error"
    r" \d+\)"
)


# ---- all ranks together
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """One save of one step, as this rank takes part in it."""

    checkpoints: Path
    step: int
    rank: int
    world_size: int

    @property
    def staging(self) -> Path:
        return self.checkpoints / f"{STAGING}{manifest.name(self.step)}"

    @property
    def staged(self) -> Path:
        """Where Trainer writes, given `staging` as its output_dir."""
        return self.staging / f"checkpoint-{self.step}"

    def on_all(self, do: Callable[[], Any]) -> list[Any]:
        """What `do` returns on each rank: it succeeds on all of them, or raises on all of them.
        Collective.

        Raises StorageError for a write that failed on any rank.
        """
        failed: Exception | None = None
        result = None
        try:
            result = do()
        except Exception as error:  # noqa: BLE001  it is raised again, here and on the other ranks
            failed = error
        words = (
            None
            if failed is None
            else (storage_problem(failed), f"{type(failed).__name__}: {failed}")
        )
        found = self._gather((result, words))
        if not any(words for _, words in found):
            return [result for result, _ in found]
        if self.rank == 0:
            # what cannot be removed now is cleared at the next start
            shutil.rmtree(self.staging, ignore_errors=True)
        self._gather(None)  # the room is there again before anybody writes what happened
        rank, (problem, text) = next(
            (rank, words) for rank, (_, words) in enumerate(found) if words
        )
        if problem is not None:
            raise StorageError(self._unwritten(rank, problem)) from failed
        if failed is not None:
            raise failed
        raise RuntimeError(f"the checkpoint of step {self.step} failed on rank {rank}: {text}")

    def on_first(self, do: Callable[[], Any]) -> Any:
        """What `do` returns on rank 0, which alone does it. Collective; raises as on_all."""
        return self.on_all(do if self.rank == 0 else _nothing)[0]

    def _unwritten(self, rank: int, problem: str) -> str:
        try:
            kept = (
                ", ".join(folder.name for folder in manifest.committed(self.checkpoints))
                or "none yet"
            )
            free = f"{free_bytes(self.checkpoints):,} bytes are free"
        except OSError as error:
            kept, free = "what is there cannot be read", str(error.strerror)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            free += f"; no file may be larger than {limit:,} bytes (ulimit -f)"
        return (
            f"{self.checkpoints}: the checkpoint of step {self.step} could not be written (rank"
            f" {rank}: {problem}; {free}). Kept: {kept}. Make room, or mend the disk, and run the"
            " same line again to continue; fewer are kept with --training.save_total_limit"
        )

    def _gather(self, mine: Any) -> list[Any]:
        """Everybody's, on every rank."""
        if self.world_size == 1:
            return [mine]
        found: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(found, mine)
        return found


def _nothing() -> None:
    return None


def storage_problem(error: BaseException) -> str | None:
    """What a disk has refused, in words; None for an error that is not a disk's."""
    # torch.distributed.checkpoint's: {rank: (exception, traceback)}
    inner = getattr(error, "failures", None)
    for one in [wrapped[0] for wrapped in inner.values()] if inner else [error]:
        if isinstance(one, StorageError):
            return str(one)
        if isinstance(one, OSError):
            where = f"{Path(one.filename).name}: " if isinstance(one.filename, str) else ""
            return f"{where}{one.strerror or one}"
        if WRITE_FAILED.search(str(one)):
            return str(one).splitlines()[0]
    return None


class DelayedWrites:
    """DeepSpeed's writer, whose failures wait: between its writes it has barriers, which every rank
    must reach."""

    def __init__(self, writer: Any) -> None:
        self.writer, self.failed = writer, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        self._do(self.writer.save, state_dict, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self._do(self.writer.makedirs, path, exist_ok=exist_ok)

    def _do(self, write: Any, *args: Any, **kwargs: Any) -> None:
        try:
            write(*args, **kwargs)
        except Exception as error:  # noqa: BLE001  raised by check(), after the barriers
            self.failed = self.failed or error

    def check(self) -> None:
        if self.failed is not None:
            raise self.failed


# ---- room
# ---------------------------------------------------------------------------


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def size_bytes(folder: Path) -> int:
    return sum(entry["bytes"] for entry in manifest.read(folder)["files"].values())


def check_room(checkpoints: Path, predicted_bytes: int) -> None:
    """Raises StorageError where the next checkpoint will not fit: as large as the last, or as
    predicted."""
    kept = [folder for folder in manifest.ours(checkpoints) if (folder / manifest.FILE).exists()]
    expected = size_bytes(kept[-1]) if kept else predicted_bytes
    need, free = int(expected * ROOM_FACTOR), free_bytes(checkpoints)
    if need > free:
        raise StorageError(f"No space left on device: it needs {need:,} bytes")


# ---- commit
# ---------------------------------------------------------------------------


def listing(staged: Path) -> dict[str, int]:
    """Every file of a staged checkpoint with its size; what is not kept is removed."""
    (staged / NOT_KEPT).unlink(missing_ok=True)
    paths = (path for path in staged.rglob("*") if path.is_file())
    return {str(path.relative_to(staged)): path.stat().st_size for path in sorted(paths)}


def deal(files: Mapping[str, int], ranks: int) -> list[list[str]]:
    """The files that each rank hashes and syncs: the largest first, to who has least."""
    hands: list[list[str]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for relative in sorted(files, key=lambda relative: (-files[relative], relative)):
        least = loads.index(min(loads))
        hands[least].append(relative)
        loads[least] += files[relative]
    return hands


def describe(staged: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """{file: bytes, sha256}, with each file on the disk: hashed from memory while the disk
    writes."""
    with ThreadPoolExecutor(1) as pool:
        synced = [pool.submit(base_files.sync, staged / relative) for relative in names]
        found = {
            relative: {
                "bytes": (staged / relative).stat().st_size,
                "sha256": manifest.sha256(staged / relative),
            }
            for relative in names
        }
        for one in synced:
            one.result()
    return found


def commit(
    staged: Path,
    checkpoints: Path,
    step: int,
    facts: Mapping[str, Any],
    files: Mapping[str, dict[str, Any]],
) -> Path:
    """Turn the folder that all ranks have finished writing into checkpoints/checkpoint-<step>; one
    process calls it.

    After the rename the checkpoint is complete on disk; before it, nothing by that name exists.
    Raises StorageError where somebody else's folder has the name.
    """
    final = checkpoints / manifest.name(step)
    if final.exists() and final not in manifest.ours(checkpoints):
        raise StorageError(
            f"{final.name} is there already and no save of ours made it; move it away"
        )
    folders = [*(path for path in staged.rglob("*") if path.is_dir()), staged]
    described = {
        **facts,
        "step": step,
        "versions": manifest.versions(),
        "files": dict(sorted(files.items())),
    }
    described["keeps_modes"] = _close_to_others(
        [*(staged / relative for relative in files), *folders]
    )
    described["seal"] = manifest.seal(described)
    base_files.write_json(staged / manifest.FILE, described)
    _close_to_others([staged / manifest.FILE])
    for folder in folders:
        base_files.sync(folder)
    # only a rejected one can stand here: resume would have continued behind a good one
    if final.exists():
        discard(final)
    manifest.list_commit(checkpoints, final.name, described["seal"])
    staged.rename(final)
    base_files.sync(checkpoints)
    return final


def _close_to_others(paths: list[Path]) -> bool:
    """Only the owner may write; False where the file system has no such modes."""
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & manifest.WRITABLE_BY_OTHERS:
            path.chmod(mode & ~manifest.WRITABLE_BY_OTHERS)
    return not any(path.stat().st_mode & manifest.WRITABLE_BY_OTHERS for path in paths)


# ---- rotation
# ---------------------------------------------------------------------------


def rotate(checkpoints: Path, keep: int, verified: set[str], best: str | None = None) -> None:
    """Remove the oldest of our checkpoints beyond `keep`, and never so many that fewer than two
    verified ones remain; nor the `best`, which counts for none of them.

    `verified`: names that this process has committed or hashed; others are hashed only when the
    last two good ones depend on them. A damaged checkpoint counts for nothing.
    """
    good, checked, spare = 0, 0, []
    for folder in reversed(manifest.ours(checkpoints)):
        if folder.name == best and checked >= MIN_VERIFIED and good >= keep:
            continue
        if checked >= MIN_VERIFIED and good >= keep:
            spare.append(folder)
        elif checked < MIN_VERIFIED:
            if folder.name in verified or manifest.fault(folder) is None:
                verified.add(folder.name)
                checked, good = checked + 1, good + 1
        elif manifest.fault(folder, hashed=False) is None:
            good += 1
    for folder in spare:
        discard(folder)
        verified.discard(folder.name)


def discard(folder: Path) -> None:
    trash = folder.with_name(f"{TRASH}{folder.name}")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)  # a half-removed folder must not look like a checkpoint
    manifest.strike_commit(folder.parent, folder.name)
    shutil.rmtree(trash)


def clear_staging(checkpoints: Path) -> None:
    """Remove what a killed save, removal or start left behind; nobody else's folders."""
    for folder in checkpoints.glob("tmp-*"):
        if OURS.match(folder.name):
            shutil.rmtree(folder)


# ---- for another engine, or another effective batch
# ---------------------------------------------------------------------------


def converted(source: Path, write: Callable[[Path], None]) -> Path:
    """A folder that Trainer resumes from, with what `write` puts there instead of the engine's own
    files."""
    folder = source.with_name(f"{CONVERTED}{source.name}")
    folder.mkdir()
    write(folder)
    for relative in manifest.read(source)["files"]:
        if relative in {"trainer_state.json", "scheduler.pt"} or relative.startswith("rng_state"):
            _link(source / relative, folder / relative)
    return folder


def rebase(source: Path, checkpoints: Path, order: Any) -> Path:
    """Make a checkpoint that counts steps of another effective batch from `source`, at the same
    sample.

    Weights, optimizer and random state are the source's; step and schedule are moved to where
    `order` (a SampleOrder whose start is the source's samples_seen) stands.
    """
    epoch, offset = divmod(order.start, order.samples)
    step = epoch * order.steps_per_epoch + order.first_step(epoch)[0]
    described = manifest.read(source)
    staged = checkpoints / f"{STAGING}{manifest.name(step)}"
    staged.mkdir()
    for relative in described["files"]:
        if relative not in {"trainer_state.json", "scheduler.pt"}:
            _link(source / relative, staged / relative)
    state = json.loads((source / "trainer_state.json").read_text(encoding="utf-8"))
    state.update(global_step=step, epoch=epoch + offset / order.samples)
    state.update(best_metric=None, best_global_step=None)  # its checkpoint is another run's
    base_files.write_json(staged / "trainer_state.json", state)
    schedule = torch.load(source / "scheduler.pt", weights_only=True)
    schedule.update(last_epoch=step, _step_count=step + 1)
    torch.save(schedule, staged / "scheduler.pt")
    facts = {
        key: value
        for key, value in described.items()
        if key not in {"files", "step", "seal", "versions"}
    }
    facts.update(effective_batch_size=order.effective_batch_size, rebased_from=str(source))
    return commit(staged, checkpoints, step, facts, describe(staged, list(listing(staged))))


def _link(source: Path, target: Path) -> None:
    """Hard-link, or copy across disks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            raise
        shutil.copy2(source, target)
