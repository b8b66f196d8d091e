"""YAML as recipes are written: plain values of the core schema, each key once, and the place of
each key.

Anchors, tags, second documents, control characters and numbers that are not finite are refused,
each in one line.
"""

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from launch.base.errors import ConfigError
from launch.base.text import did_you_mean

MAX_BYTES = 1_000_000  # limit for a recipe file
MAX_DEPTH = 20
_MAX_VALUES = 1000  # limit for a recipe file; the largest in configs/recipes has 40

KeyPath = tuple[str | int, ...]

# YAML 1.2's core schema: 1e-4 is a float, and no, yes, 12:30:00 and 2024-01-01 are text. 017 is 17,
# and 0o17 is 15.
_CORE = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
# Characters that end a line or hide in a line, such as lone surrogates. A file may contain line
# ends between its values.
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_CONTROL_IN_FILE = re.compile(CONTROL.pattern.replace("\x00-\x1f", "\x00-\x09\x0b\x0c\x0e-\x1f"))
# only its events are used, so no tag is ever constructed
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


# ---- reading
# ---------------------------------------------------------------------------


def read_yaml(path: Path) -> tuple[Any, dict[KeyPath, str]]:
    """The value in a YAML file, None for an empty file, and the place of each key. Raises
    ConfigError."""
    name = str(path)
    if bad := CONTROL.search(name):
        raise ConfigError(
            f"recipe {show(name)}: found the control character {bad[0]!r} in its name; rename the"
            " file"
        )
    try:
        if not path.is_file():
            raise ConfigError(
                f"{name}: found no such file, expected a recipe in YAML; check the path"
            )
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{name}: found {error.strerror}, expected a readable recipe; check the path"
        ) from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(
            f"{name}: found more than {MAX_BYTES:,} bytes, expected a recipe; is this a data file?"
        )
    reader = _Reader(
        _text_of(raw.removeprefix(b"\xef\xbb\xbf"), name), lambda line: f"{name}:{line}"
    )
    return reader.document(), reader.where


def parse_value(text: str, key_path: KeyPath, place: str, takes_section: bool = False) -> Any:
    """The value of a text on the command line. A flow list or mapping or a quoted text is YAML. Any
    other text is a plain scalar, so that paths need no quotes."""
    if bad := CONTROL.search(text):
        raise wrong(
            place, key_path, f"the control character {bad[0]!r}", "text on one line", "delete it"
        )
    is_section = len(key_path) == 1 and not takes_section
    if text.startswith("{") and (is_section or key_path[-1] == "train_file"):
        advice = "write it into a recipe file" if is_section else f"write [{text}]"
        raise wrong(place, key_path, "a mapping", "a single value or a [list]", advice)
    if text[:1] in ("[", "{", '"', "'"):
        return _Reader(text, lambda _: place).document(key_path)
    try:
        return _resolve(text)
    except ValueError as error:
        raise wrong(place, key_path, str(error), "a finite number", "write one") from None


def _text_of(raw: bytes, name: str) -> str:
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{name}:{line}: found bytes that are not UTF-8, expected text; save it as UTF-8"
        ) from None
    if bad := _CONTROL_IN_FILE.search(text):
        place = f"{name}:{text.count(chr(10), 0, bad.start()) + 1}"
        if bad[0] == "\t":
            raise ConfigError(f"{place}: found a tab, expected spaces; replace it with spaces")
        raise ConfigError(
            f"{place}: found the control character {bad[0]!r}, expected text; delete it"
        )
    return text


def _resolve(text: str) -> Any:
    """The value of a plain scalar. Raises ValueError for a number that is not finite or is much too
    long."""
    if _CORE["null"].match(text):
        return None
    if _CORE["bool"].match(text):
        return text[0] in "tT"
    is_int = bool(_CORE["int"].match(text))
    if not is_int and not _CORE["float"].match(text):
        return text
    if len(text) > 40:
        raise ValueError(f"a number of {len(text)} characters")
    if is_int:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if not re.search("[0-9]", text) or not math.isfinite(float(text)):
        raise ValueError(text)
    return float(text)


class _Reader:
    """Reader of a YAML document: plain Python values, and the place of each key."""

    def __init__(self, text: str, place: Callable[[int], str]) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Parser)
        self.place = place
        self.where: dict[KeyPath, str] = {}

    def document(self, key_path: KeyPath = ()) -> Any:
        try:
            next(self.events)  # the stream starts
            start = next(self.events)
            if isinstance(start, yaml.StreamEndEvent):
                return None
            if start.version or start.tags:
                raise ConfigError(
                    f"{self.place(1)}: found a % directive, expected none; delete the line"
                )
            value = self.value(next(self.events), key_path)
            next(self.events)  # the document ends
            if not isinstance(extra := next(self.events), yaml.StreamEndEvent):
                line = extra.start_mark.line + 1
                raise ConfigError(
                    f"{self.place(line)}: found a second document, expected one; delete this ---"
                )
            return value
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or str(error)
            raise ConfigError(
                f"{self.place(mark.line + 1 if mark else 1)}: found broken YAML"
                f" ({show(problem)[1:-1]}), expected YAML; check the indentation, colons, brackets"
                " and quotes here and one line above"
            ) from None

    def value(self, event: Any, key_path: KeyPath) -> Any:
        place = self.where[key_path] = self.where.get(key_path) or self.place(
            event.start_mark.line + 1
        )
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise wrong(
                place,
                key_path,
                "an anchor or alias (& or *)",
                "a value",
                "write it out, or quote it",
            )
        if event.tag is not None:
            raise wrong(
                place,
                key_path,
                f"the tag {show(event.tag)}",
                "a value without one",
                "delete the tag",
            )
        if len(key_path) > MAX_DEPTH:
            raise wrong(place, key_path[:3], f"more than {MAX_DEPTH} levels", "fewer", "flatten it")
        if len(self.where) > _MAX_VALUES:
            raise wrong(
                place,
                key_path[:3],
                f"more than {_MAX_VALUES} values",
                "a recipe",
                "is this a data file?",
            )
        if isinstance(event, yaml.MappingStartEvent):
            return dict(self.items(key_path))
        if isinstance(event, yaml.SequenceStartEvent):
            values: list[Any] = []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                values.append(self.value(event, (*key_path, len(values))))
            return values
        return self.scalar(event, key_path, place)

    def items(self, key_path: KeyPath) -> Iterator[tuple[str, Any]]:
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            place = self.place(event.start_mark.line + 1)
            if not isinstance(event, yaml.ScalarEvent) or event.anchor or event.tag is not None:
                raise wrong(
                    place, key_path, "a key that is not a plain word", "key: value", "name the key"
                )
            key = self.scalar(event, key_path, place)
            if not isinstance(key, str):
                raise wrong(place, key_path, f"the key {show(key)}", "a word", "name the key")
            inner = (*key_path, key)
            if inner in self.where:
                raise wrong(
                    place,
                    inner,
                    "the key twice",
                    "it once",
                    f"also at {self.where[inner]}; delete one",
                )
            self.where[inner] = place
            yield key, self.value(next(self.events), inner)

    def scalar(self, event: Any, key_path: KeyPath, place: str) -> Any:
        if bad := CONTROL.search(event.value):
            raise wrong(
                place,
                key_path,
                f"the control character {bad[0]!r}",
                "text on one line",
                "delete it",
            )
        if not event.implicit[0]:  # in quotes, or a block of text
            return event.value
        try:
            return _resolve(event.value)
        except ValueError as error:
            raise wrong(
                place, key_path, str(error), "a finite number", "write one, or quotes if it is text"
            ) from None


# ---- writing
# ---------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):
    """Writer that quotes exactly the texts that _resolve() would not read back as text."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  PyYAML copies it on the first add

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in _CORE.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, None)


def dump(value: Any) -> str:
    """Text that read_yaml() reads back as an equal value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


# ---- the words of a mistake
# ---------------------------------------------------------------------------


def wrong(
    place: str, key_path: KeyPath, actual: str, expected: str, advice: str = ""
) -> ConfigError:
    text = f"{with_key(place, key_path)}: found {actual}, expected {expected}"
    return ConfigError(f"{text}; {advice}" if advice else text)


def with_key(place: str, key_path: KeyPath) -> str:
    """The place of a mistake with the key, unless that is part of it: of a key that was typed, or
    of a section with a key that was."""
    key, typed = re.escape(dotted(key_path)), place.replace("-", "_")
    is_named = re.search(rf"(^_*|: ){key}(=|$)|(^| and )__{key}\.", typed)
    return place if is_named else f"{place}: {dotted(key_path)}"


def check_choice(typed: str, value: str, choices: Sequence[str], other: str = "") -> None:
    """Raises ConfigError, with the nearest choice, for a value that is none of the choices."""
    if value not in choices:
        raise ConfigError(
            f"{typed}: found {show(value)}, expected one of {', '.join(choices)}{other}"
            f"{did_you_mean(value, choices)}"
        )


def show(value: Any) -> str:
    """The value on one short line."""
    text = repr(value) if isinstance(value, str) else plain(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-1]}"


def plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dotted(key_path: KeyPath) -> str:
    return ".".join(show(str(key))[1:-1] for key in key_path) or "the top level"


def mend(value: Any, expected: str) -> str:
    """Advice for a value whose type is not the expected type; "" if there is none."""
    if isinstance(value, str):
        if expected.startswith("a [list]"):
            return f"write [{value}]"
        if "number" in expected and _CORE["float"].match(value) and re.search("[0-9]", value):
            return "drop the quotes"
        return (
            "write true or false"
            if value.lower() in ("yes", "no", "on", "off", "true", "false")
            else ""
        )
    if isinstance(value, float) and expected == "a whole number":
        return f"write {int(value)}" if value.is_integer() else "round it"
    is_scalar = isinstance(value, bool | int | float)
    return "put it in quotes" if expected.startswith(("text", "a path")) and is_scalar else ""
