"""Single mutations of the code, and whether tests notice them.

Of each folder a seeded draw of positions is changed, one at a time, in a copy of the project. The
unit tests that run the line are run until one fails, those of its module first; a mutation that
none of them notices is tried by the process tests of its folder. What is left is listed: a
hole in the tests, or the same program (EQUIVALENT, which is not tried and counts as not noticed).

A busy machine can make tests fail or hang as well. A hang is a single test that does not end in
HANG_S, and does without the mutation; before rows are recorded, the tests that noticed them pass in
an unchanged copy.

`make mutants` starts it; it goes on where it was cut off. Needs .cache/mutants."""

from __future__ import annotations

import argparse
import ast
import atexit
import contextlib
import difflib
import fcntl
import hashlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
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
EQUIVALENT: Mapping[tuple[str, str], str] = {
    (
        "launch/plan/candidates.py",
        "return 4",
    ): "only the order counts, and any number above 3 is last",
    ("launch/predict/time/timing.py", "@dataclass(frozen=True)"): "nothing assigns to its fields",
    ("launch/queue/admission.py", "@dataclass(frozen=True)"): "nothing assigns to its fields",
    (
        "launch/queue/leases.py",
        "with files.descriptor(newest, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as file:",
    ): "the flags have no bit in common",
    (
        "launch/supervise/failures.py",
        'crash is None or lost.kind != "network" or "nccl" in lost.proof.lower()',
    ): "of the kinds of consequences network is the last in the alphabet",
    ("training/checkpoints/convert.py", "@staticmethod"): "torch calls it on the class",
    (
        "training/checkpoints/convert.py",
        "return [name for name in parameters if state_names[name] == [_WEIGHT]]",
    ): "safetensors lists names in their order, in which the weight comes last",
    (
        "training/data/tokenise.py",
        'f"{self.part}.arrow" if len(self.units) == 1 else f"{self.part}-{unit:05d}.arrow"',
    ): "a unit is one of at least one",
}
MOST_TESTS = 300  # of a line
HANG_S = 300  # of one test, which takes seconds
_HANGS = " (hangs)"
_OUTPUT = "output.txt"
_SERVER = f"""
import json, os, sys
import hypothesis, pydantic, pytest, torch
from transformers import AutoTokenizer, GPT2LMHeadModel, LlamaForCausalLM, Trainer
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open({_OUTPUT!r}, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = pytest.main(json.loads(line))
        sys.stdout.flush()
        os._exit(status)
    print(pid, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
LIMIT_S = 3600.0  # of one mutation's tests; longer shows nothing


class _WithoutTypes(ast.NodeTransformer):
    """Leaves out annotations, which Python does not run."""

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)


def _changes_code(text: str, mutated: str) -> bool:
    """True if Python reads the mutated text, and as something else."""
    try:
        trees = [_WithoutTypes().visit(ast.parse(code)) for code in (text, mutated)]
    except SyntaxError:
        return False
    return ast.dump(trees[0]) != ast.dump(trees[1])


def _order(*parts: object) -> str:
    """A draw that depends on nothing but these parts: other code may come and go."""
    return hashlib.sha256(repr((SEED, *parts)).encode()).hexdigest()


def _positions(text: str) -> dict[tuple[Any, Any], list[tuple[str, int]]]:
    """(start, end) -> each operator of cosmic-ray there, and its number among the operator's."""
    places = defaultdict(list)
    nodes = list(ast_nodes(get_ast(text)))
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if operator.arguments():
            continue
        spans = (span for node in nodes for span in operator().mutation_positions(node))
        for number, span in enumerate(spans):
            places[span].append((name, number))
    return places


def draw(folder: str) -> Iterator[dict[str, Any]]:
    """Mutations of a folder: positions are drawn first, then one of the changes there, so that
    arithmetic, which has most of them, is not drawn more often than it occurs."""
    places = []
    for path in sorted((CODE / folder).rglob("*.py")):
        text, file = path.read_text(encoding="utf-8"), path.relative_to(CODE).as_posix()
        lines = text.splitlines()
        for ((line, start), (_, end)), changes in sorted(_positions(text).items()):
            before = lines[line - 1]
            place = file, before, lines[:line].count(before), start, end
            places.append((_order(*place), place, line, changes, text))
    for _, place, line, changes, text in sorted(places, key=lambda each: each[0]):
        operator, number = min(changes, key=lambda change: (_order(*place, change[0]), change))
        mutated = mutate_code(text.encode(), plugins.get_operator(operator)(), number)
        if mutated is None or not _changes_code(text, mutated):
            continue
        yield {
            **{"folder": folder, "file": place[0], "line": line},
            **{"operator": operator.partition("/")[2]},
            **_first_change(text, mutated),
            "text": mutated,
        }


def _drawn(folder: str, count: int) -> list[dict[str, Any]]:
    """The first mutations of a folder, which are drawn once for its code of now."""
    code = [path.read_bytes() for path in sorted((CODE / folder).rglob("*.py"))]
    name = hashlib.sha256(repr((SEED, count, code)).encode()).hexdigest()[:16]
    file = PLACE / f"drawn-{name}.json"
    if not file.exists():
        file.write_text(json.dumps(list(itertools.islice(draw(folder), count))), encoding="utf-8")
    return json.loads(file.read_text(encoding="utf-8"))


def _first_change(text: str, mutated: str) -> dict[str, str]:
    lines = [
        line
        for line in difflib.unified_diff(text.splitlines(), mutated.splitlines(), n=0)
        if line[1:].strip() and not line.startswith(("+++", "---", "@@"))
    ]
    return {
        key: next((line[1:].strip() for line in lines if line[0] == sign), "")
        for key, sign in (("before", "-"), ("after", "+"))
    }


def _measure_coverage() -> None:
    """Run the unit tests that are newer than what is known, and keep which of them run each
    line."""
    with (PLACE / "measuring.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # campaigns of other folders need the same
        began, before_s = time.time(), COVERAGE.stat().st_mtime if COVERAGE.exists() else 0.0
        files = sorted((CODE / "tests" / "unit").rglob("test_*.py"))
        newer = [str(file) for file in files if file.stat().st_mtime > before_s]
        if not newer:
            return
        plain = ("-m", "pytest", *newer, "-q", "-n", "2", "-p", "no:cacheprovider")
        options = *(f"--cov={folder}" for folder in FOLDERS), "--cov-context=test", "--cov-report="
        subprocess.run(
            [sys.executable, *plain, *options, *(["--cov-append"] if before_s else [])],
            cwd=CODE,
            env={**os.environ, "COVERAGE_FILE": str(COVERAGE)},
            check=True,
        )
        os.utime(COVERAGE, (began, began))


def _own_tests(row: Mapping[str, Any], copy: Path) -> list[str]:
    """Files of unit tests that bear the module's name, then the others of its folder."""
    module, unit = Path(row["file"]), copy / "tests" / "unit"
    folder = module.parent if module.parts[0] == "training" else Path(*module.parts[1:-1])
    while not (unit / folder).is_dir():
        folder = folder.parent
    paths = sorted(unit.rglob(f"test_{module.stem}.py")) + sorted((unit / folder).glob("test_*.py"))
    return list(dict.fromkeys(path.relative_to(copy).as_posix() for path in paths))


def _tests_of_line(row: Mapping[str, Any], data: coverage.CoverageData) -> list[str]:
    """The unit tests that run the line's statement; of one outside functions, those that run the
    file."""
    line, of_lines = row["line"], data.contexts_by_lineno(str(CODE / row["file"]))
    nodes = [
        node
        for node in ast.walk(ast.parse((CODE / row["file"]).read_text(encoding="utf-8")))
        if isinstance(node, ast.stmt) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    lines: Sequence[int] = list(of_lines)
    functions = ast.FunctionDef | ast.AsyncFunctionDef
    if any(isinstance(node, functions) and node.body[0].lineno <= line for node in nodes):
        statement = max(nodes, key=lambda node: node.lineno)
        body = getattr(statement, "body", None)
        end = body[0].lineno - 1 if body else statement.end_lineno or line
        lines = range(statement.lineno, max(end, line) + 1)
    contexts = {context for line in lines for context in of_lines.get(line, [])}
    return sorted({context.rpartition("|")[0] or context for context in contexts} - {""})


@cache
def _server(copy: Path) -> subprocess.Popen[bytes]:
    """A process in the copy that forks for each run of pytest: imports take most of its seconds."""
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        cwd=copy,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )
    atexit.register(server.kill)
    return server


def _forked_pytest(copy: Path, options: Sequence[str]) -> int:
    """Run pytest in the copy; its exit status, 0 where it takes longer than LIMIT_S."""
    server = _server(copy)
    assert server.stdin and server.stdout
    server.stdin.write(f"{json.dumps(options)}\n".encode())
    pid = int(server.stdout.readline())
    is_over, _, _ = select.select([server.stdout], [], [], LIMIT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    status = int(server.stdout.readline())
    return status if is_over else 0


def _failure(copy: Path, tests: Sequence[str]) -> str:
    """The first of these tests that fails or hangs, "pytest" where it is none of them, or "".
    Raises RuntimeError for tests that there are no more."""
    if not tests:
        return ""
    names, cache, traces = copy / "names.txt", copy / ".failures", Path(".cache/traces-of-tests")
    names.write_text("\n".join(tests), encoding="utf-8")
    for folder in (cache, copy / ".cache"):
        shutil.rmtree(folder, ignore_errors=True)
    if (CODE / traces).exists():  # none that a mutated copy has written
        shutil.copytree(CODE / traces, copy / traces)
    hang = f"faulthandler_timeout={HANG_S}", "faulthandler_exit_on_timeout=true"
    options = [word for each in (f"cache_dir={cache}", *hang) for word in ("-o", each)]
    options += [
        "-x",
        "-v",
        "-p",
        "no:cov",
        "--hypothesis-profile=ci",
        f"--basetemp={copy.parent / 'tests'}",
        f"@{names}",
    ]
    if _forked_pytest(copy, options) == 0:
        return ""
    text = (copy / _OUTPUT).read_text(encoding="utf-8", errors="replace")
    if "ERROR: not found:" in text or "ERROR: file or directory not found:" in text:
        raise RuntimeError(f"tests have gone; remove {COVERAGE}\n{text[-2000:]}")
    failed = cache / "v" / "cache" / "lastfailed"
    if failed.exists():
        return next(iter(json.loads(failed.read_text(encoding="utf-8"))))
    started = [line for line in text.splitlines() if line.startswith("tests/")]
    return f"{started[-1].partition(' Timeout (')[0].strip()}{_HANGS}" if started else "pytest"


def _failure_of(row: Mapping[str, Any], copy: Path, tests: Sequence[str]) -> str:
    """The first of these tests that notices the mutation, or "". Raises RuntimeError where a test
    hangs without the mutation too."""
    file = copy / row["file"]
    original = file.read_text(encoding="utf-8")
    file.write_text(row["text"], encoding="utf-8")
    try:
        failed = _failure(copy, tests)
    finally:
        file.write_text(original, encoding="utf-8")
        for compiled in file.parent.glob(f"__pycache__/{file.stem}.*"):
            compiled.unlink()  # may be of the same second and size as the original
    if failed.endswith(_HANGS) and _failure(copy, [failed.removesuffix(_HANGS)]):
        raise RuntimeError(f"{failed} without a mutation too: this machine is too busy")
    return failed


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
                row.get("num_unit_tests", 0),
                EQUIVALENT.get((row["file"], row["before"]), ""),
            ]
            for row in rows
            if not row["noticed"]
        ],
    )
    recording.write("mutants", {"seed": SEED, "rows": list(rows)}, text)


def _stored() -> list[dict[str, Any]]:
    return [json.loads(line) for line in STORE.open()] if STORE.exists() else []


def _key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return row["file"], str(row["line"]), row["before"], row["after"]


def _run(drawn: Sequence[dict[str, Any]], copy: Path, *, all_stages: bool) -> None:
    """Try the mutations that are not stored yet: unit tests first, on all of them."""
    stored = {_key(row) for row in _stored()}
    left = [row for row in drawn if _key(row) not in stored]
    _measure_coverage()
    data = coverage.CoverageData(str(COVERAGE))
    data.read()
    for stage in ("unit tests", *(("process tests",) if all_stages else ())):
        remaining = []
        for row in left:
            if stage == "unit tests":
                own = {file: number for number, file in enumerate(_own_tests(row, copy))}
                tests = _tests_of_line(row, data)
                row["num_unit_tests"] = len(tests)
                tests.sort(key=lambda test: own.get(test.partition("::")[0], len(own)))
                del tests[MOST_TESTS:]
            else:
                tests = [f"tests/process/{name}" for name in FOLDERS[row["folder"]]]
            if (row["file"], row["before"]) in EQUIVALENT:
                tests = []
            if test := _failure_of(row, copy, tests):
                _store({**row, "noticed": stage, "test": test})
            elif stage == "process tests":
                _store({**row, "noticed": "", "test": ""})
            else:
                remaining.append(row)
            print(stage, test or "NOT NOTICED", *_key(row), sep=" | ", flush=True)
        left = remaining


def _store(row: Mapping[str, Any]) -> None:
    with STORE.open("a", encoding="utf-8") as file:
        file.write(json.dumps({key: row[key] for key in row if key != "text"}) + "\n")


def _check(rows: Sequence[Mapping[str, Any]], copy: Path) -> None:
    """Raise RuntimeError if a test that noticed a mutation fails without it too."""
    tests = sorted({row["test"].removesuffix(_HANGS) for row in rows} - {"", "pytest"})
    if failed := _failure(copy, tests):
        raise RuntimeError(
            f"{failed} fails without a mutation too: remove its rows from {STORE}, then start again"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="*", help="folders to try; only all of them are recorded")
    parser.add_argument("--so-far", action="store_true", help="record the rows that are there")
    parser.add_argument("--count", type=int, default=OF_A_FOLDER, help="mutations of a folder")
    parser.add_argument("--unit", action="store_true", help="try unit tests only; record nothing")
    parser.add_argument("--again", action="store_true", help="try again what nothing noticed")
    arguments = parser.parse_args()
    if arguments.again:
        noticed = [row for row in _stored() if row["noticed"]]
        STORE.unlink(missing_ok=True)
        for row in noticed:
            _store(row)
    drawn = [
        row for folder in arguments.folders or FOLDERS for row in _drawn(folder, arguments.count)
    ]
    with tempfile.TemporaryDirectory() as place:
        copy = _copy(Path(place) / "copy")
        if not arguments.so_far:
            _run(drawn, copy, all_stages=not arguments.unit)
        if not arguments.folders and not arguments.unit:
            keys = {_key(row) for row in drawn}
            rows = [row for row in _stored() if _key(row) in keys]
            _check(rows, copy)
            _record(rows)


if __name__ == "__main__":
    main()
