"""Names and values that are secrets: recognised, kept from child processes, replaced in texts."""

import contextlib
import functools
import os
import re
from pathlib import Path

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


@functools.cache
def _secrets() -> re.Pattern[str]:
    """SECRET_VALUE, and the secrets of this process: values in its environment, and the token that
    hf stores."""
    values = {value for name, value in os.environ.items() if SECRET_NAME.search(name)}
    # RuntimeError: without a home
    with contextlib.suppress(OSError, UnicodeDecodeError, RuntimeError):
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
