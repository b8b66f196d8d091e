"""Commit checkpoints completely or not at all.

All ranks write a checkpoint to a temporary folder; it is hashed, synced, sealed and renamed. Then
old checkpoints are removed. A failure on one rank is raised on all ranks with the same error, and
the unfinished checkpoint is removed."""

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

STAGING = "tmp-"  # followed by the name of an unfinished checkpoint
_TRASH = "tmp-trash-"  # being removed
_CONVERTED = "tmp-converted-"  # for this start only
_TEMPORARY = re.compile(rf"^({STAGING}|{_TRASH}|{_CONVERTED})checkpoint-\d{{6,}}$")
# a pickle of the arguments, including tokens; lowmem never reads it
NOT_KEPT = "training_args.bin"
_MIN_VERIFIED = 2  # kept whatever the limit says, because a checkpoint can be damaged
_FREE_FACTOR = 1.1  # disk space that must be free before a save, in sizes of the last checkpoint
# Messages of the native writers of torch, safetensors and tokenizers for a failed write.
_WRITE_FAILED = re.compile(
    r"PytorchStreamWriter|inline_container|iostream error|unexpected pos|write\(\): fd|\(os error"
    r" \d+\)"
)


# ---- all ranks together
# ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Save:
    """A save of one step, on this rank."""

    checkpoints: Path
    step: int
    rank: int
    world_size: int

    @property
    def staging(self) -> Path:
        return self.checkpoints / f"{STAGING}{manifest.name(self.step)}"

    @property
    def staged(self) -> Path:
        """The folder that Trainer writes when `staging` is its output_dir."""
        return self.staging / f"checkpoint-{self.step}"

    def on_all(self, do: Callable[[], Any]) -> list[Any]:
        """Call `do` on each rank and return the results of all ranks, or raise on all ranks.
        Collective.

        Raises StorageError for a write that failed on any rank.
        """
        failed: Exception | None = None
        result, problem = None, None
        try:
            result = do()
        except Exception as error:  # noqa: BLE001  it is raised again, here and on the other ranks
            failed = error
            problem = (storage_problem(error), f"{type(error).__name__}: {error}")
        results, problems = zip(*self._gather((result, problem)), strict=True)
        rank = next((rank for rank, problem in enumerate(problems) if problem), None)
        if rank is None:
            return list(results)
        if self.rank == 0:
            # the next start removes files that cannot be removed now
            shutil.rmtree(self.staging, ignore_errors=True)
        self._gather(None)  # the space is free again before a rank writes its error
        storage, text = problems[rank]
        if storage is not None:
            raise StorageError(self._unwritten(rank, storage)) from failed
        if failed is not None:
            raise failed
        raise RuntimeError(f"the checkpoint of step {self.step} failed on rank {rank}: {text}")

    def on_first(self, do: Callable[[], Any]) -> Any:
        """Call `do` on rank 0 alone and return its result on all ranks. Collective; raises as
        on_all."""
        return self.on_all(do if self.rank == 0 else lambda: None)[0]

    def _unwritten(self, rank: int, problem: str) -> str:
        try:
            names = [folder.name for folder in manifest.committed(self.checkpoints)]
            committed = ", ".join(names) or "none yet"
            free = f"{base_files.free_bytes(self.checkpoints):,} bytes are free"
        except OSError as error:
            committed, free = "the folder cannot be read", str(error.strerror)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        if limit != resource.RLIM_INFINITY:
            free += f"; no file may be larger than {limit:,} bytes (ulimit -f)"
        return (
            f"{self.checkpoints}: the checkpoint of step {self.step} could not be written (rank"
            f" {rank}: {problem}; {free}). Kept: {committed}. Free some space, or repair the disk,"
            " and run the same line again to continue; --training.save_total_limit keeps fewer"
        )

    def _gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        torch.distributed.all_gather_object(values, value)
        return values


def storage_problem(error: BaseException) -> str | None:
    """Describe the refusal of a disk; None for another error."""
    # errors in torch.distributed.checkpoint: {rank: (exception, traceback)}
    failures = getattr(error, "failures", None)
    for cause in [failure[0] for failure in failures.values()] if failures else [error]:
        if isinstance(cause, StorageError):
            return str(cause)
        if isinstance(cause, OSError):
            where = f"{Path(cause.filename).name}: " if isinstance(cause.filename, str) else ""
            return f"{where}{cause.strerror or cause}"
        if _WRITE_FAILED.search(str(cause)):
            return str(cause).splitlines()[0]
    return None


class DelayedWrites:
    """DeepSpeed's writer with delayed errors: every rank must reach the barriers between its
    writes."""

    def __init__(self, writer: Any) -> None:
        self.writer, self.failed = writer, None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.writer, name)

    def save(self, state_dict: Any, path: str) -> None:
        weights = state_dict.get("module")
        if weights:
            state_dict = {**state_dict, "module": _in_storages_of_their_own(weights)}
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


def _in_storages_of_their_own(weights: Mapping[str, Any]) -> dict[str, Any]:
    """The weights of a card, where they are, each as a storage of its own; weights that are tied
    share theirs. torch.save copies one storage at a time to the host, and the weights of ZeRO 1 and
    2 are slices of one."""
    alone: dict[Any, torch.Tensor] = {}

    def view(weight: Any) -> Any:
        if not torch.is_tensor(weight) or not weight.is_cuda or not weight.numel():
            return weight
        place = (weight.data_ptr(), weight.shape, weight.stride(), weight.dtype)
        return alone.setdefault(place, torch.from_dlpack(weight.detach()))

    return {name: view(weight) for name, weight in weights.items()}


# ---- disk space
# ---------------------------------------------------------------------------


def check_disk_space(checkpoints: Path, predicted_bytes: int) -> None:
    """Raises StorageError if the next checkpoint will not fit. It is expected to be as large as the
    last checkpoint, or else as predicted."""
    sealed = [folder for folder in manifest.ours(checkpoints) if (folder / manifest.FILE).exists()]
    files = manifest.read(sealed[-1])["files"].values() if sealed else ()
    expected = sum(entry["bytes"] for entry in files) or predicted_bytes
    need = int(expected * _FREE_FACTOR)
    if need > base_files.free_bytes(checkpoints):
        raise StorageError(f"No space left on device: it needs {need:,} bytes")


# ---- commit
# ---------------------------------------------------------------------------


def listing(staged: Path) -> dict[str, int]:
    """List the files of a staged checkpoint with their sizes, without the file that is removed."""
    (staged / NOT_KEPT).unlink(missing_ok=True)
    paths = (path for path in staged.rglob("*") if path.is_file())
    return {str(path.relative_to(staged)): path.stat().st_size for path in sorted(paths)}


def deal(files: Mapping[str, int], ranks: int) -> list[list[str]]:
    """Divide the files among the ranks to hash and sync: the largest first, to the rank with the
    fewest bytes."""
    shares: list[list[str]] = [[] for _ in range(ranks)]
    for name in sorted(files, key=lambda name: (-files[name], name)):
        min(shares, key=lambda share: sum(files[dealt] for dealt in share)).append(name)
    return shares


def describe(staged: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Sync each file and return {file: bytes, sha256}. Files are hashed from memory while the disk
    writes."""
    with ThreadPoolExecutor(1) as pool:
        synced = pool.map(base_files.sync, [staged / name for name in names])
        described = {
            name: {
                "bytes": (staged / name).stat().st_size,
                "sha256": base_files.sha256(staged / name),
            }
            for name in names
        }
        list(synced)  # raises the error of a sync
    return described


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
    Raises StorageError if a folder that lowmem did not write has the name.
    """
    final = checkpoints / manifest.name(step)
    if final.exists() and final not in manifest.ours(checkpoints):
        raise StorageError(f"{final.name} exists, and lowmem did not write it; move it away")
    folders = [*(path for path in staged.rglob("*") if path.is_dir()), staged]
    described = {
        **facts,
        "step": step,
        "versions": manifest.versions(),
        "files": dict(sorted(files.items())),
        "keeps_owners": staged.stat().st_uid == os.geteuid(),
        "keeps_modes": _close_to_others([*(staged / relative for relative in files), *folders]),
    }
    described["seal"] = manifest.seal(described)
    base_files.write_json(staged / manifest.FILE, described)
    _close_to_others([staged / manifest.FILE])
    for folder in folders:
        base_files.sync(folder)
    # only a rejected checkpoint can be here: a run continues after a good one
    if final.exists():
        discard(final)
    manifest.list_commit(checkpoints, final.name, described["seal"])
    staged.rename(final)
    base_files.sync(checkpoints)
    return final


def _close_to_others(paths: list[Path]) -> bool:
    """Let only the owner write; return False if the file system has no such modes."""
    for path in paths:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & manifest.WRITABLE_BY_OTHERS:
            path.chmod(mode & ~manifest.WRITABLE_BY_OTHERS)
    return not any(path.stat().st_mode & manifest.WRITABLE_BY_OTHERS for path in paths)


# ---- rotation
# ---------------------------------------------------------------------------


def rotate(checkpoints: Path, keep: int, verified: set[str], best: str | None = None) -> None:
    """Remove the oldest checkpoints beyond `keep`.

    At least two verified checkpoints remain, and the `best`, which is not counted. `verified` names
    the checkpoints that this process has committed or hashed. Another checkpoint is hashed only if
    it is needed as one of the last two. A damaged checkpoint is not counted.
    """
    good, checked, spare = 0, 0, []
    for folder in reversed(manifest.ours(checkpoints)):
        if checked >= _MIN_VERIFIED and good >= keep:
            if folder.name != best:
                spare.append(folder)
        elif checked < _MIN_VERIFIED:
            if folder.name in verified or manifest.fault(folder) is None:
                verified.add(folder.name)
                checked, good = checked + 1, good + 1
        elif manifest.fault(folder, hashed=False) is None:
            good += 1
    for folder in spare:
        discard(folder)
        verified.discard(folder.name)


def discard(folder: Path) -> None:
    trash = folder.with_name(f"{_TRASH}{folder.name}")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)  # a half-removed folder must not look like a checkpoint
    manifest.strike_commit(folder.parent, folder.name)
    shutil.rmtree(trash)


def clear_staging(checkpoints: Path) -> None:
    """Remove the temporary folders of a killed save, removal or start, and no other folders."""
    for folder in checkpoints.glob("tmp-*"):
        if _TEMPORARY.match(folder.name):
            shutil.rmtree(folder)


# ---- for another engine, or another effective batch
# ---------------------------------------------------------------------------


def converted(source: Path, write: Callable[[Path], None]) -> Path:
    """Make a folder that Trainer resumes from, with the files of `write` in place of the
    engine's."""
    folder = source.with_name(f"{_CONVERTED}{source.name}")
    folder.mkdir()
    write(folder)
    # Trainer's files that are the same under every engine
    same = ("trainer_state.json", "scheduler.pt", "scaler.pt", "rng_state")
    for relative in manifest.read(source)["files"]:
        if relative.startswith(same):
            _link(source / relative, folder / relative)
    return folder


def rebase(source: Path, checkpoints: Path, order: Any) -> Path:
    """Make a checkpoint that counts steps of another effective batch from `source`, at the same
    sample.

    Weights, optimizer and random state are the source's; step and schedule are moved to where
    `order` (a SampleOrder whose start is the source's samples_seen) stands.
    """
    epoch, offset = divmod(order.start, order.num_samples)
    step = epoch * order.steps_per_epoch + order.first_step(epoch)[0]
    described = manifest.read(source)
    staged = checkpoints / f"{STAGING}{manifest.name(step)}"
    staged.mkdir()
    for relative in described["files"]:
        if relative not in {"trainer_state.json", "scheduler.pt"}:
            _link(source / relative, staged / relative)
    state = json.loads((source / "trainer_state.json").read_text(encoding="utf-8"))
    state |= {
        **{"global_step": step, "epoch": epoch + offset / order.num_samples},
        **{"best_metric": None, "best_global_step": None},  # the best checkpoint is another run's
    }
    base_files.write_json(staged / "trainer_state.json", state)
    schedule = torch.load(source / "scheduler.pt", weights_only=True)
    schedule.update(last_epoch=step, _step_count=step + 1)
    torch.save(schedule, staged / "scheduler.pt")
    replaced = {"files", "step", "seal", "versions"}
    facts = {key: value for key, value in described.items() if key not in replaced}
    facts |= {"effective_batch_size": order.effective_batch_size, "rebased_from": str(source)}
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
