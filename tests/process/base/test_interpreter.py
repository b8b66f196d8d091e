"""The guides' `python3 scripts/train.py` with a python3 that has none of the packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.builders import CODE

GUIDE = "from config.training_config import get_medium_config; get_medium_config()"


@pytest.fixture(scope="module")
def bare(tmp_path_factory) -> Path:
    """A Python without packages."""
    folder = tmp_path_factory.mktemp("bare") / "a 'python'"
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def run(python: Path, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
    variables = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, **env}
    return subprocess.run(
        [python, *words], env=variables, cwd=CODE, capture_output=True, text=True, timeout=60
    )


def test_the_entry_goes_on_with_the_python_that_has_them_and_the_same_words(bare):
    done = run(bare, str(CODE / "scripts" / "train.py"), "--mode", "$(touch pwned) pretran")
    assert (
        "lacks torch, transformers, accelerate, pydantic, yaml, psutil, rich, pyarrow; going on"
        " with .venv" in done.stderr
    )
    assert "error: --mode=$(touch pwned) pretran: found '$(touch pwned) pretran'" in done.stderr
    assert done.returncode == 2
    assert not (CODE / "pwned").exists()


def test_so_does_the_import_of_the_guides_one_line_program(bare):
    done = run(bare, "-c", GUIDE)
    assert done.returncode == 0, done.stderr
    assert "58491392" in done.stdout


def test_a_program_of_the_users_is_not_replaced_by_another_process(bare, tmp_path):
    program = tmp_path / "mine.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(CODE)!r}); {GUIDE}")
    done = run(bare, str(program))
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_a_python_that_lacks_them_too_is_an_error_and_no_endless_loop(bare):
    done = run(bare, "-c", GUIDE, PYTHON=str(bare))
    assert done.returncode == 3
    assert "lacks torch" in done.stderr
