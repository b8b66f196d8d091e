"""Export of a run that is complete: the model is collected from all ranks; then rank 0 writes its
folder and checks it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import torch

from launch.base.errors import ExportError
from launch.data.conversation import Conversation
from launch.run_folder import layout
from training.compat import deepspeed_private
from training.compat.transformers_private import Network
from training.engines import setup
from training.log import logger
from training.loop import export, export_check
from training.loop.callbacks import HostMemory
from training.loop.trainer import LowMemTrainer
from training.model import build, four_bit


@dataclass(frozen=True)
class _Collected:
    """The model that rank 0 exports, and what its folder must compute."""

    network: Network  # with all its weights: the trainer's own, or a copy on the host
    expected: export_check.Trained


def collect(
    start: layout.RankStart, trainer: LowMemTrainer, tokens: Path, questions: Sequence[Conversation]
) -> _Collected | None:
    """Collect what rank 0 exports; None on another rank. Collective."""
    expected = export_check.trained(start, trainer, tokens, questions)
    network: Network = trainer.accelerator.unwrap_model(trainer.model)
    if start.plan.strategy.launch_mode.shards_parameters:
        network = _gathered(start, trainer, network)
    return _Collected(network, expected) if trainer.args.process_index == 0 else None


def _gathered(start: layout.RankStart, trainer: LowMemTrainer, trained: Network) -> Network | None:
    """The model on rank 0's host, with the weights of all ranks, gathered one at a time. Another
    rank's has no values. Collective."""
    recipe, plan, is_first = start.recipe, start.plan, trainer.args.process_index == 0
    quantization = recipe.quantized(plan.strategy.mixed_precision)
    if quantization and recipe.model.path is not None:  # the folder has the weights of 4 bits
        four_bit.gather_trained(trained, is_first)
        return trained
    network, copies = None, {}
    if is_first:
        with setup.whole_weights(plan.strategy):
            network = build.build(
                *(recipe.model, plan.shape, recipe.lora, plan.lora_targets),
                *(trainer.processing_class, recipe.training.seed, quantization),
                keeps_ids=recipe.keeps_ids,
            )
        copies = dict(four_bit.named_numbers(network))
    # weights of 4 bits are those of the same seed
    for name, parameter in four_bit.named_numbers(trained):
        with deepspeed_private.gathered([parameter]), torch.no_grad():
            full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            if is_first:
                copies.pop(name).copy_(full)
    assert not copies, f"not gathered: {sorted(copies)}"
    return network


def write(
    start: layout.RankStart,
    run_id: str,
    trainer: LowMemTrainer,
    collected: _Collected,
    host: HostMemory,
    uninterrupted: Callable[[], AbstractContextManager[None]],
) -> str:
    """Write the model's folder on rank 0 and check it; a sentence on what was compared. The folder
    takes its name `uninterrupted`. Raises ExportError."""
    recipe, strategy, network = start.recipe, start.plan.strategy, collected.network
    folder = Path(recipe.output_dir)
    if trainer.streaming is not None and recipe.model.path is None:
        trainer.streaming.give_back()  # the adapter is merged
        network.to("cpu")
    content = export.write(network, trainer, recipe, start.plan, run_id, uninterrupted)
    logger.info("model: %s (%s)", folder, content)
    free_bytes = export_check.close_engine(trainer, start.plan.estimate.host_bytes, host.read())
    try:
        with setup.whole_weights(strategy):
            checked = export_check.check(
                *(folder, recipe, trainer.accelerator, network, collected.expected, free_bytes)
            )
    except ExportError as error:
        export.write_check(folder, f"{layout.NOT_CHECKED}: {error}")
        error.fix = (
            "do not use this folder; the same line again exports the last step, and checks it again"
        )
        raise
    export.write_check(folder, checked)
    logger.info("checked: %s", checked)
    return checked
