"""Bytes of weights, gradients and optimizer states, by optimizer and quantisation."""

import math
from collections.abc import Callable, Sequence
from functools import partial

from launch.base.errors import ConfigError
from launch.base.text import nearest
from launch.predict.parameters import Shape, Shapes
from launch.predict.trained_parameters import COPY, trainable_shapes
from launch.schema.model_sections import DTYPE_BYTES, LoraSection, QuantizationSection
from launch.schema.plan import MemoryEstimate, ModelFamily

LORA_BYTES = (
    4  # adapters are float32 whatever the model's dtype, unless autocast_adapter_dtype is false
)

# elements; bitsandbytes 0.50 Optimizer2State: smaller tensors keep 32-bit states
_BNB_MIN_8BIT_SIZE = 4096

_BNB_BLOCK_SIZE = 256  # elements per absmax value (float32)

_BNB_MAP_BYTES = 256 * 4  # one quantization map per state, shared by all tensors

_BNB_4BIT_BLOCK_SIZE = 64  # weights per scale: Params4bit

_BNB_4BIT_CODE_BYTES = 16 * 4  # the values of nf4 or fp4, a table for every weight

# (name, shape, bytes of an element) -> bytes of its states
_OptimizerBytes = Callable[[str, Shape, int], int]


def _states(num_states: int, state_bytes: int | None = None) -> _OptimizerBytes:
    """States of `state_bytes` an element; None: zeros_like(parameter), as torch.optim makes them,
    so in its dtype. The scalar step counters are left out."""
    return lambda name, shape, element_bytes: (
        num_states * math.prod(shape) * (state_bytes or element_bytes)
    )


def _adafactor(name: str, shape: Shape, element_bytes: int) -> int:
    """transformers.Adafactor, beta1 None: a row and a column of float32 per matrix, float32 for
    each other element."""
    if len(shape) < 2:
        return 4 * math.prod(shape)
    return 4 * (math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1])


def _bnb_8bit(num_states: int, name: str, shape: Shape, element_bytes: int) -> int:
    size = math.prod(shape)
    if size < _BNB_MIN_8BIT_SIZE or _is_embedding(name):
        return num_states * size * 4
    return num_states * (size + 4 * math.ceil(size / _BNB_BLOCK_SIZE))


def _is_embedding(name: str) -> bool:
    """True if the Trainer gives this parameter 32-bit states, as it does to every nn.Embedding."""
    module = name.replace(COPY, ".").removesuffix(".weight").rpartition(".")[2]
    return module in ("shared", "wte", "wpe", "relative_attention_bias") or "embed" in module


_8BIT = {
    "adamw_bnb_8bit": 2,
    "adamw_8bit": 2,
    "paged_adamw_8bit": 2,
    "lion_8bit": 1,
    "paged_lion_8bit": 1,
    "rmsprop_bnb_8bit": 1,
}

# TrainingArguments.optim -> its states; only what a test has measured
OPTIMIZERS: dict[str, _OptimizerBytes] = {
    "adamw_torch": _states(2),
    "adamw_torch_fused": _states(2),
    "adafactor": _adafactor,
    "sgd": _states(0),
    "adagrad": _states(1),
    "rmsprop": _states(1),
    **{name: partial(_bnb_8bit, num_states) for name, num_states in _8BIT.items()},
    "paged_adamw_32bit": _states(2, 4),
    "lion_32bit": _states(1, 4),
    "paged_lion_32bit": _states(1, 4),
    "rmsprop_bnb": _states(1, 4),
    "rmsprop_bnb_32bit": _states(1, 4),
}


def unquantizable(trainable: Shapes, family: ModelFamily) -> str | None:
    """The reason why linear layers cannot have 4 bits beside these trained parameters; None if they
    can."""
    if not family.quantizable:
        return f"transformers would give 4 bits to no layer of model_type {family.model_type!r}" + (
            ", or to some of the layers of a name" if family.quantizable is None else ""
        )
    for name in trainable:
        module, is_copy, _ = name.partition(COPY)
        if is_copy and has_4_bits(name.replace(COPY, "."), family):
            return (
                f"lora.modules_to_save would train a copy of {module}, but its linear weights have"
                " 4 bits, and no gradients; name norms, embeddings or the output head there, or"
                " leave quantization out"
            )
    return None


def has_4_bits(name: str, family: ModelFamily) -> bool:
    """True if this parameter is of a layer that transformers would quantise."""
    return name.rpartition(".")[0].rpartition(".")[2] in (family.quantizable or ())


def held_bytes(
    name: str,
    shape: Shape,
    section: QuantizationSection | None,
    family: ModelFamily,
    element_bytes: int,
) -> int:
    """Bytes of a parameter, of which the linear layers that transformers would quantise have 4
    bits, without scales. `section` is Recipe.quantized()."""
    if section is None or not has_4_bits(name, family):
        return math.prod(shape) * element_bytes
    if name.endswith(".weight"):
        return math.ceil(math.prod(shape) / 2)
    assert section.bnb_4bit_compute_dtype is not None
    # a bias has the type of what it is added to
    return math.prod(shape) * DTYPE_BYTES[section.bnb_4bit_compute_dtype]


def scales_bytes(
    tensor_shapes: Shapes, section: QuantizationSection | None, family: ModelFamily
) -> int:
    """Bytes beside weights of 4 bits: scales, their scales, tables of values."""
    if section is None:
        return 0
    sizes = (
        math.prod(shape)
        for name, shape in tensor_shapes.items()
        if name.endswith(".weight") and has_4_bits(name, family)
    )
    return sum(
        _four_bit_bytes(size, section.bnb_4bit_use_double_quant) - math.ceil(size / 2)
        for size in sizes
    )


def _four_bit_bytes(size: int, double: bool) -> int:
    """Two weights in a byte, a scale for each block; with double quantisation the scales have 8
    bits, and scales."""
    blocks = math.ceil(size / _BNB_4BIT_BLOCK_SIZE)
    # the last: their mean
    nested_bytes = blocks + 4 * math.ceil(blocks / _BNB_BLOCK_SIZE) + _BNB_MAP_BYTES + 4
    return math.ceil(size / 2) + _BNB_4BIT_CODE_BYTES + (nested_bytes if double else 4 * blocks)


def model_state(
    tensor_shapes: Shapes,
    freeze: Sequence[str],
    lora: LoraSection | None,
    family: ModelFamily,
    optim: str,
    dtype: str,
    quantization: QuantizationSection | None = None,
) -> MemoryEstimate:
    """Bytes of weights, gradients and optimizer states on each rank, where each rank holds a full
    copy.

    `dtype` is recipe.model.dtype: autocast (bf16, fp16) adds nothing here. `quantization` is
    Recipe.quantized(). States of a paged optimizer count in full.
    Not counted: momentum or centering asked for through optim_args.

    Raises ConfigError for an optimizer whose states are not known exactly, and for layers that
    cannot be quantised.
    """
    if optim not in OPTIMIZERS:
        raise ConfigError(
            f"training.optim: the memory of {optim!r} is not known; known: {', '.join(OPTIMIZERS)}"
            + "".join(f"; nearest: {near}" for near in nearest(optim, OPTIMIZERS))
        )
    trainable = trainable_shapes(tensor_shapes, freeze, lora, family)
    optimizer_bytes = sum(
        OPTIMIZERS[optim](name, shape, _element_bytes(name, lora, dtype, quantization, family))
        for name, shape in trainable.items()
    )
    if optim in _8BIT and any(
        math.prod(shape) >= _BNB_MIN_8BIT_SIZE and not _is_embedding(name)
        for name, shape in trainable.items()
    ):
        optimizer_bytes += _8BIT[optim] * _BNB_MAP_BYTES
    if quantization is not None and (reason := unquantizable(trainable, family)):
        raise ConfigError(f"quantization: {reason}")
    base_bytes = scales_bytes(tensor_shapes, quantization, family) + sum(
        held_bytes(name, shape, quantization, family, DTYPE_BYTES[dtype])
        for name, shape in tensor_shapes.items()
    )
    gradients_bytes = trained_bytes(trainable, lora, dtype, quantization, family)
    return MemoryEstimate(
        weights_bytes=base_bytes + (0 if lora is None else gradients_bytes),
        gradients_bytes=gradients_bytes,
        optimizer_bytes=optimizer_bytes,
    )


def trained_bytes(
    trainable: Shapes,
    lora: LoraSection | None,
    dtype: str,
    quantization: QuantizationSection | None,
    family: ModelFamily,
) -> int:
    """Bytes of the parameters that are trained, where each rank holds a full copy."""
    return sum(
        math.prod(shape) * _element_bytes(name, lora, dtype, quantization, family)
        for name, shape in trainable.items()
    )


def _element_bytes(
    name: str,
    lora: LoraSection | None,
    dtype: str,
    quantization: QuantizationSection | None,
    family: ModelFamily,
) -> int:
    """Bytes of an element of a trained parameter. Copies of modules stay in model.dtype."""
    if lora is None or COPY in name:
        return DTYPE_BYTES[dtype]
    if lora.autocast_adapter_dtype:
        return LORA_BYTES
    layer, is_adapter, _ = name.partition(".lora_")
    if quantization is None or not is_adapter or not has_4_bits(f"{layer}.weight", family):
        return DTYPE_BYTES[dtype]
    assert quantization.bnb_4bit_compute_dtype is not None
    return DTYPE_BYTES[quantization.bnb_4bit_compute_dtype]
