"""Measure what this machine's cores do in PyTorch: the rates by which seconds of trainings on CPUs
are predicted (launch/predict/time/rates.py)."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from launch.base import processes
from launch.schema.machine import CoreFigures

_ROUNDS, _LIMIT_S = 6, 1.5  # the best counts; 70 ms each with two cores, more on a busy machine
_CALLS = 50  # of operators that take microseconds
_SMALL_FLOPS, _LARGE_FLOPS = 2 * 128**3, 2 * 256 * 1024**2
_ATTENTION_FLOPS = 14 * 2 * 8 * 256**2 * 32  # two products forward; five backward, with one again
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def figures(threads: Sequence[int]) -> list[CoreFigures]:
    """The rates of each number of threads. Rounds take turns, since a scheduler may need a tenth of
    a second to find a core for each thread."""
    measured, began_with, until = _functions(), torch.get_num_threads(), time.monotonic() + _LIMIT_S
    best = [dict.fromkeys(measured, math.inf) for _ in threads]
    shares = [0.0 for _ in threads]
    try:
        for turn in range(_ROUNDS):
            if turn > 1 and time.monotonic() > until:
                break
            for number, count in enumerate(threads):
                torch.set_num_threads(count)
                before = processes.scheduled()
                for name, function in measured.items():
                    function()  # its tensors are in the caches, as in a step
                    began = time.perf_counter()
                    function()
                    seconds = time.perf_counter() - began
                    best[number][name] = min(best[number][name], seconds)
                shares[number] = max(shares[number], processes.core_share(before))
    finally:
        torch.set_num_threads(began_with)
    return [_rates(*each) for each in zip(threads, best, shares, strict=True)]


def _rates(threads: int, seconds: dict[str, float], core_share: float) -> CoreFigures:
    """`seconds`: of each of _functions()."""
    flops_per_s, call_s = {}, {}
    for name in _DTYPES:
        flops_per_s[name] = _LARGE_FLOPS / seconds[f"large {name}"]
        flops_per_s[f"attention {name}"] = _ATTENTION_FLOPS / seconds[f"attention {name}"]
        call_s[name] = max(seconds[f"small {name}"] - _SMALL_FLOPS / flops_per_s[name], 0.0)
    return CoreFigures(
        threads=threads,
        flops_per_s=flops_per_s,
        call_s=call_s,
        bytes_per_s={kind: moved / seconds[kind] for kind, moved in _MOVED.items()},
        # half of the calls are forward, half backward
        operator_s=seconds["operator"] / (2 * _CALLS),
        view_s=seconds["view"] / (2 * _CALLS),
        module_s=seconds["module"] / _CALLS,
        core_share=core_share,
    )


_MIB = float(1 << 20)
# kind of kernel -> bytes that the one of _functions() reads and writes: tensors of 1 MiB, and of 64
_MOVED = {
    "": 3 * _MIB,
    "cast": 1.5 * _MIB,
    "strided": 3 * _MIB,
    "broadcast": 2 * _MIB,
    "softmax": 2 * _MIB,
    "norm": 2 * _MIB,
    "reduction": _MIB,
    "gather": 2 * _MIB,
    "transcendental": 2 * _MIB,
    "sigmoid": 2 * _MIB,
    "random": 2 * _MIB,
    "selection": 3.25 * _MIB,
    "large": 192 * _MIB,
}


def _functions() -> dict[str, Callable[[], Any]]:
    """The name of each figure -> the work whose seconds it is of. Fast ones have a place for their
    result: a rank's allocator has one, while new pages take longer than the kernel."""
    x, y, out = torch.rand(512, 512), torch.rand(512, 512), torch.rand(512, 512)
    row, rows, mask, half = torch.rand(512), torch.arange(512), x > 0.5, x.bfloat16()
    large, other = torch.ones(16384, 1024), torch.ones(16384, 1024)
    leaf, module = torch.ones(8, 8, requires_grad=True), torch.nn.Identity()
    functions: dict[str, Callable[[], Any]] = {
        "": lambda: torch.add(x, y, out=out),
        "cast": lambda: half.copy_(x),
        "strided": lambda: torch.add(x.t(), y, out=out),
        "broadcast": lambda: torch.mul(x, row, out=out),
        "softmax": lambda: torch.softmax(x, -1),
        "norm": lambda: F.layer_norm(x, (512,)),
        "reduction": lambda: x.sum(0),
        "gather": lambda: F.embedding(rows, x),
        "transcendental": lambda: torch.tanh(x),
        "sigmoid": lambda: F.silu(x),
        "random": lambda: torch.empty_like(x).bernoulli_(0.9),
        "selection": lambda: torch.where(mask, x, y),
        "large": lambda: large.add_(other),
        "operator": lambda: _chain(leaf, lambda tensor: tensor * 1.0),
        "view": lambda: _chain(leaf, torch.t),
        "module": lambda: [module(leaf) for _ in range(_CALLS)],
    }
    for name, dtype in _DTYPES.items():
        small, wide, tall, square = (
            torch.ones(sides, dtype=dtype)
            for sides in ((128, 128), (256, 1024), (1024, 256), (1024, 1024))
        )
        query = torch.ones(2, 8, 256, 32, dtype=dtype, requires_grad=True)
        functions |= {
            f"small {name}": lambda a=small: a @ a,
            f"large {name}": lambda a=tall, b=wide, c=square: torch.mm(a, b, out=c),
            f"attention {name}": lambda q=query: F.scaled_dot_product_attention(q, q, q).backward(
                q.detach()
            ),
        }
    return functions


def _chain(leaf: torch.Tensor, operator: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Call an operator forward and backward."""
    tensor = leaf
    for _ in range(_CALLS):
        tensor = operator(tensor)
    tensor.backward(leaf.detach())
