"""YAML and `--section.key=value` become one Recipe, or one line per mistake that says where it is and what to do.

A recipe file may hold, beside Recipe's own keys, `without_gpu:`, a partial recipe that is laid over the file where
there is no GPU and the user named no model.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from launch import schema
from launch.errors import ConfigError
from launch.schema import Change, Recipe

RECIPES = Path(__file__).resolve().parent.parent / "configs" / "recipes"
MAX_BYTES = 1_000_000  # of a recipe file
MAX_DEPTH = 20
MAX_VALUES = 1000  # of a recipe file; the largest of configs/recipes has 40
MAX_PROBLEMS = 5  # lines of one message; a file with more mistakes is read again anyway
OVERRIDE_FORM = "--section.key=value, as in --training.learning_rate=1e-4"
NO_GPU = "no GPU here: the small default model; name one with --model.shape=NAME or --model.path=FOLDER"

SECTIONS: dict[str, type[BaseModel]] = {
    "model": schema.ModelSection,
    "tokenizer": schema.TokenizerSection,
    "lora": schema.LoraSection,
    "data": schema.DataSection,
    "training": schema.TrainingSection,
    "launch": schema.LaunchSection,
    "evaluation": schema.EvaluationSection,
}

_MICRO_BATCH = "per_device_train_batch_size is fitted before the start and the effective batch is held"
_CHECKPOINTS = "the launcher writes and finds its own checkpoints: --resume=auto, --resume=PATH, --resume=never"
_PUBLISH = "publish the finished folder yourself: hf upload NAME FOLDER"
OWNED = {  # TrainingArguments' fields that the launcher sets -> what to use instead
    "output_dir": "use the top-level output_dir",
    "deepspeed": "use launch.mode",
    "fsdp": "use launch.mode",
    "fsdp_config": "use launch.mode",
    "local_rank": "ranks are numbered by accelerate; use launch.num_processes",
    "ddp_backend": "use launch.mode=dual_gpu_nccl or dual_gpu_gloo",
    "use_cpu": "use launch.mode=cpu",
    "accelerator_config": "use launch.mode",
    "parallelism_config": "use launch.mode",
    "auto_find_batch_size": _MICRO_BATCH,
    "resume_from_checkpoint": _CHECKPOINTS,
    "enable_jit_checkpoint": "SIGTERM already saves",
    "overwrite_output_dir": _CHECKPOINTS,
    "save_strategy": "checkpoints are counted in steps; use save_steps",
    "ignore_data_skip": "a resumed run goes on with the next sample",
    "train_sampling_strategy": "the order of samples comes from the seed",
    "dataloader_drop_last": "every sample counts, also the last few",
    "activation_checkpointing": "use gradient_checkpointing",
    "warmup_ratio": "use warmup_steps; below 1 it is a share of all steps",
    "push_to_hub": _PUBLISH,
    "report_to": "figures are in events.jsonl and report.html of the run folder",
    "logging_dir": "logs are in the run folder and in logs/",
    "disable_tqdm": "progress is one line per logging_steps",
    "do_train": "use task",
    "do_eval": "use data.validation_file",
    "do_predict": "use evaluation.exact_match_rows",
}

Keys = tuple[str | int, ...]


# ---- strict YAML ---------------------------------------------------------------------------------------------------

# YAML 1.2's core schema: 1e-4 is a float; no, yes, 12:30:00 and 2024-01-01 are text; 017 is 17 and 0o17 is 15
_CORE = {
    "null": re.compile(r"(?:~|null|Null|NULL|)\Z"),
    "bool": re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z"),
    "int": re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z"),
    "float": re.compile(
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
    ),
}
# Characters that end a line or hide in one, lone surrogates among them; a file may hold line ends between its values
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
_CONTROL_IN_FILE = re.compile(_CONTROL.pattern.replace("\x00-\x1f", "\x00-\x09\x0b\x0c\x0e-\x1f"))
_Parser: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # only its events are used: no tag is ever constructed


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the text that _resolve() would not read back as text."""

    yaml_implicit_resolvers: dict[Any, Any] = {}  # noqa: RUF012  PyYAML copies it on the first add

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern in _CORE.items():
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", _pattern, None)


def _resolve(text: str) -> Any:
    """The value of a plain scalar. Raises ValueError for a number that is not finite or absurdly long."""
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
    """One YAML document as plain Python values, and the place of each of its keys."""

    def __init__(self, text: str, place: Callable[[int], str]) -> None:
        self.events: Iterator[Any] = yaml.parse(text, Loader=_Parser)
        self.place = place
        self.where: dict[Keys, str] = {}

    def document(self, keys: Keys = ()) -> Any:
        try:
            next(self.events)  # the stream starts
            start = next(self.events)
            if isinstance(start, yaml.StreamEndEvent):
                return None
            if start.version or start.tags:
                raise ConfigError(f"{self.place(1)}: found a % directive, expected none; delete the line")
            value = self.value(next(self.events), keys)
            next(self.events)  # the document ends
            if not isinstance(extra := next(self.events), yaml.StreamEndEvent):
                line = extra.start_mark.line + 1
                raise ConfigError(f"{self.place(line)}: found a second document, expected one; delete this ---")
            return value
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            problem = getattr(error, "problem", None) or str(error)
            raise ConfigError(
                f"{self.place(mark.line + 1 if mark else 1)}: found broken YAML ({_show(problem)[1:-1]}), expected"
                " YAML; check the indentation, colons, brackets and quotes here and one line above"
            ) from None

    def value(self, event: Any, keys: Keys) -> Any:
        place = self.where[keys] = self.where.get(keys) or self.place(event.start_mark.line + 1)
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise _wrong(place, keys, "an anchor or alias (& or *)", "a value", "write it out, or quote it")
        if event.tag is not None:
            raise _wrong(place, keys, f"the tag {_show(event.tag)}", "a value without one", "delete the tag")
        if len(keys) > MAX_DEPTH:
            raise _wrong(place, keys[:3], f"more than {MAX_DEPTH} levels", "fewer", "flatten it")
        if len(self.where) > MAX_VALUES:
            raise _wrong(place, keys[:3], f"more than {MAX_VALUES} values", "a recipe", "is this a data file?")
        if isinstance(event, yaml.MappingStartEvent):
            return dict(self.items(keys))
        if isinstance(event, yaml.SequenceStartEvent):
            values: list[Any] = []
            while not isinstance(event := next(self.events), yaml.SequenceEndEvent):
                values.append(self.value(event, (*keys, len(values))))
            return values
        return self.scalar(event, keys, place)

    def items(self, keys: Keys) -> Iterator[tuple[str, Any]]:
        seen: dict[str, str] = {}
        while not isinstance(event := next(self.events), yaml.MappingEndEvent):
            place = self.place(event.start_mark.line + 1)
            if not isinstance(event, yaml.ScalarEvent) or event.anchor or event.tag is not None:
                raise _wrong(place, keys, "a key that is not a plain word", "key: value", "name the key")
            key = self.scalar(event, keys, place)
            if not isinstance(key, str):
                raise _wrong(place, keys, f"the key {_show(key)}", "a word", "name the key")
            if key in seen:
                raise _wrong(place, (*keys, key), "the key twice", "it once", f"also at {seen[key]}; delete one")
            seen[key] = self.where[(*keys, key)] = place
            yield key, self.value(next(self.events), (*keys, key))

    def scalar(self, event: Any, keys: Keys, place: str) -> Any:
        if bad := _CONTROL.search(event.value):
            raise _wrong(place, keys, f"the control character {bad[0]!r}", "text on one line", "delete it")
        if not event.implicit[0]:  # in quotes, or a block of text
            return event.value
        try:
            return _resolve(event.value)
        except ValueError as error:
            raise _wrong(place, keys, str(error), "a finite number", "write one, or quotes if it is text") from None


def _read(path: Path) -> _Layer:
    name = str(path)
    if bad := _CONTROL.search(name):
        raise ConfigError(f"recipe {_show(name)}: found the control character {bad[0]!r} in its name; rename the file")
    try:
        if not path.is_file():
            raise ConfigError(f"{name}: found no such file, expected a recipe in YAML; check the path")
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: found {error.strerror}, expected a readable recipe; check the path") from None
    if len(raw) > MAX_BYTES:
        raise ConfigError(f"{name}: found more than {MAX_BYTES:,} bytes, expected a recipe; is this a data file?")
    raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{name}:{line}: found bytes that are not UTF-8, expected text; save it as UTF-8") from None
    if bad := _CONTROL_IN_FILE.search(text):
        place = f"{name}:{text.count(chr(10), 0, bad.start()) + 1}"
        if bad[0] == "\t":
            raise ConfigError(f"{place}: found a tab, expected spaces; replace it with spaces")
        raise ConfigError(f"{place}: found the control character {bad[0]!r}, expected text; delete it")
    reader = _Reader(text, lambda line: f"{name}:{line}")
    data = reader.document()
    if not isinstance(data, dict) or not data:
        found, keys = _show(data) if data else "nothing", ", ".join(Recipe.model_fields)
        raise ConfigError(f"{name}:1: found {found}, expected the keys of a recipe: {keys}")
    return _Layer(data, reader.where)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file, under the strict rules above. Raises ConfigError."""
    return _read(path).data


def dump(recipe: Recipe) -> str:
    """YAML text that load() reads back as an equal recipe."""
    return yaml.dump(recipe.model_dump(mode="json"), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10**6)


# ---- layers: the file, its without_gpu, the user's overrides -------------------------------------------------------


class Override(str):
    """`section.key=value`; `typed` is what the user wrote where that was another name (seed_cli.py)."""

    typed: str = ""


@dataclass(frozen=True)
class _Layer:
    """A recipe or a part of one, as it was written, and the place of each key."""

    data: dict[str, Any]
    where: dict[Keys, str] = field(default_factory=dict)

    def get(self, section: str, key: str) -> Any:
        """The value that a recipe without this key would have, if it is not here."""
        content = self.data.get(section)
        if isinstance(content, dict) and key in content:
            return content[key]
        known = SECTIONS[section].model_fields.get(key) if section in SECTIONS else None
        return None if known is None or known.is_required() else known.default


def _over(base: _Layer, top: _Layer) -> _Layer:
    """`top` laid over `base`, key by key; another model leaves nothing of the first one's source and frozen modules."""
    data = dict(base.data)
    for key, value in top.data.items():
        below = data.get(key)
        if not isinstance(value, dict) or below is None:
            data[key] = value
        elif isinstance(below, dict):  # anything else is a mistake in the file, which validation reports
            data[key] = {**below, **value}
    before, model = base.data.get("model"), top.data.get("model")
    if isinstance(before, dict) and isinstance(model, dict):
        for key, other in (("shape", "path"), ("path", "shape")):
            if model.get(key) is not None and model[key] != before.get(key):
                data["model"] = {k: v for k, v in data["model"].items() if k in model or k not in (other, "freeze")}
    kept = {keys: place for keys, place in base.where.items() if len(keys) < 3 or keys[:2] not in top.where}
    return _Layer(data, {**kept, **top.where})


def _dropped(before: _Layer, after: _Layer, reason: str) -> list[Change]:
    old, new = before.data.get("model"), after.data.get("model")
    if not isinstance(old, dict) or not isinstance(new, dict):
        return []
    return [
        Change(f"model.{key}", _text(value), _text(after.get("model", key)), reason)
        for key, value in old.items()
        if value and key not in new
    ]


def _overrides(texts: Sequence[str]) -> _Layer:
    data: dict[str, Any] = {}
    where: dict[Keys, str] = {}
    for text in texts:
        name, equals, value = text.removeprefix("--").partition("=")
        section, dot, key = name.replace("-", "_").partition(".")
        place = f"--{name}=..." if re.search("([_-]token|secret|password)$", name) else _show(text)[1:-1]
        if isinstance(text, Override) and text.typed:
            place = _show(text.typed)[1:-1]
        if not equals or not re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)?", section + dot + key, re.ASCII | re.IGNORECASE):
            found = "no '='" if not equals else f"the key {_show(name)}"
            raise ConfigError(f"override {place}: found {found}, expected {OVERRIDE_FORM}")
        keys: Keys = (section, key) if key else (section,)
        parsed = _override_value(value.strip(" "), keys, place)
        if key:
            content = data.get(section)
            data[section] = {**(content if isinstance(content, dict) else {}), key: parsed}
        else:
            data[section] = parsed
        where[(section,)] = where[keys] = place
    return _Layer(data, where)


def _override_value(text: str, keys: Keys, place: str) -> Any:
    """A flow list or a quoted text is read as YAML; all else is one plain scalar, so that paths need no quotes."""
    if bad := _CONTROL.search(text):
        raise _wrong(place, keys, f"the control character {bad[0]!r}", "text on one line", "delete it")
    if text.startswith("{"):
        raise _wrong(place, keys, "a mapping", "a single value or a [list]", "write it into a recipe file")
    if text[:1] not in ("[", '"', "'"):
        try:
            return _resolve(text)
        except ValueError as error:
            raise _wrong(place, keys, str(error), "a finite number", "write one") from None
    return _Reader(text, lambda _: place).document(keys)


# ---- one line per mistake ------------------------------------------------------------------------------------------


def _show(value: Any) -> str:
    """A found value on one short line."""
    text = repr(value) if isinstance(value, str) else _text(value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-1]}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "null" if value is None else json.dumps(value, ensure_ascii=False)


def _key(keys: Keys) -> str:
    return ".".join(_show(str(key))[1:-1] for key in keys) or "the top level"


def _wrong(place: str, keys: Keys, found: str, expected: str, do: str = "") -> ConfigError:
    return ConfigError(f"{place}: {_key(keys)}: found {found}, expected {expected}" + (f"; {do}" if do else ""))


def _near(name: str, known: Iterable[str]) -> str:
    return "".join(difflib.get_close_matches(name[:64].lower(), list(known), 1))


def _unknown(keys: Keys) -> tuple[str, str]:
    """What was expected instead of an unknown key, and the nearest name."""
    *sections, name = map(str, keys)
    own = [*SECTIONS[sections[0]].model_fields] if sections else [*Recipe.model_fields, "without_gpu"]
    if sections == ["training"]:
        own += [key for key in training_fields() if key not in OWNED and not key.startswith("hub_")]
    elsewhere = {key: f"{section}.{key}" for section, model in SECTIONS.items() for key in model.model_fields}
    near = elsewhere.get(name) or _near(name, own) or elsewhere.get(_near(name, elsewhere))
    expected = "a field of TrainingArguments" if sections == ["training"] else f"a key of {_key(keys[:-1])}"
    if near:
        return expected, f"did you mean {near}?"
    return expected, "delete it" if sections == ["training"] else f"there are {', '.join(own)}"


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "tuple_type": "a [list]",
    "model_type": "a section: keys below it",
}
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}


def _hint(value: Any, expected: str) -> str:
    """What to do when a value has the wrong type."""
    if isinstance(value, str):
        if "number" in expected and _CORE["float"].match(value) and re.search("[0-9]", value):
            return "drop the quotes"
        return "write true or false" if value.lower() in ("yes", "no", "on", "off", "true", "false") else ""
    if isinstance(value, float) and expected == "a whole number":
        return f"write {int(value)}" if value.is_integer() else "round it"
    return "put it in quotes" if expected == "text" and value is not None else ""


def _problems(layer: _Layer, file: str) -> list[tuple[Keys, ConfigError]]:
    """Every mistake that makes no Recipe of this layer."""
    problems: list[tuple[Keys, ConfigError]] = []

    def place(keys: Keys) -> str:
        return next((layer.where[keys[:n]] for n in range(len(keys), 0, -1) if keys[:n] in layer.where), file)

    try:
        _recipe(layer)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            keys, kind, value, context = tuple(one["loc"]), one["type"], one["input"], one.get("ctx", {})
            if kind == "value_error":
                wrong = ConfigError(f"{place(keys)}: {_key(keys)}: {context['error']}")
            elif kind == "missing":
                wrong = _wrong(file, keys, "nothing", "a value", f"write it into the file or give --{_key(keys)}=VALUE")
            elif kind == "extra_forbidden":
                wrong = _wrong(place(keys), keys, "an unknown key", *_unknown(keys))
            else:
                bounds = [f"{word} {context[bound]:.15g}" for bound, word in _BOUNDS.items() if bound in context]
                expected = context.get("expected") or context.get("pattern") or " and ".join(bounds)
                expected = expected or _EXPECTED.get(kind) or one["msg"]
                wrong = _wrong(place(keys), keys, _show(value), expected, _hint(value, expected))
            problems.append((keys, wrong))
    training = layer.data.get("training")
    for key, value in training.items() if isinstance(training, dict) else ():
        keys = ("training", key)
        if key not in schema.TrainingSection.model_fields and (mistake := _extra_mistake(key, value)):
            problems.append((keys, _wrong(place(keys), keys, *mistake)))
    output_dir = layer.data.get("output_dir")
    if isinstance(output_dir, str):
        parts = Path(output_dir).parts
        if not parts or ".." in parts or any(len(part.encode()) > 255 for part in parts):
            expected = "a folder without .. and with names of at most 255 bytes"
            keys = ("output_dir",)
            problems.append((keys, _wrong(place(keys), keys, _show(output_dir), expected, "write the folder itself")))
    return problems


def _refuse(problems: Sequence[tuple[Keys, ConfigError]]) -> None:
    if problems:
        lines = [str(problem) for _, problem in problems[:MAX_PROBLEMS]]
        more = [f"and {len(problems) - MAX_PROBLEMS} more"] if len(problems) > MAX_PROBLEMS else []
        raise ConfigError("\n".join([*lines, *more]))


@lru_cache(maxsize=1)
def training_fields() -> Mapping[str, frozenset[str]]:
    """TrainingArguments' fields -> the alternatives of their types, from the installed source; {}: not installed."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return {}
    source = Path(spec.submodule_search_locations[0], "training_args.py").read_text(encoding="utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    fields: dict[str, frozenset[str]] = {}
    for node in (node for one in classes if one.name == "TrainingArguments" for node in one.body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            fields[node.target.id] = frozenset(_alternatives(node.annotation))
    return fields


def _alternatives(annotation: ast.expr) -> Iterator[str]:
    if isinstance(annotation, ast.BinOp):
        yield from _alternatives(annotation.left)
        yield from _alternatives(annotation.right)
    else:
        yield ast.unparse(annotation.value if isinstance(annotation, ast.Subscript) else annotation)


_TYPES = {"bool": "true or false", "int": "a whole number", "float": "a number", "str": "text", "list": "a [list]"}


def _extra_mistake(key: str, value: Any) -> tuple[str, str, str] | None:
    """Found, expected and what to do about a key of `training:` that Recipe does not know itself."""
    do = OWNED.get(key) or (_PUBLISH if key.startswith("hub_") else None)
    if do and (key, value) != ("save_strategy", "steps"):
        return "a field that the launcher sets", "it left out", do
    if not (fields := training_fields()):
        return "an extra field", "an installed transformers to check it with", "install the requirements"
    if key not in fields:
        return ("an unknown key", *_unknown(("training", key)))
    types = fields[key]
    known = types <= {*_TYPES, "dict", "None"}  # an enumeration or a Literal: TrainingArguments itself decides
    if not known or (value is None and "None" in types) or type(value).__name__ in types:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and "float" in types:
        return None
    expected = " or ".join(text for name, text in _TYPES.items() if name in types) or "a mapping"
    return _show(value), expected, _hint(value, expected)


# ---- the way in ----------------------------------------------------------------------------------------------------


def _recipe(layer: _Layer) -> Recipe:
    # JSON, because pydantic's strict mode takes a list for a tuple only there
    return Recipe.model_validate_json(json.dumps(layer.data), strict=True)


def _find(name_or_path: str) -> Path:
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        return Path(name_or_path)
    names = sorted(path.stem for path in RECIPES.glob("*.yaml"))
    if name_or_path not in names:
        near = _near(name_or_path, names)
        raise ConfigError(
            f"recipe {_show(name_or_path)}: found no such recipe, expected one of {', '.join(names)} or a path to a"
            f" .yaml file" + (f"; did you mean {near}?" if near else "")
        )
    return RECIPES / f"{name_or_path}.yaml"


def load(name_or_path: str, overrides: Sequence[str] = (), has_gpu: bool = True) -> tuple[Recipe, tuple[Change, ...]]:
    """The recipe of that name or file with the overrides, and what was replaced in it. Raises ConfigError."""
    path = _find(name_or_path)
    file = str(path)
    base, top = _read(path), _overrides(overrides)
    changes: list[Change] = []
    if (partial := _without_gpu(base)) is not None:
        small = _over(base, partial)
        _refuse([problem for problem in _problems(small, file) if problem[0] in partial.where])
        if not has_gpu and "model" not in top.data:
            changes += [change for change in _replaced(base, partial) if tuple(change.key.split(".")) not in top.where]
            changes += _dropped(base, small, NO_GPU)
            base = small
    final = _over(base, top)
    changes += [
        change
        for change in _dropped(base, final, "these are modules of the recipe's own model, which you replaced")
        if change.key == "model.freeze"
    ]
    _refuse(_problems(final, file))
    return _recipe(final), tuple(changes)


def _without_gpu(base: _Layer) -> _Layer | None:
    """Takes the partial recipe out of the file's layer."""
    if "without_gpu" not in base.data:
        return None
    data = base.data.pop("without_gpu")
    if not isinstance(data, dict):
        raise _wrong(base.where[("without_gpu",)], ("without_gpu",), _show(data), "a part of a recipe", "delete it")
    return _Layer(data, {keys[1:]: place for keys, place in base.where.items() if keys[:1] == ("without_gpu",)})


def _replaced(base: _Layer, partial: _Layer) -> Iterator[Change]:
    """One change for each value of the file that the partial recipe replaces with another one."""
    for section, content in partial.data.items():
        if not isinstance(content, dict):
            if base.data.get(section) != content:
                yield Change(section, _text(base.data.get(section)), _text(content), NO_GPU)
            continue
        for key, value in content.items():
            before = base.get(section, key)
            if (list(before) if isinstance(before, tuple) else before) != value:
                yield Change(f"{section}.{key}", _text(before), _text(value), NO_GPU)


def check_batch(text: str) -> int:
    """The wrappers' positional batch size. Raises ConfigError."""
    if not re.fullmatch("[1-9][0-9]{0,4}", text) or int(text) > 65_536:
        raise ConfigError(f"batch size {_show(text)} is not a whole number from 1 to 65536")
    return int(text)
