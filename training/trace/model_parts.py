"""The parts of the model that transformers builds from a config, on the meta device."""

import importlib.util
from collections import defaultdict
from contextlib import suppress
from itertools import product
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from launch.base.errors import ConfigError
from launch.schema.model_sections import ModelSection, QuantizationSection
from launch.schema.plan import ModelFamily, ModelSize
from launch.schema.result import ModelParts
from training.compat import transformers_private
from training.model import build, four_bit
from training.trace import forward_facts, layer_stacks

# names that most configs have, tried first
_DEPTH_NAMES = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"),
    *("num_decoder_layers", "decoder_layers"),
)


def model_parts(config: dict[str, Any]) -> ModelParts:
    """The parts of the model that transformers builds from a config. Raises ConfigError."""
    try:
        model = _built(config)
    # a config is read by each model type in its own way: what it raises is shown
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(
            f"transformers cannot build a {config['model_type']} from this config: {cause}"
        ) from error
    if model.config.is_encoder_decoder:
        build.decoder_start(model.config, pad_token_id=0)
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    tied = {
        name: names[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in parameters
    }
    has_conv1d = any(isinstance(module, Conv1D) for module in model.modules())
    depth_keys, period = _of_depth(model, config)
    forward = forward_facts.read(model)
    linear, quantizable = _linear_layers(model)
    return ModelParts(
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        ModelFamily(
            config["model_type"],
            linear,
            quantizable,
            tied,
            bool(model.config.is_encoder_decoder),
            has_conv1d,
            depth_keys,
            period,
            forward,
        ),
    )


def _built(config: dict[str, Any]) -> PreTrainedModel:
    with torch.device("meta"):
        # the parameters of each attention are the same; not each type has sdpa
        return build.from_shape(
            ModelSection(shape="meta"), ModelSize("meta", config, 0, 0), attention="eager"
        )


def _of_depth(model: PreTrainedModel, config: dict[str, Any]) -> tuple[tuple[str, ...], int]:
    """(ModelFamily.depth_keys, layer_period): the keys of the config with which a model of few
    layers has the layers of this model. Of a model with few layers itself no keys are sought."""
    counts = [len(stack) for stack in layer_stacks.stacks(model)]
    period = layer_stacks.layer_period(model)
    if not counts or layer_stacks.is_nested(model) or not period:
        return (), 0
    values = model.config.to_dict()
    layer_keys = (name for name in values if "layer" in name and name not in _DEPTH_NAMES)
    names = [*(name for name in _DEPTH_NAMES if name in values), *layer_keys]
    choices = product(
        *([name for name in names if values[name] == num_layers] for num_layers in counts)
    )
    for names_of_depth in sorted(choices, key=lambda names: len(counts) - len(set(names))):
        few = layer_stacks.shallow(config, names_of_depth, period)
        if few is None:
            return (), period
        with suppress(ValueError, TypeError, IndexError, KeyError, RuntimeError):
            if layer_stacks.stands_for(_built(few.config), model, period):
                return names_of_depth, period
    return (), 0


def _linear_layers(model: PreTrainedModel) -> tuple[tuple[str, ...], tuple[str, ...] | None]:
    """Last names of the linear layers without the output head, and of those that transformers would
    quantise, which are replaced here; None if it would quantise some layers of a name and not
    others. A name that other modules with a matrix share is none of a linear layer: peft could not
    train all of them."""
    head = model.get_output_embeddings()
    is_linear: dict[str, dict[str, bool]] = defaultdict(dict)
    for full_name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if weight is not None and weight.dim() == 2 and module is not head:
            name = full_name.rpartition(".")[2]
            is_linear[name][full_name] = isinstance(module, torch.nn.Linear | Conv1D)
    linear = tuple(name for name, layers in is_linear.items() if all(layers.values()))
    if importlib.util.find_spec("bitsandbytes") is None:
        return linear, ()
    section = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16")
    transformers_private.quantize_layers(model, four_bit.config(section))
    quantized = {name for name, _ in four_bit.layers(model)}
    shares = {name: quantized & layers.keys() for name, layers in is_linear.items()}
    if any(share and share != is_linear[name].keys() for name, share in shares.items()):
        return linear, None
    return linear, tuple(name for name, share in shares.items() if share)
