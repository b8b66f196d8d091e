"""A checkpoint has the weights of a model under the model's own names, or it is refused."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from launch.base.errors import CheckpointError
from training.checkpoints import names


def network() -> torch.nn.Module:
    """An embedding whose weight is the head's too, and a layer."""
    model = torch.nn.Module()
    model.embedding, model.layer = torch.nn.Embedding(4, 3), torch.nn.Linear(3, 3, bias=False)
    model.head = torch.nn.Linear(3, 4, bias=False)
    model.head.weight = model.embedding.weight
    return model


def write(folder, *files: tuple[str, ...]) -> None:
    for number, stored in enumerate(files):
        weights = {name: torch.zeros(2) for name in stored}
        save_file(weights, folder / f"model-{number}.safetensors")


@pytest.mark.parametrize(
    "files",
    [
        (("layer.weight", "head.weight"),),  # a tied weight has one of its names
        (("embedding.weight",), ("layer.weight",)),
        (),  # an engine's own files hold the weights
    ],
)
def test_weights_under_the_names_of_the_model_are_enough(tmp_path, files):
    write(tmp_path, *files)
    names.check(network(), tmp_path)


def test_a_weight_that_is_stored_under_another_name_is_named(tmp_path):
    write(tmp_path, ("model.layers.0.weight", "head.weight"))
    with pytest.raises(CheckpointError, match=r"no weights for layer\.weight \(1 missing\)"):
        names.check(network(), tmp_path)
    adapted = network()
    adapted.peft_config = {}  # its checkpoints hold the adapter's weights alone
    names.check(adapted, tmp_path)
