"""Machines that are only described: by a file like those in configs/machines/, or by the words
--gpu, --gpus and --ram."""

import dataclasses
import itertools
import types
import typing
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import did_you_mean, size
from launch.probe import cards
from launch.schema.machine import GIB, Gpu, Machine, OptionalPackage

LARGEST = 1 << 60  # no size in GiB is larger
# assumed of a machine whose file leaves them out
CPUS = 8
_DISK_GIB = 500.0
_REASON = "described"
ASSUMED = "assumed"
# keys that may be left out, and the key of their reason
_REASONS = {
    "host_available_gib": "host_available_reason",
    "cpu_count": "cpu_reason",
    "shm_gib": "shm_reason",
    "disk_free_gib": "disk_reason",
}
MAX_BYTES, MAX_DEPTH = 1 << 16, 20
_SHORT_KEYS = ("gpu", "ram_gib")  # keys of a file beside the fields of Machine


def from_words(gpu: str, count: int, ram_gib: float) -> Machine:
    """The machine with so many cards of this name, and so much RAM. Raises ConfigError for a name
    that configs/cards.yaml lacks."""
    return _machine("--gpu", {"gpu": gpu, "gpus": count, "ram_gib": ram_gib})


def from_file(path: Path) -> Machine:
    """The machine that a file describes: `gpu`, `gpus` (a number) and `ram_gib`, or the fields of
    Machine and Gpu, with sizes in GiB. Raises ConfigError."""
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: is no regular file; expected the YAML of a machine")
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ConfigError(
                f"{path}: more than {MAX_BYTES:,} bytes; expected a machine's few keys"
            )
        text = raw.decode()
        _check_depth(path, text)
        values = yaml.safe_load(text)
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    return _machine(str(path), values)


def _check_depth(path: Path, text: str) -> None:
    """Raises ConfigError for a nesting that a reader of values would not survive."""
    nested = itertools.accumulate(
        isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    )
    if any(level > MAX_DEPTH for level in nested):
        raise ConfigError(f"{path}: nested too deeply; expected a machine's few keys")


def _machine(where: str, values: object) -> Machine:
    """The machine with these values, and assumptions in place of those that are missing."""
    values = _mapping(where, values, {*_fields(Machine), *_SHORT_KEYS})
    missing: list[str] = []
    parts = _cards(where, values, missing)
    facts = _facts(where, values, parts)
    missing += [key for key in _required(Machine) if key not in facts and key != "gpus"]
    if missing:
        names = ", ".join("ram_gib" if key == "host_limit_gib" else key for key in missing)
        plural = "s" if len(missing) > 1 else ""
        raise ConfigError(
            f"{where}: missing key{plural} {names}; expected gpu (a card of configs/cards.yaml),"
            " gpus (how many) and ram_gib, or every key as in configs/machines/"
        )
    machine = _checked(where, facts, Machine, "")
    gpus = tuple(
        Gpu(**_checked(where, part, Gpu, f"gpus[{index}].")) for index, part in enumerate(parts)
    )
    for index, gpu in enumerate(gpus):
        if gpu.free_bytes > gpu.total_bytes:
            raise ConfigError(
                f"{where}: gpus[{index}].free_gib is more than its total_gib"
                f" {gpu.total_bytes / GIB:g}; expected at most that"
            )
    return Machine(gpus=gpus, assumed=_assumed(values, parts, facts), **machine)


def _cards(where: str, values: Mapping[str, Any], missing: list[str]) -> list[dict[str, Any]]:
    """The values of each card by key, with those of configs/cards.yaml. Keys that neither has are
    added to `missing`."""
    listed = values.get("gpus", 1 if "gpu" in values else None)
    if "gpu" in values:
        if type(listed) is not int or not 1 <= listed <= 1024:
            raise ConfigError(f"{where}: gpus is {listed!r}; expected how many of gpu, from 1")
        if not isinstance(values["gpu"], str):
            raise ConfigError(f"{where}: gpu is {values['gpu']!r}; expected the name of a card")
        listed = [{"name": values["gpu"], "index": index} for index in range(listed)]
    if listed is None or isinstance(listed, int):
        missing.append("gpu")
        return []
    if not isinstance(listed, list):
        raise ConfigError(f"{where}: gpus is {listed!r}; expected a list, [] for none")
    parts = []
    for index, card in enumerate(listed):
        prefix = f"gpus[{index}]."
        part = _mapping(where, card, _fields(Gpu), prefix)
        needed = [key for key in _required(Gpu) if key not in part]
        if {*needed} & {"vendor", "total_gib", "architecture"} and isinstance(
            part.get("name"), str
        ):
            row = cards.by_words(part["name"], where).described(index)
            part = {
                "vendor": row.vendor,
                "total_gib": row.total_bytes / GIB,
                "architecture": row.architecture,
                "reason": row.reason,
                **part,
                "name": row.name,
            }
        defaults = {"index": index, "driver": "", "reason": _REASON}
        if "total_gib" in part:
            defaults["free_gib"] = part["total_gib"]
        part = {**defaults, **part}
        missing += [f"{prefix}{key}" for key in _required(Gpu) if key not in part]
        parts.append(part)
    return parts


def _facts(where: str, values: Mapping[str, Any], parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The values of the machine by key, without its cards, with assumptions."""
    facts = {key: value for key, value in values.items() if key not in (*_SHORT_KEYS, "gpus")}
    if "ram_gib" in values:
        if "host_limit_gib" in values:
            raise ConfigError(f"{where}: ram_gib and host_limit_gib are both given; expected one")
        facts["host_limit_gib"] = values["ram_gib"]
    counts = Counter(
        str(part.get("name")).removeprefix(f"{part.get('vendor')} ".upper()) for part in parts
    )
    ram_gib = facts.get("host_limit_gib")
    return {
        "name": " + ".join(f"{count}x {name}" for name, count in counts.items()) or "no GPU",
        **{key: _REASON for key in _fields(Machine) if key.endswith("_reason")},
        **{reason: ASSUMED for key, reason in _REASONS.items() if key not in facts},
        "cpu_count": CPUS,
        "disk_free_gib": _DISK_GIB,
        "host_available_gib": ram_gib,
        # tmpfs(5): half of the RAM
        "shm_gib": ram_gib / 2 if isinstance(ram_gib, int | float) else 0,
        **facts,
    }


def _assumed(
    values: Mapping[str, Any], parts: list[dict[str, Any]], facts: Mapping[str, Any]
) -> str:
    """The assumptions in place of missing keys, as a line of the plan; "" if there are none."""
    listed = values.get("gpus")
    of_cards = {"free_gib": "all of each card's memory is free", "driver": "driver not known"}
    lines = [
        text
        for key, text in of_cards.items()
        if parts and not (isinstance(listed, list) and all(key in card for card in listed))
    ]
    texts = {
        "host_available_gib": "all of the RAM is free",
        "cpu_count": f"{facts['cpu_count']} CPUs",
        "shm_gib": "/dev/shm half of the RAM",
        "disk_free_gib": f"{size(int(facts['disk_free_gib'] * GIB))} of disk free",
    }
    lines += [text for key, text in texts.items() if key not in values]
    return ", ".join(lines)


def _fields(noun: type) -> dict[str, tuple[str, Any]]:
    """(field, type) by the key of a file, in which sizes are in GiB."""
    hints = typing.get_type_hints(noun)
    return {
        name.replace("_bytes", "_gib"): (name, hint)
        for name, hint in hints.items()
        if name != "assumed"
    }


def _required(noun: type) -> list[str]:
    """The keys without a default."""
    optional = {
        field.name for field in dataclasses.fields(noun) if field.default is not dataclasses.MISSING
    }
    return [key for key, (name, _) in _fields(noun).items() if name not in optional]


def _mapping(
    where: str, content: object, right: typing.Iterable[str], prefix: str = ""
) -> dict[str, Any]:
    """The values by key. Raises ConfigError for what is no mapping, and for the first key that no
    noun has."""
    if not isinstance(content, dict):
        name = prefix.rstrip(".") or "the file"
        raise ConfigError(f"{where}: {name} is not a mapping of keys to values")
    values = {str(key): value for key, value in content.items()}
    for key in values:
        if key not in right:
            near = did_you_mean(key, {*right} - values.keys())
            raise ConfigError(f"{where}: unknown key {prefix}{key}{near}")
    return values


def _checked(where: str, values: Mapping[str, Any], noun: type, prefix: str) -> dict[str, Any]:
    """The values by field name, with sizes in bytes. Raises ConfigError for the first key that is
    wrong."""
    facts = {}
    for key, (name, hint) in _fields(noun).items():
        if key not in values:
            continue
        facts[name] = value = values[key]
        if expected := _expected(key, hint, value):
            raise ConfigError(f"{where}: {prefix}{key} is {value!r}; expected {expected}")
        if key.endswith("_gib"):
            facts[name] = int(value * GIB)
        elif key == "packages":
            facts[name] = tuple(value)
    return facts


def _expected(key: str, hint: Any, value: Any) -> str:
    """A description of the right values if this value is wrong; "" if it is right."""
    optional = typing.get_args(OptionalPackage)
    is_number = type(value) in (int, float) and 0 <= value < LARGEST
    least = 1 if key == "cpu_count" else 0
    rules = {
        "size": ("a size in GiB such as 19.6", is_number),
        int: (
            f"a whole number, at least {least}",
            is_number and type(value) is int and value >= least,
        ),
        str: ("text (a number in quotes)", isinstance(value, str)),
        types.UnionType: (
            f"a list of {', '.join(optional)}, [] for none (packages of requirements.txt count"
            " as installed)",
            isinstance(value, list) and all(name in optional for name in value),
        ),
        typing.Literal: (
            " or ".join(map(str, typing.get_args(hint))),
            value in typing.get_args(hint),
        ),
    }
    kind = "size" if key.endswith("_gib") else typing.get_origin(hint) or hint
    description, is_right = rules[kind]
    return "" if is_right else description
