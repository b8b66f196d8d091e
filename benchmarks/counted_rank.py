"""train_low_mem.py with every byte of the CPU allocator counted (allocator.c is preloaded); for
cpu_memory.py.

Writes allocator-<rank>.json into the attempt's folder: for each section of the run (load, each
optimizer step, evaluation, save) the bytes held when it began and the most held within it. Weights
that the model still reads from a mapped file are added: the allocator never sees them, and each
becomes private memory when it is updated. Beside them, in trained.pt, the row with which the export
is compared, and its logits.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import train_low_mem
from tests.modes import fsdp_on_cpu
from training import run
from training.loop import export_check
from training.loop.trainer import LowMemTrainer

counter = ctypes.CDLL(None)
counter.lowmem_mark.restype = ctypes.c_int64
counter.lowmem_holds.argtypes = [ctypes.c_void_p]
sections: list[dict[str, Any]] = [{"name": "load", "begin_bytes": 0}]
networks: list[torch.nn.Module] = []  # the model, once it is built


def mapped_bytes() -> int:
    """Bytes of the model's tensors that the allocator does not hold: still in the file they were
    loaded from."""
    tensors = [one for network in networks for one in (*network.parameters(), *network.buffers())]
    local = [one.to_local() if hasattr(one, "to_local") else one for one in tensors]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in local}
    return sum(
        size for pointer, size in storages.items() if pointer and not counter.lowmem_holds(pointer)
    )


def mark(name: str) -> None:
    """Close the section that runs and begin another."""
    now, mapped = ctypes.c_int64(), mapped_bytes()
    sections[-1]["peak_bytes"] = counter.lowmem_mark(ctypes.byref(now)) + (
        mapped if len(sections) > 1 else 0
    )
    sections.append({"name": name, "begin_bytes": now.value + mapped})


class Marks(TrainerCallback):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        mark("train")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mark(f"step {state.global_step + 1}")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mark(f"after {state.global_step}")

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        mark("end")


class Phased(LowMemTrainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        mark("evaluation")
        return super().evaluate(*args, **kwargs)

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        mark("save")
        super()._save_checkpoint(*args, **kwargs)


if __name__ == "__main__":
    if os.environ.get("ACCELERATE_USE_FSDP") == "true":
        fsdp_on_cpu.engage_fsdp()
    run.LowMemTrainer = Phased  # type: ignore[misc]  run.py makes the one it finds under this name
    build = run.build_parts

    def marked(*args: Any) -> run.Parts:
        parts = build(*args)
        networks.append(parts.trainer.model)
        parts.trainer.add_callback(Marks())
        return parts

    run.build_parts = marked
    attempt = Path(sys.argv[sys.argv.index("--run-dir") + 1]) / "attempts" / "01"
    compared = export_check.trained

    def recorded(*args: Any) -> export_check.Trained:
        trained = compared(*args)
        if os.environ.get("RANK", "0") == "0":
            torch.save((dict(trained.rows.inputs), trained.logits), attempt / "trained.pt")
        return trained

    export_check.trained = recorded
    status = train_low_mem.main(sys.argv[1:])
    mark("")
    (attempt / f"allocator-{os.environ.get('RANK', '0')}.json").write_text(
        json.dumps(sections[:-1])
    )
    sys.exit(status)
