"""On the PYTHONPATH of a test: ranks do what PYTHON_FAULTS says, and leave
PYTHON_FAULT_MARKS/<name> each time they do.

PYTHON_FAULTS is JSON: {name: {"module", "attribute", "rank", "when", "times", "do"}}; `do` runs
before the function that the attribute names is called, with its arguments as `args`, where `when`
is true. The product knows nothing of it.
"""

from __future__ import annotations

import importlib.machinery
import itertools
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

FAULTS = json.loads(os.environ.get("PYTHON_FAULTS", "{}"))


class AtImport(importlib.machinery.PathFinder):
    """Changes a module as soon as it has been executed."""

    @classmethod
    def find_spec(
        cls, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        mine = {fault: facts for fault, facts in FAULTS.items() if facts["module"] == name}
        spec = super().find_spec(name, path, target) if mine else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_insert(module: ModuleType) -> None:
            execute(module)
            for fault, facts in mine.items():
                insert(module, fault, facts)

        spec.loader.exec_module = execute_and_insert  # type: ignore[method-assign]
        return spec


def insert(module: ModuleType, fault: str, facts: dict[str, Any]) -> None:
    *owners, last = facts["attribute"].split(".")
    owner: Any = module
    for part in owners:
        owner = getattr(owner, part)
    whole = getattr(owner, last)
    marks = Path(os.environ["PYTHON_FAULT_MARKS"])
    calls = itertools.count()

    def faulty(*args: Any, **kwargs: Any) -> Any:
        is_mine = facts.get("rank") in (None, int(os.environ.get("RANK", "0")))
        done = len(list(marks.glob(f"{fault}.*")))
        is_now = eval(
            facts.get("when", "True"), {"args": args, "call": next(calls), "done": done, "os": os}
        )
        if is_mine and is_now and done < facts.get("times", 1_000_000):
            (marks / f"{fault}.{done}").touch()
            exec(facts["do"], {"args": args, "os": os})
        return whole(*args, **kwargs)

    setattr(owner, last, faulty)


if FAULTS:
    sys.meta_path.insert(0, AtImport)
