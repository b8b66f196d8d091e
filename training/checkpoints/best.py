"""Take the weights of the step with the lowest held-out loss, instead of the last step's
(training.load_best_model_at_end).

trainer_state.json of every checkpoint names that step, so that a continued run knows it."""

from pathlib import Path

from transformers import Trainer, TrainerState

from launch.run_folder import manifest
from training.compat import transformers_private
from training.log import logger


def checkpoint_name(state: TrainerState) -> str | None:
    """The name of the checkpoint with the lowest held-out loss."""
    return manifest.name(state.best_global_step) if state.best_global_step else None


def take(trainer: Trainer, checkpoints: Path) -> None:
    """Put the best weights in place of the last ones, on every rank."""
    state = trainer.state
    name = checkpoint_name(state)
    if name is None or state.best_global_step == state.global_step:
        return
    problem = manifest.fault(checkpoints / name)
    if problem:
        logger.warning(
            "the model is the last step's: %s had the lowest held-out loss, but %s", name, problem
        )
        state.best_global_step = state.best_metric = None
        return
    transformers_private.load_weights(trainer, str(checkpoints / name))
    logger.info(
        "the model is step %d's: lowest held-out loss %.4f",
        state.best_global_step,
        state.best_metric,
    )
