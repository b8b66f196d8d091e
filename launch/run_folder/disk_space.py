"""Disk space for the checkpoints of a run and for its model, checked before anything is started."""

from pathlib import Path

from launch.base import files
from launch.base.errors import ResourceError
from launch.base.text import size
from launch.run_folder import manifest
from launch.run_folder.layout import RunDir
from launch.schema.model_sections import DTYPE_BYTES
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe

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
