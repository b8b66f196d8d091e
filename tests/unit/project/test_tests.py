"""Rules for the tests themselves: they read public names only, inject faults that exist, and
have no time limits that a busy machine breaks."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRODUCT = ("launch", "training")
CLOCKS = ("monotonic", "perf_counter", "process_time", "time")
MIN_LIMIT_S = 60  # a shorter limit fails on a busy machine


def sources(*folders: str) -> list[Path]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 20, f"{folders}: {len(paths)} modules; the search does not go down"
    return paths


def path_name(source: Path) -> str:
    return source.relative_to(ROOT).as_posix()


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def private_names(source: Path) -> Iterator[str]:
    """Private names of launch/ and training/ that another module imports or reads."""
    tree = ast.parse(source.read_text(encoding="utf-8"))
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in PRODUCT:
            for alias in node.names:
                modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if is_private(alias.name):
                    yield f"{node.lineno}: {node.module}.{alias.name}"
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in modules
            and is_private(node.attr)
        ):
            yield f"{node.lineno}: {modules[node.value.id]}.{node.attr}"


def test_no_module_reads_private_names_of_another():
    problems = {
        path_name(source): names
        for source in sources(*PRODUCT, "tests", "benchmarks", "scripts")
        if (names := list(private_names(source)))
    }
    assert problems == {}


def faults() -> list[tuple[str, str]]:
    """(module, attribute) of every fault that a test injects."""
    named = set()
    texts = (source.read_text(encoding="utf-8") for source in sources("tests"))
    for text in (text for text in texts if '"attribute"' in text):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Dict):
                pairs = {
                    key.value: value.value
                    for key, value in zip(node.keys, node.values, strict=True)
                    if isinstance(key, ast.Constant) and isinstance(value, ast.Constant)
                }
                if {"module", "attribute"} <= pairs.keys():
                    named.add((str(pairs["module"]), str(pairs["attribute"])))
    return sorted(named)


def names_of(statement: ast.stmt) -> set[str]:
    """Names that a statement of a module or class defines or imports."""
    if isinstance(statement, ast.ImportFrom):
        return {alias.asname or alias.name for alias in statement.names}
    return {statement.name} if isinstance(statement, ast.FunctionDef | ast.ClassDef) else set()


@pytest.mark.parametrize(("module", "attribute"), faults())
def test_every_fault_names_a_function_that_is_defined(module, attribute):
    """A fault that names no function would end every rank of its test in another way."""
    source = (ROOT / module.replace(".", "/")).with_suffix(".py")
    scope: list[ast.stmt] = ast.parse(source.read_text(encoding="utf-8")).body
    for name in attribute.split("."):
        (definition,) = (node for node in scope if name in names_of(node))
        scope = definition.body if isinstance(definition, ast.ClassDef) else []


def short_limits(tree: ast.Module) -> Iterator[ast.AST]:
    """Assertions that little time has passed (`assert clock() - began < 2`), short `timeout=`s."""
    for node in ast.walk(tree):
        match node:
            case ast.Compare(
                left=ast.BinOp(left=ast.Call(func=ast.Attribute(attr=clock)), op=ast.Sub()),
                ops=[ast.Lt() | ast.LtE()],
                comparators=[limit],
            ) if clock in CLOCKS:
                if not (isinstance(limit, ast.Constant) and limit.value >= MIN_LIMIT_S):
                    yield node
            case ast.keyword(arg="timeout", value=ast.Constant(value=limit_s)):
                if limit_s < MIN_LIMIT_S:
                    yield node


def test_no_fast_test_depends_on_the_speed_of_the_machine():
    problems = {}
    for source in sources("tests/unit", "tests/process"):
        tree = ast.parse(source.read_text(encoding="utf-8"))
        limits = [ast.unparse(node) for node in short_limits(tree)]
        if limits:
            problems[path_name(source)] = limits
    assert problems == {"tests/process/supervise/test_hosts.py": ["timeout=0.5"]}, (
        "a connection that cannot be made may be given up early"
    )
