"""The code that the results of the CUDA build speak of, and a check that they are of today's code.

A row of results/cuda_build_memory.json and cuda_build_modes.json names a hash of SOURCES. Where the
code has changed since, its figures are doubtful: `make check` runs this module, which then fails
and names the command that makes them again. Comments, docstrings, layout and texts of errors are
not in the hash.

SOURCES is what decides the bytes of a card, or what a mode saves and reads back:
- the driver without a card, whose counters are the measurement
- training/: the model, the loop, the engines, the checkpoints, the libraries' private names, the
  padding of batches; and trace/, which makes the predictions
- launch/: the states of a mode and of an optimizer, the replay of the allocator, and the files that
  Accelerate and DeepSpeed read
Not in it: host RAM, seconds, rows and tokenising, supervision and reports, on which no figure
depends; the choice of a plan, since the cases name mode and batch; versions of packages, which a
result names itself.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
SOURCES = (
    *("tests/fake_cuda",),
    *("training/run.py", "training/data/batches.py", "training/loop", "training/model"),
    *("training/engines", "training/checkpoints", "training/compat", "training/trace"),
    *("launch/schema/modes.py", "launch/render/accelerate.py", "launch/render/deepspeed.py"),
    *("launch/predict/estimate.py", "launch/predict/sharding.py", "launch/predict/optimizers.py"),
    *("launch/predict/parameters.py", "launch/predict/trained_parameters.py"),
    *("launch/predict/traces.py", "launch/predict/memory/allocator.py"),
    *("launch/predict/memory/allocator_config.py", "launch/predict/memory/phases.py"),
)
SUFFIXES = (".py", ".c", ".h")
# results -> the command that makes them again
GUARDED = {
    "cuda_build_memory": "make cuda-build-memory",
    "cuda_build_modes": "make cuda-build-modes",
}
KEY = "sources"  # of a row
# text in quotes, which stays, or a comment
C_PARTS = re.compile(r'("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')|//[^\n]*|/\*.*?\*/', re.DOTALL)


def digest(root: Path = ROOT) -> str:
    """The hash of all sources below a copy of the project."""
    whole_hash = hashlib.sha256()
    for path in files(root):
        text = path.read_text(encoding="utf-8")
        content = of_python(text) if path.suffix == ".py" else of_c(text)
        whole_hash.update(f"{path.relative_to(root).as_posix()}\0{content}\0".encode())
    return whole_hash.hexdigest()[:16]


def files(root: Path = ROOT) -> list[Path]:
    """Every file that SOURCES names or contains. Raises FileNotFoundError for a name without
    code."""
    paths: list[Path] = []
    for name in SOURCES:
        path = root / name
        inside = [path] if path.is_file() else sorted(path.rglob("*"))
        code = [each for each in inside if each.suffix in SUFFIXES]
        if not code:
            raise FileNotFoundError(f"{name}: no code there; correct SOURCES in {__file__}")
        paths += code
    return paths


def of_python(text: str) -> str:
    """The code without comments, docstrings, layout and texts of errors; the same in each version
    of Python."""
    return "".join(_node(ast.parse(text)))


def _node(value: Any) -> Iterator[str]:
    """A node of a syntax tree as text, without fields that are empty: newer versions add some."""
    if isinstance(value, list):
        for each in value:
            yield from _node(each)
            yield ","
    elif isinstance(value, ast.Raise) and isinstance(value.exc, ast.Call):
        yield "Raise("
        yield from _node(value.exc.func)
        yield ")"
    elif isinstance(value, ast.AST):
        yield f"{type(value).__name__}("
        for name, field in ast.iter_fields(value):
            if name == "body" and isinstance(value, ast.Module | ast.ClassDef | _FUNCTIONS):
                field = field[1:] if ast.get_docstring(value, clean=False) is not None else field
            if field not in (None, []) and name not in ("kind", "type_comment"):
                yield f"{name}="
                yield from _node(field)
        yield ")"
    else:
        yield repr(value)


_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def of_c(text: str) -> str:
    """The code without comments; runs of blanks are one, blank lines none."""
    code = C_PARTS.sub(lambda match: match[1] or " ", text)
    lines = (" ".join(line.split()) for line in code.splitlines())
    return "\n".join(line for line in lines if line)


def problem(name: str, current: str, results: Path = RESULTS) -> str:
    """The line on results that were made with other sources; "" if there are none."""
    file = results / f"{name}.json"
    if not file.exists():
        return ""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    if not any(KEY in row for row in rows):
        print(f"{file.parent.name}/{file.name}: NOT CHECKED: no row names the code that made it")
        return ""
    stale = sum(row.get(KEY) != current for row in rows)
    if not stale:
        return ""
    return (
        f"{file.parent.name}/{file.name}: {stale} of {len(rows)} rows were made with other code"
        f" than today's (SOURCES in benchmarks/sources.py); {GUARDED[name]} makes them again"
    )


def main() -> int:
    current = digest()
    problems = [line for name in GUARDED if (line := problem(name, current))]
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
