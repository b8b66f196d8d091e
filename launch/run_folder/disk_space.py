"""Disk space of runs: for the checkpoints and the model of a start, checked before anything is
started; and that which finished runs still take, and its removal by rules.

1. Folders of dry runs, and of starts that ended before they had a plan.
2. Checkpoints of complete runs, but of the newest runs of each recipe.
3. Only if asked: checkpoints of unfinished runs, and of complete runs whose model is no longer in
   output_dir, but of the newest runs of each recipe.

Logs, figures and reports of runs stay. A run that is in use is left alone, and so is a checkpoint
from which another, unfinished run continues. Nothing goes that no plan marks as ours, under a name
that a run does not write, or behind a link."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launch.base import files, locks
from launch.base.errors import CheckpointError, LockHeld, ResourceError
from launch.base.text import size
from launch.queue import leases
from launch.run_folder import layout, manifest
from launch.run_folder.layout import DRY_RUN, RunDir, holds_model
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import Outcome

# whatever the limit says: one checkpoint alone can be damaged, and there would be none
_MIN_KEPT = 2


def num_kept(recipe: Recipe) -> int:
    """Checkpoints that a run keeps. While another is written, all of them are there."""
    return max(recipe.training.save_total_limit, _MIN_KEPT) + recipe.training.load_best_model_at_end


def stored_bytes(run: RunDir, recipe: Recipe, plan: Plan) -> int:
    """Bytes of the checkpoints that are there already, of those that are kept."""
    return min(len(manifest.ours(run.checkpoints)), num_kept(recipe)) * plan.checkpoint_bytes


def exported_bytes(recipe: Recipe, plan: Plan) -> int:
    """Bytes of the weights in output_dir."""
    model = plan.shape
    adapter_bytes = model.lora_bytes + model.tied_copy_bytes
    if recipe.lora is not None and recipe.model.path is not None:
        return adapter_bytes
    return model.parameters * DTYPE_BYTES[recipe.output_dtype(model.config)] + adapter_bytes


def check(run: RunDir, recipe: Recipe, plan: Plan, leased_bytes: int = 0) -> list[str]:
    """A line if more checkpoints are kept than the limit says. Raises ResourceError if they, or the
    model, will not fit, beside what other runs have leased there.

    Those of an earlier attempt have their space already.
    """
    limit, checkpoint_bytes = recipe.training.save_total_limit, plan.checkpoint_bytes
    num_there = num_kept(recipe)
    free = max(files.free_bytes(run.checkpoints) - leased_bytes, 0)
    there = min(len(manifest.ours(run.checkpoints)), num_there)
    need = (num_there + 1 - there) * checkpoint_bytes
    if need > free:
        fits = free // checkpoint_bytes - 1 + there if checkpoint_bytes else 0
        helps = f"--training.save_total_limit={fits}, or " if _MIN_KEPT <= fits < num_there else ""
        raise ResourceError(
            f"{run.checkpoints}: {num_there} checkpoints of about {size(checkpoint_bytes)} are kept"
            f" (training.save_total_limit {limit}) while the next is written, which takes"
            f" {size(need)} more; {size(free)} are free{_less(leased_bytes)}. Try {helps}"
            "LOWMEM_ROOT on a larger disk, or free some space there"
        )
    output = Path(recipe.output_dir)
    model_bytes, free_there = exported_bytes(recipe, plan), files.free_bytes(output)
    beside = ""
    if files.disk(output) == files.disk(run.checkpoints):
        of_checkpoints = max(need - checkpoint_bytes, 0)
        free_there = max(free - of_checkpoints, 0)
        beside = f" beside {size(of_checkpoints)} for checkpoints{_less(leased_bytes)}"
    if model_bytes > free_there:
        raise ResourceError(
            f"output_dir {output}: the model takes about {size(model_bytes)}, and"
            f" {size(free_there)} are free there{beside}; choose an output_dir on a larger disk, or"
            " free some space there"
        )
    if limit < _MIN_KEPT:
        return [
            f"training.save_total_limit {limit}: the {_MIN_KEPT} newest checkpoints that verify are"
            f" kept all the same, about {size(_MIN_KEPT * checkpoint_bytes)}; a single checkpoint"
            " could be damaged, and the run would be lost"
        ]
    return []


def _less(leased_bytes: int) -> str:
    return f" beside {size(leased_bytes)} of other runs' leases" if leased_bytes else ""


# ---- removal
# ---------------------------------------------------------------------------

_ONLY_WEIGHTS = "its model is not in its output_dir any more, these are its only weights here"
UNTOUCHED_S = 60.0  # a start makes its folder some seconds before its plan


@dataclass(frozen=True)
class Removal:
    """A folder whose content can go: all of it, or the checkpoints of a run."""

    rule: Literal["dry run", "start without a plan", "complete", "unfinished"]
    run: RunDir
    bytes: int
    note: str = ""

    @property
    def paths(self) -> list[Path]:
        """Paths to remove. The folder of checkpoints stays."""
        if self.rule in ("complete", "unfinished"):
            return manifest.written(self.run.checkpoints)
        return [self.run.root]


def survey(runs: Path, keep: int, unfinished: bool) -> tuple[list[Removal], list[str]]:
    """(removals in the order of the rules, lines on runs that stay although they are old).

    Nothing is changed. `keep`: so many of the newest runs of each recipe keep their checkpoints;
    `unfinished`: those of unfinished runs can go too."""
    removals, stays = list(_leftovers(runs)), []
    planned = RunDir.all(runs)
    continued = set(_continued(planned))
    for name in sorted({run.root.parent.name for run in planned}):
        trained = [run for run in RunDir.all(runs, name) if has_checkpoints(run) or _outcome(run)]
        for run in filter(has_checkpoints, trained[keep:]):
            checkpoints_bytes = sum(map(size_bytes, manifest.written(run.checkpoints)))
            outcome = _outcome(run)
            are_last = outcome and not holds_model(Path(outcome.model_dir), run.run_id)
            links = (run.root.parent, run.root, run.checkpoints)
            if link := next((path for path in links if path.is_symlink()), None):
                stays.append(f"{run.run_id}: its checkpoints lie behind the link {link}")
            elif _is_in_use(run):
                stays.append(f"{run.run_id}: in use")
            elif run.root.resolve() in continued:
                stays.append(f"{run.run_id}: an unfinished run continues from its checkpoint")
            elif outcome and not are_last:
                removals.append(Removal("complete", run, checkpoints_bytes))
            elif unfinished:
                note = _ONLY_WEIGHTS if are_last else "it could still be continued"
                removals.append(Removal("unfinished", run, checkpoints_bytes, note))
            else:
                why = _ONLY_WEIGHTS if are_last else "not complete"
                stays.append(f"{run.run_id}: {why}; --unfinished removes its checkpoints")
    order = {"dry run": 0, "start without a plan": 1, "complete": 2, "unfinished": 3}
    return sorted(removals, key=lambda removal: order[removal.rule]), stays


def _leftovers(runs: Path) -> Iterator[Removal]:
    for root in sorted(runs.glob("*/*")):
        run = RunDir(root)
        if (
            not run.is_removable()
            or _is_in_use(run)
            or time.time() - root.stat().st_mtime < UNTOUCHED_S
        ):
            continue
        if root.name == DRY_RUN:
            yield Removal("dry run", run, size_bytes(root))
        elif layout.STAMP.fullmatch(root.name) and not run.plan_file.exists():
            yield Removal("start without a plan", run, size_bytes(root))


def remove(removal: Removal) -> bool:
    """Remove it; False if a start has taken the run in the meantime."""
    is_run = removal.rule in ("complete", "unfinished")
    try:
        with layout.run_lock(removal.run) if is_run else nullcontext():
            for path in removal.paths:
                files.remove(path)
    except LockHeld:
        return False
    return True


def has_checkpoints(run: RunDir) -> bool:
    return run.checkpoints.is_dir() and any(run.checkpoints.glob("checkpoint-*"))


def _is_in_use(run: RunDir) -> bool:
    """True if a start trains the run, or waits for its memory."""
    own = (lease for lease in leases.of_this_machine() if lease.is_own)
    leased = {Path(lease.record.run).resolve() for lease in own}
    return run.root.resolve() in leased or locks.holder_pid(run.lock_file) is not None


def _outcome(run: RunDir) -> Outcome | None:
    """The outcome of a complete run; one whose outcome is damaged is not known to be complete."""
    with suppress(CheckpointError):
        return run.outcome()
    return None


def _continued(runs: Sequence[RunDir]) -> Iterator[Path]:
    """Folders of the runs from whose checkpoints unfinished runs continue."""
    for run in runs:
        with suppress(CheckpointError):  # a damaged one cannot continue either
            continues = run.read_continues()
            if continues and not _outcome(run):
                yield continues.checkpoint.parent.parent.resolve()


def size_bytes(folder: Path) -> int:
    """Bytes of a file, or of all files in a folder; one with several names counts once, links do
    not."""
    if folder.is_file():
        return folder.stat().st_size
    sizes: dict[tuple[int, int], int] = {}
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # a running run removes files
                status = Path(place, name).lstat()
                sizes[status.st_dev, status.st_ino] = status.st_size
    return sum(sizes.values())
