"""Rates of matrix products on one GPU, by what their sizes can be divided by.

An output head over so many words: forward, the gradient of its input and that of its weights. In
16 bits a vendor's library has its fast kernels for rows of a multiple of 16 bytes, or 8 numbers; a
model whose number of words is no multiple of 8 gets others. The exit code is 3 without a GPU.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import recording

RESULT = "gpu_products"
TOKENS_AND_WIDTH = ((16384, 1024), (2048, 768))
# of GPT-2, the T5 of sft_fast and near them
WORDS = (50304, 50264, 50260, 50258, 50257, 29304, 29300, 29298, 29297)
WARM_UP, REPETITIONS = 2, 5
DTYPES = ("bfloat16", "float16", "float32")


def seconds(product: Callable[[], torch.Tensor]) -> float:
    """Of one product, the mean of some in a row."""
    for _ in range(WARM_UP):
        product()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(REPETITIONS):
        product()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / REPETITIONS / 1e3


def rates(dtype: str, tokens: int, width: int, words: int) -> list[float]:
    """TFLOP/s of forward and of both gradients."""

    def tensor(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=getattr(torch, dtype))

    inputs, weights, gradient = tensor(tokens, width), tensor(words, width), tensor(tokens, words)
    products = (
        lambda: inputs @ weights.t(),
        lambda: gradient @ weights,
        lambda: gradient.t() @ inputs,
    )
    return [2 * tokens * width * words / seconds(product) / 1e12 for product in products]


def divisor(row: Mapping[str, Any]) -> int:
    """The largest of 1, 2, 4 and 8 that divides the number of words."""
    return math.gcd(row["sizes"][2], 8)


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    head = ["dtype", "tokens", "width", "words", "divided by", "forward", "of inputs", "of weights"]
    lines = [
        [
            row["dtype"],
            *(str(size) for size in row["sizes"]),
            str(divisor(row)),
            *(f"{rate:.0f}" for rate in row["tflops"]),
        ]
        for row in rows
    ]
    means = {
        (dtype, by): statistics.mean(
            rate
            for row in rows
            for rate in row["tflops"]
            if row["dtype"] == dtype and divisor(row) == by
        )
        for dtype in DTYPES
        for by in (8, 4, 2, 1)
    }
    shares = [
        [dtype, *(f"{means[dtype, by] / means[dtype, 8]:.2f}" for by in (8, 4, 2, 1))]
        for dtype in DTYPES
    ]
    return (
        "Mean rate, beside that of numbers of words that 8 divides:\n\n"
        + recording.table(["dtype", "8", "4", "2", "odd"], shares)
        + "\nTFLOP/s of forward and of the gradients:\n\n"
        + recording.table(head, lines)
    )


def main() -> int:
    if not torch.cuda.is_available():
        print("needs a GPU that torch can use", file=sys.stderr)
        return 3
    rows = [
        {
            "dtype": dtype,
            "sizes": [tokens, width, words],
            "tflops": rates(dtype, tokens, width, words),
        }
        for dtype in DTYPES
        for tokens, width in TOKENS_AND_WIDTH
        for words in WORDS
    ]
    recording.write(RESULT, {"rows": rows}, text(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
