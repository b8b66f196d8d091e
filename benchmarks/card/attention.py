"""Seconds of attention by kernel, mask, heads and length: forward and backward, and rows of
documents without padding."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
TOKENS = 8192
BACKWARD_PRODUCTS = 2.5  # over forward's: five products for two (arXiv 2205.14135)


@dataclass(frozen=True)
class Attention:
    """One call of attention; rows x length are the tokens."""

    kernel: str
    mask: str  # causal: by a flag; tensor: a causal mask, as for padded rows; none
    heads: int
    key_heads: int
    width: int
    length: int
    rows: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        heads = f"{self.heads}/{self.key_heads}x{self.width}"
        return f"{self.kernel} {self.mask} {heads} {self.rows}x{self.length} {self.dtype}"

    @property
    def flops(self) -> int:
        """Of forward: both products, half of them where the kernel leaves the masked half out."""
        products = 4 * self.rows * self.heads * self.length**2 * self.width
        return products // 2 if self.mask == "causal" else products


SMALL_HEADS, LARGE_HEADS = (14, 14, 64), (32, 32, 128)
SMALL_GROUPS, LARGE_GROUPS = (14, 2, 64), (32, 8, 128)


def cases() -> Iterator[Attention]:
    """The table, in the order of what a plan needs first."""
    lengths = (2048, 512, 8192)
    for kernel, mask in (("flash", "causal"), ("efficient", "tensor"), ("efficient", "causal")):
        for length in lengths:
            for heads in (SMALL_HEADS, LARGE_HEADS):
                yield Attention(kernel, mask, *heads, length, TOKENS // length)
    for length in lengths:
        for groups in (SMALL_GROUPS, LARGE_GROUPS):
            yield Attention("flash", "causal", *groups, length, TOKENS // length)
    for heads in (SMALL_HEADS, LARGE_HEADS):
        yield Attention("math", "causal", *heads, 512, 16)
        yield Attention("math", "tensor", *heads, 2048, 1)
        yield Attention("efficient", "causal", *heads, 2048, 1, "float32")
        yield Attention("math", "causal", *heads, 512, 4, "float32")
        yield Attention("flash", "causal", *heads, 2048, 4, "float16")
        yield Attention("flash", "causal", *heads, 1003, 4)
        yield Attention("efficient", "tensor", *heads, 1003, 4)
        yield Attention("flash", "none", *heads, 512, 16)
    for mask in ("causal", "tensor"):
        for length in lengths:
            for heads in (LARGE_GROUPS, SMALL_GROUPS):
                yield Attention("cudnn", mask, *heads, length, TOKENS // length)


def heads_of(case: Attention, heads: int) -> torch.Tensor:
    """A projection's output seen as heads, as a model makes it: strided."""
    dtype = getattr(torch, case.dtype)
    shape = (case.rows, case.length, heads, case.width)
    made = torch.randn(shape, device=clock.device(), dtype=dtype).transpose(1, 2)
    return made.requires_grad_()


def mask_of(case: Attention) -> torch.Tensor | None:
    """A causal mask of booleans whose last row is padded, as transformers makes it."""
    if case.mask != "tensor":
        return None
    square = torch.ones(case.length, case.length, device=clock.device(), dtype=torch.bool).tril()
    mask = square.expand(case.rows, 1, case.length, case.length).clone()
    mask[-1, :, :, : case.length // 8] = False
    mask[-1, :, : case.length // 8, 0] = True  # a row that sees nothing is NaN in some kernels
    return mask


def timed(case: Attention, attend: Callable[..., torch.Tensor]) -> Iterator[Row]:
    """Forward, which records for backward, and backward."""
    made: list[Any] = []

    def forward() -> Row:
        made.extend(heads_of(case, heads) for heads in (case.heads, case.key_heads, case.key_heads))
        made.append(partial(attend, *made))
        return figures(clock.device_seconds([made[3]]), case.flops)

    def backward() -> Row:
        inputs, call = made[:3], made[3]
        out = call()
        gradient = torch.randn_like(out)
        grad = partial(torch.autograd.grad, out, inputs, gradient, retain_graph=True)
        return figures(clock.device_seconds([grad]), int(BACKWARD_PRODUCTS * case.flops))

    for direction, measure in (("forward", forward), ("backward", backward)):
        fields = {"case": f"{case.name} {direction}", "direction": direction, **asdict(case)}
        row = attempted(fields, measure)
        yield row
        if "error" in row:
            return


def figures(timing: Row, flops: int) -> Row:
    return {**timing, "flops": flops, "tflops": flops / timing["s"] / 1e12}


def sdpa_rows(case: Attention) -> Iterator[Row]:
    mask = mask_of(case)
    attend = partial(
        scaled_dot_product_attention,
        attn_mask=mask,
        is_causal=case.mask == "causal",
        **({"enable_gqa": True} if case.heads != case.key_heads else {}),
    )
    with sdpa_kernel(KERNELS[case.kernel]):
        yield from timed(case, attend)


def documents_rows(case: Attention) -> Iterator[Row]:
    """Rows joined into one, each a document that attends to itself: torch's varlen_attn."""
    from torch.nn.attention.varlen import varlen_attn

    starts = torch.arange(case.rows + 1, device=clock.device(), dtype=torch.int32) * case.length
    names = inspect.signature(varlen_attn).parameters  # torch 2.13 has a window, 2.11 a flag
    options: dict[str, Any] = (
        {"window_size": (-1, 0)} if "window_size" in names else {"is_causal": True}
    )
    if "enable_gqa" in names:
        options["enable_gqa"] = case.heads != case.key_heads

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        flat = [each.transpose(1, 2).flatten(0, 1) for each in heads]
        lengths = (starts, starts, case.length, case.length)
        return varlen_attn(*flat, *lengths, **options)

    yield from timed(case, attend)


def measure() -> Iterator[Row]:
    is_small = clock.memory_bytes() < 16 << 30
    table = [replace(case, rows=max(1, case.rows // 4)) if is_small else case for case in cases()]
    first, rest = table[:12], table[12:]
    for case in first:
        yield from sdpa_rows(case)
    for length in (2048, 512, 8192):
        for groups in (SMALL_GROUPS, LARGE_GROUPS):
            case = Attention("varlen", "causal", *groups, length, TOKENS // length)
            try:
                yield from documents_rows(case)
            except (ImportError, AttributeError) as error:
                yield {"case": case.name, "error": f"{type(error).__name__}: {error}"}
    for case in rest:
        yield from sdpa_rows(case)
