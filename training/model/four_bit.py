"""Linear layers whose weights have 4 bits: bitsandbytes' own, in the places where transformers puts
them.

peft.prepare_model_for_kbit_training is left out: it makes embeddings, norms and the output layer
float32 (0.5 GiB of a 7B model), and with the embeddings every hidden state that a layer hands on.
Here they keep model.dtype: who wants them in float32 leaves that at its default. Norms compute in
float32 and the loss is of float32 logits either way.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from launch.schema.recipe import QuantizationSection
from training.compat import bitsandbytes_private, transformers_private
from training.compat.transformers_private import Network

SCALES_BLOCK = 256  # scales that share a scale: bitsandbytes 0.50 functional.quantize_4bit


def config(section: QuantizationSection) -> BitsAndBytesConfig:
    """What from_pretrained() wants to know; of a section whose compute dtype is decided."""
    assert section.bnb_4bit_compute_dtype is not None
    return BitsAndBytesConfig(**section.model_dump())


def quantize(model: Network, section: QuantizationSection) -> None:
    """Replace the linear layers that from_pretrained() would replace, one after the other, where
    they are.

    On the meta device too: the same tensors, without values."""
    from bitsandbytes import functional as four_bit

    with torch.device("cpu"):  # bitsandbytes makes this table at its first use, and keeps it
        four_bit.name2qmap.setdefault("dynamic", four_bit.create_dynamic_map())
    whole = dict(model.named_modules())
    transformers_private.quantize_layers(model, config(section))
    for name, layer in layers(model):
        source = whole.pop(name)
        weight = source.weight.data.T if isinstance(source, Conv1D) else source.weight.data
        layer.weight = bitsandbytes_private.quantized(layer.weight, weight)
        if layer.bias is not None:
            layer.bias = torch.nn.Parameter(source.bias.data, requires_grad=False)
    model.is_loaded_in_4bit = True  # PEFT asks
    settle(model)


def settle(model: torch.nn.Module) -> None:
    """Do now, or never, what bitsandbytes does to a layer at its first use."""
    for _, layer in layers(model):
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)
        # On CPUs with AVX512-BF16 an evaluation would repack the weights for good, rounding their
        # scales, into a layout through which no gradient goes.
        layer.support_avx512bf16_for_cpu = False


def layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, bitsandbytes.nn.Linear4bit) of each quantised layer."""
    from bitsandbytes.nn import Linear4bit  # pyright: ignore[reportPrivateImportUsage]

    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            yield name, module


def scales(parameter: torch.Tensor) -> list[torch.Tensor]:
    """What a 4-bit weight needs beside its own bytes: scales, their scales, tables of values. Of
    another weight: []."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return []
    return [
        state.absmax,
        state.code,
        *([state.offset, state.state2.absmax, state.state2.code] if state.nested else []),
    ]


def copy_state(weight: Any, empty: Any) -> None:
    """Give a 4-bit weight's quantisation state, without values, to the parameter in its place."""
    if getattr(weight, "quant_state", None) is not None:
        empty.quant_state = without_values(weight.quant_state)


def without_values(state: Any) -> Any:
    """A weight's quantisation state with empty tensors, made where a tensor is made now."""
    made = copy.copy(state)
    for name in ("absmax", "code", "offset"):
        tensor = getattr(state, name)
        setattr(
            made, name, None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype)
        )
    if state.nested:
        made.state2 = without_values(state.state2)
    return made


def merged(model: Network, dtype: torch.dtype) -> torch.nn.Module:
    """The model as it was trained, of ordinary layers on the CPU: dequantised weights plus LoRA's,
    rounded once.

    PEFT's own merging would quantise the sum again."""
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit  # pyright: ignore[reportPrivateImportUsage]

    weights: dict[str, torch.Tensor] = {}
    for name, layer in list(model.get_base_model().named_modules()):
        has_adapter = hasattr(layer, "get_base_layer")
        base = layer.get_base_layer() if has_adapter else layer
        if isinstance(base, Linear4bit) and not name.endswith(".base_layer"):
            packed: Any = base.weight
            weight = dequantize_4bit(packed.data, packed.quant_state).float()
            if has_adapter:
                weight += layer.get_delta_weight("default")
            weights[name] = weight.to("cpu", dtype)
        elif has_adapter and base is not layer:
            layer.merge()
    plain = model.unload()
    for name, weight in weights.items():
        plain.set_submodule(name, _ordinary(plain.get_submodule(name), weight))
    return plain.to("cpu")


def _ordinary(layer: Any, weight: torch.Tensor) -> torch.nn.Module:
    """The layer that a quantised one stands for, with this weight (out, in)."""
    out_features, in_features = weight.shape
    with torch.device("meta"):
        if layer.source_cls is Conv1D:
            made: torch.nn.Module = Conv1D(out_features, in_features)
        else:
            made = torch.nn.Linear(in_features, out_features, bias=layer.bias is not None)
    made.weight = torch.nn.Parameter(
        weight.T.contiguous() if layer.source_cls is Conv1D else weight
    )
    if layer.bias is not None:
        made.bias = torch.nn.Parameter(layer.bias.data.to("cpu", weight.dtype))
    return made


# ---- on fake tensors


def decompositions(on_cuda: bool) -> dict[Any, Callable[..., torch.Tensor]]:
    """What the product with a 4-bit weight does inside, for a dispatch mode to see: operator -> its
    kernel."""
    kernel = _gemm_on_cuda if on_cuda else bitsandbytes_private.gemm_4bit()
    return {torch.ops.bitsandbytes.gemm_4bit.default: kernel}


def _gemm_on_cuda(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    shape: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """_dequant_linear_fallback in backends/cuda/ops.py: the whole weight is dequantised, then
    F.linear.

    Up to 1,536 tokens (256 on ROCm) a fused kernel may run instead, which needs less: this is an
    upper bound there."""
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        wide = operators.dequantize_blockwise.default(
            absmax_8bit, absmax, absmax_code, SCALES_BLOCK, torch.float32
        )
        absmax = wide + absmax_offset
    weight = operators.dequantize_4bit.default(
        packed, absmax, blocksize, quant_type, shape, inputs.dtype
    )
    return functional.linear(inputs, weight, bias)
