"""The run that a start uses: a new run, the unfinished one, or none because it is complete. It
never starts from zero silently."""

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
from launch.run_folder.layout import RunDir, holds_model, run_at
from launch.schema.levers import Levers
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
    "training.early_stopping_patience": "schedule",
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
    word: Allowed | None  # value of resume.allow that allows it; None: no value does
    undo: str = ""  # the flags that undo it


@dataclass(frozen=True)
class ResumeChoice:
    """The run folder to use and the line that says why."""

    run: RunDir
    line: str
    complete: bool = False


_NewRun = Callable[[], RunDir]


def decide(
    runs: Path, recipe: Recipe, plan: Plan, tokens: TokenCache, resume: str, new_run: _NewRun
) -> ResumeChoice:
    """`resume`: auto, never, or a path to a run or one of its checkpoints. `new_run` makes the
    folder of a new run.

    Raises CheckpointError if a run could be continued but its model, data or settings have changed.
    """
    # a key that cannot be had is said before hours of training, not at the first save
    manifest.key()
    if resume == "never":
        return ResumeChoice(new_run(), "starting a new run (--resume never)")
    if resume != "auto":
        return _from_path(resume, recipe, plan, tokens, new_run)
    begun, elsewhere = _of_this_output(runs, recipe)
    if not begun:
        return ResumeChoice(new_run(), "\n".join(["starting a new run", *_unfinished(elsewhere)]))
    newest, changes = begun[0], _changes(begun[0], recipe, plan, tokens)
    if changes and (same := _unchanged(begun[1:], recipe, plan, tokens)):
        return _continued(same, None, (), recipe, new_run)
    if (finished := newest.outcome()) and changes:
        kinds = {change.word for change in changes}
        is_longer = "schedule" in kinds and finished.step < (plan.total_steps(recipe) or math.inf)
        if not (is_longer and kinds <= set(recipe.resume.allow)):
            parts = [change.text for change in changes]
            if is_longer and kinds == {"schedule"}:
                parts.append(
                    f"add --resume.allow=[schedule] to go on from its step {finished.step:,}"
                    " instead"
                )
            line = f"starting a new run: changed since {newest.run_id}: {'; '.join(parts)}"
            return ResumeChoice(
                new_run(), "\n".join([line, *_unfinished([*begun[1:], *elsewhere])])
            )
    return _continued(newest, None, changes, recipe, new_run)


def begun_levers(runs: Path, recipe: Recipe, resume: str) -> Levers | None:
    """The levers of the run that a start may go on with; None where it begins a new one."""
    if resume == "never":
        return None
    with suppress(CheckpointError):  # decide() says what is damaged
        begun = _of_this_output(runs, recipe)[0] if resume == "auto" else [run_at(resume)]
        for run in begun:
            if run.last_step() and (run.outcome() is None or "schedule" in recipe.resume.allow):
                return run.read_plan().strategy.levers
    return None


def _of_this_output(runs: Path, recipe: Recipe) -> tuple[list[RunDir], list[RunDir]]:
    """(runs of the recipe's name that write to its output_dir, those that write elsewhere), the
    newest first.

    Only runs that can be continued or are complete. Raises CheckpointError if the newest is
    damaged; older damaged runs are left out."""
    of_output: list[RunDir] = []
    elsewhere: list[RunDir] = []
    for run in RunDir.all(runs, recipe.name):
        try:
            if run.has_trained() or run.continues_file.exists():
                (of_output if run.writes_to(recipe.output_dir) else elsewhere).append(run)
        except CheckpointError:
            if not of_output and not elsewhere:
                raise
    # a dry run, or a start that ended before its first checkpoint, takes no run over
    return ([run for run in of_output if run.has_trained()] or of_output), elsewhere


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
    resume: str, recipe: Recipe, plan: Plan, tokens: TokenCache, new_run: _NewRun
) -> ResumeChoice:
    path, run = base_files.expanded(resume), run_at(resume)
    is_checkpoint = path != run.root
    if (
        run.is_dry_run
        or not run.plan_file.exists()
        or (is_checkpoint and not (path / manifest.FILE).exists())
    ):
        content = f"{path.name} without {manifest.FILE}" if is_checkpoint else "no run of ours"
        raise CheckpointError(
            f"--resume {path}: found {content} there; give a folder runs/<recipe>/<time>, or one of"
            " its checkpoints/checkpoint-<step>, or auto, or never"
        )
    return _continued(
        run, path if is_checkpoint else None, _changes(run, recipe, plan, tokens), recipe, new_run
    )


def _continued(
    earlier: RunDir,
    checkpoint: Path | None,
    changes: Sequence[Change],
    recipe: Recipe,
    new_run: _NewRun,
) -> ResumeChoice:
    """The run itself if nothing has changed, else a new run that takes over the given checkpoint,
    or the newest.

    A complete run writes its model again, from its last checkpoint, into an output_dir that does
    not hold it."""
    allow = recipe.resume.allow
    is_same_run = checkpoint is None and not changes
    finished = is_same_run and earlier.outcome() is not None
    if finished and holds_model(Path(recipe.output_dir), earlier.run_id):
        return ResumeChoice(
            earlier, f"{earlier.run_id} is complete; to start over: --resume never", complete=True
        )
    if refused := [change for change in changes if change.word not in allow]:
        raise CheckpointError(_refusal(earlier, refused))
    source, lines = _source(earlier, checkpoint, allow, hashed=not is_same_run)
    lines += _versions(source, recipe)
    if is_same_run:
        line = (
            f"{earlier.run_id} is complete, but {recipe.output_dir} does not hold its model:"
            f" writing it again from {source.name}"
            if finished
            else f"continuing {earlier.run_id}"
        )
        return ResumeChoice(earlier, "\n".join([line, *lines]))
    reason = "; ".join(change.text for change in changes) or "--resume"
    start = _take_over(source, new_run, reason)
    if any(change.word in ("data", "seed") for change in changes):
        lines.append(
            "the order of samples has changed: in this epoch some may come twice and others not at"
            " all"
        )
    return ResumeChoice(start.run, "\n".join([start.line, *lines]))


def _refusal(run: RunDir, refused: Sequence[Change]) -> str:
    texts = "; ".join(change.text for change in refused)
    undo = "".join(change.undo for change in refused)
    allowed = ",".join(sorted({change.word or "" for change in refused}))
    override = (
        f" continue all the same with --resume.allow=[{allowed}],"
        if all(change.word for change in refused)
        else ""
    )
    return (
        f"{run.root}: this {'finished' if run.outcome() else 'unfinished'} run cannot be continued:"
        f" its model, data or settings have changed ({texts}). Undo the change to continue it"
        f"{undo},{override} start over with --resume never, or if it is another job give it a name"
        " and a folder of its own: --name=NAME --output_dir=DIR"
    )


def _source(
    run: RunDir, checkpoint: Path | None, allow: Sequence[Allowed], hashed: bool
) -> tuple[Path, list[str]]:
    """The checkpoint to go on from, and a line for each newer one that cannot be used. Raises
    CheckpointError.

    Not `hashed`: its content is verified when it is loaded, and an older one taken then."""
    if checkpoint is not None:
        if problem := manifest.fault(checkpoint, hashed, allow):
            raise CheckpointError(
                f"--resume {checkpoint}: {problem}; give another one, or --resume never starts over"
            )
        return checkpoint, []
    newest, faults = manifest.newest_valid(run.checkpoints, allow, hashed)
    continues = run.read_continues()
    if newest is None and not faults and continues:  # nothing of its own yet
        newest = continues.checkpoint
        if problem := manifest.fault(newest, hashed, allow):
            raise CheckpointError(f"{newest}: {problem}; --resume never starts over")
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
    changed = list(manifest.version_changes(manifest.written_with(source)))
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


def _take_over(source: Path, new_run: _NewRun, reason: str) -> ResumeChoice:
    """A new run that goes on from another run's checkpoint, at the same sample."""
    facts = manifest.read(source)
    samples_seen = facts.get("samples_seen")
    if samples_seen is None:
        raise CheckpointError(f"{source}: its manifest does not say how many samples it has seen")
    run = new_run()
    base_files.write_json(
        run.continues_file, Continues(source.resolve(), samples_seen, facts.get("group_size"))
    )
    return ResumeChoice(
        run,
        f"continuing {source.parent.parent.name}/{source.name} in a new run ({reason}):"
        f" {samples_seen:,} samples are done, the step counter and the learning-rate schedule are"
        " those of the new batch at that sample",
    )


def _changes(earlier: RunDir, recipe: Recipe, plan: Plan, tokens: TokenCache) -> list[Change]:
    changes = list(_differences(earlier, recipe, tokens))
    planned, had_adapter = earlier.read_plan(), earlier.read_recipe().lora is not None
    before, after = planned.strategy.effective_batch_size, plan.strategy.effective_batch_size
    if before != after:
        count = after // recipe.training.samples_per_process
        flags = recipe.keeping(before, count, count)
        changes.append(
            Change(f"effective batch {before} -> {after}", "effective_batch_size", flags)
        )
    has_base = had_adapter and recipe.lora and recipe.model.path
    if has_base and planned.base_fingerprint != plan.base_fingerprint:
        changes.append(
            Change(
                "model.path: the weights that the adapter is trained for are not the same", "model"
            )
        )
    return changes


def _differences(earlier: RunDir, recipe: Recipe, tokens: TokenCache) -> Iterator[Change]:
    before_recipe = earlier.read_recipe()
    old, new = leaves(before_recipe.model_dump()), leaves(recipe.model_dump())
    explains_rows = False  # a changed key says already why the rows differ
    for section in ("lora", "quantization"):
        is_set = getattr(recipe, section) is not None
        if is_set != (getattr(before_recipe, section) is not None):
            yield Change(f"{section} {'added' if is_set else 'removed'}", WORDS[section])
            old = {key: old.get(key) for key in old if not key.startswith(section)}
            new = {key: new.get(key) for key in new if not key.startswith(section)}
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
        yield Change(
            _rows_differ(used.made_of or {}, before_recipe, tokens.identity, recipe), "data"
        )


def _rows_differ(
    before: Mapping[str, Any], before_recipe: Recipe, current: Mapping[str, Any], recipe: Recipe
) -> str:
    """The files whose content or place differs between two token caches, by their identities."""
    old_files, files = _row_files(before_recipe), _row_files(recipe)
    changed = [
        part
        for part in files
        if before
        and before.get(part) != current.get(part)
        # held-out rows of the training file change with it
        and (part != "validation" or recipe.data.validation_size is None)
    ]
    if not changed and before and before.get("version") != current["version"]:
        return (
            "the rows were tokenised by another version of this program, which may do it otherwise"
        )
    if not changed and before and recipe.data.is_mixed:
        return "the sources of data.train_file, their weights or columns are not the same"
    in_place = [files[part] for part in changed if old_files[part] == files[part]]
    texts = [
        f"data.{part}_file {old_files[part]} -> {files[part]}"
        for part in changed
        if old_files[part] != files[part]
    ]
    if in_place or not texts:
        texts.append(f"the content of {', '.join(in_place) or 'a file'} has changed")
    return f"the rows or the tokenizer are not the same: {'; '.join(texts)}"


def _row_files(recipe: Recipe) -> dict[str, str]:
    """The files that decide the tokenised rows, by their parts of a token cache's identity."""
    data = recipe.data
    return {
        "train": data.train_file if isinstance(data.train_file, str) else data.train_names,
        "validation": data.validation_file or "none",
        "tokenizer": "the tokenizer",
        "chat_template": "tokenizer.chat_template",
    }


def may_change(key: str) -> bool:
    """True if a run and its continuation may differ in a key: neither the weights nor the rows
    depend on it. Of a file the content is compared, of a batch its effective size."""
    return not affected_by(key) & {"weights", "rows"}


def _shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_shown, value))}]"
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value)
