"""Memory that a rank on a CPU keeps for oneDNN's bf16 kernels.

oneDNN compiles a kernel for each shape of a matrix product. It keeps the last 1,024 of them, and
torch's ideep keeps as many beside it: 0.7 GiB after rows of 150 lengths
(benchmarks/bf16_shapes.py). With these settings a rank keeps the kernels of about one micro-batch,
whose layers use them again. Kernels in float32 are MKL's, which compiles none. Pure.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate

from launch.predict.parameters import Shapes
from launch.schema.plan import Strategy

KERNELS = 64
# Capacities of oneDNN's cache and of ideep's, which holds kernels that oneDNN's has dropped.
# Source: oneDNN primitive_cache.cpp, ideep lru_cache.hpp; 0 or a smaller number compiles kernels
# for every layer
ONEDNN, ITS_OLD_NAME, IDEEP = (
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "DNNL_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
)
# A kernel in both caches: 64 of them take 75 to 80 MiB more than a run in float32
KERNEL_BYTES = 1200 << 10


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to a rank's; those of the user stay."""
    names = {ONEDNN: {ONEDNN, ITS_OLD_NAME}, IDEEP: {IDEEP}}  # variable -> those that set it
    return {name: str(KERNELS) for name, alike in names.items() if alike.isdisjoint(environ)}


def kernels(tensor_shapes: Shapes, trained: Shapes, lengths: float, evaluates: bool) -> int:
    """The kernels that micro-batches of so many lengths need: a product of each shape of a matrix,
    the gradients of its input, and of its weights if it is trained; an evaluation has products of
    its own."""
    matrices, of_trained = (
        {sides for sides in parts.values() if len(sides) == 2}
        for parts in ({**tensor_shapes, **trained}, trained)
    )
    return math.ceil(lengths * (2 * len(matrices) + len(of_trained))) + evaluates * len(matrices)


def padded_lengths(row_lengths: Sequence[int], micro_batch: int, micro_batches: float) -> float:
    """The number of lengths that micro-batches of rows at random are padded to, on average.
    `row_lengths`: a sample."""
    lengths, below = 0.0, 0.0
    for count in accumulate(count for _, count in sorted(Counter(row_lengths).items())):
        share = (count / len(row_lengths)) ** micro_batch
        lengths += 1 - (1 - share + below) ** micro_batches
        below = share
    return lengths


def kept_bytes(strategy: Strategy, dtype: str, needed: int = KERNELS) -> int:
    """Bytes of the kernels that a rank keeps of those that are needed; `dtype` is that of the
    weights."""
    is_bf16 = strategy.mixed_precision == "bf16" or dtype == "bfloat16"
    return min(needed, KERNELS) * KERNEL_BYTES if strategy.device == "cpu" and is_bf16 else 0
