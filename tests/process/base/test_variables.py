"""The variables that the installed libraries read are those that the ranks get."""

from __future__ import annotations

import re
from importlib.metadata import distribution
from pathlib import Path

import pytest

from launch.base.variables import NAMES, OF_LIBRARIES, WITHHELD

pytestmark = pytest.mark.process

READ = re.compile(
    r"(?:environ(?:\.get|\.setdefault|\.pop)?[(\[]|getenv\(|env_name=|env_var=|_env\()\s*\(?"
    r"[\"\']([A-Z][A-Z0-9_]+)[\"\']"
)
PACKAGES = ("torch", "transformers", "accelerate", "huggingface_hub", "datasets")


@pytest.mark.parametrize("package", PACKAGES)
def test_each_variable_that_a_library_reads_is_passed_or_withheld_for_a_reason(package):
    folder = Path(str(distribution(package).locate_file(package)))
    read = {
        name
        for file in folder.rglob("*.py")
        if "testing" not in file.parts
        for name in READ.findall(file.read_text(encoding="utf-8", errors="replace"))
        if name.startswith(OF_LIBRARIES)
    }
    assert read, folder
    new = read - NAMES - set(" ".join(WITHHELD).split())
    assert not new, f"add to launch/base/variables.py, or say there why it is withheld: {new}"
