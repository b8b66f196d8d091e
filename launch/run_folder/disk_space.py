"""Room on the disk for the checkpoints of a run, asked for before anything is started."""

from __future__ import annotations

from launch.base import files
from launch.base.errors import ResourceError
from launch.base.text import size
from launch.run_folder import manifest
from launch.run_folder.layout import RunDir
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe

# whatever the limit says: one checkpoint alone can be damaged, and there would be none
MIN_KEPT = 2


def check(run: RunDir, recipe: Recipe, plan: Plan) -> list[str]:
    """A line where more are kept than the limit says. Raises ResourceError where they will not fit.

    While one is written, those to be kept are all there; those of an earlier attempt have their
    room already.
    """
    limit, checkpoint_bytes = recipe.training.save_total_limit, plan.checkpoint_bytes
    kept = max(limit, MIN_KEPT) + recipe.training.load_best_model_at_end
    free = files.free_bytes(run.checkpoints)
    there = min(len(manifest.ours(run.checkpoints)), kept)
    need = (kept + 1 - there) * checkpoint_bytes
    if need > free:
        fits = free // checkpoint_bytes - 1 + there if checkpoint_bytes else 0
        helps = f"--training.save_total_limit={fits}, or " if MIN_KEPT <= fits < kept else ""
        raise ResourceError(
            f"{run.checkpoints}: {kept} checkpoints of about {size(checkpoint_bytes)} are kept"
            f" (training.save_total_limit {limit}) while the next is written, which takes"
            f" {size(need)} more; {size(free)} are free. Try {helps}LOWMEM_ROOT on a larger disk,"
            " or make room"
        )
    if limit < MIN_KEPT:
        return [
            f"training.save_total_limit {limit}: the {MIN_KEPT} newest checkpoints that verify are"
            " kept all the same, about "
            + size(MIN_KEPT * checkpoint_bytes)
            + "; one alone could be damaged, and the run lost"
        ]
    return []
