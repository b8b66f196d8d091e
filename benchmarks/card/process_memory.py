"""Host memory and bytes of the card that a process on a card has, library by library: a child that
prints a row after each step. Run as a module it is the child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.card.rows import Row, attempted

CODE = Path(__file__).resolve().parents[2]
FIELDS = {"Pss": "pss_bytes", "Anonymous": "anonymous_bytes", "Rss": "rss_bytes"}
LIMIT_S = 30.0


def host_memory(pid: int | str = "self") -> dict[str, int]:
    """PSS, anonymous and resident bytes of a process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines[1:]}
    return {name: sizes[field] for field, name in FIELDS.items() if field in sizes}


def card_memory() -> dict[str, int]:
    """Bytes in use on the card, all processes', once this one has a context there."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"card_bytes": total - free, "torch_bytes": torch.cuda.memory_reserved()}


def import_torch() -> None:
    import_module("torch")


def make_context() -> None:
    import torch

    torch.zeros(1, device="cuda")
    torch.cuda.synchronize()


def product(dtype: str) -> Callable[[], None]:
    def run() -> None:
        import torch

        x = torch.ones(256, 256, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
        torch.nn.functional.linear(x, x).sum().backward()
        torch.cuda.synchronize()

    return run


def attend(kernel: str) -> Callable[[], None]:
    def run() -> None:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q = torch.ones(1, 2, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        with sdpa_kernel(getattr(SDPBackend, kernel)):
            out = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        out.sum().backward()
        torch.cuda.synchronize()

    return run


def kernels_of_a_step() -> None:
    """Kernels of a model's other layers, whose modules the driver loads when they are used."""
    import torch

    x = torch.ones(64, 64, device="cuda", requires_grad=True)
    ids = torch.arange(64, device="cuda")
    functional = torch.nn.functional
    y = functional.layer_norm(functional.silu(x.to(torch.bfloat16)).float(), (64,))
    functional.cross_entropy(torch.cat((y, torch.sin(y)), 1), ids).backward()
    parameter = torch.nn.Parameter(x.detach().clone())
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()
    torch.cuda.synchronize()


def use_triton() -> None:
    import torch

    from benchmarks.card import triton_kernel

    triton_kernel.small_launch(torch.ones(8, device="cuda"))(None)
    torch.cuda.synchronize()


def use_bitsandbytes() -> None:
    import torch

    functional = import_module("bitsandbytes").functional
    packed = functional.quantize_4bit(torch.ones(64, 64, device="cuda"), quant_type="nf4")
    functional.dequantize_4bit(*packed)
    torch.cuda.synchronize()


def import_transformers() -> None:
    import_module("transformers.models.qwen2.modeling_qwen2")
    import_module("transformers.trainer")


def pin() -> None:
    import torch

    torch.ones(1 << 20).pin_memory()


STEPS: tuple[tuple[str, bool, Callable[[], object]], ...] = (
    # name, whether it needs a card
    ("start", False, lambda: None),
    ("import torch", False, import_torch),
    ("CUDA context", True, make_context),
    ("product float32", True, product("float32")),
    ("product bfloat16", True, product("bfloat16")),
    ("flash attention", True, attend("FLASH_ATTENTION")),
    ("efficient attention", True, attend("EFFICIENT_ATTENTION")),
    ("cuDNN attention", True, attend("CUDNN_ATTENTION")),
    ("kernels of a step", True, kernels_of_a_step),
    ("pinned 4 MiB", True, pin),
    ("Triton launch", True, use_triton),
    ("bitsandbytes", True, use_bitsandbytes),
    ("import transformers", False, import_transformers),
)


def step_row(name: str, run: Callable[[], object]) -> Row:
    def measure() -> Row:
        began = time.perf_counter()
        run()
        return {"s": time.perf_counter() - began, **host_memory(), **card_memory()}

    return attempted({"case": name}, measure)


def worker_row(count: int) -> Row:
    """Data workers, forked once all of the above is loaded: what each has of its own."""

    def measure() -> Row:
        import torch

        began = time.perf_counter()
        loader = torch.utils.data.DataLoader(list(range(64)), batch_size=4, num_workers=count)
        batches: Any = iter(loader)
        next(batches)
        seconds = time.perf_counter() - began
        children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        workers = [host_memory(pid) for pid in children]
        return {"s": seconds, **host_memory(), **card_memory(), "workers": workers}

    return attempted({"case": f"{count} data workers"}, measure)


def has_card() -> bool:
    """Asked once torch is imported."""
    return sys.modules["torch"].cuda.is_available()


def child() -> None:
    for name, needs_card, run in STEPS:
        if not needs_card or has_card():
            print(json.dumps(step_row(name, run)), flush=True)
    print(json.dumps(worker_row(2)), flush=True)


def measure() -> Iterator[Row]:
    """Rows of a fresh child, as they come. A parent that has not imported torch shares none of its
    libraries, so that the child's PSS is what a training alone has."""
    argv = [sys.executable, "-m", "benchmarks.card.process_memory"]
    path = os.pathsep.join(filter(None, [str(CODE), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path}
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=said, text=True, env=env)
        try:
            assert process.stdout
            for line in process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
            code = process.wait(LIMIT_S)
            if code:
                said.seek(0)
                error = f"exit code {code}: {said.read()[-300:]}"
                yield {"case": "end of the child", "error": error}
        finally:
            process.kill()
            process.wait()


if __name__ == "__main__":
    child()
