#!/usr/bin/env python3
"""Write configs/model_families.json: the forward passes of the families whose parameters are
counted, as the installed transformers builds them. Those of other versions stay."""

from __future__ import annotations

import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

# run as a script: launch/ is beside scripts/, so it is imported after this line
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launch.base import files
from launch.predict.model_families import COMMITTED
from launch.predict.parameters import FAMILIES
from training.trace.model_parts import model_parts


def forward_passes() -> dict[str, Any]:
    """The facts on each family's forward pass, by its name."""
    families = {name: model_parts({"model_type": name}).family for name in sorted(FAMILIES)}
    return {name: asdict(family.forward) for name, family in families.items()}


def main() -> None:
    committed = files.read(COMMITTED, dict[str, Any]) or {}
    files.write_json(COMMITTED, {**committed, version("transformers"): forward_passes()})


if __name__ == "__main__":
    main()
