"""Checkpoints, whole or not there: written aside, synced, described by a manifest, renamed; verified on resume."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch import rundir

MANIFEST = "manifest.json"
NAME = re.compile(r"^checkpoint-\d{6,}$")
STAGING_PREFIX = "tmp-"
NOT_KEPT = "training_args.bin"  # a pickle of the arguments, tokens included; nothing of ours reads it


def name(step: int) -> str:
    return f"checkpoint-{step:06d}"


def commit(staged: Path, checkpoints: Path, step: int, facts: Mapping[str, Any]) -> Path:
    """Turn the folder that all ranks have finished writing into checkpoints/checkpoint-<step>; one process calls it.

    After the rename the checkpoint is complete on disk; before it, nothing by that name exists.
    """
    (staged / NOT_KEPT).unlink(missing_ok=True)
    files = {}
    for path in sorted(path for path in staged.rglob("*") if path.is_file()):
        files[str(path.relative_to(staged))] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        _sync(path)
    rundir.write_json(staged / MANIFEST, {**facts, "step": step, "files": files})
    for folder in [*(path for path in staged.rglob("*") if path.is_dir()), staged]:
        _sync(folder)
    final = checkpoints / name(step)
    if final.exists():  # only a rejected one can stand here: resume would have continued behind a good one
        _discard(final)
    staged.rename(final)
    _sync(checkpoints)
    return final


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))


def fault(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None when every file is the one the manifest describes."""
    try:
        described = manifest(folder)
        files = dict(described["files"])
    except FileNotFoundError:
        return f"{folder.name} has no {MANIFEST}: it was not finished"
    except (ValueError, KeyError, TypeError):
        return f"{folder.name}/{MANIFEST} cannot be read"
    for relative, expected in files.items():
        path = folder / relative
        if not path.is_file():
            return f"{folder.name}/{relative} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{folder.name}/{relative} has {path.stat().st_size:,} bytes, expected {expected['bytes']:,}"
        if _sha256(path) != expected["sha256"]:
            return f"{folder.name}/{relative} was changed after it was written"
    return None


def newest_valid(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """The checkpoint to resume from, and what was wrong with each newer one."""
    faults = []
    for folder in reversed(committed(checkpoints)):
        problem = fault(folder)
        if problem is None:
            return folder, faults
        faults.append(problem)
    return None, faults


def committed(checkpoints: Path) -> list[Path]:
    """Our checkpoints by step, oldest first; nobody else's folders."""
    return sorted((path for path in checkpoints.glob("checkpoint-*") if NAME.match(path.name)), key=_step)


def rotate(checkpoints: Path, keep: int) -> None:
    """Remove the oldest checkpoints beyond `keep`, counted by step."""
    for folder in committed(checkpoints)[:-keep]:
        _discard(folder)


def clear_staging(checkpoints: Path) -> None:
    """Remove what a killed save left behind."""
    for folder in checkpoints.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(folder)


def _discard(folder: Path) -> None:
    trash = folder.with_name(f"{STAGING_PREFIX}trash-{folder.name}")
    if trash.exists():
        shutil.rmtree(trash)
    folder.rename(trash)  # a half-removed folder must not look like a checkpoint
    shutil.rmtree(trash)


def _step(folder: Path) -> int:
    return int(folder.name.rsplit("-", 1)[1])


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rebase(source: Path, checkpoints: Path, order: Any) -> Path:
    """Make a checkpoint that counts steps of another effective batch from `source`, at the same sample.

    Weights, optimizer and random state are the source's; step and schedule are moved to where `order` (a SampleOrder
    whose start is the source's samples_seen) stands.
    """
    import torch

    epoch, offset = divmod(order.start, order.samples)
    step = epoch * order.steps_per_epoch + order.first_step(epoch)[0]
    described = manifest(source)
    staged = checkpoints / f"{STAGING_PREFIX}{name(step)}"
    staged.mkdir()
    for relative in described["files"]:
        if relative not in {"trainer_state.json", "scheduler.pt"}:
            _link(source / relative, staged / relative)
    state = json.loads((source / "trainer_state.json").read_text(encoding="utf-8"))
    state.update(global_step=step, epoch=epoch + offset / order.samples)
    rundir.write_json(staged / "trainer_state.json", state)
    schedule = torch.load(source / "scheduler.pt", weights_only=True)
    schedule.update(last_epoch=step, _step_count=step + 1)
    torch.save(schedule, staged / "scheduler.pt")
    facts = {key: value for key, value in described.items() if key not in {"files", "step"}}
    facts.update(effective_batch_size=order.effective_batch_size, rebased_from=str(source))
    return commit(staged, checkpoints, step, facts)


def _link(source: Path, target: Path) -> None:
    """Hard-link, or copy across disks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
