"""The Python that runs this program: .venv's Python if the current Python lacks packages, and UTF-8
mode if the locale is not UTF-8. Standard library only, because it is imported first."""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

from launch.base.errors import stopped_by

# SIGUSR1: Slurm's early warning
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
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
# Nothing is pasted into this text: the command line follows as arguments.
_BOOTSTRAP = 'ROOT="$1"; shift; source "$ROOT/scripts/lib/bootstrap.sh"; exec "$PYTHON" "$@"'


def prepare(argv: list[str]) -> None:
    """Prepare this process for its other imports: stop signals, packages and UTF-8. `doctor` runs
    without the packages, because it says which packages are missing."""
    end_on_stop_signals()
    if argv[:1] != ["doctor"]:
        go_on_with_packages()
    _go_on_in_utf8()


def end_on_stop_signals() -> None:
    """End this process at a stop signal with the exit code of a stopped run, until
    launch/supervise/stop_signals.py handles signals. SIGUSR2 (save) has nothing to save yet."""

    def end(number: int, frame: object) -> None:
        if number != signal.SIGUSR2:
            os.write(2, f"error: {stopped_by(number)}\n".encode())
            os._exit(130 if number == signal.SIGINT else 75)

    for number in handled_signals():
        signal.signal(number, end)


def handled_signals() -> list[signal.Signals]:
    """Stop signals and SIGUSR2, without a SIGHUP that nohup has switched off."""
    by_nohup = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return [number for number in (*STOPS, signal.SIGUSR2) if number not in by_nohup]


def ignore_stop_signals() -> None:
    """Ignore stop signals, and SIGUSR2, from here to the end of this process.

    The interpreter takes handlers away before it ends, and a signal then would replace the exit
    code. To block signals is not enough: they reach threads of libraries (pyarrow's), which do not
    block them."""
    for number in (*STOPS, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def go_on_with_packages() -> None:
    """Run the same command line with .venv's Python if this Python lacks a package. .venv is made
    first if it is missing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if not missing:
        return
    root = str(Path(__file__).resolve().parents[2])
    has_bootstrap = Path(root, "scripts/lib/bootstrap.sh").is_file()
    if not has_bootstrap or os.environ.get("LOWMEM_IN_VENV") == root or len(sys.orig_argv) < 2:
        raise ImportError(f"{sys.executable} lacks {', '.join(missing)}; install requirements.txt")
    print(
        f"lowmem: {sys.executable} lacks {', '.join(missing)}; going on with .venv",
        file=sys.stderr,
        flush=True,
    )
    os.environ["LOWMEM_IN_VENV"] = root
    os.execvp(
        "bash", ["bash", "-euo", "pipefail", "-c", _BOOTSTRAP, "bash", root, *sys.orig_argv[1:]]
    )


def _go_on_in_utf8() -> None:
    """Run the same command line in Python's UTF-8 mode if the locale cannot name every file."""
    if sys.getfilesystemencoding() != "utf-8":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
