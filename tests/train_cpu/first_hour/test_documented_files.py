"""The files that docs/data.md and docs/models_and_recipes.md show whole are read and trained as a
reader saves them."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path

import pytest

from launch.data.files import folders
from tests import builders

PAGES = ("data.md", "models_and_recipes.md")
# a paragraph that begins with a file's name, and a block that is its content
FILE = re.compile(
    r"^`(\w+\.(?:jsonl?|[ct]sv|txt|py|sh|yaml))`(?:(?!\n\n).)*:\n\n```\w*\n(.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
PROGRAMS = {".py": sys.executable, ".sh": "bash"}  # write files that are no text
MADE = ("rows.parquet", "rows_arrow", "rows.tar", "texts.tar")


def shown() -> dict[str, str]:
    """The files of the pages, by name."""
    pages = [(builders.CODE / "docs" / page).read_text(encoding="utf-8") for page in PAGES]
    found = [match.groups() for page in pages for match in FILE.finditer(page)]
    files = dict(found)
    assert len(files) == len(found), "two files have one name"
    return files


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with every file of the pages, and what its programs make."""
    folder = tmp_path_factory.mktemp("documented")
    for name, content in shown().items():
        (folder / name).write_text(content, encoding="utf-8")
        if program := PROGRAMS.get(Path(name).suffix):
            subprocess.run([program, name], cwd=folder, check=True, timeout=60)
    return folder


def data_files() -> list[str]:
    return [*(name for name in shown() if Path(name).suffix in folders.SUFFIXES), *MADE]


def test_every_type_of_file_that_is_read_is_shown():
    types = {folders.SUFFIXES[Path(name).suffix or ".arrow"] for name in data_files()}
    assert types == set(folders.SUFFIXES.values())


def test_each_shown_file_is_read_and_both_of_its_rows_are_trained(folder):
    names = data_files()
    with chdir(folder):
        done = builders.launch(folder, "show", "my.yaml", f"--data.train_file=[{','.join(names)}]")
    assert done.returncode == 0, done.stderr + done.stdout
    row = re.compile(rf"^{folder}/([^/:]+)(?:/\S+)?:\d+: \d+ tokens, [1-9]\d* with", re.MULTILINE)
    rows = row.findall(done.stdout)
    assert sorted(rows) == sorted(2 * names)
    for trained in ("⟦Paris<|end|>⟧", "⟦1 2 3<|end|>⟧", "⟦yes, no<|end|>⟧", "⟦巴黎<|end|>⟧"):
        assert trained in done.stdout


@pytest.mark.modes
def test_the_shown_recipe_trains_as_it_is_and_its_model_answers(folder):
    with chdir(folder):
        done = builders.launch(folder, "run", "my.yaml")
    assert done.returncode == 0, done.stderr + done.stdout
    chat = [sys.executable, builders.CODE / "scripts/chat.py", folder / "model_save/my"]
    question = "日本的首都是哪里？"
    asked = subprocess.run(
        [*chat, question], capture_output=True, text=True, timeout=120, check=True
    )
    assert asked.stdout == "东京\n"
