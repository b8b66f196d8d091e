"""Text for people: secrets and control characters are removed, a wrong name gets the nearest right
name, and sizes are in GiB."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from launch.schema.machine import GIB, MIB

# Characters that control a terminal or that it hides: control characters except tab and newline,
# surrogates, changes of direction
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")

# Names of variables and keys whose values are secrets, and values that are secrets wherever they
# stand
SECRET_NAME = re.compile(
    r"(?i)(^|[_-])(token|secrets?|password|passwd|credentials?|jwt|(api|access|private|secret)[_-]?key)([_-]|$)"
)

SECRET_VALUE = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{20,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bsk-[A-Za-z0-9_-]{20,}|\bxox[abprs]-[A-Za-z0-9-]{10,}|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]+"
)

LEAST_SECRET = 8  # characters; a shorter value occurs in too many harmless words


def visible(text: str) -> str:
    """The text as it may be shown anywhere: characters that a terminal obeys or hides are written
    as escapes."""
    return HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


@functools.cache
def _secrets() -> re.Pattern[str]:
    """SECRET_VALUE, and the secrets of this process: values in its environment, and the token that
    hf stores."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        values.add(
            Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token")
            .read_text(encoding="utf-8")
            .strip()
        )
    long = sorted((value for value in values if len(value) >= LEAST_SECRET), key=len, reverse=True)
    return re.compile("|".join([*map(re.escape, long), SECRET_VALUE.pattern]))


def holds_secret(text: str) -> bool:
    """True if the text contains a secret of this process, or a value that looks like a secret."""
    return _secrets().search(text) is not None


def shown(text: str) -> str:
    """The text for a terminal, a log or a report: visible, and without secrets."""
    return visible(_secrets().sub("[secret]", text))


def from_here(path: Path) -> str:
    """The path as a command in the current folder takes it."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def nearest(name: str, names: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names that are most like a wrong name, best first. Upper and lower case do not count."""
    import difflib  # takes 5 ms, which only a mistake should cost

    by_lower = {right.lower(): right for right in names}
    near = difflib.get_close_matches(name[:255].lower(), by_lower, count, cutoff)
    return [by_lower[lower] for lower in near]


def suggestion(name: str, names: Sequence[str]) -> str:
    """The part of an error that leads from a wrong name to the right names."""
    near = nearest(name, names, 3)
    return f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(names[:12])}"


def size(count: int) -> str:
    """Bytes as people read them."""
    if count >= GIB // 10:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / (1 << 10):.1f} KiB"
