"""Rates of matrix products: a linear layer's forward and both gradients, by dtype and sizes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from benchmarks.card import clock
from benchmarks.card.rows import Row, attempted

# tokens, inner, outer: of hidden sizes 896 (Qwen 0.5B), 2048 (1B), 4096 (7B)
LAYERS = (
    *((4096, 896, 896), (4096, 896, 4864), (4096, 4864, 896), (4096, 896, 128)),
    *((4096, 2048, 2048), (2048, 2048, 11008), (4096, 4096, 4096), (4096, 4096, 11008)),
    *((4096, 11008, 4096), (16384, 4096, 1024), (512, 896, 896), (512, 4096, 4096)),
    *((1024, 2048, 2048), (16384, 896, 896), (16384, 2048, 2048), (16384, 4096, 4096)),
    *((512, 896, 4864), (2048, 896, 4864), (8192, 4096, 4096), (16384, 4096, 11008)),
)
# sizes that 8 does not divide, and tokens that no tile divides
UNALIGNED = (
    *((4096, 4095, 4096), (4096, 4096, 4095), (4096, 4096, 8257), (4096, 4092, 4096)),
    *((4096, 4094, 4096), (4096, 896, 50257), (4095, 4096, 4096), (1037, 896, 4864)),
    (1037, 4096, 4096),
)
ADAPTERS = (  # LoRA's: rank 16, and 64
    *((4096, 896, 16), (4096, 16, 896), (4096, 4096, 16), (4096, 16, 4096)),
    *((16384, 4096, 16), (16384, 16, 11008), (4096, 4096, 64), (512, 896, 16)),
)
VOCABULARY = (
    *((2048, 896, 8192), (2048, 2048, 32000), (2048, 4096, 32000), (2048, 896, 151936)),
    *((4096, 2048, 151936), (8192, 896, 8192)),
)
Kinds = dict[str, tuple[tuple[int, int, int], ...]]
ALL: Kinds = {
    "layers": LAYERS,
    "unaligned": UNALIGNED,
    "adapters": ADAPTERS,
    "vocabulary": VOCABULARY,
}
SOME: Kinds = {
    "layers": (*LAYERS[:8], *LAYERS[10:13], LAYERS[15]),
    "unaligned": UNALIGNED[:3],
    "adapters": ADAPTERS[:4],
    "vocabulary": VOCABULARY[1:4:2],
}
# dtype, whether float32 may be computed in tf32, sizes by kind
TABLE = (
    ("bfloat16", False, ALL),
    ("float32", False, SOME),
    ("float32", True, SOME),
    ("float16", False, SOME),
)
BATCHED = ((448, 512, 64), (64, 2048, 128))  # batch x heads, sequence, head: eager attention
SUSTAINED = 8192
SUSTAINED_S, WINDOWS = 1.5, 6

Matrices = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
LAYOUTS: dict[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "forward": lambda inputs, weights, gradient: torch.mm(inputs, weights.t()),
    "of inputs": lambda inputs, weights, gradient: torch.mm(gradient, weights),
    "of weights": lambda inputs, weights, gradient: torch.mm(gradient.t(), inputs),
}


def matrices(dtype: torch.dtype, tokens: int, inner: int, outer: int) -> list[Matrices]:
    """Sets of a layer's inputs, weights and output gradients."""
    size = (tokens * inner + inner * outer + tokens * outer) * dtype.itemsize
    shapes = ((tokens, inner), (outer, inner), (tokens, outer))
    return [
        tuple(torch.randn(shape, device=clock.device(), dtype=dtype) for shape in shapes)
        for _ in range(clock.num_sets(size))
    ]


def figures(timing: Row, flops: int) -> Row:
    return {**timing, "flops": flops, "tflops": flops / timing["s"] / 1e12}


def layer_rows(dtype: str, tf32: bool, kind: str, sizes: tuple[int, int, int]) -> Iterator[Row]:
    """Forward and both gradients of one layer."""
    tokens, inner, outer = sizes
    sets: list[Matrices] = []
    for layout, product in LAYOUTS.items():
        name = "tfloat32" if tf32 else dtype
        fields = {
            "case": f"{name} {tokens}x{inner}x{outer} {layout}",
            **{"dtype": name, "kind": kind, "layout": layout, "sizes": list(sizes)},
        }

        def measure(product: Callable[..., torch.Tensor] = product) -> Row:
            if not sets:
                sets.extend(matrices(getattr(torch, dtype), *sizes))
            calls = [partial(product, *each) for each in sets]
            return figures(clock.device_seconds(calls), 2 * tokens * inner * outer)

        yield attempted(fields, measure)


def batched_row(dtype: str, batch: int, length: int, width: int) -> Row:
    def measure() -> Row:
        shape = (batch, length, width)
        sets = [
            [
                torch.randn(shape, device=clock.device(), dtype=getattr(torch, dtype))
                for _ in range(2)
            ]
            for _ in range(2)
        ]
        calls = [partial(torch.bmm, a, b.transpose(1, 2)) for a, b in sets]
        return figures(clock.device_seconds(calls), 2 * batch * length * length * width)

    case = f"{dtype} batched {batch}x{length}x{width}"
    return attempted({"case": case, "dtype": dtype, "sizes": [batch, length, width]}, measure)


def bias_row(dtype: str, tokens: int, inner: int, outer: int) -> Row:
    """A layer with a bias, which the library adds in the product's own kernel."""

    def measure() -> Row:
        sets = matrices(getattr(torch, dtype), tokens, inner, outer)
        bias = torch.randn(outer, device=clock.device(), dtype=getattr(torch, dtype))
        calls = [partial(torch.addmm, bias, each[0], each[1].t()) for each in sets]
        return figures(clock.device_seconds(calls), 2 * tokens * inner * outer)

    case = f"{dtype} {tokens}x{inner}x{outer} with bias"
    return attempted({"case": case, "dtype": dtype, "sizes": [tokens, inner, outer]}, measure)


def sustained_row() -> Row:
    """Large products without a pause: the rate of each window shows whether clocks fall."""

    def measure() -> Row:
        size = SUSTAINED if clock.memory_bytes() > 16 << 30 else SUSTAINED // 2
        a, b = (
            torch.randn(size, size, device=clock.device(), dtype=torch.bfloat16) for _ in range(2)
        )
        rates, began = [], time.perf_counter()
        one_s = clock.device_seconds([partial(torch.mm, a, b)])["s"]
        count = max(1, min(400, round(SUSTAINED_S / WINDOWS / one_s)))
        for _ in range(WINDOWS):
            (window_s,) = clock.elapsed(clock.in_stream([partial(torch.mm, a, b)] * count), 0, 1)
            rates.append(2 * size**3 * count / window_s / 1e12)
        return {
            **{"s": 2 * size**3 / statistics.median(rates) / 1e12, "windows_tflops": rates},
            **{"tflops": statistics.median(rates), "wall_s": time.perf_counter() - began},
        }

    return attempted({"case": "sustained", "dtype": "bfloat16", "sizes": [SUSTAINED] * 3}, measure)


def measure() -> Iterator[Row]:
    yield sustained_row()
    for dtype, tf32, kinds in TABLE:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        for kind, sizes in ((kind, each) for kind, layers in kinds.items() for each in layers):
            yield from layer_rows(dtype, tf32, kind, sizes)
    torch.set_float32_matmul_precision("highest")
    for sizes in LAYERS[:2]:
        yield bias_row("bfloat16", *sizes)
    for batch in BATCHED:
        yield batched_row("bfloat16", *batch)
