"""Single mutations of the code, and whether tests notice them.

Of each folder a seeded draw of positions is changed, one at a time, in a copy of the project. The
unit tests that run the line are run until one fails; a mutation that none of them notices is tried
by the process tests of its folder. What is left is listed: a hole in the tests, or the same program
(EQUIVALENT, which counts as not noticed too).

`make mutants` starts it; it goes on where it was cut off. Needs .cache/mutants."""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import coverage
import parso  # noqa: F401  cosmic_ray.ast imports it in a circle otherwise
from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code

from benchmarks import recording

CODE = recording.CODE
PLACE = CODE / ".cache" / "mutants"
COVERAGE, STORE = PLACE / "coverage", PLACE / "rows.jsonl"
SEED, OF_A_FOLDER = 1, 25
# folder -> the process tests of what unit tests let pass
FOLDERS: Mapping[str, Sequence[str]] = {
    "launch/plan": ("commands/test_cli.py", "commands/test_fit.py"),
    "launch/predict": ("commands/test_fit.py", "commands/test_assumed_facts.py"),
    "launch/queue": ("queue",),
    "launch/supervise": ("supervise", "base"),
    "launch/run_folder": ("commands/test_attach.py", "submit"),
    "training/data": ("data",),
    "training/checkpoints": ("data/test_worker.py",),
    "training/loop": ("data/test_data_worker_memory.py",),
}
GOAL = 0.85  # of each folder
# (file, line of code before the mutation): why the program is the same
EQUIVALENT: Mapping[tuple[str, str], str] = {}
MOST_TESTS = 300  # of a line
LIMIT_S = 300.0  # of one mutation's tests; longer is a hang, which a test would show


class _WithoutTypes(ast.NodeTransformer):
    """Leaves out annotations, which Python does not run."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _code(text: str) -> str:
    return ast.dump(_WithoutTypes().visit(ast.parse(text)))


def _positions(text: str) -> dict[tuple[Any, Any], list[tuple[str, int]]]:
    """(start, end) -> each operator of cosmic-ray there, and its number among the operator's."""
    places = defaultdict(list)
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if operator.arguments():
            continue
        spans = (
            span
            for node in ast_nodes(get_ast(text))
            for span in operator().mutation_positions(node)
        )
        for number, span in enumerate(spans):
            places[span].append((name, number))
    return places


def draw(folder: str) -> Iterator[dict[str, Any]]:
    """Mutations of a folder: positions are drawn first, then one of the changes there, so that
    arithmetic, which has most of them, is not drawn more often than it occurs."""
    rng = random.Random(f"{SEED} {folder}")
    texts = {
        path: path.read_text(encoding="utf-8") for path in sorted((CODE / folder).rglob("*.py"))
    }
    places = [
        (path, span, changes)
        for path, text in texts.items()
        for span, changes in sorted(_positions(text).items())
    ]
    rng.shuffle(places)
    for path, ((line, _), _), changes in places:
        operator, number = rng.choice(sorted(changes))
        text = texts[path]
        mutated = mutate_code(text.encode(), plugins.get_operator(operator)(), number)
        if mutated is None or _code(text) == _code(mutated):
            continue
        pairs = zip(text.splitlines(), mutated.splitlines(), strict=False)
        before, after = next(pair for pair in pairs if pair[0] != pair[1])
        yield {
            **{"folder": folder, "file": path.relative_to(CODE).as_posix(), "line": line},
            **{"operator": operator.partition("/")[2]},
            **{"before": before.strip(), "after": after.strip(), "text": mutated},
        }


def _measure_coverage() -> None:
    """Run the unit tests once, and keep which of them run each line."""
    plain = ("-m", "pytest", "tests/unit", "-q", "-n", "2", "-p", "no:cacheprovider")
    options = *(f"--cov={folder}" for folder in FOLDERS), "--cov-context=test", "--cov-report="
    subprocess.run(
        [sys.executable, *plain, *options],
        cwd=CODE,
        env={**os.environ, "COVERAGE_FILE": str(COVERAGE)},
        check=True,
    )


def _tests_of(row: Mapping[str, Any], data: coverage.CoverageData) -> list[str]:
    """The unit tests that run the line, those of its own module first."""
    contexts = data.contexts_by_lineno(str(CODE / row["file"])).get(row["line"], [])
    names = {context.rpartition("|")[0] or context for context in contexts} - {""}
    stem = Path(row["file"]).stem
    return sorted(names, key=lambda name: (f"test_{stem}.py" not in name, name))[:MOST_TESTS]


def _notices(copy: Path, tests: Sequence[str]) -> bool:
    """True if one of these tests fails, or does not end."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:cov"]
    names = copy / "names.txt"
    names.write_text("\n".join(tests), encoding="utf-8")
    process = subprocess.Popen(
        [*command, f"@{names}"],
        cwd=copy,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(LIMIT_S) != 0
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return True


def _tried(row: dict[str, Any], data: coverage.CoverageData, copy: Path) -> dict[str, Any]:
    """The row of a mutation: who notices it."""
    file, text = copy / row["file"], row.pop("text")
    original, tests = file.read_text(encoding="utf-8"), _tests_of(row, data)
    process_tests = [f"tests/process/{name}" for name in FOLDERS[row["folder"]]]
    file.write_text(text, encoding="utf-8")
    try:
        if tests and _notices(copy, tests):
            noticed = "unit tests"
        else:
            noticed = "process tests" if _notices(copy, process_tests) else ""
    finally:
        file.write_text(original, encoding="utf-8")
    return {**row, "num_unit_tests": len(tests), "noticed": noticed}


def _copy(place: Path) -> Path:
    """A copy of the project, without what git does not track."""
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=CODE, capture_output=True, check=True
    ).stdout.split(b"\0")
    for name in filter(None, map(os.fsdecode, names)):
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes((CODE / name).read_bytes())
        target.chmod((CODE / name).stat().st_mode)
    (place / ".venv").symlink_to(CODE / ".venv")
    return place


def _record(rows: Sequence[Mapping[str, Any]]) -> None:
    lines = []
    for folder in FOLDERS:
        of_folder = [row for row in rows if row["folder"] == folder]
        num_noticed = sum(bool(row["noticed"]) for row in of_folder)
        by_unit = sum(row["noticed"] == "unit tests" for row in of_folder)
        same = sum((row["file"], row["before"]) in EQUIVALENT for row in of_folder)
        share = f"{num_noticed / max(len(of_folder), 1):.0%}"
        lines.append([folder, len(of_folder), num_noticed, by_unit, same, share])
    text = recording.table(
        ["folder", "mutations", "noticed", "by unit tests", "the same program", "share"], lines
    )
    text += "\nNot noticed:\n\n" + recording.table(
        ["place", "before", "after", "unit tests that run it", "why it is the same program"],
        [
            [
                f"{row['file']}:{row['line']}",
                *(f"`{row[key]}`".replace("|", "\\|") for key in ("before", "after")),
                row["num_unit_tests"],
                EQUIVALENT.get((row["file"], row["before"]), ""),
            ]
            for row in rows
            if not row["noticed"]
        ],
    )
    recording.write("mutants", {"seed": SEED, "rows": list(rows)}, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--so-far", action="store_true", help="record the rows that are there")
    parser.add_argument("--count", type=int, default=OF_A_FOLDER, help="mutations of a folder")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in STORE.open()] if STORE.exists() else []
    if not arguments.so_far:
        if not COVERAGE.exists():
            _measure_coverage()
        data = coverage.CoverageData(str(COVERAGE))
        data.read()
        done = {(row["file"], row["line"], row["after"]) for row in rows}
        with tempfile.TemporaryDirectory() as place:
            copy = _copy(Path(place) / "copy")
            for folder in FOLDERS:
                for _, row in zip(range(arguments.count), draw(folder), strict=False):
                    if (row["file"], row["line"], row["after"]) in done:
                        continue
                    row = _tried(row, data, copy)
                    print(row["noticed"] or "NOT NOTICED", row["file"], row["line"], flush=True)
                    rows.append(row)
                    with STORE.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")
    _record(rows)


if __name__ == "__main__":
    main()
