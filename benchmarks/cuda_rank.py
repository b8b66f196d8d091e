"""train_low_mem.py with the peaks of PyTorch's CUDA allocator for each part of the run; for
cuda_build_memory.py.

Writes memory-<rank>.json into the attempt's folder: for each section (load, each optimizer step,
evaluation, save) the most bytes allocated and reserved within it.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

import train_low_mem
from training import run
from training.loop.trainer import LowMemTrainer

sections: list[dict[str, Any]] = [{"name": "load"}]


def mark(name: str) -> None:
    """Close the section that runs and begin another."""
    sections[-1] |= {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
    }
    torch.cuda.reset_peak_memory_stats()
    sections.append({"name": name})


class Marks(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        mark(f"step {state.global_step + 1}")

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        mark("after a step")


class Phased(LowMemTrainer):
    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        mark("evaluation")
        metrics = super().evaluate(*args, **kwargs)
        mark("after an evaluation")
        return metrics

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        mark("save")
        super()._save_checkpoint(*args, **kwargs)
        mark("after a save")


if __name__ == "__main__":
    run.LowMemTrainer = Phased  # type: ignore[misc]  run.py makes the one it finds under this name
    build = run.build_parts

    def marked(*args: Any) -> run.Parts:
        parts = build(*args)
        parts.trainer.add_callback(Marks())
        return parts

    run.build_parts = marked
    attempt = Path(sys.argv[sys.argv.index("--run-dir") + 1]) / "attempts" / "01"
    status = train_low_mem.main(sys.argv[1:])
    mark("")
    content = json.dumps(sections[:-1])
    (attempt / f"memory-{os.environ.get('RANK', '0')}.json").write_text(content, encoding="utf-8")
    train_low_mem.leave(status)
