"""torch.compile of the decoder's layers in training steps: they share their code, lengths are
dynamic, and what is around them (masks, logits, loss) runs as it is. Evaluations and generation run
eagerly: to compile for them too takes minutes, and would save seconds."""

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate.utils import DynamoBackend
from transformers import TrainerCallback, TrainingArguments

from launch.schema.levers import Levers
from training.compat import levers_private, transformers_private
from training.compat.transformers_private import Network

logger = logging.getLogger("lowmem")


def apply(trainer: Any, levers: Levers) -> None:
    """Compile each layer in place, so that no name of a weight changes, instead of the whole model
    by Accelerate."""
    if not levers.torch_compile:
        return
    args = trainer.args
    trainer.accelerator.state.dynamo_plugin.backend = DynamoBackend.NO
    compile_layers(trainer.model, args.torch_compile_backend, args.torch_compile_mode)
    trainer.add_callback(_Graphs())


def compile_layers(network: Network, backend: str, mode: str | None = None) -> None:
    """Compile the layers of a model, or a model of no layers as a whole."""
    for layer in undivided_layers(network) or [network]:
        layer.compile(dynamic=True, backend=backend, mode=mode)


def undivided_layers(network: Network) -> list[torch.nn.Module]:
    """The layers of a model: modules of the classes that are sharded as a unit."""
    classes = transformers_private.layer_classes(network)
    return [module for module in network.modules() if type(module).__name__ in classes]


def eagerly(args: TrainingArguments) -> AbstractContextManager[Any]:
    """No compiled code within."""
    return torch.compiler.set_stance("force_eager") if args.torch_compile else nullcontext()


class _Graphs(TrainerCallback):
    """Says what was compiled, and what was not."""

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        compiled = levers_private.compiled()
        logger.info("torch.compile: %d graphs, %d graph breaks", compiled.graphs, compiled.breaks)
        if compiled.eager:
            logger.warning(
                "torch.compile: %d piece(s) of code were not compiled and ran as they are;"
                " TORCH_LOGS=recompiles,graph_breaks says why",
                compiled.eager,
            )
