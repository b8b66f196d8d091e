"""Measure the memory of a process before it has work: `python -m training.children.import_memory
ROLE`.

Imports the modules of that process and prints a line of JSON: private bytes, and bytes of mapped
files, which are shared.
"""

import argparse
import importlib
import json
import re
from pathlib import Path
from typing import Any

from launch.base import modules
from training.compat import without_torch

ROLES = {
    "launcher": (
        "launch.plan.resolve",
        "launch.supervise.attempt",
        "launch.supervise.screen",
        "pyarrow.parquet",
    ),
    "agent": ("accelerate.commands.launch", "torch.distributed.run"),
    "prepare": ("training.data.prepare", "training.data.tokenise", "tokenizers"),
    "rank": ("training.run", "torch.utils.tensorboard"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=ROLES)
    parser.add_argument("--without", nargs="*", default=[], help="packages that the run leaves out")
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where the rank computes"
    )
    arguments = parser.parse_args()
    modules.leave_out(arguments.without)
    if arguments.role == "prepare":
        without_torch.hide()
    for module in ROLES[arguments.role]:
        importlib.import_module(module)
    context = {}
    if arguments.role == "rank":
        free_before = _free_bytes() if arguments.device == "cuda" else {}
        _first_step(arguments.device)
        context = _context(free_before)
    print(json.dumps(memory_bytes() | context))


def _free_bytes() -> dict[str, tuple[str, int]]:
    """Name and free bytes of each NVIDIA card by its UUID, read without a context; {} on a machine
    without their driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return {}
    return {
        str(pynvml.nvmlDeviceGetUUID(card)): (
            str(pynvml.nvmlDeviceGetName(card)),
            int(pynvml.nvmlDeviceGetMemoryInfo(card).free),
        )
        for card in map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    }


def _context(free_before: dict[str, tuple[str, int]]) -> dict[str, Any]:
    """Bytes that this process takes of its card outside torch's allocator, and the card's name; 0:
    not known. What other programs take or give back meanwhile is in it."""
    import torch

    uuid = f"GPU-{torch.cuda.get_device_properties(0).uuid}" if free_before else ""
    if uuid not in free_before:
        return {"context_bytes": 0, "context_card": ""}
    name, free = free_before[uuid]
    context_bytes = free - _free_bytes()[uuid][1] - torch.cuda.memory_reserved(0)
    return {"context_bytes": max(context_bytes, 0), "context_card": name}


def _first_step(device: str) -> None:
    """Take a first step, which starts threads, loads the pages of kernels, and on a GPU makes the
    context."""
    import torch

    layer = torch.nn.Linear(64, 64, device=device)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True)
    torch.nn.functional.cross_entropy(
        layer(torch.ones(64, 64, device=device)), torch.ones(64, device=device).long()
    ).backward()
    optimizer.step()
    if device == "cuda":
        _train()


def _train() -> None:
    """Take two steps of a small Llama in 16 bits, as a rank does, from pinned batches that a data
    worker makes: on a card the driver and the libraries load a kernel, and the host the pages that
    it lies in, when it is first used."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    half = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    rows = torch.utils.data.TensorDataset(torch.ones(8, 256, dtype=torch.long))
    for (batch,) in torch.utils.data.DataLoader(rows, 4, num_workers=1, pin_memory=True):
        batch = batch.to("cuda", non_blocking=True)
        with torch.autocast("cuda", half):
            model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def memory_bytes() -> dict[str, int]:
    """Measure this process. Shared memory of a driver is used by this process alone and counts as
    private."""
    rows = re.findall(r"^(\w+): +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.M)
    sizes = {name: int(kib) * 1024 for name, kib in rows}
    mapped = sizes["Rss"] - sizes["Anonymous"] - sizes.get("Pss_Shmem", 0)
    return {"private_bytes": sizes["Rss"] - mapped, "mapped_bytes": mapped}


if __name__ == "__main__":
    main()
