"""Seconds of an optimizer step and of clipping, on the device and on the host, and of 4-bit weights
that are unpacked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

Parameters = list[torch.nn.Parameter]
# numbers of each parameter: large ones alone, and as a model has them
LARGE = (4_000_000,) * 25
MANY = (1024, 660_000) * 150
ADAMW: Any = torch.optim.AdamW


def eight_bit(parameters: Parameters) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(parameters, lr=1e-4)


@dataclass(frozen=True)
class Update:
    """An optimizer over parameters of so many numbers."""

    name: str
    make: Callable[[Parameters], Any]
    counts: Sequence[int]
    dtype: torch.dtype = torch.float32
    state_bytes: int = 8  # a number's two states
    graph: bool = False

    @property
    def moved_bytes(self) -> int:
        """Weights and states read and written, gradients read."""
        return sum(self.counts) * (3 * self.dtype.itemsize + 2 * self.state_bytes)


FUSED, FOREACH = partial(ADAMW, fused=True), partial(ADAMW, foreach=True)
UPDATES = (
    Update("fused AdamW", FUSED, LARGE),
    Update("fused AdamW", FUSED, MANY),
    Update("foreach AdamW", FOREACH, LARGE),
    Update("foreach AdamW", FOREACH, MANY),
    Update("8-bit AdamW", eight_bit, LARGE, state_bytes=2),
    Update("8-bit AdamW", eight_bit, MANY, state_bytes=2),
    Update("fused AdamW", FUSED, LARGE, torch.bfloat16, 4),
    Update("8-bit AdamW", eight_bit, LARGE, torch.bfloat16, 2),
    Update("SGD", partial(torch.optim.SGD, lr=1e-3, fused=True), LARGE, state_bytes=0),
)


def parameters_of(counts: Sequence[int], dtype: torch.dtype) -> Parameters:
    """Parameters with gradients; a quarter of them on a card of less than 12 GB."""
    share = 4 if clock.memory_bytes() < 12 << 30 else 1
    made = []
    for count in counts[:: share if len(set(counts)) == 1 else 1]:
        made.append(torch.nn.Parameter(torch.randn(count, device=clock.device(), dtype=dtype)))
        made[-1].grad = 1e-3 * torch.randn_like(made[-1])
    return made


def update_row(update: Update) -> Row:
    """Device seconds of a step, and the host's in issuing it."""

    def measure() -> Row:
        parameters = parameters_of(update.counts, update.dtype)
        numbers = sum(each.numel() for each in parameters)
        moved = update.moved_bytes * numbers // sum(update.counts)
        optimizer = update.make(parameters)
        timing = clock.device_seconds([optimizer.step], graph=False)
        host = clock.host_seconds(lambda _: optimizer.step(), 2, len(parameters), batches=5)
        return {
            **timing,
            **{"bytes": moved, "gb_s": moved / timing["s"] / 1e9, "numbers": numbers},
            **{"tensors": len(parameters), "host_s_per_tensor": host["s"]},
            "processor_s_per_tensor": host["processor_s"],
        }

    name = str(update.dtype).removeprefix("torch.")
    fields = {"case": f"{update.name} {name}, {len(update.counts)} tensors"}
    return attempted({**fields, "dtype": name}, measure)


def clip_row(counts: Sequence[int]) -> Row:
    """clip_grad_norm_() as a whole."""

    def measure() -> Row:
        parameters = parameters_of(counts, torch.float32)
        clip = partial(torch.nn.utils.clip_grad_norm_, parameters, 1.0)
        timing = clock.device_seconds([clip])
        moved = 3 * 4 * sum(each.numel() for each in parameters)
        host = clock.host_seconds(lambda _: clip(), 5, len(parameters), batches=5)
        return {
            **{**timing, "bytes": moved, "gb_s": moved / timing["s"] / 1e9},
            **{"tensors": len(parameters), "host_s_per_tensor": host["s"]},
        }

    return attempted({"case": f"clip_grad_norm_ float32, {len(counts)} tensors"}, measure)


def optimizer() -> Iterator[Row]:
    for update in UPDATES:
        yield update_row(update)
    for counts in (LARGE, MANY):
        yield clip_row(counts)


WEIGHTS = ((4096, 4096), (11008, 4096), (4864, 896))  # outer, inner


def dequantize_row(outer: int, inner: int, is_double: bool, dtype: torch.dtype) -> Row:
    """NF4 weights of blocks of 64 unpacked; double: their scales are packed too."""

    def measure() -> Row:
        from bitsandbytes import functional

        def packed() -> tuple[torch.Tensor, Any]:
            weights = torch.randn(outer, inner, device=clock.device(), dtype=dtype)
            return functional.quantize_4bit(
                weights, quant_type="nf4", compress_statistics=is_double
            )

        moved = outer * inner // 2 + outer * inner * dtype.itemsize + outer * inner // 16
        sets = [packed() for _ in range(clock.num_sets(moved))]
        timing = clock.device_seconds([partial(functional.dequantize_4bit, *each) for each in sets])
        host = clock.host_seconds(lambda _: functional.dequantize_4bit(*sets[0]), 50)
        figures = {"bytes": moved, "gb_s": moved / timing["s"] / 1e9, "host_s": host["s"]}
        return {**timing, **figures}

    name = str(dtype).removeprefix("torch.")
    case = f"NF4 to {name} {outer}x{inner}{' double' if is_double else ''}"
    return attempted({"case": case, "sizes": [outer, inner], "double": is_double}, measure)


def linear_row(tokens: int, outer: int, inner: int) -> Row:
    """A linear layer of 4-bit weights: unpacked, then the product."""

    def measure() -> Row:
        import bitsandbytes

        layer = bitsandbytes.nn.Linear4bit(
            *(inner, outer), bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        ).to(clock.device())
        inputs = torch.randn(
            tokens, inner, device=clock.device(), dtype=torch.bfloat16, requires_grad=True
        )
        return clock.device_seconds([partial(layer, inputs)])

    case = f"Linear4bit {tokens}x{inner}x{outer}"
    return attempted({"case": case, "sizes": [tokens, inner, outer]}, measure)


def four_bit() -> Iterator[Row]:
    for weights in WEIGHTS:
        for is_double in (True, False):
            yield dequantize_row(*weights, is_double, torch.bfloat16)
    yield dequantize_row(*WEIGHTS[0], True, torch.float32)
    yield linear_row(2048, *WEIGHTS[0])
