"""Number formats and attention kernels of each GPU architecture: bf16, fp16, TF32 and fused
attention. Constants only, no torch.

Sources. NVIDIA: CUDA C++ Programming Guide, "Arithmetic Instructions" (tensor cores for fp16 from
7.0, bf16 and TF32 from 8.0). AMD bf16: HIP documentation, "Hardware features" (none in RDNA 1 and
2); XLA's has_bf16_dtype_support (MI100 and newer, gfx11, gfx12); gpuopen.com/learn/wmma_on_rdna3.
torch.cuda.is_bf16_supported() is no help: under ROCm it is True for every card up to torch 2.13.
Fused attention: PyTorch's sdp_utils.cpp asks AOTriton whether it has kernels for the gfx name and
whether it calls them experimental; the answers are in AOTriton's v3src/util.cc, here those of
0.12b, which torch 2.13 builds with (pytorch/pytorch pull 184288). The package flash_attn: its
README (Ampere and newer; MI200, MI300 and MI350 by composable kernels; its Triton kernels for
other cards need a setting of the user, and are left out here). varlen_attn: PyTorch's flash kernels
check for Ampere or newer; AMD's are not tried.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from launch.schema.machine import CUDNN_LAST, PREFER_CUDNN, Gpu, cudnn_is_last

ALLOW_EXPERIMENTAL = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"

Attention = Literal["fused", "experimental", "math", "unknown"]


@dataclass(frozen=True)
class Architecture:
    """The abilities of the hardware. PyTorch emulates missing abilities slowly, or refuses them."""

    bf16: bool
    fp16: bool  # faster than fp32
    tf32: bool  # transformers' answer: no AMD card has it
    # math: the scores of a layer, batch x heads x length^2, are stored in memory
    attention: Attention
    flash_attn: bool = False  # the package of that name has kernels for it
    varlen_attn: bool = False  # PyTorch's flash kernels for rows of many lengths run on it


# Newest first. The first row whose compute capability is not above the card's applies.
NVIDIA: tuple[tuple[tuple[int, int], Architecture], ...] = (
    # Ampere
    (
        (8, 0),
        Architecture(
            bf16=True,
            fp16=True,
            tf32=True,
            attention="fused",
            flash_attn=True,
            varlen_attn=True,
        ),
    ),
    ((7, 0), Architecture(bf16=False, fp16=True, tf32=False, attention="fused")),  # Volta, Turing
    # Pascal: fp16 at 1/64 on 6.1
    ((0, 0), Architecture(bf16=False, fp16=False, tf32=False, attention="fused")),
)

_OLD = Architecture(bf16=False, fp16=True, tf32=False, attention="math")
_FUSED = Architecture(bf16=True, fp16=True, tf32=False, attention="fused")
_CDNA = replace(_FUSED, flash_attn=True)
_EXPERIMENTAL = Architecture(bf16=True, fp16=True, tf32=False, attention="experimental")
_MATH = Architecture(bf16=True, fp16=True, tf32=False, attention="math")

AMD: dict[str, Architecture] = {
    "gfx900": _OLD,  # Vega 10
    "gfx906": _OLD,  # MI50, MI60, Radeon VII
    "gfx908": _MATH,  # MI100: bf16 at half the rate of fp16
    "gfx90a": _CDNA,  # MI200
    "gfx942": _CDNA,  # MI300
    "gfx950": _CDNA,  # MI350
    "gfx1100": _FUSED,  # RX 7900; experimental, and wrong, in AOTriton 0.11b: never forced
    "gfx1101": _EXPERIMENTAL,  # RX 7800 XT, 7700 XT
    "gfx1102": _EXPERIMENTAL,  # RX 7600
    "gfx1103": _EXPERIMENTAL,  # Radeon 780M
    "gfx1150": _EXPERIMENTAL,
    "gfx1151": _FUSED,  # Strix Halo
    "gfx1152": _EXPERIMENTAL,
    "gfx1153": _EXPERIMENTAL,
    "gfx1200": _EXPERIMENTAL,  # RX 9060
    "gfx1201": _FUSED,  # RX 9070, Radeon AI PRO R9700; official since AOTriton 0.10b
}
# gfx names without kernels in AOTriton: RDNA 1 and 2 (gfx10), and cards older than gfx908
_FAMILIES: tuple[tuple[str, Architecture], ...] = (
    ("gfx11", _MATH),
    ("gfx12", _MATH),
    ("gfx94", _MATH),
    ("gfx", _OLD),
)

# A card that does not report its architecture: it runs as requested, without a note on attention.
UNKNOWN = Architecture(bf16=True, fp16=True, tf32=True, attention="unknown", flash_attn=True)


def look_up(gpu: Gpu) -> Architecture:
    """The facts of a card, by its compute capability or its gfx name."""
    if gpu.vendor == "nvidia":
        if not (match := re.fullmatch(r"(\d+)\.(\d+)", gpu.architecture)):
            return UNKNOWN
        capability = int(match[1]), int(match[2])
        return next(facts for least, facts in NVIDIA if capability >= least)
    gfx = gpu.architecture.partition(":")[0]  # gfx90a:sramecc+:xnack-
    return AMD.get(gfx) or next(
        (facts for prefix, facts in _FAMILIES if gfx.startswith(prefix)), UNKNOWN
    )


def environment(gpus: Sequence[Gpu], few_shapes: bool) -> dict[str, str]:
    """The variables with which ranks on these cards get PyTorch's own fused attention."""
    prefer_cudnn = any(gpu.architecture in PREFER_CUDNN for gpu in gpus)
    needed = {
        ALLOW_EXPERIMENTAL: any(look_up(gpu).attention == "experimental" for gpu in gpus),
        CUDNN_LAST: prefer_cudnn and cudnn_is_last(few_shapes, {}),
    }
    return {variable: "1" for variable, is_needed in needed.items() if is_needed}


def expands_segments(gpus: Sequence[Gpu], kernel: str) -> bool:
    """True if the driver of these cards can map memory into addresses that PyTorch's allocator has
    kept free. `kernel`: the release of the operating system's. Under WSL 2 the driver refuses what
    PyTorch asks for (pytorch/pytorch issue 192330); ROCm's is not known to us."""
    return all(gpu.vendor == "nvidia" for gpu in gpus) and "microsoft" not in kernel.lower()


def attention_notes(gpus: Sequence[Gpu], few_shapes: bool) -> Iterator[str]:
    """Yield a line for each kind of card whose attention needs a variable, or has no fused
    kernel."""
    for name, attention in {gpu.architecture: look_up(gpu).attention for gpu in gpus}.items():
        notes = (
            (
                name in PREFER_CUDNN and cudnn_is_last(few_shapes, {}),
                "cuDNN's kernels come after PyTorch's own: they would compile for each shape of a"
                f" batch, and keep that in host RAM; {CUDNN_LAST}=0 puts them first",
            ),
            (
                attention == "experimental",
                f"PyTorch calls its fused kernels for {name} experimental; {ALLOW_EXPERIMENTAL}=1"
                " allows them, unless you set that variable yourself",
            ),
            (
                attention == "math",
                f"PyTorch has no fused kernel for {name}; every layer holds its scores in memory"
                " (batch x heads x length^2)",
            ),
        )
        yield from (f"attention: {note}" for is_so, note in notes if is_so)


def without_bf16(gpus: Sequence[Gpu]) -> str:
    """The reason why these cards do not train in bf16; "" if all of them do."""
    lacking = [gpu for gpu in gpus if not look_up(gpu).bf16]
    if not lacking:
        return ""
    names = ", ".join(dict.fromkeys(f"{gpu.name} ({gpu.architecture})" for gpu in lacking))
    slow = (
        "; its fp16 saves memory but no time"
        if not all(look_up(gpu).fp16 for gpu in lacking)
        else ""
    )
    return f"no bf16 in the hardware of {names}{slow}"
