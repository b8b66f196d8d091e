"""Text for people: secrets and control characters are removed, a wrong name gets the nearest right
name, and sizes are in GiB. Names and values that are secrets are recognised here."""

import os
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

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


# ---- secrets
# ---------------------------------------------------------------------------

# A word of a variable's or a key's name that says that its value is a secret, between the name's
# ends, "_", "-" and "."
SECRET_NAME = re.compile(
    r"(?i)(^|[._-])((api|access|private|secret)?(token|key)|secrets?|pat|auth|authorization"
    r"|(?-i:(API|ACCESS|PRIVATE|SECRET)?(TOKENS|KEYS))|(?<=[._-])(pw|pwd|psk)"
    r"|pass(word|wd|phrase)?|jwt|cookie|credentials?|creds?)([._-]|\Z)"
)
# Start of a value: at a word, also behind a colour's code, an escaped line break and %3D
BEGIN = r"(?:\b|(?<=[\d;\[]m)|(?<=\\[nrt])|(?<=%[\dA-Fa-f]{2}))"

# The form of values that are secrets wherever they stand, and the issuer's own description
_SECRET_VALUES = (
    # huggingface.co/docs/hub/security-tokens
    rf"{BEGIN}(?:hf|api_org)_[A-Za-z0-9]{{16,}}",
    # github.blog/2021-04-05-behind-githubs-new-authentication-token-formats
    rf"{BEGIN}gh[pousr]_[A-Za-z0-9]{{16,}}",
    # docs.github.com/en/authentication/keeping-your-account-and-data-secure
    rf"{BEGIN}github_pat_\w{{20,}}",
    # docs.gitlab.com/security/tokens: token prefixes
    rf"{BEGIN}gl(?:pat|oas|dt|rt|ptt|soat|agent)-[\w.-]{{16,}}",
    # github.blog/2021-09-23-announcing-npms-new-access-token-format
    rf"{BEGIN}npm_[A-Za-z0-9]{{36}}\b",
    # docs.aws.amazon.com/IAM/latest/UserGuide/reference_identifiers.html
    rf"{BEGIN}(?:AKIA|ASIA)[A-Z0-9]{{16}}\b",
    # cloud.google.com/docs/authentication/api-keys: 39 characters
    rf"{BEGIN}AIza[\w-]{{35}}",
    # platform.openai.com/docs/api-reference/authentication
    rf"{BEGIN}sk-[A-Za-z0-9_-]{{20,}}",
    # replicate.com/docs/topics/security/api-tokens: 40 characters
    rf"{BEGIN}r8_[A-Za-z0-9]{{37}}\b",
    # api.slack.com/authentication/token-types
    rf"{BEGIN}xox[abeprs]-[A-Za-z0-9-]{{10,}}",
    # RFC 7519, JSON Web Token
    rf"{BEGIN}(?<!-)eyJ[\w-]{{10,}}\.eyJ[\w-]{{10,}}\.[\w-]+",
    # RFC 6750, section 2.1: Authorization request header
    r"(?i:\bbearer) +[\w.~+/-]{16,}=*",
    # RFC 7617, section 2: user and password in base64
    r"(?i:\bauthorization[\"']?: *[\"']?basic) +[\w+/-]{8,}=*",
    # RFC 7468, section 10 and 11: private keys; a cut-off one has no end
    r"-----BEGIN [A-Z0-9 ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z0-9 ]*PRIVATE KEY-----|[\s\S]*)",
    # RFC 3986, section 3.2.1: user:password of an address; without a scheme, a password has more
    # than letters, unlike what stands in front of a mail address
    r"(?<=://)[^\s/@:]*:[^\s/@]+(?=@)",
    r"(?<![\w/.:+-])[\w.+-]+:(?=[^\s@]*[^\sA-Za-z@])[^\s/@:\"']{6,}(?=@[\w-]+(?:\.[\w-]+)+)",
)
SECRET_VALUE = re.compile("|".join(_SECRET_VALUES))

_LEAST_SECRET = 8  # characters; a shorter value occurs in too many harmless words


@cache
def _secrets() -> re.Pattern[str]:
    """SECRET_VALUE, and the secrets of this process: values in its environment, and the token that
    hf stores."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    # RuntimeError: without a home
    with suppress(OSError, UnicodeDecodeError, RuntimeError):
        home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface").expanduser()
        values.add(
            Path(os.environ.get("HF_TOKEN_PATH") or Path(home) / "token")
            .read_text(encoding="utf-8")
            .strip()
        )
    # shorter values occur in harmless texts, and a path names the place of a secret
    secret = [value for value in values if len(value) >= _LEAST_SECRET and value[0] != "/"]
    longest_first = sorted(map(re.escape, secret), key=len, reverse=True)
    return re.compile("|".join([*longest_first, SECRET_VALUE.pattern]))


def holds_secret(text: str) -> bool:
    """True if the text contains a secret of this process, or a value that looks like a secret."""
    return _secrets().search(text) is not None


def without_secrets(text: str) -> str:
    """The text with [secret] in place of each secret."""
    return _secrets().sub("[secret]", text)
