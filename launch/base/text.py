"""Text for people: without secrets and control characters, with the nearest known name, sizes in
GiB."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from launch.schema.machine import GIB

# What a terminal obeys or hides: control characters but tab and newline, halves of characters,
# changes of direction
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

LEAST_SECRET = 8  # characters; a shorter value of such a name stands in too many innocent words


def visible(text: str) -> str:
    """The text as it may be shown anywhere: what would act on a terminal, or not be seen, is
    written out."""
    return HIDDEN.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


@functools.cache
def _known() -> re.Pattern[str] | None:
    """The secrets that this process was given: in its environment, and as the token that hf
    stores."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
    with contextlib.suppress(OSError, UnicodeDecodeError):
        values.add(
            Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token")
            .read_text(encoding="utf-8")
            .strip()
        )
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


def nearest(word: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The known names most like a word that is none of them, best first, upper and lower case
    aside."""
    import difflib  # 5 ms, which only a mistake costs

    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(word[:255].lower(), names, count, cutoff)
    return [names[name] for name in near]


def suggestion(word: str, known: Iterable[str]) -> str:
    """The words of an error that point from a wrong name to the right ones."""
    names = list(known)
    near = nearest(word, names, 3)
    return f"nearest: {', '.join(near)}" if near else f"there are: {', '.join(names[:12])}"


def gib(size: int) -> str:
    return (
        f"{size / GIB:.2f} GiB" if size >= GIB // 100 or not size else f"{size / (1 << 20):.1f} MiB"
    )


def size(count: int) -> str:
    """Bytes as people read them."""
    if count >= GIB // 10:
        return f"{count / GIB:.2f} GiB"
    return f"{count / (1 << 20):.1f} MiB" if count >= 1 << 20 else f"{count / (1 << 10):.1f} KiB"
