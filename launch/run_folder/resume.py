"""The run that a start uses: a new run, the unfinished one, or none because it is complete. It
never starts from zero silently."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.base import files as base_files
from launch.base.errors import CheckpointError
from launch.data.token_cache import TokenCache
from launch.run_folder import manifest
from launch.run_folder.layout import RunDir
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import affected_by, leaves
from launch.schema.result import Continues
from launch.schema.run_sections import Allowed

# The word of resume.allow that lets a changed key, or a key of a changed section, pass; others are
# never let pass.
WORDS: Mapping[str, Allowed] = {
    "training.seed": "seed",
    "training.num_train_epochs": "schedule",
    "training.max_steps": "schedule",
    "data": "data",
    "tokenizer": "data",
    "model": "model",
    "lora": "model",
    "quantization": "model",
}


@dataclass(frozen=True)
class Change:
    """A difference between a run and its continuation."""

    text: str
    word: Allowed | None  # of resume.allow; None: never


@dataclass(frozen=True)
class Start:
    """The run folder to use and the line that says why."""

    run: RunDir
    line: str
    complete: bool = False


NewRun = Callable[[], RunDir]


def decide(
    runs: Path, recipe: Recipe, plan: Plan, tokens: TokenCache, resume: str, new_run: NewRun
) -> Start:
    """`resume`: auto, never, or a path to a run or one of its checkpoints. `new_run` makes the
    folder of a new run.

    Raises CheckpointError if a run could be continued but its model, data or settings have changed.
    """
    # a key that cannot be had is said before hours of training, not at the first save
    manifest.key()
    if resume == "never":
        return Start(new_run(), "starting a new run (--resume never)")
    if resume != "auto":
        return _from_path(Path(resume).expanduser(), recipe, plan, tokens, new_run)
    begun, others = _of_this_output(runs, recipe)
    if not begun:
        return Start(new_run(), "\n".join(["starting a new run", *_unfinished(others)]))
    newest, changes = begun[0], _changes(begun[0], recipe, plan, tokens)
    if changes and (same := _unchanged(begun[1:], recipe, plan, tokens)):
        return _continued(same, None, (), recipe, new_run)
    if (finished := newest.outcome()) and changes:
        kinds = {change.word for change in changes}
        is_longer = "schedule" in kinds and finished.step < (plan.total_steps(recipe) or math.inf)
        if not (is_longer and kinds <= set(recipe.resume.allow)):
            differences = "; ".join(change.text for change in changes)
            line = f"starting a new run: {newest.run_id} had {differences}"
            if is_longer and kinds == {"schedule"}:
                line += (
                    f"; add --resume.allow=[schedule] to go on from its step {finished.step:,}"
                    " instead"
                )
            return Start(new_run(), "\n".join([line, *_unfinished([*begun[1:], *others])]))
    return _continued(newest, None, changes, recipe, new_run)


def _of_this_output(runs: Path, recipe: Recipe) -> tuple[list[RunDir], list[RunDir]]:
    """(runs of the recipe's name that write to its output_dir, those that write elsewhere), the
    newest first.

    Only runs that can be continued or are complete. Raises CheckpointError if the newest is
    damaged; older damaged runs are left out."""
    own: list[RunDir] = []
    others: list[RunDir] = []
    for run in RunDir.all(runs, recipe.name):
        try:
            if run.has_trained() or run.continues_file.exists():
                (own if run.writes_to(recipe.output_dir) else others).append(run)
        except CheckpointError:
            if not own and not others:
                raise
    # a dry run, or a start that ended before its first checkpoint, takes no run over
    return ([run for run in own if run.has_trained()] or own), others


def _unchanged(
    earlier: Sequence[RunDir], recipe: Recipe, plan: Plan, tokens: TokenCache
) -> RunDir | None:
    """The first of these runs that is unfinished and trains the same; damaged runs are passed
    over."""
    for run in earlier:
        with suppress(CheckpointError):
            if not run.outcome() and not _changes(run, recipe, plan, tokens):
                return run
    return None


def _unfinished(earlier: Sequence[RunDir]) -> list[str]:
    """A line for the newest of these runs that has not finished, with the flag that continues
    it."""
    for run in earlier:
        with suppress(CheckpointError):
            if not run.outcome():
                folder = run.read_recipe().output_dir
                return [
                    f"{run.run_id} has not finished (step {run.last_step():,}, output_dir"
                    f" {folder}); --resume {shlex.quote(str(run.root))} continues it"
                ]
    return []


def _from_path(
    path: Path, recipe: Recipe, plan: Plan, tokens: TokenCache, new_run: NewRun
) -> Start:
    is_checkpoint = path.name.startswith("checkpoint-")
    run = RunDir(path.parent.parent if is_checkpoint else path)
    if (
        run.is_dry_run
        or not run.plan_file.exists()
        or (is_checkpoint and not (path / manifest.FILE).exists())
    ):
        raise CheckpointError(
            f"--resume {path}: found no run of ours there; give a folder runs/<recipe>/<time>, or"
            " one of its checkpoints/checkpoint-<step>, or auto, or never"
        )
    return _continued(
        run, path if is_checkpoint else None, _changes(run, recipe, plan, tokens), recipe, new_run
    )


def _continued(
    earlier: RunDir,
    checkpoint: Path | None,
    changes: Sequence[Change],
    recipe: Recipe,
    new_run: NewRun,
) -> Start:
    """The run itself if nothing has changed, else a new run that takes over the given checkpoint,
    or the newest."""
    allow = recipe.resume.allow
    if checkpoint is None and not changes and earlier.outcome():
        return Start(
            earlier, f"{earlier.run_id} is complete; --resume never starts over", complete=True
        )
    if refused := [change for change in changes if change.word not in allow]:
        raise CheckpointError(_refusal(earlier, refused))
    is_same_run = checkpoint is None and not changes
    source, lines = _source(earlier, checkpoint, allow, hashed=not is_same_run)
    lines += _versions(source, recipe)
    if is_same_run:
        return Start(earlier, "\n".join([f"continuing {earlier.run_id}", *lines]))
    reason = "; ".join(change.text for change in changes) or "--resume"
    start = _take_over(source, new_run, reason)
    if any(change.word in ("data", "seed") for change in changes):
        lines.append(
            "the order of samples has changed: in this epoch some may come twice and others not at"
            " all"
        )
    return Start(start.run, "\n".join([start.line, *lines]))


def _refusal(run: RunDir, refused: Sequence[Change]) -> str:
    texts = "; ".join(change.text for change in refused)
    allowed = ",".join(sorted({change.word or "" for change in refused}))
    can_be_allowed = all(change.word for change in refused)
    override = f" continue all the same with --resume.allow=[{allowed}]," if can_be_allowed else ""
    return (
        f"{run.root}: this unfinished run cannot be continued: its model, data or settings have"
        f" changed ({texts}). Undo the change to continue it,{override} start over with --resume"
        " never, or if it is another job give it a name and a folder of its own: --name=NAME"
        " --output_dir=DIR"
    )


def _source(
    run: RunDir, checkpoint: Path | None, allow: Sequence[Allowed], hashed: bool
) -> tuple[Path, list[str]]:
    """The checkpoint to go on from, and a line for each newer one that cannot be used. Raises
    CheckpointError.

    Not `hashed`: its content is verified when it is loaded, and an older one taken then."""
    if checkpoint is not None:
        if problem := manifest.fault(checkpoint, hashed, allow):
            raise CheckpointError(f"--resume {checkpoint}: {problem}")
        return checkpoint, []
    newest, faults = manifest.newest_valid(run.checkpoints, allow, hashed)
    continues = run.read_continues()
    if newest is None and not faults and continues:  # nothing of its own yet
        newest = continues.checkpoint
        if problem := manifest.fault(newest, hashed, allow):
            raise CheckpointError(f"{newest}: {problem}")
    if newest is None:
        reason = "; ".join(faults) or "there is none"
        raise CheckpointError(
            f"{run.checkpoints}: no checkpoint can be used ({reason}); --resume never starts over"
        )
    return newest, [f"not resuming from it: {fault}" for fault in faults]


def _versions(source: Path, recipe: Recipe) -> list[str]:
    """A line for the libraries that are not those that wrote the checkpoint.

    Raises CheckpointError where one that reads its files is of another major.minor, unless that is
    allowed."""
    changed = list(manifest.version_changes(manifest.read(source).get("versions", {})))
    if not changed:
        return []
    libraries = "; ".join(text for text, _ in changed)
    if any(is_deep for _, is_deep in changed) and "versions" not in recipe.resume.allow:
        raise CheckpointError(
            f"{source}: written with other libraries ({libraries}), which may read its files or"
            " train otherwise; install those, or continue all the same with"
            " --resume.allow=versions"
        )
    return [f"{source.name} was written with other libraries: {libraries}"]


def _take_over(source: Path, new_run: NewRun, reason: str) -> Start:
    """A new run that goes on from another run's checkpoint, at the same sample."""
    facts = manifest.read(source)
    samples_seen = facts.get("samples_seen")
    if samples_seen is None:
        raise CheckpointError(f"{source}: its manifest does not say how many samples it has seen")
    run = new_run()
    continues = Continues(source.resolve(), samples_seen, facts.get("group_size"))
    base_files.write_json(run.continues_file, continues)
    return Start(
        run,
        f"continuing {source.parent.parent.name}/{source.name} in a new run ({reason}):"
        f" {samples_seen:,} samples are done, the step counter and the learning-rate schedule are"
        " those of the new batch at that sample",
    )


def _changes(earlier: RunDir, recipe: Recipe, plan: Plan, tokens: TokenCache) -> list[Change]:
    changes = list(_differences(earlier, recipe, tokens))
    planned = earlier.read_plan()
    before, now = planned.strategy.effective_batch_size, plan.strategy.effective_batch_size
    if before != now:
        changes.append(Change(f"effective batch {before} -> {now}", "effective_batch_size"))
    if planned.base_fingerprint != plan.base_fingerprint and recipe.lora and recipe.model.path:
        changes.append(
            Change(
                "model.path: the weights that the adapter is trained for are not the same", "model"
            )
        )
    return changes


def _differences(earlier: RunDir, recipe: Recipe, tokens: TokenCache) -> Iterator[Change]:
    old, new = leaves(earlier.read_recipe().model_dump()), leaves(recipe.model_dump())
    explains_rows = False  # a changed key says already why the rows differ
    for key in sorted(old.keys() | new.keys()):
        section = key.split(".")[0]
        if not may_change(key) and old.get(key) != new.get(key):
            yield Change(
                f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}",
                WORDS.get(key) or WORDS.get(section),
            )
            explains_rows |= section in ("data", "tokenizer")
    used = earlier.read_tokens()
    if used and used.folder.name != tokens.folder.name and not explains_rows:
        now, before = tokens.identity, used.made_of or {}
        files = {
            "train": recipe.data.train_names if recipe.data.is_mixed else recipe.data.train_file,
            "validation": recipe.data.validation_file,
            "tokenizer": "the tokenizer",
            "chat_template": "tokenizer.chat_template",
        }
        changed = [
            str(file or f"data.{part}_file")
            for part, file in files.items()
            if before
            and before.get(part) != now.get(part)
            # held-out rows of the training file change with it
            and (part != "validation" or recipe.data.validation_size is None)
        ]
        which = ", ".join(changed) or "a file"
        text = f"the rows or the tokenizer are not the same: the content of {which} has changed"
        if before and before.get("version") != now["version"] and not changed:
            text = (
                "the rows were tokenised by another version of this program, which may do it"
                " otherwise"
            )
        elif before and not changed and recipe.data.is_mixed:
            text = "the sources of data.train_file, their weights or columns are not the same"
        yield Change(text, "data")


def may_change(key: str) -> bool:
    """True if a run and its continuation may differ in a key: neither the weights nor the rows
    depend on it. Of a file the content is compared, of a batch its effective size."""
    return not affected_by(key) & {"weights", "rows"}


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
