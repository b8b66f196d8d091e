"""Text for people: secrets and control characters are removed, a wrong name gets the nearest right
name, and sizes are in GiB."""

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from launch.base.secrets import without_secrets
from launch.schema.machine import GIB, MIB

COLUMNS = 100  # width of a screen; a longer line is shortened or folded
WHOLE = 1_000_000  # columns of a file or a pipe
BARS = "▁▂▃▄▅▆▇█"
# signs that a terminal may lack, and those of ASCII in their place; one set is replaced as a whole
_IN_ASCII = {BARS: ".:-=+*%#", "▏": "|", "⟦⟧": "[]", "°": " "}
_MOST_NAMES = 12  # names listed where none resembles the wrong one
# Characters that control a terminal or that it hides: control characters except tab and newline,
# surrogates, changes of direction
HIDDEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def visible(text: str) -> str:
    """The text as it may be shown anywhere: characters that a terminal obeys or hides are written
    as escapes."""
    return HIDDEN.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def shown(text: str) -> str:
    """The text for a terminal, a log or a report: visible, and without secrets."""
    return visible(without_secrets(text))


def encodable(text: str, encoding: str) -> str:
    """The text, as long as it is, in signs that a terminal of that encoding can show."""
    for signs, ascii_signs in _IN_ASCII.items():
        try:
            signs.encode(encoding)
        except UnicodeEncodeError:
            text = text.translate(str.maketrans(signs, ascii_signs))
    return text


def cause(error: BaseException) -> str:
    """The first line of an error that says what is wrong: torch puts headings above it, as in
    "Error(s) in loading state_dict for ...:"."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    candidates = (line for line in lines if not line.endswith(":"))
    return next(candidates, lines[0] if lines else type(error).__name__)


def from_here(path: Path) -> str:
    """The path as a command in the current folder takes it."""
    working_folder = Path.cwd()
    return str(path.relative_to(working_folder) if path.is_relative_to(working_folder) else path)


def columns(of_terminal: int = COLUMNS) -> int:
    """The columns of standard output: in a file or a pipe, so many that no line is cut."""
    return of_terminal if sys.stdout and sys.stdout.isatty() else WHOLE


def nearest(name: str, names: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names that are most like a wrong name, best first. Upper and lower case do not count."""
    import difflib  # takes 5 ms, which only a mistake should cost

    by_lower = {right.lower(): right for right in names}
    near = difflib.get_close_matches(name[:255].lower(), by_lower, count, cutoff)
    return [by_lower[lower] for lower in near]


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of an error that leads from a wrong name to the nearest, by all of it or by its first
    word (adamm: adamw_torch); "" without one."""
    by_name = {right: right for right in names}
    by_name = {right.partition("_")[0]: right for right in reversed(by_name)} | by_name
    return "".join(f"; did you mean {by_name[near]}?" for near in nearest(name, by_name))


def suggestion(name: str, names: Sequence[str]) -> str:
    """The part of an error that leads from a wrong name to the right names."""
    near = nearest(name, names, 3)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    there = f"there are: {', '.join(names[:_MOST_NAMES])}{more}"
    return f"nearest: {', '.join(near)}" if near else there


def size(count: int) -> str:
    """Bytes as people read them."""
    if count >= GIB // 10:
        return f"{count / GIB:,.2f} GiB"
    return f"{count / MIB:.1f} MiB" if count >= MIB else f"{count / (1 << 10):.1f} KiB"


def pace(step_s: float) -> str:
    """The time of a step as people read it."""
    return f"{step_seconds(step_s)} a step"


def step_seconds(step_s: float) -> str:
    """The seconds of a step, in three digits; a long time as people read it."""
    return f"{step_s:.3g} s" if step_s < 100 else duration(step_s)


def duration(seconds: float) -> str:
    """A time as people read it."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 or not seconds else f"{seconds:.1f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:,.1f} h" if seconds < 172_800 else f"{seconds / 86400:,.1f} days"
