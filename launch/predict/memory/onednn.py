"""Memory that a rank on a CPU keeps for oneDNN's bf16 kernels.

oneDNN compiles a kernel for each shape of a matrix product. It keeps the last 1,024 of them, and
torch's ideep keeps as many beside it: 0.7 GiB after rows of 150 lengths
(benchmarks/bf16_shapes.py). With these settings a rank keeps the kernels of about one micro-batch,
whose layers use them again. Kernels in float32 are MKL's, which compiles none. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from launch.schema.plan import Strategy

KERNELS = 64
# of oneDNN's cache, and of ideep's, which holds kernels that oneDNN's has dropped. Source: oneDNN
# primitive_cache.cpp, ideep lru_cache.hpp; 0 or a smaller number compiles kernels for every layer
ONEDNN, ITS_OLD_NAME, IDEEP = (
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY",
    "DNNL_PRIMITIVE_CACHE_CAPACITY",
    "LRU_CACHE_CAPACITY",
)
# of a kernel in each of the caches: 75 to 80 MiB of 64, beside a run in float32
KERNEL_BYTES = 1200 << 10


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to a rank's; those of the user stay."""
    added = {name: str(KERNELS) for name in (ONEDNN, IDEEP) if name not in environ}
    if ITS_OLD_NAME in environ:
        added.pop(ONEDNN, None)
    return added


def kept_bytes(strategy: Strategy, dtype: str) -> int:
    """Bytes of the kernels that a rank keeps; `dtype` is that of the weights."""
    is_bf16 = strategy.mixed_precision == "bf16" or dtype == "bfloat16"
    return KERNELS * KERNEL_BYTES if strategy.device == "cpu" and is_bf16 else 0
