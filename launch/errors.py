"""What can be wrong, as the user reads it: one line on stderr and a documented exit code, never a traceback."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
from collections.abc import Iterable
from pathlib import Path


class LaunchError(Exception):
    """A mistake or a shortage the user can mend; the message says what was found, what was expected, what to do."""

    exit_code = 1


class ConfigError(LaunchError):
    """A recipe, an override or a flag is wrong."""

    exit_code = 2


class ResourceError(LaunchError):
    """A file, a folder, a device or memory that the run needs is not there."""

    exit_code = 3


class DoesNotFit(ResourceError):
    """No candidate fits the machine; the message names the nearest misses in GiB."""


class DataError(LaunchError):
    """A data file cannot be used as it is; the message names file and line or column."""

    exit_code = 4


class CheckpointError(LaunchError):
    """There are checkpoints, but none that this run may continue from."""

    exit_code = 5


class NonFinite(LaunchError):
    """A loss, a gradient or a weight is NaN or infinite, or the gradients stay far above all before."""

    exit_code = 8

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class LockHeld(LaunchError):
    """Another process is using the run folder."""

    exit_code = 9


class StorageError(LaunchError):
    """The disk refused a write."""

    exit_code = 10


class NetworkError(LaunchError):
    """Machines or ranks that cannot reach each other."""

    exit_code = 11


class Stopped(LaunchError):
    """A signal ended it: 75, or 130 where it was Ctrl-C."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(BaseException):
    """A stop signal while nothing runs yet; no Exception, so that nobody takes it for an answer to what was tried."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} while no rank ran")
        self.exit_code = 130 if number == signal.SIGINT else 75


# ---- what may be shown ---------------------------------------------------------------------------------------------

# What a terminal obeys or hides: control characters but tab and newline, halves of characters, changes of direction
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


# Names of variables and keys whose values are secrets, and values that are secrets wherever they stand
SECRET_NAME = re.compile(
    r"(?i)(^|[_-])(token|secrets?|password|passwd|credentials?|jwt|(api|access|private|secret)[_-]?key)([_-]|$)"
)
SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
)
LEAST_SECRET = 8  # characters; a shorter value of such a name stands in too many innocent words


def visible(text: str) -> str:
    """The text as it may be shown anywhere: what would act on a terminal, or not be seen, is written out."""
    return HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


@functools.cache
def _known() -> re.Pattern[str] | None:
    """The secrets that this process was given: in its environment, and as the token that hf stores."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        values.add(Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token").read_text(encoding="utf-8").strip())
    long = sorted((value for value in values if len(value) >= LEAST_SECRET), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, long))) if long else None


def holds_secret(text: str) -> bool:
    """Whether a secret that is known here, or what looks like one, stands in the text."""
    known = _known()
    return bool(SECRET_VALUE.search(text) or (known and known.search(text)))


def shown(text: str) -> str:
    """The text for a terminal, a log or a report: visible, and without secrets."""
    known = _known()
    text = known.sub("[secret]", text) if known else text
    return visible(SECRET_VALUE.sub("[secret]", text))


# ---- names that are nearly right -------------------------------------------------------------------------------------


def nearest(word: str, known: Iterable[str], count: int = 1) -> list[str]:
    """The known names most like a word that is none of them, best first, upper and lower case aside."""
    import difflib  # 5 ms, which only a mistake costs

    names = {name.lower(): name for name in known}
    return [names[near] for near in difflib.get_close_matches(word[:255].lower(), names, count)]


def suggestion(word: str, known: Iterable[str]) -> str:
    """The words of an error that point from a wrong name to the right ones."""
    names = list(known)
    near = nearest(word, names, 3)
    return f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(names[:12])}"
