"""YAML and `--section.key=value` become one Recipe, or one line per mistake that says where it is
and what to do.

A recipe file may hold, beside Recipe's own keys, `without_gpu:`, a partial recipe that is laid over
the file where there is no GPU and the user named no model.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from launch.base.errors import ConfigError
from launch.base.text import SECRET_NAME, holds_secret, nearest
from launch.base.workspace import FILES
from launch.recipe import key_reference, strict_yaml, training_arguments
from launch.recipe.strict_yaml import Keys, dotted, mend, plain, show, wrong
from launch.schema import recipe as schema_recipe
from launch.schema.plan import Change
from launch.schema.recipe import SECTIONS, Recipe

RECIPES = FILES / "configs" / "recipes"
MAX_PROBLEMS = 5  # lines of one message; a file with more mistakes is read again anyway
OVERRIDE_FORM = "--section.key=value, as in --training.learning_rate=1e-4"
NO_GPU = (
    "no GPU here: the small default model; name one with --model.shape=NAME or --model.path=FOLDER"
)

# a source, or a choice that is switched on -> the keys that mean nothing beside another one
BELONGING = {
    ("model", "shape"): ("path", "path_if_there", "freeze"),
    ("model", "path"): ("shape", "path_if_there", "freeze"),
    ("data", "train_file"): ("validation_file",),
    ("data", "packing"): ("batch_by_tokens",),
}
REPLACED = {
    "model": "these are modules of the recipe's own model, which you replaced",
    "data": "these are held-out rows of the recipe's own data, which you replaced",
    "data.batch_by_tokens": "data.packing leaves nothing for it to do",
}
# -> what runs without
NEEDS_HELD_OUT = {("evaluation", "exact_match_rows"): 0, ("training", "eval_steps"): None}
NOTHING_HELD_OUT = "no rows are held out to evaluate on; name some with --data.validation_file=FILE"


# ---- the way in
# ---------------------------------------------------------------------------


def load(
    name_or_path: str, overrides: Sequence[str] = (), has_gpu: bool = True
) -> tuple[Recipe, tuple[Change, ...]]:
    """The recipe of that name or file with the overrides, and what was replaced in it. Raises
    ConfigError."""
    path = _find(name_or_path)
    file = str(path)
    base, top = _read(path), _overrides(overrides)
    changes: list[Change] = []
    if (partial := _without_gpu(base)) is not None:
        small = _over(base, partial)
        _refuse([problem for problem in _problems(small, file) if problem[0] in partial.where])
        if not has_gpu and "model" not in top.data:
            changes += [
                change
                for change in _replaced(base, partial)
                if tuple(change.key.split(".")) not in top.where
            ]
            changes += _dropped(base, small, {"model": NO_GPU})
            base = small
    final = _over(base, top)
    changes += [
        change
        for change in _dropped(base, final, REPLACED)
        if change.key not in ("model.shape", "model.path")
    ]
    _refuse(_problems(final, file))
    recipe = _recipe(final)
    if recipe.data.validation_file is None:
        for (section, key), nothing in NEEDS_HELD_OUT.items():
            value = getattr(getattr(recipe, section), key)
            if value and (section, key) in top.where:
                changes.append(
                    Change(f"{section}.{key}", plain(value), plain(nothing), NOTHING_HELD_OUT)
                )
    return recipe, tuple(changes)


def dump(recipe: Recipe) -> str:
    """YAML text that load() reads back as an equal recipe."""
    return strict_yaml.dump(recipe.model_dump(mode="json"))


def check_batch(text: str) -> int:
    """The wrappers' positional batch size. Raises ConfigError."""
    if not re.fullmatch("[1-9][0-9]{0,4}", text) or int(text) > 65_536:
        raise ConfigError(f"batch size {show(text)} is not a whole number from 1 to 65536")
    return int(text)


def _find(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name_or_path not in names:
        near = "".join(f"; did you mean {name}?" for name in nearest(name_or_path, names))
        raise ConfigError(
            f"recipe {show(name_or_path)}: found no such recipe, expected one of {', '.join(names)}"
            f" or a path to a .yaml file{near}"
        )
    return RECIPES / f"{name_or_path}.yaml"


def _read(path: Path) -> _Layer:
    data, where = strict_yaml.read_yaml(path)
    if not isinstance(data, dict) or not data:
        found, keys = show(data) if data else "nothing", ", ".join(Recipe.model_fields)
        raise ConfigError(f"{path}:1: found {found}, expected the keys of a recipe: {keys}")
    return _Layer(data, where)


def _recipe(layer: _Layer) -> Recipe:
    # JSON, because pydantic's strict mode takes a list for a tuple only there
    return Recipe.model_validate_json(json.dumps(layer.data), strict=True)


# ---- layers: the file, its without_gpu, the user's overrides
# -------------------------------------------------------


class Override(str):
    """`section.key=value`; `typed` is what the user wrote where that was another name
    (launch/recipe/guides)."""

    typed: str = ""


@dataclass(frozen=True)
class _Layer:
    """A recipe or a part of one, as it was written, and the place of each key."""

    data: dict[str, Any]
    where: dict[Keys, str]

    def get(self, section: str, key: str) -> Any:
        """The value that a recipe without this key would have, if it is not here."""
        content = self.data.get(section)
        if isinstance(content, dict) and key in content:
            return content[key]
        known = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
        return None if known is None or known.is_required() else known.default


def _over(base: _Layer, top: _Layer) -> _Layer:
    """`top` laid over `base`, key by key; another source (BELONGING) leaves nothing of what
    belonged to the first."""
    data = dict(base.data)
    for key, value in top.data.items():
        below = data.get(key)
        if not isinstance(value, dict) or below is None:
            data[key] = value
        elif isinstance(below, dict):
            # anything else is a mistake in the file, which validation reports
            data[key] = {**below, **value}
    for (section, key), belonging in BELONGING.items():
        before, given = base.data.get(section), top.data.get(section)
        if not isinstance(before, dict) or not isinstance(given, dict):
            continue
        if given.get(key) and given[key] != before.get(key):
            data[section] = {
                k: v for k, v in data[section].items() if k in given or k not in belonging
            }
    kept = {
        keys: place
        for keys, place in base.where.items()
        if len(keys) < 3 or keys[:2] not in top.where
    }
    return _Layer(data, {**kept, **top.where})


def _dropped(before: _Layer, after: _Layer, reasons: Mapping[str, str]) -> list[Change]:
    """What went with the source it belonged to; `reasons` by section, or by section.key."""
    changes = []
    for section, reason in reasons.items():
        old, new = before.data.get(section), after.data.get(section)
        if isinstance(old, dict) and isinstance(new, dict):
            for key, value in old.items():
                name = f"{section}.{key}"
                if value and key not in new:
                    left = plain(after.get(section, key))
                    changes.append(Change(name, plain(value), left, reasons.get(name, reason)))
    return changes


def _overrides(texts: Sequence[str]) -> _Layer:
    data: dict[str, Any] = {}
    where: dict[Keys, str] = {}
    for text in texts:
        name, equals, value = text.removeprefix("--").partition("=")
        section, dot, key = name.replace("-", "_").partition(".")
        place = (
            f"--{name}=..." if SECRET_NAME.search(name) or holds_secret(value) else show(text)[1:-1]
        )
        if isinstance(text, Override) and text.typed:
            place = show(text.typed)[1:-1]
        if not equals or not re.fullmatch(
            r"[a-z]\w*(\.[a-z]\w*)?", section + dot + key, re.ASCII | re.IGNORECASE
        ):
            found = "no '='" if not equals else f"the key {show(name)}"
            raise ConfigError(f"override {place}: found {found}, expected {OVERRIDE_FORM}")
        keys: Keys = (section, key) if key else (section,)
        parsed = strict_yaml.parse_value(value.strip(" "), keys, place)
        if key:
            content = data.get(section)
            data[section] = {**(content if isinstance(content, dict) else {}), key: parsed}
        else:
            data[section] = parsed
        where[(section,)] = where[keys] = place
    return _Layer(data, where)


def _without_gpu(base: _Layer) -> _Layer | None:
    """Takes the partial recipe out of the file's layer."""
    if "without_gpu" not in base.data:
        return None
    data = base.data.pop("without_gpu")
    if not isinstance(data, dict):
        raise wrong(
            base.where[("without_gpu",)],
            ("without_gpu",),
            show(data),
            "a part of a recipe",
            "delete it",
        )
    return _Layer(
        data,
        {keys[1:]: place for keys, place in base.where.items() if keys[:1] == ("without_gpu",)},
    )


def _replaced(base: _Layer, partial: _Layer) -> Iterator[Change]:
    """One change for each value of the file that the partial recipe replaces with another one."""
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


def _unknown(keys: Keys) -> tuple[str, str]:
    """What was expected instead of an unknown key, and the key that was meant."""
    *sections, name = map(str, keys)
    section = sections[0] if sections else ""
    expected = (
        "a field of TrainingArguments" if section == "training" else f"a key of {dotted(keys[:-1])}"
    )
    near = key_reference.likely(name, section) if section else None
    if not section:
        top = nearest(name, [*Recipe.model_fields, "without_gpu"])
        near = top[0] if top else key_reference.likely(name)
    if near:
        return expected, f"did you mean {near.removeprefix(f'{section}.')}?"
    return expected, f"python -m launch keys {section}".rstrip() + " lists the keys"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a [list]",
    "model_type": "a section: keys below it",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _problems(layer: _Layer, file: str) -> list[tuple[Keys, ConfigError]]:
    """Every mistake that makes no Recipe of this layer."""
    problems: list[tuple[Keys, ConfigError]] = []

    def place(keys: Keys) -> str:
        return next(
            (layer.where[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in layer.where),
            file,
        )

    try:
        _recipe(layer)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            between = _between(one, layer) if one["type"] == "value_error" else ""
            problems.append((one["loc"], _schema_problem(one, between or place(one["loc"]), file)))
    training = layer.data.get("training")
    for key, value in training.items() if isinstance(training, dict) else ():
        keys = ("training", key)
        if key not in schema_recipe.TrainingSection.model_fields and (
            mistake := _training_mistake(key, value)
        ):
            problems.append((keys, wrong(place(keys), keys, *mistake)))
    for keys, text in _texts(layer.data):
        if holds_secret(text):
            found, do = "what looks like a secret", "delete it; it would stand in files of the run"
            problems = [(other, problem) for other, problem in problems if other != keys]
            problems.append(
                (keys, wrong(place(keys), keys, found, "a value that anybody may read", do))
            )
    output_dir = layer.data.get("output_dir")
    if isinstance(output_dir, str):
        parts = Path(output_dir).parts
        if not parts or ".." in parts or any(len(part.encode()) > 255 for part in parts):
            expected = "a folder without .. and with names of at most 255 bytes"
            keys = ("output_dir",)
            problems.append(
                (
                    keys,
                    wrong(place(keys), keys, show(output_dir), expected, "write the folder itself"),
                )
            )
    return problems


def _between(one: ErrorDetails, layer: _Layer) -> str:
    """The places of the keys that a mistake between several of them names, as far as they were
    written."""
    words = re.findall(r"[a-z]\w*(?:\.[a-z]\w*)?", str(one.get("ctx", {}).get("error", "")))
    named = [(*one["loc"][:1], word) if one["loc"] else tuple(word.split(".")) for word in words]
    return " and ".join(
        dict.fromkeys(
            layer.where[keys]
            for keys in named
            if len(keys) == 2
            and keys in layer.where
            and keys[1] in (layer.data.get(str(keys[0])) or ())
        )
    )


def _texts(value: Any, keys: Keys = ()) -> Iterator[tuple[Keys, str]]:
    """Every text of a recipe and where it stands."""
    if isinstance(value, str):
        yield keys, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _texts(item, (*keys, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _texts(item, (*keys, index))


def _schema_problem(one: ErrorDetails, place: str, file: str) -> ConfigError:
    """What pydantic says about one value, in our words."""
    keys, kind, context = one["loc"], one["type"], one.get("ctx", {})
    if kind == "value_error":
        return ConfigError(f"{place}: {f'{dotted(keys)}: ' if keys else ''}{context['error']}")
    if kind == "missing":
        return wrong(
            file,
            keys,
            "nothing",
            "a value",
            f"write it into the file or give --{dotted(keys)}=VALUE",
        )
    if kind == "extra_forbidden":
        return wrong(place, keys, "an unknown key", *_unknown(keys))
    bounds = [
        f"{word} {context[bound]:.15g}" for bound, word in _BOUNDS.items() if bound in context
    ]
    expected = context.get("expected") or context.get("pattern") or " and ".join(bounds)
    expected = expected or _EXPECTED.get(kind) or one["msg"]
    return wrong(place, keys, show(one["input"]), expected, mend(one["input"], expected))


def _training_mistake(key: str, value: Any) -> tuple[str, str, str] | None:
    """Found, expected and what to do about a key of `training:` that Recipe does not know
    itself."""
    instead = training_arguments.instead(key)
    if instead and (key, value) != ("save_strategy", "steps"):
        return "a field that the launcher sets", "it left out", instead
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
        return ("an unknown key", *_unknown(("training", key)))
    return training_arguments.wrong_type(key, value)


def _refuse(problems: Sequence[tuple[Keys, ConfigError]]) -> None:
    if problems:
        lines = [str(problem) for _, problem in problems[:MAX_PROBLEMS]]
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise ConfigError("\n".join([*lines, *more]))
