"""Entries of a ledger."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from launch.predict.history import calibration
from launch.predict.history.calibration import Figures, Measurement
from launch.predict.history.ledger import Ledger, Tuned
from launch.schema.plan import Strategy
from tests.builders import CODE

KEYS = {"machine_key": "machine-1", "model_key": "model-1", "recipe_key": "recipe-1"}


def measurement(
    run_id: str = "tiny-1", asked: int | None = 100, took: int | None = 100, **given: Any
) -> Measurement:
    """A run that was predicted to allocate `asked` bytes and took so many."""
    facts: dict[str, Any] = {
        "time": 1.0,
        "run_id": run_id,
        **KEYS,
        "device": "cuda",
        "device_name": "RTX 3080",
        "mode": "single_gpu",
        "num_processes": 1,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 4,
        "max_length": 128,
        "mixed_precision": "bf16",
        "gradient_checkpointing": True,
        "versions": {"torch": "2.9.0"},
        "predicted": Figures(allocated_bytes=asked),
        "measured": Figures(allocated_bytes=took),
    }
    return Measurement(**{**facts, **given})


def tuned(strategy: Strategy, **given: Any) -> Tuned:
    return Tuned(
        **{
            "time": 1.0,
            **KEYS,
            "strategy": strategy,
            "why": "fastest of 3",
            "step_s": 0.5,
            **given,
        }
    )


def residuals(book: Ledger, quantity: Any = "allocated_bytes", device: Any = "cuda") -> list[float]:
    """Oldest first."""
    return [error for _, error in calibration.residuals(book.measurements(), quantity, device)]


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of the file, as another program reads them."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def add(path: Path, text: str) -> None:
    """Append text, as another program may."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(text)


def old_file(path: Path, script: str = (CODE / "tests/data/ledger.sql").read_text("utf-8")) -> Path:
    """The file that an earlier version has written: three measurements, two results of tuning."""
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.with_suffix(".sqlite")
    with closing(sqlite3.connect(old)) as db:
        db.executescript(script)
    return old
