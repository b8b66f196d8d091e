"""The Python that runs us: another one where this one lacks the packages, UTF-8 where the locale is
not. Standard library only, because it is imported first."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "pydantic",
    "yaml",
    "psutil",
    "rich",
    "pyarrow",
)  # scripts/lib/bootstrap.sh asks for the same
# Nothing is pasted into it: the words follow as arguments.
BOOTSTRAP = 'ROOT="$1"; shift; source "$ROOT/scripts/lib/bootstrap.sh"; exec "$PYTHON" "$@"'


def go_on_with_packages() -> None:
    """Run the same command line with .venv's Python, made first if need be, where this Python lacks
    a package."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not missing:
        return
    root = str(Path(__file__).resolve().parents[2])
    if os.environ.get("LOWMEM_IN_VENV") == root or len(sys.orig_argv) < 2:
        raise ImportError(f"{sys.executable} lacks {', '.join(missing)}; install requirements.txt")
    print(
        f"lowmem: {sys.executable} lacks {', '.join(missing)}; going on with .venv",
        file=sys.stderr,
        flush=True,
    )
    os.environ["LOWMEM_IN_VENV"] = root
    os.execvp(
        "bash", ["bash", "-euo", "pipefail", "-c", BOOTSTRAP, "bash", root, *sys.orig_argv[1:]]
    )


def go_on_in_utf8() -> None:
    """Run the same command line in UTF-8 mode where a locale cannot name every file; Python's own
    way out."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
