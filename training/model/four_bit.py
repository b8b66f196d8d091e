"""Replace linear layers by bitsandbytes' layers with 4-bit weights, in the same places as
transformers.

peft.prepare_model_for_kbit_training is left out: it makes embeddings, norms and the output layer
float32 (0.5 GiB of a 7B model), and through the embeddings all hidden states. Here they keep
model.dtype, which is float32 by default. Norms compute in float32, and the loss is of float32
logits, in any case.
"""

import copy
import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from accelerate import Accelerator
from torch.nn import functional
from transformers import BitsAndBytesConfig
from transformers.pytorch_utils import Conv1D

from launch.base.errors import ConfigError
from launch.schema.model_sections import QuantizationSection
from training.compat import bitsandbytes_private, levers_private, transformers_private
from training.compat.transformers_private import Network

_M_MMAP_THRESHOLD = -3  # malloc.h
MMAP_THRESHOLD_BYTES = 32 << 20  # the threshold of ranks on CPUs (launch/predict/memory/malloc.py)
_SCALES_BLOCK = 256  # number of scales with a common scale: bitsandbytes 0.50 quantize_4bit


def config(section: QuantizationSection) -> BitsAndBytesConfig:
    """The argument of from_pretrained(), from a section whose compute dtype is decided."""
    assert section.bnb_4bit_compute_dtype is not None
    return BitsAndBytesConfig(**section.model_dump())


def quantize(model: Network, section: QuantizationSection) -> None:
    """Replace the linear layers that from_pretrained() would replace, in place and one by one.

    On the meta device too: the same tensors, without values."""
    from bitsandbytes import functional as four_bit

    with torch.device("cpu"):  # bitsandbytes makes this table at its first use, and keeps it
        four_bit.name2qmap.setdefault("dynamic", four_bit.create_dynamic_map())
    modules = dict(model.named_modules())
    transformers_private.quantize_layers(model, config(section))
    for name, layer in layers(model):
        source = modules.pop(name)
        weight = source.weight.data.T if isinstance(source, Conv1D) else source.weight.data
        layer.weight = bitsandbytes_private.quantized(layer.weight, weight)
        if layer.bias is not None:
            layer.bias = torch.nn.Parameter(source.bias.data, requires_grad=False)
    model.is_loaded_in_4bit = True  # PEFT asks
    settle(model)


def settle(model: torch.nn.Module) -> None:
    """Do the changes that bitsandbytes would make to a layer at its first use, or prevent them."""
    for _, layer in layers(model):
        if layer.bias is not None:
            layer.bias.data = layer.bias.data.to(layer.compute_dtype)
        # On CPUs with AVX512-BF16 an evaluation would repack the weights until the end, rounding
        # their scales, into a layout without gradients.
        layer.support_avx512bf16_for_cpu = False


def keep_rows(weight: Any, rank: int, ranks: int) -> None:
    """Leave of a packed weight the bytes that FSDP2 gives to this rank. Its state stays whole.

    Raises ConfigError."""
    if weight.quant_state.shape.numel() % 4:
        raise ConfigError(
            f"launch.mode: fsdp2 shares out weights of 4 bits in numbers of 16, and a weight of"
            f" {'x'.join(map(str, weight.quant_state.shape))} does not fill them; expected a number"
            " of elements that 4 divides; use single_gpu or dual_gpu_nccl"
        )
    rows = weight.data.view(torch.uint8).view(-1, 2)  # FSDP2 divides numbers of 16 bits
    length = -(-len(rows) // ranks)
    weight.data = rows[rank * length : (rank + 1) * length].clone()


def divide(accelerator: Accelerator) -> None:
    """Let FSDP2 share out a model with weights of 4 bits, of which this rank has its own rows
    already. Before Trainer.train()."""
    # gathering casts numbers of other types to this one
    dtype = torch.float16 if accelerator.mixed_precision == "fp16" else torch.bfloat16

    def divided(library: Callable[[Network], Network], network: Network) -> Network:
        rows = _take_rows(network, dtype, accelerator.process_index, accelerator.num_processes)
        network = library(network)
        _place_rows(rows, accelerator.device)
        return network

    levers_private.around_division(accelerator, divided)


_Rows = dict[tuple[torch.nn.Module, str], torch.Tensor]  # (module, its parameter) -> rows


@torch.no_grad()
def _take_rows(model: Network, dtype: torch.dtype, rank: int, ranks: int) -> _Rows:
    """Put parameters without values in the place of frozen ones, for fully_shard(). This rank's
    rows of them: those of 4 bits as numbers of `dtype`, the others on the host.

    Accelerate holds what it is given until all is divided: no card has to hold it so long."""
    rows: _Rows = {}
    for _, layer in layers(model):
        rows[layer, "weight"] = layer.weight.data.view(dtype)
        layer.quant_state = layer.weight.quant_state
        size = layer.quant_state.shape.numel() // 4, 1
        layer.weight = _empty_parameter(torch.empty(size, dtype=dtype, device="meta"))
    empty: dict[int, torch.nn.Parameter] = {}  # id of a parameter, which may have several names
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.requires_grad:
                parameter.data = parameter.data.cpu()
            elif (module, name) not in rows:
                length = -(-len(parameter) // ranks)
                rows[module, name] = parameter[rank * length : (rank + 1) * length].cpu()
                empty.setdefault(id(parameter), _empty_parameter(parameter))
                setattr(module, name, empty[id(parameter)])
    return rows


def _empty_parameter(like: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty_like(like, device="meta"), requires_grad=False)


def _place_rows(rows: _Rows, device: torch.device) -> None:
    """Put this rank's rows into the parameters that fully_shard() has divided."""
    from torch.distributed.tensor import DTensor

    placed: dict[int, torch.nn.Parameter] = {}  # id of a parameter, which may have several names
    for module, name in [*rows]:
        like, local = getattr(module, name), rows.pop((module, name))
        if id(like) not in placed:
            divided = DTensor.from_local(
                *(local.to(device), like.device_mesh, like.placements),
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
            module.load_state_dict({name: divided}, strict=False, assign=True)
            placed[id(like)] = getattr(module, name)
        setattr(module, name, placed[id(like)])
        state, weight = getattr(module, "quant_state", None), cast(Any, placed[id(like)])
        if state is not None and name == "weight":
            state.to(device)
            weight.state_of_layer = state  # scales() finds it


@torch.no_grad()
def gather_trained(model: torch.nn.Module, keeps: bool) -> None:
    """Put the whole of each divided parameter that is trained on the host of the rank that `keeps`
    them. In the place of all others stand parameters without values. Collective."""
    numbers = {id(parameter) for _, parameter in named_numbers(model)}
    gathered: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            part: Any = parameter
            if id(part) not in gathered:
                values = torch.empty(part.shape, dtype=part.dtype, device="meta")
                if id(part) not in numbers:
                    values = torch.empty(2 * part.numel(), dtype=torch.uint8, device="meta")
                elif part.requires_grad:
                    # the last groups of a forward pass may still be gathered
                    full = part.full_tensor() if hasattr(part, "full_tensor") else part
                    values = full.detach().cpu() if keeps else values
                gathered[id(part)] = torch.nn.Parameter(values, requires_grad=part.requires_grad)
            setattr(module, name, gathered[id(part)])


def named_numbers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """named_parameters() without the weights of 4 bits, whose bytes are no numbers of their type
    where FSDP2 has divided them."""
    packed = {
        id(module.weight)
        for module in model.modules()
        if getattr(module, "quant_state", None) is not None
    }
    return (pair for pair in model.named_parameters() if id(pair[1]) not in packed)


def convert(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Give a model whose 4-bit weights were packed before the type that those packed here have:
    from_pretrained() leaves its other weights in the type in which they are stored."""
    for parameter in model.parameters():
        if (state := getattr(parameter, "quant_state", None)) is not None:
            state.dtype = dtype
        elif parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)


@contextmanager
def giving_blocks_back() -> Iterator[None]:
    """Have glibc map each block of 1 MiB or more, so that it goes back when it is freed.

    Packed weights keep apart the holes that their larger copies leave: 1.4 GiB of a 7B's load."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
    mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, bitsandbytes.nn.Linear4bit) of each quantised layer."""
    from bitsandbytes.nn import Linear4bit  # pyright: ignore[reportPrivateImportUsage]

    for name, module in list(model.named_modules()):
        if isinstance(module, Linear4bit):
            yield name, module


def scales(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors of a 4-bit weight beside its own bytes: scales, their scales, tables of values.
    Another weight has none."""
    state = getattr(parameter, "quant_state", None) or getattr(parameter, "state_of_layer", None)
    if state is None:
        return []
    nested = [state.offset, state.state2.absmax, state.state2.code] if state.nested else []
    return [state.absmax, state.code, *nested]


def dequantized(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """The values of a layer's weight, of 4 bits or not, in this type."""
    weight = layer.weight
    # a weight that FSDP2 has gathered has left its state with the layer
    state = getattr(weight, "quant_state", None) or getattr(layer, "quant_state", None)
    if state is None:
        return weight.to(dtype)
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(weight.data, state).to(dtype)


def copy_state(weight: Any, empty: Any) -> None:
    """Give a 4-bit weight's quantisation state, with empty tensors, to the parameter that replaces
    it."""
    if getattr(weight, "quant_state", None) is not None:
        empty.quant_state = _without_values(weight.quant_state)


def _without_values(state: Any) -> Any:
    empty = copy.copy(state)
    for name in ("absmax", "code", "offset"):
        tensor = getattr(state, name)
        if tensor is not None:
            setattr(empty, name, torch.empty(tensor.shape, dtype=tensor.dtype))
    if state.nested:
        empty.state2 = _without_values(state.state2)
    return empty


def merged(model: Network, dtype: torch.dtype) -> torch.nn.Module:
    """The trained model with ordinary layers on the CPU: the sums of dequantised weights and LoRA's
    weights, rounded once.

    PEFT's own merging would quantise the sum again."""
    from bitsandbytes.nn import Linear4bit  # pyright: ignore[reportPrivateImportUsage]

    weights: dict[str, torch.Tensor] = {}
    for name, layer in list(model.get_base_model().named_modules()):
        has_adapter = hasattr(layer, "get_base_layer")
        base = layer.get_base_layer() if has_adapter else layer
        if isinstance(base, Linear4bit) and not name.endswith(".base_layer"):
            weight = dequantized(base, torch.float32)
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
    """An ordinary layer with this weight (out, in), in place of a quantised layer."""
    out_features, in_features = weight.shape
    with torch.device("meta"):
        if layer.source_cls is Conv1D:
            plain, weight = Conv1D(out_features, in_features), weight.T.contiguous()
        else:
            plain = torch.nn.Linear(in_features, out_features, bias=layer.bias is not None)
    plain.weight = torch.nn.Parameter(weight)
    if layer.bias is not None:
        plain.bias = torch.nn.Parameter(layer.bias.data.to("cpu", weight.dtype))
    return plain


# ---- on fake tensors


def decompositions(on_cuda: bool) -> dict[Any, Callable[..., torch.Tensor]]:
    """Kernels by operator: the product with a 4-bit weight, made of operators that a dispatch mode
    sees."""
    kernel = _gemm_on_cuda if on_cuda else bitsandbytes_private.gemm_4bit()
    return {torch.ops.bitsandbytes.gemm_4bit.default: kernel}


def _gemm_on_cuda(
    inputs: torch.Tensor,
    packed: torch.Tensor,
    weight_shape: list[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """_dequant_linear_fallback in backends/cuda/ops.py: dequantise the full weight, then F.linear.

    Up to 1,536 tokens (256 on ROCm) a fused kernel may run instead, which needs less: for these the
    kernel is an upper bound."""
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        wide = operators.dequantize_blockwise.default(
            absmax_8bit, absmax, absmax_code, _SCALES_BLOCK, torch.float32
        )
        absmax = wide + absmax_offset
    weight = operators.dequantize_4bit.default(
        packed, absmax, blocksize, quant_type, weight_shape, inputs.dtype
    )
    return functional.linear(inputs, weight, bias)
