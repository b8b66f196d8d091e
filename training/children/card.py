"""Programs of the self-check on the first card: python -m training.children.card PROGRAM.

facts        prints a line of JSON: bytes outside the allocator, the allocator, the attention
             kernels that PyTorch chooses beside those that a plan counts with, and the rates of
             copies and of products
compile      compiles one small function, and prints a line of JSON with the reason why
             torch.compile cannot run here, or none
take_memory  takes the card's memory, as another program would: it makes a context, reads a number
             from standard input, and takes all but so many bytes until the input ends
"""

import itertools
import json
import os
import sys

import torch
from torch.nn.attention import SDPBackend

from training.children import link
from training.compat import torch_private
from training.trace import cuda_semantics

_COPY_BYTES = 256 << 20
COPIES = 5
HEADS, LENGTH, WIDTH = 12, 512, 64
KERNELS = {
    SDPBackend.MATH: "math",
    SDPBackend.FLASH_ATTENTION: "flash",
    SDPBackend.EFFICIENT_ATTENTION: "efficient",
    SDPBackend.CUDNN_ATTENTION: "cudnn",
}


def _print_facts() -> None:
    card = torch.cuda.get_device_properties(0)
    print(
        json.dumps(
            {
                "name": card.name,
                "capability": f"{card.major}.{card.minor}",
                "multiprocessors": card.multi_processor_count,
                "total_bytes": card.total_memory,
                "torch": torch.__version__,
                "cuda": torch.version.cuda,
                "allocator": torch.cuda.get_allocator_backend(),
                "allocator_settings": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
                "outside_bytes": outside_bytes(),
                "attention": attention(f"{card.major}.{card.minor}"),
                "bytes_per_second": copies(),
                "flops_per_second": link.matmul_flops_per_s(torch.device("cuda", 0)),
            }
        )
    )


def outside_bytes() -> int:
    """Bytes of the card that are used, less those of the allocator, after a product: the context
    of this process, as long as nothing else uses the card."""
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    layer(torch.ones(64, 1024, device="cuda")).sum().backward()
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def attention(capability: str) -> dict[str, list[str]]:
    """[the kernel of PyTorch, that of a plan] by data type and mask."""
    chosen = {}
    for dtype, masked in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), (False, True)
    ):
        query, key, value = (
            torch.zeros(2, HEADS, LENGTH, WIDTH, device="cuda", dtype=dtype, requires_grad=True)
            for _ in range(3)
        )
        mask = torch.ones(2, 1, LENGTH, LENGTH, device="cuda", dtype=torch.bool) if masked else None
        arguments = (query, key, value, mask, 0.0, not masked)
        kernel = torch_private.attention_kernel(*arguments)
        planned = cuda_semantics.choose(
            cuda_semantics.Target(capability), cuda_semantics.Call(*arguments)
        )
        name = f"{str(dtype).removeprefix('torch.')}{', mask' if masked else ''}"
        chosen[name] = [KERNELS[kernel], planned]
    return chosen


def copies() -> dict[str, float]:
    """Rates between pinned host memory and the card, by direction."""
    host = torch.empty(_COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda", pin_memory=False)
    return {
        "to the card": rate(device, host),
        "to the host": rate(host, device),
    }


def rate(target: torch.Tensor, source: torch.Tensor) -> float:
    device = torch.device("cuda", 0)
    best = min(link.timed(lambda: target.copy_(source), device) for _ in range(COPIES))
    return _COPY_BYTES / best


def _try_compiler() -> None:
    reason = ""
    try:
        torch.compile(lambda tensor: (tensor + 1).relu())(torch.ones(64, device="cuda"))
    except Exception as error:  # noqa: BLE001  whatever a compiler lacks is a reason
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    print(json.dumps({"reason": reason}))


def _take_memory() -> None:
    torch.zeros(1, device="cuda")
    left_bytes = int(sys.stdin.readline() or 0)
    free_bytes, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(free_bytes - left_bytes, 0), dtype=torch.uint8, device="cuda")
    print(f"took {taken.numel()} of {free_bytes} bytes", flush=True)
    sys.stdin.read()


PROGRAMS = {"facts": _print_facts, "compile": _try_compiler, "take_memory": _take_memory}

if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
