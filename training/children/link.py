"""Run a rank of the link test: a checked all-reduce, then timed all-reduces.

launch/probe/link_test.py starts it for each rank, in the environment whose transport is tested. It
prints READY when torch and the device are ready, so that a slow start does not count as a link that
hangs. Rank 0 prints a JSON line at the end.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

READY = "link test: ready"  # link_test.py looks for this line
_BUFFER_BYTES = 64 << 20  # above DDP's bucket of 25 MiB: limited by bandwidth, not by latency
_MEASURE_S = 1.0
_MAX_REPEATS = 5
_MATMUL_SIZE = 4096


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backend", choices=("nccl", "gloo"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), required=True)
    parser.add_argument(
        "--rank", type=int, required=True, help="also the number of the rank's visible GPU"
    )
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument(
        "--store", required=True, help="absolute path of a file not there yet, one for all ranks"
    )
    parser.add_argument("--timeout-s", type=float, required=True, help="of each collective")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if arguments.device == "cuda":
        device = torch.device("cuda", arguments.rank)
        torch.cuda.init()  # its error names the driver or the build; set_device's does not
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # makes the context: the slow part of a first start
    else:
        torch.set_num_threads(1)
    print(READY, flush=True)
    dist.init_process_group(
        arguments.backend,
        init_method=Path(arguments.store).as_uri(),
        rank=arguments.rank,
        world_size=arguments.world_size,
        timeout=timedelta(seconds=arguments.timeout_s),
    )
    bus_bytes_per_s = measure(device, arguments.rank, arguments.world_size)
    slowest = torch.tensor(
        matmul_flops_per_s(device) if arguments.device == "cuda" else 0.0, device=device
    )
    dist.all_reduce(slowest, dist.ReduceOp.MIN)
    result = {
        "backend": dist.get_backend(),
        "world_size": dist.get_world_size(),
        "bus_bytes_per_s": bus_bytes_per_s,
        "nccl": ".".join(map(str, nccl.version())) if arguments.backend == "nccl" else None,
        "flops_per_s": slowest.item() or None,
    }
    dist.destroy_process_group()
    if arguments.rank == 0:
        print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)  # the destructors of a driver or of NCCL may hang, and the test is over


def measure(device: torch.device, rank: int, world_size: int) -> float:
    """Measure the bus bandwidth of the slowest rank: the bytes that each card must send and receive
    per second.

    Source: nccl-tests, doc/PERFORMANCE.md. The buffer is checked before and after, because some
    links lose data.
    """
    expected = world_size * (world_size + 1) / 2
    # float32; small messages take another path through NCCL than large messages
    for size in (1024, _BUFFER_BYTES // 4):
        buffer = torch.full((size,), rank + 1.0, device=device)
        seconds = timed(partial(dist.all_reduce, buffer), device)
        check(buffer, expected, f"all-reduce of {size} values")
    repeats = max(1, min(_MAX_REPEATS, int(_MEASURE_S / _agreed_max(seconds, device))))
    buffer.fill_(1.0)
    best = min(
        _agreed_max(timed(partial(dist.all_reduce, buffer), device), device) for _ in range(repeats)
    )
    check(buffer, float(world_size) ** repeats, f"{repeats} rounds of all-reduce")
    # a single rank moves nothing between cards: its bus bandwidth is 0 by definition
    return _BUFFER_BYTES * 2 * (world_size - 1) / world_size / best


def check(buffer: torch.Tensor, expected: float, action: str) -> None:
    values = buffer.cpu()  # compared by the host, so that only the link and the copy are trusted
    smallest, largest = values.min().item(), values.max().item()
    if not smallest == largest == expected:
        raise SystemExit(
            f"link test: {action} gave {smallest:g} to {largest:g}, expected {expected:g}"
        )


def timed(do: Callable[[], object], device: torch.device) -> float:
    """The seconds of an action, and of the work that it gives to the device."""
    synchronize(device)
    began = time.perf_counter()
    do()
    synchronize(device)
    return time.perf_counter() - began


def _agreed_max(seconds: float, device: torch.device) -> float:
    """Return the slowest rank's time, so that all ranks decide alike."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return slowest.item()


def matmul_flops_per_s(device: torch.device) -> float:
    """Measure a large matmul in half precision; a real step reaches a part of its speed."""
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    # of random numbers: those of equal ones take less power, so that clocks are higher than in
    # training (thonking.ai/p/strangely-matrix-multiplications)
    first, second = (
        torch.randn(_MATMUL_SIZE, _MATMUL_SIZE, dtype=dtype, device=device) for _ in range(2)
    )
    # the first products are slower
    best = min(timed(lambda: torch.mm(first, second), device) for _ in range(5))
    return 2 * _MATMUL_SIZE**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
