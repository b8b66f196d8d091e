"""The buffer of a CUDA kernel that sums over rows, as of the gradient of a bias or of a norm's
weight: several blocks of threads share a column, and each writes its partial sum."""

import math

MOST_THREADS, _WARP = 512, 32  # threads of a block, threads of a warp
_FEW_VALUES, _MANY_VALUES = 16, 256  # rows that a thread sums


def partial_sums_bytes(rows: int, columns: int, multiprocessors: int, threads: int) -> int:
    """Bytes of the partial sums, in float32; 0: one block sums a whole column.

    `multiprocessors` of the card, `threads` that one of them holds. Source: setReduceConfig and
    ReduceConfig::global_memory_size in Reduce.cuh; tests/cuda_build/test_workspaces.py compares
    with PyTorch."""
    vector = math.gcd(columns, 4)
    most = MOST_THREADS // vector
    widest, highest = (_power_of_two(min(size, most)) for size in (columns // vector, rows))
    height = min(highest, most // min(widest, _WARP))
    width = min(widest, most // height)
    values = -(-rows // height)  # rows that a thread sums
    if rows < min(height * _FEW_VALUES, _MANY_VALUES) or values < _MANY_VALUES:
        return 0
    grid = -(-columns // vector // width)
    wanted = multiprocessors * (threads // (width * height))
    if grid > wanted:
        return 0
    blocks = max(min(-(-wanted // grid), -(-values // _FEW_VALUES)), -(-values // _MANY_VALUES))
    return 4 * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_two(size: int) -> int:
    """The highest power of two that is not above `size`."""
    return 1 << (size.bit_length() - 1)
