"""Where a start begins: a new run, the unfinished one, or nowhere because it is complete. Never silently from zero."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from launch import rundir
from launch.errors import CheckpointError
from launch.rundir import RunDir
from launch.schema import Plan, Recipe, Strategy

# What may differ between a run and its continuation: it cuts or reports the same training, or places it elsewhere.
FREE_KEYS = frozenset(
    {
        "output_dir",
        "launch",
        "evaluation",
        "training.per_device_train_batch_size",
        "training.per_device_eval_batch_size",
        "training.gradient_accumulation_steps",
        "training.gradient_checkpointing",
        "training.logging_steps",
        "training.save_steps",
        "training.save_total_limit",
        "training.eval_steps",
        "training.dataloader_num_workers",
        "data.train_file",  # the rows count, not their place: the token cache names their content
        "data.validation_file",
        "tokenizer.path",
    }
)


@dataclass(frozen=True)
class Start:
    """The run folder to use and the line that says why."""

    run: RunDir
    line: str
    complete: bool = False


def decide(runs: Path, recipe: Recipe, plan: Plan, tokens: Path, wish: str, now: datetime) -> Start:
    """wish: auto, never, or a path to a run or one of its checkpoints.

    Raises CheckpointError when a run could be continued but what trains has changed.
    """
    if wish == "never":
        return Start(RunDir.create(runs, recipe.name, now), "starting a new run (--resume never)")
    if wish != "auto":
        return _from_path(Path(wish).expanduser(), runs, recipe, plan, tokens, now)
    earlier = RunDir.newest(runs, recipe.name)
    if earlier is None:
        return Start(RunDir.create(runs, recipe.name, now), "starting a new run")
    differences = list(_differences(earlier, recipe, tokens))
    batches = earlier.read_plan().strategy.effective_batch_size, plan.strategy.effective_batch_size
    if earlier.outcome():
        if not differences and batches[0] == batches[1]:
            return Start(earlier, f"{earlier.run_id} is complete; --resume never starts over", complete=True)
        changed = differences or [f"effective batch {batches[0]} -> {batches[1]}"]
        return Start(
            RunDir.create(runs, recipe.name, now), f"starting a new run: {earlier.run_id} had {'; '.join(changed)}"
        )
    if differences:
        raise CheckpointError(
            f"{earlier.root}: this unfinished run cannot be continued, what trains has changed ("
            + "; ".join(differences)
            + "). Undo the change to continue it, or start over with --resume never"
        )
    _check_engine(_newest_checkpoint(earlier), plan.strategy)
    if batches[0] == batches[1]:
        return Start(earlier, f"continuing {earlier.run_id}")
    return _take_over(_newest_checkpoint(earlier), runs, recipe, now, f"effective batch {batches[0]} -> {batches[1]}")


def _from_path(path: Path, runs: Path, recipe: Recipe, plan: Plan, tokens: Path, now: datetime) -> Start:
    is_checkpoint = path.name.startswith("checkpoint-")
    run = RunDir(path.parent.parent if is_checkpoint else path)
    if not run.plan_file.exists() or (is_checkpoint and not (path / "manifest.json").exists()):
        raise CheckpointError(
            f"--resume {path}: found no run of ours there; give a folder runs/<recipe>/<time>, or one of its"
            " checkpoints/checkpoint-<step>, or auto, or never"
        )
    differences = list(_differences(run, recipe, tokens))
    if differences:
        raise CheckpointError(f"--resume {path}: what trains has changed ({'; '.join(differences)})")
    same_batch = run.read_plan().strategy.effective_batch_size == plan.strategy.effective_batch_size
    if not is_checkpoint and same_batch and run.outcome():
        return Start(run, f"{run.run_id} is complete; --resume never starts over", complete=True)
    source = path if is_checkpoint else _newest_checkpoint(run)
    _check_engine(source, plan.strategy)
    if is_checkpoint or not same_batch:
        return _take_over(source, runs, recipe, now, "--resume")
    return Start(run, f"continuing {run.run_id}")


def _check_engine(source: Path, strategy: Strategy) -> None:
    """Raises CheckpointError for a checkpoint that this plan's engine would misread: DDP reads ZeRO's and loses the
    optimizer's state without a word, other ranks or stages end in a traceback."""
    facts = rundir.read_json(source / "manifest.json") or {}
    mode, ranks = facts.get("mode", strategy.mode), facts.get("world_size", strategy.num_processes)
    then = replace(strategy, mode=mode, num_processes=ranks)
    if then.engine in ("plain", "ddp"):
        is_readable = strategy.engine in ("plain", "ddp")
    elif then.engine == "fsdp2":
        is_readable = strategy.engine == "fsdp2"
    else:  # stages 1 and 2 write the same slices
        is_readable = ranks == strategy.num_processes and (then.zero_stage == 3, then.engine) == (
            strategy.zero_stage == 3,
            strategy.engine,
        )
    if not is_readable:
        raise CheckpointError(
            f"{source}: written by {mode} with {ranks} rank(s), which {strategy.mode} with {strategy.num_processes}"
            f" cannot read; continue with --launch.mode={mode} --launch.num_processes={ranks}, or start over with"
            " --resume never"
        )


def _newest_checkpoint(run: RunDir) -> Path:
    found = sorted(run.checkpoints.glob("checkpoint-*/manifest.json"), key=lambda path: path.parent.name)
    if found:
        return found[-1].parent
    continues = rundir.read_json(run.continues_file)
    if continues:
        return Path(continues["checkpoint"])
    raise CheckpointError(f"{run.checkpoints}: no finished checkpoint; --resume never starts over")


def _take_over(source: Path, runs: Path, recipe: Recipe, now: datetime, reason: str) -> Start:
    """A new run that goes on from another run's checkpoint, at the same sample."""
    samples_seen = (rundir.read_json(source / "manifest.json") or {}).get("samples_seen")
    if samples_seen is None:
        raise CheckpointError(f"{source}: its manifest does not say how many samples it has seen")
    run = RunDir.create(runs, recipe.name, now)
    rundir.write_json(run.continues_file, {"checkpoint": str(source.resolve()), "samples_seen": samples_seen})
    return Start(
        run,
        f"continuing {source.parent.parent.name}/{source.name} in a new run ({reason}): {samples_seen:,} samples are"
        " done, the step counter and the learning-rate schedule are those of the new batch at that sample",
    )


def _differences(earlier: RunDir, recipe: Recipe, tokens: Path) -> Iterator[str]:
    old, new = _leaves(earlier.read_recipe().model_dump()), _leaves(recipe.model_dump())
    for key in sorted(old.keys() | new.keys()):
        free = key in FREE_KEYS or key.split(".")[0] in FREE_KEYS
        if not free and old.get(key) != new.get(key):
            yield f"{key} {_shown(old.get(key))} -> {_shown(new.get(key))}"
    used = rundir.read_json(earlier.tokens_file)
    if used and Path(used["folder"]).name != tokens.name:
        yield "the rows or the tokenizer are not the same"


def _leaves(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, item in value.items():
        found |= _leaves(item, f"{prefix}{key}.") if isinstance(item, Mapping) else {f"{prefix}{key}": item}
    return found


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
