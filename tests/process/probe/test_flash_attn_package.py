"""Whether attention can be the package flash_attn's: a real child imports what stands where
packages stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

CODE = Path(__file__).resolve().parents[3]
NOTES_IMPORT = "import os; open(os.environ['PYTHON_NOTES'], 'a').write('imported ')\n"


def asked(folder: Path) -> str:
    """What a launcher says that finds packages in this folder too."""
    child = "from pathlib import Path; from launch.probe import import_memory"
    child += "; print(import_memory.no_flash_attn(Path('cache')))"
    variables = {
        **os.environ,
        "PYTHONPATH": f"{CODE}{os.pathsep}{folder}",
        "PYTHON_NOTES": str(folder / "notes"),
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", child],
        env=variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def installed(folder: Path, version: str, code: str, name: str = "flash_attn") -> Path:
    (folder / "flash_attn").mkdir()
    (folder / "flash_attn/__init__.py").write_text(code)
    about = folder / f"{name}-{version}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n"
    )
    return folder


def test_one_that_is_imported_can_be_used_and_is_tried_once(tmp_path):
    installed(tmp_path, "2.8.3.post1", NOTES_IMPORT)
    assert asked(tmp_path) == asked(tmp_path) == "None"
    assert (tmp_path / "notes").read_text() == "imported "


def test_one_built_for_another_torch_is_not_used_and_the_reason_is_kept(tmp_path):
    installed(
        tmp_path,
        "2.8.3",
        NOTES_IMPORT + "raise ImportError('flash_attn_2_cuda.so: undefined symbol: _ZN3c10')",
    )
    for _ in range(2):
        expected = (
            "flash_attn 2.8.3 cannot be imported (ImportError: flash_attn_2_cuda.so: undefined"
            " symbol: _ZN3c10)"
        )
        assert asked(tmp_path) == expected
    assert (tmp_path / "notes").read_text() == "imported "


def test_an_old_one_and_another_package_of_that_name_are_not_imported(tmp_path):
    for folder in ("old", "other"):
        (tmp_path / folder).mkdir()
    assert (
        asked(installed(tmp_path / "old", "2.1.0", NOTES_IMPORT))
        == "flash_attn 2.1.0 is older than 2.3.3"
    )
    other = installed(tmp_path / "other", "4.0.0", NOTES_IMPORT, name="flash_attn_4")
    assert asked(other) == "the package flash_attn is not installed"
    assert not list(tmp_path.glob("*/notes"))
