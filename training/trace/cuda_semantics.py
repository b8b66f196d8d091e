"""Make fake tensors on the CPU behave as on a CUDA card: attention kernel, dropout, autocast,
optimizer loops.

A tensor labelled cuda needs a card as soon as autograd meets it. So the label stays cpu, and the
behaviour of CUDA is put in place of the CPU's: kernels are registered in Python for the CPU's
dispatch keys, and a few names in torch, transformers and accelerate are replaced. All of it is
taken back on exit.

Sources, in aten/src/ATen of PyTorch 2.11 to 2.13: native/transformers/cuda/sdp_utils.cpp,
native/transformers/attention.cpp, native/Dropout.cpp, native/SoftMax.cpp, autocast_mode.h.
"""

import math
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, Literal

import torch

from launch.schema.machine import PREFER_CUDNN
from training.compat import (
    accelerate_private,
    levers_private,
    torch_private,
    transformers_private,
)
from training.compat.torch_private import FakeTensor, FakeTensorMode, op_implementations_dict

aten = torch.ops.aten
HALF = (torch.float16, torch.bfloat16)
CUDNN = 91900  # for a torch without cuDNN: the version in the CUDA 13 build of torch 2.11 (9.19.0)

Kernel = Literal["cudnn", "flash", "efficient", "math"]


@dataclass(frozen=True)
class Target:
    """The card that a trace stands for."""

    architecture: str  # compute capability, 8.6, or gfx name
    # AMD: PyTorch has fused kernels for it and may use them
    fused_attention: bool = True
    cudnn: int = CUDNN  # 0: its attention comes after PyTorch's own kernels
    documents: int = 0  # documents in a row, for flash_attn's kernel of unequal lengths

    @property
    def capability(self) -> tuple[int, int] | None:
        """None: an AMD card."""
        match = re.fullmatch(r"(\d+)\.(\d+)", self.architecture)
        return (int(match[1]), int(match[2])) if match else None


@contextmanager
def cuda_semantics(
    target: Target, fp16: bool = False, keeps_shapes: bool = False
) -> Iterator[None]:
    """Let CPU-labelled tensors take the target's code paths inside.

    keeps_shapes: torch's cache of shapes, which then has those of this target, is the caller's.

    fp16: mixed precision is requested as bf16, because accelerate refuses fp16 on a CPU, and
    becomes fp16 here, whose kernels differ. The gradient scaler is left out; on a card it holds
    three scalars."""
    with ExitStack() as stack:
        library = torch.library.Library("aten", "IMPL")
        stack.callback(torch_private.destroy, library)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "Overriding a previously registered kernel"
            library.impl("scaled_dot_product_attention", attention(target), "AutogradCPU")
            library.impl("dropout", _dropout, "AutogradCPU")
            library.impl("softmax.int", partial(_softmax, aten._softmax.default), "AutogradCPU")
            log_softmax = partial(_softmax, aten._log_softmax.default)
            library.impl("log_softmax.int", log_softmax, "AutogradCPU")
            library.impl("_fused_rms_norm", _no_kernel, "CPU")  # else it is made of other operators
            _autocast_as_cuda(library)
        types = [torch.Tensor, torch.nn.Parameter, FakeTensor]
        changes = [
            *torch_private.foreach_on_cpu(types),
            *transformers_private.fakes_as_real(_flash_attn_varlen),
            levers_private.grouped_heads(not target.capability or target.capability >= (8, 0)),
            *([accelerate_private.fp16_on_cpu()] if fp16 else []),
            (torch, "is_autocast_enabled", _is_autocast_enabled),
        ]
        stack.enter_context(levers_private.replaced(changes))
        norm = aten.native_layer_norm.default
        stack.callback(op_implementations_dict.update, {norm: op_implementations_dict[norm]})
        op_implementations_dict[norm] = _native_layer_norm
        if not keeps_shapes:
            FakeTensorMode.cache_clear()  # it holds results of the CPU's own kernels
            stack.callback(FakeTensorMode.cache_clear)
        yield


def _is_autocast_enabled(
    device_type: str = "cpu", library: Callable[[str], bool] = torch.is_autocast_enabled
) -> bool:
    """torch.is_autocast_enabled(), which without a device speaks of CUDA: peft asks so, for 4-bit
    layers."""
    return library(device_type)


# ---- attention


@dataclass(frozen=True)
class Call:
    """The arguments of scaled_dot_product_attention. query, key, value: (batch, heads, seq,
    width)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @property
    def requires_grad(self) -> bool:
        return torch.is_grad_enabled() and any(
            x.requires_grad for x in (self.query, self.key, self.value)
        )


def attention(target: Target) -> Callable[..., torch.Tensor]:
    """Make the scaled_dot_product_attention of attention.cpp, with the kernels of this card."""

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = Call(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        kernel = choose(target, call)
        mask = _additive(attn_mask, query.dtype, -65504.0 if kernel == "cudnn" else -math.inf)
        if kernel == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query,
                key,
                value,
                mask,
                call.requires_grad,
                dropout_p,
                is_causal,
                False,
                scale=scale,
            )[0]
        if kernel == "flash":
            width = query.shape[-1]
            scale = scale if scale is not None else 1 / math.sqrt(width)
            padded = [_multiple_of(8, tensor) for tensor in (query, key, value)]
            out = aten._scaled_dot_product_flash_attention(
                *padded, dropout_p, is_causal, False, scale=scale
            )[0]
            return out if out.shape[-1] == width else out[..., :width]
        if kernel == "efficient":
            if mask is not None:
                mask = _aligned(mask).expand(*query.shape[:3], key.shape[2])
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, mask, call.requires_grad, dropout_p, is_causal, scale=scale
            )[0]
        return _math(replace(call, mask=mask))

    return scaled_dot_product_attention


def _flash_attn_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    deterministic: bool = False,
) -> torch.Tensor:
    """Stand in for flash_attn.flash_attn_varlen_func, (tokens, heads, width), with rows of equal
    length. PyTorch's kernel has the same source and saves the same tensors for backward."""
    rows = [_multiple_of(8, x.unflatten(0, (-1, max_seqlen_q)).transpose(1, 2)) for x in (q, k, v)]
    scale = softmax_scale if softmax_scale is not None else 1 / math.sqrt(q.shape[-1])
    out = aten._scaled_dot_product_flash_attention(*rows, dropout_p, causal, False, scale=scale)[0]
    return out[..., : q.shape[-1]].transpose(1, 2).flatten(0, 1)


def choose(target: Target, call: Call) -> Kernel:
    """select_sdp_backend: the first kernel in the card's order that takes this call."""
    tensors = (call.query, call.key, call.value)
    operands = [*tensors, call.mask] if call.mask is not None else tensors
    if (
        len({tensor.dtype for tensor in tensors}) > 1
        or any(tensor.dim() != 4 for tensor in tensors)
        or any(tensor.stride(-1) != 1 for tensor in operands)
        or not all(tensor.shape[-2] for tensor in tensors)
        or not _heads_fit(call)
    ):
        return "math"
    if _takes_cudnn(target, call):
        return "cudnn"
    if _takes_flash(target, call):
        return "flash"
    return "efficient" if _takes_efficient(target, call) else "math"


def _heads_fit(call: Call) -> bool:
    """check_batch_size_and_num_heads_dense."""
    query, key, value = call.query, call.key, call.value
    if not query.shape[0] == key.shape[0] == value.shape[0] or key.shape[1] != value.shape[1]:
        return False
    return query.shape[1] % key.shape[1] == 0 if call.enable_gqa else query.shape[1] == key.shape[1]


def _takes_cudnn(target: Target, call: Call) -> bool:
    """check_prefer_cudnn_attention: cuDNN is tried first on Hopper and on Blackwell's data centre
    cards; can_use_cudnn_attention, for such a card."""
    query, mask = call.query, call.mask
    widest = 256 if target.capability == (9, 0) else 128
    widths = (query.shape[-1], call.value.shape[-1])
    return (
        target.cudnn > 91500
        and target.architecture in PREFER_CUDNN
        and query.dtype in HALF
        and all(width <= widest and width % 8 == 0 for width in widths)
        and (mask is None or (not mask.requires_grad and mask.dim() in (2, 4)))
        and call.key.shape[2] > 1
        and (call.dropout_p == 0 or query.shape[2] > 1)
        and (call.dropout_p * 16).is_integer()
    )


def _takes_flash(target: Target, call: Call) -> bool:
    """can_use_flash_attention."""
    query, key = call.query, call.key
    width = query.shape[-1]
    widest = (
        512 if target.capability is None and not target.architecture.startswith("gfx11") else 256
    )
    if (
        call.mask is not None
        or query.dtype not in HALF
        or width > widest
        or not width == key.shape[-1] == call.value.shape[-1]
        or (call.is_causal and query.shape[-2] != key.shape[-2])
    ):
        return False
    if target.capability is None:
        return target.fused_attention
    if not (8, 0) <= target.capability <= (12, 1):
        return False
    has_little_shared_memory = (8, 6) <= target.capability <= (8, 9) or target.capability >= (12, 0)
    if has_little_shared_memory and call.requires_grad:
        return width <= 192 or (call.dropout_p == 0 and width > 224)
    return True


def _takes_efficient(target: Target, call: Call) -> bool:
    """can_use_mem_efficient_attention. Up to 2.13 it has no grouped queries (pytorch/pytorch pull
    191085)."""
    query, mask = call.query, call.mask
    half = query.dtype in HALF
    widths = (query.shape[-1], call.value.shape[-1])
    if (
        query.dtype not in (*HALF, torch.float32)
        or widths[0] != call.key.shape[-1]
        or query.shape[1] != call.key.shape[1]
    ):
        return False
    if target.capability is None:  # AOTriton: a mask is boolean or of the query's type
        widest = 256 if target.architecture.startswith("gfx11") else 512
        fits = widths[0] == widths[1] <= widest and widths[0] % (8 if half else 4) == 0
        return (
            target.fused_attention
            and fits
            and (mask is None or mask.dtype in (torch.bool, query.dtype))
        )
    oldest = (8, 0) if query.dtype == torch.bfloat16 else (5, 0)
    if not oldest <= target.capability <= (12, 1):
        return False
    alignment = 4 if target.capability >= (8, 0) else 1  # minimum_gemm_alignment
    if target.capability >= (8, 0) or (target.capability >= (7, 0) and half):
        alignment = max(alignment, 8 if half else 4)
    return all(width % alignment == 0 for width in widths)


def _additive(mask: torch.Tensor | None, dtype: torch.dtype, masked: float) -> torch.Tensor | None:
    """convert_boolean_attn_mask: the value `masked` is added where a boolean mask is False."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.scalar_tensor(masked, dtype=dtype, device=mask.device))


def _multiple_of(width: int, tensor: torch.Tensor) -> torch.Tensor:
    missing = -tensor.shape[-1] % width
    return torch.nn.functional.pad(tensor, (0, missing)) if missing else tensor


def _aligned(mask: torch.Tensor) -> torch.Tensor:
    """preprocess_mask: let rows begin at multiples of 8 elements. Other rows are padded, and the
    result is a view without the padding."""
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    length = mask.shape[-1]
    return torch.nn.functional.pad(mask, (0, 8 - length % 8))[..., :length]


def _math(call: Call) -> torch.Tensor:
    """_scaled_dot_product_attention_math, mask additive. ATen's own kernel adds the mask in place
    to a real tensor, and out of place to a fake tensor."""
    query, key, value = map(_wide, (call.query, call.key, call.value))
    mask = call.mask
    root = math.sqrt(call.scale if call.scale is not None else 1 / math.sqrt(query.shape[-1]))
    query = query * root
    if call.is_causal:
        allowed = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
        mask = _additive(allowed, query.dtype, -math.inf)
    if call.enable_gqa and key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    scores = query @ (key.transpose(-2, -1) * root)
    if mask is not None:
        scores.add_(mask)
    scores = torch_private.safe_softmax(scores, -1)
    if call.dropout_p > 0:
        scores = torch.dropout(scores, call.dropout_p, True)
    return (scores @ value).to(call.query.dtype)


# ---- dropout, softmax, layer norm


def _dropout(tensor: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Use the fused kernel, as is_fused_kernel_acceptable is true on CUDA: the mask for backward
    has one byte per element."""
    if not train or p == 0 or not tensor.numel():
        return tensor
    return torch.native_dropout(tensor, p, True)[0] if p < 1 else tensor * 0


def _softmax(
    kernel: Any, tensor: torch.Tensor, dim: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """CUDA's softmax: in fp32 of fp16 scores it needs no fp32 copy of them; of bf16 scores it
    does."""
    if tensor.dtype == torch.float16 and dtype == torch.float32:
        return kernel(tensor, dim, True)
    return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)


def _no_kernel(*args: Any) -> Any:
    raise AssertionError("a fake tensor has no values")


def _native_layer_norm(
    fake_mode: FakeTensorMode,
    operator: Any,
    tensor: torch.Tensor,
    normalized_shape: list[int],
    *args: Any,
) -> tuple[torch.Tensor, ...]:
    """CUDA's layer norm: mean and deviation are fp32, not of the input's type as on the CPU."""
    axis = tensor.dim() - len(normalized_shape)
    reduced = (*tensor.shape[:axis], *[1] * len(normalized_shape))
    with fake_mode:
        return (
            torch.empty_like(tensor, memory_format=torch.contiguous_format),
            *(torch.empty(reduced, dtype=torch.float32, device=tensor.device) for _ in range(2)),
        )


# ---- autocast

# AT_FORALL_FP32: operators whose arguments are cast to fp32. Operators on images and on packed
# sequences, which no text model has, are left out.
FP32 = (
    *(
        "acos",
        "asin",
        "cosh",
        "erfinv",
        "exp",
        "expm1",
        "log",
        "log10",
        "log2",
        "log1p",
        "reciprocal",
        "rsqrt",
        "sinh",
    ),
    *(
        "tan",
        "pow.Tensor_Scalar",
        "pow.Tensor_Tensor",
        "pow.Scalar",
        "softplus",
        "layer_norm",
        "native_layer_norm",
    ),
    *(
        "rms_norm",
        "group_norm",
        "cosine_similarity",
        "poisson_nll_loss",
        "cosine_embedding_loss",
        "nll_loss",
    ),
    *(
        "nll_loss2d",
        "hinge_embedding_loss",
        "kl_div",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "mse_loss",
    ),
    *(
        "margin_ranking_loss",
        "multilabel_margin_loss",
        "soft_margin_loss",
        "triplet_margin_loss",
        "multi_margin_loss",
    ),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp"),
    *("frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
)
# AT_FORALL_FP32_SET_OPT_DTYPE: operators that compute in fp32 unless a dtype is passed.
FP32_OUT = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum"),
    *(
        "linalg_vector_norm",
        "linalg_matrix_norm",
        "linalg_matrix_norm.str_ord",
        "sum",
        "sum.dim_IntList",
    ),
)
# AT_FORALL_PROMOTE: operators of which a single fp32 argument makes all arguments fp32.
PROMOTE = (
    *(
        "addcdiv",
        "addcmul",
        "atan2",
        "bilinear",
        "cross",
        "dot",
        "vdot",
        "grid_sampler",
        "index_put",
        "tensordot",
    ),
    "scatter_add",
)


def _autocast_as_cuda(library: torch.library.Library) -> None:
    """Give the CPU's autocast the operator lists of CUDA's. Both lists have the same matrix
    products in half precision, apart from a few operators that are made of those."""
    has_kernel = torch_private.has_kernel
    for name in torch_private.operator_names():
        is_of_cpu = name.startswith("aten::") and has_kernel(name, "AutocastCPU")
        if is_of_cpu and not has_kernel(name, "AutocastCUDA"):
            library.impl(
                name.removeprefix("aten::"), torch.library.fallthrough_kernel, "AutocastCPU"
            )
    for names, policy in ((FP32, _in_fp32), (FP32_OUT, _out_in_fp32), (PROMOTE, _promoted)):
        for name in names:
            if has_kernel(f"aten::{name}", "AutocastCUDA"):  # rms_norm: not in 2.11
                packet, _, overload = name.partition(".")
                operator = getattr(getattr(aten, packet), overload or "default")
                library.impl(name, partial(policy, operator), "AutocastCPU")


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in HALF else value


def _in_fp32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    return torch_private.without_autocast(
        operator, map(_wide, args), {name: _wide(value) for name, value in kwargs.items()}
    )


def _out_in_fp32(operator: Any, *args: Any, **kwargs: Any) -> Any:
    position = _place_of_dtype(operator)
    dtype = kwargs.get("dtype", args[position] if len(args) > position else None)
    if dtype is None and args[0].is_floating_point() and args[0].dtype != torch.float64:
        args, kwargs = args[:position], {**kwargs, "dtype": torch.float32}
    return torch_private.without_autocast(operator, args, kwargs)


@cache
def _place_of_dtype(operator: Any) -> int:
    arguments = torch_private.schema(operator).arguments
    return [argument.name for argument in arguments].index("dtype")


def _promoted(operator: Any, *args: Any, **kwargs: Any) -> Any:
    if any(isinstance(value, torch.Tensor) and value.dtype == torch.float32 for value in args):
        return _in_fp32(operator, *args, **kwargs)
    return torch_private.without_autocast(operator, args, kwargs)
