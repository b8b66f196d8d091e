"""The command of an installed package: `lowmem VERB` is `python -m launch VERB`.

Its name is its own: ROS 2 has a package `launch` too, whose folder may come first (PYTHONPATH)."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    runpy.run_module("launch", run_name="__main__")
