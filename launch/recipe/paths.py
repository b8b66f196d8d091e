"""Paths in recipes: they are made absolute, and replaced by a model or tokenizer that an earlier
command has left, and by the folders of names on a hub."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launch.base import files
from launch.base.errors import DataError
from launch.data import chat_templates
from launch.hub import names
from launch.recipe import load, strict_yaml
from launch.schema.model_sections import TokenizerSection
from launch.schema.plan import Change
from launch.schema.recipe import Recipe
from launch.schema.result import DOWNLOADED, Downloaded

PATH_KEYS = (
    "data.train_file",
    "data.validation_file",
    "model.path",
    "model.path_if_there",
    "tokenizer.path",
    "tokenizer.path_if_there",
    "tokenizer.chat_template",
    "output_dir",
    "log_dir",
)
_HUB_KEYS = {  # keys that take a name on a hub -> the split of a data set's name without one
    "model.path": "",
    "data.train_file": "train",
    "data.validation_file": "validation",
}


def with_downloads(
    recipe: Recipe, folder_of: Callable[[names.HubName], Path]
) -> tuple[Recipe, list[Change]]:
    """The recipe with a folder in the place of each name on a hub."""
    raw = recipe.model_dump(exclude_unset=True)
    changes = []
    for dotted, split in _HUB_KEYS.items():
        section, _, key = dotted.partition(".")
        value = raw.get(section, {}).get(key)
        of_list = [(source, "path") for source in value] if isinstance(value, list | tuple) else []
        for place, field in of_list or [(raw.get(section, {}), key)]:
            typed = place.get(field) or ""
            if not typed.startswith(names.PREFIX):
                continue
            name = names.parse(typed, section == "data", split)
            place[field] = str(folder := folder_of(name))
            if record := files.read_or_none(folder / DOWNLOADED, Downloaded):
                changes.append(Change(dotted, str(name), str(folder), f"downloaded: {record}"))
    return Recipe.model_validate(raw), changes


def pinned(recipe: Recipe, changes: Sequence[Change]) -> list[str]:
    """Keys that name the folders of what with_downloads() has replaced, for a later start."""
    replaced = {change.key for change in changes if change.reason.startswith("downloaded: ")}
    raw = recipe.model_dump(mode="json", exclude_unset=True)
    return [
        f"--{section}.{key}={strict_yaml.plain(raw[section][key])}"
        for section, _, key in (name.partition(".") for name in _HUB_KEYS if name in replaced)
    ]


def use_existing_model(recipe: Recipe) -> tuple[Recipe, list[Change]]:
    """Use model.path_if_there as model.path if that folder holds a model and no other was named."""
    section = recipe.model
    folder = section.path_if_there
    if folder is None or section.path is not None:
        return recipe, []
    if not (Path(folder) / "config.json").is_file():
        reason = f"no model is in {folder} yet: training starts from random weights"
        return recipe, [Change("model.path_if_there", folder, "none", reason)]
    chosen = section.model_copy(update={"path": folder, "shape": None})
    return recipe.model_copy(update={"model": chosen}), [
        Change(
            "model.shape", str(section.shape), folder, "the model of model.path_if_there is there"
        )
    ]


def use_existing_tokenizer(recipe: Recipe) -> tuple[Recipe, list[Change]]:
    """Use tokenizer.path_if_there as tokenizer.path if that folder exists and no other tokenizer
    was named."""
    section = recipe.tokenizer
    named = section.path or recipe.model.path
    if named or section.path_if_there is None or not Path(section.path_if_there).is_dir():
        return recipe, []
    chosen = section.model_copy(update={"path": section.path_if_there})
    return recipe.model_copy(update={"tokenizer": chosen}), [
        Change(
            "tokenizer.path",
            "none",
            section.path_if_there,
            "the folder of tokenizer.path_if_there is there",
        )
    ]


def unused_tokenizer_keys(recipe: Recipe) -> list[Change]:
    """The keys of a trained tokenizer that are set although the tokenizer is that of a folder."""
    section = recipe.tokenizer
    folder = section.path or recipe.model.path
    if folder is None:
        return []
    reason = f"only for a tokenizer that is trained on the data; this one is that of {folder}"
    return [
        Change(f"tokenizer.{key}", str(value), "not used", reason)
        for _, key in load.OF_TRAINED_TOKENIZER
        if (value := getattr(section, key)) != TokenizerSection.model_fields[key].default
    ]


def absolute_override(override: str) -> str:
    """The override with an absolute path: a path on the command line is relative to the current
    folder. The typed text stays for messages."""
    key, equals, value = override.partition("=")
    dotted = key.lstrip("-").replace("-", "_")
    is_list = value.startswith("[")
    if (
        not equals
        or dotted not in PATH_KEYS
        or value in ("", "null", "~")
        or value[0] == "{"
        or (is_list and dotted != "data.train_file")
    ):
        return override
    typed = getattr(override, "typed", "") or override
    parsed = strict_yaml.parse_value(value, (key,), typed) if is_list else value
    path = strict_yaml.plain(_of_key(dotted, parsed, Path.cwd()))
    return load.Override(f"{key}={path}", typed)


def with_absolute_paths(recipe: Recipe, base: Path) -> Recipe:
    """The recipe with every path absolute."""
    raw = recipe.model_dump(exclude_unset=True)  # a key that is not set stays open to planning
    for dotted in PATH_KEYS:
        name, _, key = dotted.rpartition(".")
        section = raw.get(name, {}) if name else raw
        if section.get(key) is not None:
            section[key] = _of_key(dotted, section[key], base)
    return Recipe.model_validate(raw)


def absolute(value: Any, base: Path) -> Any:
    """A path, or the paths of a list of sources, made absolute; names on a hub and other values as
    they are."""
    if isinstance(value, str):
        return _join(base, value)
    if isinstance(value, list | tuple):
        sources = ({"path": source} if isinstance(source, str) else source for source in value)
        return [
            {**source, "path": _join(base, source["path"])}
            if isinstance(source, dict) and _is_path(source.get("path"))
            else source
            for source in sources
        ]
    return value


def _of_key(dotted: str, value: Any, base: Path) -> Any:
    """The paths of a key, absolute; a name on a hub, and that of a chat template, as it is."""
    if dotted == "tokenizer.chat_template" and not chat_templates.is_file(value):
        return value
    is_name = dotted.startswith("data.") and _is_path(value) and names.is_data(value)
    if is_name and not (base / value).exists():
        raise DataError(
            f"{dotted}: there is no such file or folder: {value}; of a data set on a hub, type"
            f" --{dotted}={names.PREFIX}{value} --download"
        )
    if dotted == "model.path" and names.is_model(value) and not (base / value).exists():
        return names.PREFIX + value.removeprefix(names.PREFIX)
    if dotted in _HUB_KEYS and isinstance(value, str) and not _is_path(value):
        return value
    return absolute(value, base)


def _is_path(value: Any) -> bool:
    """False for names on a hub, and for mistakes."""
    return isinstance(value, str) and bool(value) and not value.startswith(names.PREFIX)


def _join(base: Path, path: str) -> str:
    return os.path.normpath(base / files.expanded(path))
