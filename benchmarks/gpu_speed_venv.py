"""A venv over the packages of the Python that runs this, with folders or archives of packages
before them.

    python3 gpu_speed_venv.py TARGET [SITE.tar.gz | FOLDER]...

It needs nothing but Python, and fetches nothing. In the venv, a process that a variable names as a
training of gpu_speed loads the gates of gpu_speed_hook.
"""

from __future__ import annotations

import sys
import sysconfig
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

HOOK = (
    'import os; "NVIDIA_SPEED_NAME" in os.environ and'
    ' __import__("benchmarks.gpu_speed_hook", fromlist=["install"]).install()\n'
)


def create(target: Path) -> None:
    """An empty venv; by hand where the module venv cannot make one."""
    try:
        venv.create(target, symlinks=True, with_pip=False)
    except (OSError, ValueError) as error:
        print(f"venv: {error}; made by hand", file=sys.stderr)
        base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        (target / "lib" / version / "site-packages").mkdir(parents=True, exist_ok=True)
        (target / "bin").mkdir(exist_ok=True)
        (target / "bin" / "python").unlink(missing_ok=True)
        (target / "bin" / "python").symlink_to(base)
        (target / "pyvenv.cfg").write_text(f"home = {base.parent}\n", encoding="utf-8")


def make(target: Path, sources: Sequence[Path]) -> Path:
    """Make the venv; its Python. Archives are unpacked into it, the first source comes first."""
    create(target)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = target / "lib" / version / "site-packages"
    folders = [source for source in sources if source.is_dir()]
    for archive in (source for source in sources if not source.is_dir()):
        with tarfile.open(archive) as packed:
            packed.extractall(site, filter="data")
    parent = Path(sysconfig.get_path("purelib"))
    lines = [f"import site; site.addsitedir({str(folder)!r})\n" for folder in [*folders, parent]]
    (site / "zz_parent.pth").write_text("".join(lines), encoding="utf-8")
    (site / "zzz_gates.pth").write_text(HOOK, encoding="utf-8")
    return target / "bin" / "python"


if __name__ == "__main__":
    print(make(Path(sys.argv[1]), [Path(word).resolve() for word in sys.argv[2:]]))
