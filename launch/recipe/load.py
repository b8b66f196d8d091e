"""Loading of recipes: YAML and `--section.key=value` become a Recipe, or one line for each mistake
that names its place and a fix.

Besides Recipe's own keys a recipe file may contain `without_gpu:`. This partial recipe overrides
the file if there is no GPU and the user has named no model.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from launch.base.errors import ConfigError
from launch.base.text import SECRET_NAME, did_you_mean, holds_secret, nearest
from launch.base.workspace import FILES
from launch.recipe import key_reference, strict_yaml, training_arguments, unread_keys
from launch.recipe.strict_yaml import KeyPath, dotted, mend, plain, show, wrong
from launch.schema.data_section import A_LIST, A_PATH, ColumnNames, DataSource
from launch.schema.levers import CheckpointingKwargs
from launch.schema.plan import Change
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import SECTIONS
from launch.schema.training_section import TrainingSection

RECIPES = FILES / "configs" / "recipes"
MAX_PROBLEMS = 5  # lines of a message; a file with more mistakes is read again anyway
NO_GPU = (
    "no GPU here: the small default model; name one with --model.shape=NAME or --model.path=FOLDER"
)

# a source, or a choice that is switched on -> the keys that lose their meaning if it changes
_BELONGING = {
    ("model", "shape"): ("path", "path_if_there", "freeze"),
    ("model", "path"): ("shape", "path_if_there", "freeze"),
    ("data", "train_file"): ("validation_file",),
    ("data", "validation_file"): ("validation_size",),
    ("data", "validation_size"): ("validation_file",),
    ("data", "packing"): ("batch_by_tokens",),
}
OF_TRAINED_TOKENIZER = (("tokenizer", "vocab_size"), ("tokenizer", "split"))
_REPLACED = {
    "model": "these are modules of the recipe's own model, which you replaced",
    "data": "these are held-out rows of the recipe's own data, which you replaced",
    "data.batch_by_tokens": "data.packing leaves nothing for it to do",
}


def load(
    name_or_path: str, overrides: Sequence[str] = (), has_gpu: bool = True
) -> tuple[Recipe, tuple[Change, ...]]:
    """The recipe of that name or file with the overrides, and the values that were replaced: those
    of the user, on the command line or in a file of his own. Of a recipe in configs/recipes/ the
    keys that the user's words leave without use are none of them. Raises ConfigError."""
    path = find(name_or_path)
    file = str(path)
    base, top = _read(path), _overrides(overrides)
    partial = _without_gpu(base)
    changes = [
        change for layer in (base, partial, top) if layer for change in _with_new_names(layer)
    ]
    replaced: list[Change] = []
    problems: list[ConfigError] = []
    if partial is not None:
        small = _over(base, partial)
        problems += [
            error for key_path, error in _problems(small, file) if key_path in partial.where
        ]
        if not has_gpu and "model" not in top.data:
            replaced = [*_replaced(base, partial), *_dropped(base, small, {"model": NO_GPU})]
            base = small
    final = _over(base, top)
    problems += [error for _, error in _problems(final, file)]
    named = " ".join(map(str, problems))
    problems += [
        ConfigError(f"{change.key}: {change.requested} is left out; {change.reason}")
        for change in _dropped(base, final, _REPLACED)
        if change.key in named
    ]
    _refuse(problems)
    recipe = _recipe(final)
    unread = [*unread_keys.of_recipe(recipe)]
    without_use = [
        *((section, key) for section, key, _ in unread),
        *(OF_TRAINED_TOKENIZER if recipe.tokenizer.path else ()),
    ]
    changes += [
        change
        for change in replaced
        if (key_path := tuple(change.key.split("."))) not in top.where
        and key_path not in without_use
    ]
    if is_file(name_or_path):
        changes += [
            change
            for change in _dropped(base, final, _REPLACED)
            if change.key not in ("model.shape", "model.path")
        ]
    changes += [
        Change(f"{section}.{key}", plain(value), plain(default), reason)
        for section, key, reason in unread
        if (section, key) in (final if is_file(name_or_path) else top).where
        and (value := final.get(section, key))
        and value != (default := _Layer({}, {}).get(section, key))
    ]
    return recipe, tuple(changes)


def is_written(name_or_path: str, overrides: Sequence[str], key: str) -> bool:
    """True if the user wrote this key himself: on the command line, or in a file of his own."""
    return is_file(name_or_path) or tuple(key.split(".")) in _overrides(overrides).where


def dump(recipe: Recipe) -> str:
    """YAML text that load() reads back as an equal recipe."""
    return strict_yaml.dump(recipe.model_dump(mode="json"))


def check_batch(text: str) -> int:
    """The wrappers' positional batch size. Raises ConfigError."""
    if not re.fullmatch("[1-9][0-9]{0,4}", text) or int(text) > 65_536:
        raise ConfigError(f"batch size {show(text)} is not a whole number from 1 to 65536")
    return int(text)


def is_file(name_or_path: str) -> bool:
    """True for the path of a recipe's file, False for a name in configs/recipes/."""
    return "/" in name_or_path or name_or_path.endswith((".yaml", ".yml"))


def find(name_or_path: str) -> Path:
    """The file of a recipe. Raises ConfigError for a name that is not there."""
    if is_file(name_or_path):
        return Path(name_or_path)
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name_or_path not in names:
        raise ConfigError(
            f"recipe {show(name_or_path)}: found no such recipe, expected one of {', '.join(names)}"
            f" or a path to a .yaml file{did_you_mean(name_or_path, names)}"
        )
    return RECIPES / f"{name_or_path}.yaml"


def _read(path: Path) -> "_Layer":
    data, where = strict_yaml.read_yaml(path)
    if not isinstance(data, dict) or not data:
        content, names = show(data) if data else "nothing", ", ".join(Recipe.model_fields)
        raise ConfigError(f"{path}:1: found {content}, expected the keys of a recipe: {names}")
    return _Layer(data, where)


def _with_new_names(layer: "_Layer") -> Iterator[Change]:
    """Rename the keys of `training:` that transformers has renamed. Yields a change for each
    key."""
    training = layer.section("training")
    for old, new in training_arguments.RENAMED.items():
        if old not in training:
            continue
        place = layer.where.pop(("training", old))
        if new in training:
            raise ConfigError(f"{place}: training.{old} is training.{new}, which is set too")
        training[new] = training.pop(old)
        layer.where["training", new] = place
        value = plain(training[new])
        yield Change(f"training.{new}", value, value, f"training.{old} is now training.{new}")


def _recipe(layer: "_Layer") -> Recipe:
    # JSON, because pydantic's strict mode takes a list for a tuple only there
    return Recipe.model_validate_json(json.dumps(layer.data), strict=True)


# ---- layers: the file, its without_gpu, and the user's overrides
# -------------------------------------------------------


class Override(str):
    """A text `section.key=value`. `typed` is the text that the user wrote, if it was another name
    (launch/recipe/guides)."""

    typed: str

    def __new__(cls, text: str, typed: str = "") -> "Override":
        override = super().__new__(cls, text)
        override.typed = typed
        return override


@dataclass(frozen=True)
class _Layer:
    """A recipe or a part of a recipe, as it was written, and the place of each key."""

    data: dict[str, Any]
    where: dict[KeyPath, str]

    def section(self, name: str) -> dict[str, Any]:
        """The keys of a section; {} if it is not written, or is no section by mistake."""
        content = self.data.get(name)
        return content if isinstance(content, dict) else {}

    def get(self, section: str, key: str) -> Any:
        """The value of a key. If it is not written, its default."""
        if key in self.section(section):
            return self.section(section)[key]
        field = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
        return None if field is None or field.is_required() else field.default


def _over(base: _Layer, top: _Layer) -> _Layer:
    """Merge `top` over `base`, key by key. Another source (_BELONGING) removes the keys that
    belonged to the first source."""
    data = dict(base.data)
    for key, value in top.data.items():
        below = data.get(key)
        if not isinstance(value, dict) or below is None:
            data[key] = value
        elif isinstance(below, dict):
            # any other value is a mistake in the file, which validation reports
            data[key] = {**below, **value}
    for (section, key), belonging in _BELONGING.items():
        before, chosen = base.section(section), top.section(section)
        if before and chosen.get(key) and chosen[key] != before.get(key):
            data[section] = {
                k: v for k, v in data[section].items() if k in chosen or k not in belonging
            }
    below = {
        key_path: place
        for key_path, place in base.where.items()
        if len(key_path) < 3 or key_path[:2] not in top.where
    }
    return _Layer(data, {**below, **top.where})


def _dropped(before: _Layer, after: _Layer, explanations: Mapping[str, str]) -> list[Change]:
    """Changes of keys that were removed with their source. `explanations` are by section, or by
    section.key."""
    return [
        Change(
            f"{section}.{key}",
            plain(value),
            plain(after.get(section, key)),
            explanations.get(f"{section}.{key}", explanation),
        )
        for section, explanation in explanations.items()
        if isinstance(after.data.get(section), dict)
        for key, value in before.section(section).items()
        if value and key not in after.section(section)
    ]


def _is_public(section: str, key: str) -> bool:
    """True for a key whose value an error may repeat: not for a secret's, nor for a key that does
    not exist, which may be a secret's misspelt."""
    if not key:
        return section in SECTIONS or section in Recipe.model_fields
    fields = SECTIONS[section].model_fields if section in SECTIONS else {}
    is_extra = section == "training" and key in training_arguments.installed()
    return key in fields or (is_extra and not SECRET_NAME.search(key))


def _overrides(texts: Sequence[str]) -> _Layer:
    data: dict[str, Any] = {}
    where: dict[KeyPath, str] = {}
    problems: list[ConfigError] = []
    for text in texts:
        try:
            key_path, parsed, place = _override(text)
        except ConfigError as error:
            problems.append(error)
            continue
        section, *key = key_path
        above = data.get(section)
        data[section] = (
            {**(above if isinstance(above, dict) else {}), key[0]: parsed} if key else parsed
        )
        where[(section,)] = where[key_path] = place
    _refuse(problems)
    return _Layer(data, where)


def _override(text: str) -> tuple[tuple[str, ...], Any, str]:
    """The key path, the value and the place of a text `--section.key=value`."""
    name, equals, value = text.removeprefix("--").partition("=")
    section, dot, key = name.replace("-", "_").partition(".")
    is_shown = _is_public(section, key) and not holds_secret(value)
    typed = getattr(text, "typed", "") or (text if is_shown else f"--{name}=...")
    place = show(typed)[1:-1]
    if not equals or not re.fullmatch(
        r"[a-z]\w*(\.[a-z]\w*)?", section + dot + key, re.ASCII | re.IGNORECASE
    ):
        mistake = f"the key {show(name)}" if equals else "no '='"
        raise ConfigError(
            f"override {place}: found {mistake}, expected --section.key=value, as in"
            " --training.learning_rate=1e-4"
        )
    key_path = (section, key) if key else (section,)
    return key_path, strict_yaml.parse_value(value.strip(" "), key_path, place), place


def _without_gpu(base: _Layer) -> _Layer | None:
    """Take the partial recipe out of the file's layer."""
    name = "without_gpu"
    if name not in base.data:
        return None
    data = base.data.pop(name)
    if not isinstance(data, dict):
        raise wrong(base.where[(name,)], (name,), show(data), "a part of a recipe", "delete it")
    return _Layer(
        data,
        {key_path[1:]: place for key_path, place in base.where.items() if key_path[:1] == (name,)},
    )


def _replaced(base: _Layer, partial: _Layer) -> Iterator[Change]:
    """Yield a change for each value of the file that the partial recipe replaces."""
    for section, content in partial.data.items():
        if not isinstance(content, dict):
            if base.data.get(section) != content:
                yield Change(section, plain(base.data.get(section)), plain(content), NO_GPU)
            continue
        for key, value in content.items():
            before = base.get(section, key)
            if (list(before) if isinstance(before, tuple) else before) != value:
                yield Change(f"{section}.{key}", plain(before), plain(value), NO_GPU)


# ---- one line per mistake
# ---------------------------------------------------------------------------


def unknown_key(key_path: KeyPath) -> tuple[str, str]:
    """(expected keys, advice) for an unknown key: the key that was probably meant."""
    if key_path[:2] == ("data", "train_file") or key_path[:2] in _MAPPINGS:
        source = ColumnNames if key_path[-2:-1] == ("columns",) else DataSource
        model = _MAPPINGS.get(key_path[:2], source)
        names = ", ".join(model.model_fields)
        near = nearest(str(key_path[-1]), model.model_fields)
        return f"one of {names}", f"did you mean {near[0]}?" if near else "write one of them"
    *sections, name = map(str, key_path)
    section = sections[0] if sections else ""
    expected = (
        "a field of TrainingArguments"
        if section == "training"
        else f"a key of {dotted(key_path[:-1])}"
    )
    top = [] if section else nearest(name, [*Recipe.model_fields, "without_gpu"])
    if near := top[0] if top else key_reference.likely(name, section):
        return expected, f"did you mean {near.removeprefix(f'{section}.')}?"
    return expected, f"python -m launch keys {section}".rstrip() + " lists the keys"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a [list]",
    "model_type": "a section: keys below it",
    "string_too_short": "text that is not empty",
    # pattern of `name`; no other text has one
    "string_pattern_mismatch": "1 to 64 letters, digits, dots, _ and -, a letter or digit first",
}
_MAPPINGS: dict[KeyPath, type[BaseModel]] = {
    ("training", "activation_checkpointing_kwargs"): CheckpointingKwargs,
}
_SOURCES = {  # forms of data.train_file, by the length of a key path
    **{2: "a path, or a list: [{path: FILE}, ...]", 3: "a path, or {path: FILE}"},
}
_BOUNDS = {
    **{"ge": "at least {:.15g}", "gt": "more than {:.15g}", "le": "at most {:.15g}"},
    **{"lt": "less than {:.15g}", "max_length": "at most {} characters"},
}


def _problems(layer: _Layer, file: str) -> list[tuple[KeyPath, ConfigError]]:
    """Every mistake that keeps this layer from becoming a Recipe."""
    problems: list[tuple[KeyPath, ConfigError]] = []

    def place(key_path: KeyPath) -> str:
        return next(
            (
                layer.where[key_path[:n]]
                for n in range(len(key_path), 0, -1)
                if key_path[:n] in layer.where
            ),
            file,
        )

    def add(key_path: KeyPath, *mistake: str) -> None:
        problems.append((key_path, wrong(place(key_path), key_path, *mistake)))

    try:
        _recipe(layer)
    except ValidationError as error:
        for detail in _of_keys(error.errors(include_url=False)):
            loc = detail["loc"]
            # a section has a line for each of its faults
            for text in str(detail.get("ctx", {}).get("error", "")).split("\n"):
                between = _between(text, loc, layer) if len(loc) < 2 else ""
                problems.append((loc, _schema_problem(detail, text, between or place(loc), file)))
    for key, value in layer.section("training").items():
        if key not in TrainingSection.model_fields and (mistake := _training_mistake(key, value)):
            add(("training", key), *mistake)
    for key_path, text in _texts(layer.data):
        if holds_secret(text):
            problems = [(other, problem) for other, problem in problems if other != key_path]
            secret, public = "what looks like a secret", "a value that anybody may read"
            add(key_path, secret, public, "delete it; it would stand in files of the run")
    output_dir = layer.data.get("output_dir")
    if isinstance(output_dir, str):
        parts = Path(output_dir).parts
        if not parts or ".." in parts or any(len(part.encode()) > 255 for part in parts):
            expected = "a folder without .. and with names of at most 255 bytes"
            add(("output_dir",), show(output_dir), expected, "write the folder itself")
    return problems


def _of_keys(details: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """The mistakes at the keys of a recipe. Of a value with several types pydantic has a mistake
    for each type, with the type's name after the key: they become one, or those inside of a
    list."""
    mistakes: list[ErrorDetails] = []
    of_types: dict[KeyPath, list[ErrorDetails]] = {}
    for detail in details:
        loc = tuple(part for part in detail["loc"] if part not in (A_PATH, A_LIST))
        if len(loc) > 2 and isinstance(loc[2], str) and loc[:2] not in _MAPPINGS:
            inside = (*loc[:2], *loc[3:])
            of_types.setdefault(loc[:2], []).append({**detail, "loc": inside})
        else:
            mistakes.append({**detail, "loc": loc})
    for key_path, of_key in of_types.items():
        inside = [detail for detail in of_key if len(detail["loc"]) > len(key_path)]
        expected = " or ".join(map(_expected, of_key))
        mistakes += inside or [{**of_key[0], "type": "union", "ctx": {"expected": expected}}]
    return mistakes


def _between(text: str, section: KeyPath, layer: _Layer) -> str:
    """The places of the keys that a mistake between several keys names, if they were written."""
    names = re.findall(r"[a-z]\w*(?:\.[a-z]\w*)?", text)
    named = [(*section, name) if section else tuple(name.split(".")) for name in names]
    return " and ".join(
        dict.fromkeys(
            layer.where[key_path]
            for key_path in named
            if len(key_path) == 2
            and key_path in layer.where
            and key_path[1] in (layer.data.get(str(key_path[0])) or ())
        )
    )


def _texts(value: Any, key_path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield every text of a recipe with its key path."""
    if isinstance(value, str):
        yield key_path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, (*key_path, key))


def _schema_problem(detail: ErrorDetails, text: str, place: str, file: str) -> ConfigError:
    """The error for a mistake that pydantic has found in a value. `text`: what one of our own rules
    says of it."""
    key_path, kind = detail["loc"], detail["type"]
    if text:
        where = strict_yaml.with_key(place, key_path) if key_path else place
        first, _, rest = text.partition(": ")  # a rule of the whole recipe names the key itself
        is_named = strict_yaml.with_key(place, (first,)) == place
        return ConfigError(f"{where}: {rest if is_named and not key_path else text}")
    if kind == "missing" and len(key_path) > 2:  # a key of an entry in a list
        form = f"write {{{key_path[-1]}: VALUE, ...}}"
        return wrong(place, key_path[:-1], show(detail["input"]), f"a {key_path[-1]} in it", form)
    if kind == "missing":
        advice = f"write it into the file or give --{dotted(key_path)}=VALUE"
        return wrong(file, key_path, "nothing", "a value", advice)
    if kind == "extra_forbidden":
        return wrong(place, key_path, "an unknown key", *unknown_key(key_path))
    expected, value = _expected(detail), detail["input"]
    if kind in ("string_type", "model_type") and key_path[:2] == ("data", "train_file"):
        expected = _SOURCES.get(len(key_path), expected)
    choices = re.findall(r"'(\w[^']*)'", expected) if isinstance(value, str) else ()
    near = did_you_mean(str(value), choices).removeprefix("; ")
    return wrong(place, key_path, show(value), expected, near or mend(value, expected))


def _expected(detail: ErrorDetails) -> str:
    """The expected value, in words."""
    context = detail.get("ctx", {})
    bounds = [
        phrase.format(context[bound]) for bound, phrase in _BOUNDS.items() if bound in context
    ]
    return (
        context.get("expected")
        or " and ".join(bounds)
        or _EXPECTED.get(detail["type"], detail["msg"])
    )


def _training_mistake(key: str, value: Any) -> tuple[str, str, str] | None:
    """(actual, expected, advice) for a wrong key or value of `training:` that has no field in
    Recipe."""
    instead = training_arguments.instead(key)
    if instead and (key, value) != ("save_strategy", "steps"):
        return "a field that has no effect here", "it left out", instead
    if SECRET_NAME.search(key):
        return (
            "a key for a secret",
            "none",
            "delete it: nothing is uploaded, and it would stand in files of the run",
        )
    if not training_arguments.installed():
        return (
            "an extra field",
            "an installed transformers to check it with",
            "install the requirements",
        )
    if key not in training_arguments.installed():
        return ("an unknown key", *unknown_key(("training", key)))
    return training_arguments.wrong_type(key, value)


def _refuse(problems: Iterable[ConfigError]) -> None:
    lines = [*dict.fromkeys(map(str, problems))]
    if lines:
        more = [f"and {len(lines) - MAX_PROBLEMS} more"] if len(lines) > MAX_PROBLEMS else []
        raise ConfigError("\n".join([*lines[:MAX_PROBLEMS], *more]))
