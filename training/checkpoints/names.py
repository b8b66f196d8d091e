"""The names of weights in checkpoints: those of the model itself.

transformers writes a folder under the names of its family's published files, which for some types
are others (GPT-NeoX's head, the experts of mixtures). Only from_pretrained() takes those: Trainer
reads a checkpoint by the model's names, and would go on without the weights that it does not find.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import safe_open

from launch.base.errors import CheckpointError
from training.compat.transformers_private import Network


@contextmanager
def of_model(network: Network) -> Iterator[None]:
    """Inside, save_pretrained() writes weights under the model's names. Adapters have no others."""
    if hasattr(network, "peft_config"):
        yield
        return
    network.save_pretrained = partial(network.save_pretrained, save_original_format=False)
    try:
        yield
    finally:
        del network.save_pretrained


def check(network: Network, folder: Path) -> None:
    """Raise CheckpointError if a whole model's checkpoint lacks a weight by each of its names."""
    files = sorted(folder.glob("model*.safetensors"))
    if hasattr(network, "peft_config") or not files:
        return
    stored: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as weights:
            stored.update(weights.keys())
    names = defaultdict(list)  # a tied weight has several
    for name, parameter in network.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    missing = [each[0] for each in names.values() if not stored.intersection(each)]
    if missing:
        raise CheckpointError(
            f"{folder}: found no weights for {missing[0]} ({len(missing)} missing), expected a"
            " checkpoint with the names of the model's weights; it was written under the names of"
            " published files by an earlier version: start anew with --resume never"
        )
