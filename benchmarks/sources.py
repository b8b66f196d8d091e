"""The code that the results of the CUDA build speak of, and a check that they are of today's code.

A row of results/cuda_build_memory.json and cuda_build_modes.json names hashes of its sources: of
what was measured, and of what was predicted beside it. Where the code has changed since, the
figures are doubtful: `make check` runs this module, which then fails and names the command that
makes them again; where only predictions have changed, the command predicts and measures nothing.
Comments, docstrings, layout, texts of errors and `from __future__` are not in the hash.

ENGINES decides what a mode starts, saves and reads back: the driver without a card, the engines,
the private names of the libraries, and the files that Accelerate and DeepSpeed read. PREDICTION
decides the predicted bytes: the traces, the states of a mode and of an optimizer, the replay of the
allocator. Not in them: private names of Python, which data workers need; the loop, the checkpoints
and the model, which the tests of CPUs and `make test-cuda-build` run too; host RAM, seconds, rows,
supervision and reports, on which no figure depends; the choice of a plan, since the cases name
mode, batch and attention; versions of packages, which a result names itself.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
OF_STEPS = ("accelerate", "bitsandbytes", "deepspeed", "torch", "transformers")
ENGINES = (
    *("tests/fake_cuda", "training/engines"),
    *(f"training/compat/{library}_private.py" for library in OF_STEPS),
    *("launch/schema/modes.py", "launch/render/accelerate.py", "launch/render/deepspeed.py"),
)
PREDICTION = (
    *("training/trace", "training/compat/fake_private.py"),
    *("launch/predict/step", "launch/schema/recorded_step.py"),
    *("launch/predict/estimate.py", "launch/predict/facts.py"),
    *("launch/predict/budgets.py", "launch/predict/sharding.py"),
    *("launch/predict/optimizers.py", "launch/predict/parameters.py", "launch/predict/traces.py"),
    *("launch/predict/trained_parameters.py", "launch/predict/memory/allocator.py"),
    *("launch/predict/memory/allocator_config.py", "launch/predict/memory/phases.py"),
    *("launch/predict/memory/partial_sums.py", "launch/predict/memory/loading.py"),
    *("launch/predict/memory/traced_steps.py", "launch/predict/target_counts.py"),
    *("training/data/largest_batches.py", "training/data/sample_order.py"),
)
_RUNS = ("launch/supervise", "launch/run_folder", "training/checkpoints", "training/run.py")
# results of a campaign -> the code that they speak of, and the command that makes them again
CAMPAIGNS: dict[str, tuple[tuple[str, ...], str]] = {
    "modes": ((*_RUNS, "training/engines"), "make modes"),
    "kills": (_RUNS, "make kills"),
    "kills_by_mode": (_RUNS, "make kills"),
    "stops": ((*_RUNS, "training/control"), "python -m benchmarks.stops"),
    "fuzz": (("launch/plan", "launch/recipe", "launch/schema"), "make fuzz"),
    "families": (("training/model", "training/levers", "launch/predict"), "make families"),
    "exports": (("training/loop/exported_files.py", "training/model"), "make test-exports"),
    "cpu_memory": (("launch/predict/memory", "training/loop"), "python -m benchmarks.cpu_memory"),
    "host_edge": (("launch/predict/memory", "training/model"), "python -m benchmarks.host_edge"),
}
MOST_COMMITS = 50  # to that code, before results are called old
SUFFIXES = (".py", ".c", ".h")
MEASURED, PREDICTED = "sources", "prediction_sources"  # keys of a row
# results -> the sources of each key; make cuda-build-memory and make cuda-build-modes make them
# again
GUARDED: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda_build_memory": {MEASURED: ENGINES, PREDICTED: (*ENGINES, *PREDICTION)},
    "cuda_build_modes": {MEASURED: ENGINES},
}
# text in quotes, which stays, or a comment
C_PARTS = re.compile(r'("(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\')|//[^\n]*|/\*.*?\*/', re.DOTALL)


def digests(name: str, root: Path = ROOT) -> dict[str, str]:
    """The keys and hashes of a row of results that is made now, below a copy of the project."""
    hashes: dict[str, str] = {}
    for key, named in GUARDED[name].items():
        whole_hash = hashlib.sha256()
        for path in files(named, root):
            text = path.read_text(encoding="utf-8")
            content = of_python(text) if path.suffix == ".py" else of_c(text)
            whole_hash.update(f"{path.relative_to(root).as_posix()}\0{content}\0".encode())
        hashes[key] = whole_hash.hexdigest()[:16]
    return hashes


def files(named: Sequence[str], root: Path = ROOT) -> list[Path]:
    """Every file that sources name or contain. Raises FileNotFoundError for a name without
    code."""
    paths: list[Path] = []
    for source in named:
        path = root / source
        inside = [path] if path.is_file() else sorted(path.rglob("*"))
        code = [each for each in inside if each.suffix in SUFFIXES]
        if not code:
            raise FileNotFoundError(f"{source}: no code there; correct GUARDED in {__file__}")
        paths += code
    return paths


def of_python(text: str) -> str:
    """The code without comments, docstrings, layout, texts of errors and `from __future__`; the
    same in each version of Python."""
    return "".join(_node(ast.parse(text)))


def _node(value: Any) -> Iterator[str]:
    """A node of a syntax tree as text, without fields that are empty: newer versions add some."""
    if isinstance(value, list):
        for each in value:
            if not (isinstance(each, ast.ImportFrom) and each.module == "__future__"):
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


def problem(name: str, current: Mapping[str, str], results: Path = RESULTS) -> str:
    """The line on results that were made with other sources; "" if there are none."""
    file = results / f"{name}.json"
    if not file.exists():
        return ""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    if not any(MEASURED in row for row in rows):
        print(f"{file.parent.name}/{file.name}: NOT CHECKED: no row names the code that made it")
        return ""
    stale = sum(any(row.get(key) != current[key] for key in current) for row in rows)
    if not stale:
        return ""
    return (
        f"{file.parent.name}/{file.name}: {stale} of {len(rows)} rows were made with other code"
        f" than today's (benchmarks/sources.py); make {name.replace('_', '-')} makes them again"
    )


def old_results(name: str) -> str:
    """The line on results of a campaign whose code many commits have changed since; "" if few
    have, or where there is no history."""
    file, (paths, command) = RESULTS / f"{name}.json", CAMPAIGNS[name]
    if not file.exists():
        return ""
    made = json.loads(file.read_text(encoding="utf-8"))
    # older results do not name their commit
    commit = made.get("commit", "").rstrip("+") or _git("log", "-1", "--format=%h", "--", str(file))
    count = _git("rev-list", "--count", f"{commit}..HEAD", "--", *paths) if commit else ""
    if not count or int(count) <= MOST_COMMITS:
        return ""
    return (
        f"{file.parent.name}/{file.name}: of {made.get('date', commit)}, and {count} commits have"
        f" changed its code since ({', '.join(paths)}); {command} makes it again"
    )


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return ""
    return done.stdout.strip() if not done.returncode else ""


def main() -> int:
    for line in filter(None, map(old_results, CAMPAIGNS)):
        print(f"old: {line}")
    problems = [line for name in GUARDED if (line := problem(name, digests(name)))]
    for line in problems:
        print(f"error: {line}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
