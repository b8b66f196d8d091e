"""Arguments that plan, run and tune share: a recipe, a batch size and keys of the recipe; and the
error for an unknown flag."""

import math
import os
import re
import shlex
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from launch.base import environment
from launch.base.errors import ConfigError, LaunchError
from launch.base.text import did_you_mean, holds_secret, nearest, shown
from launch.base.workspace import FILES
from launch.predict.facts import Wishes
from launch.probe import described
from launch.recipe import key_reference, load, strict_yaml
from launch.recipe.strict_yaml import dotted, show
from launch.schema.machine import Machine
from launch.schema.recipe import Recipe
from launch.schema.recipe_keys import SECTIONS

AUTO = "auto"
_BATCH_KEY = "per_device_train_batch_size"
_BARE_KEY = "launch.wait"  # true without a value, and it never takes the next argument
SWITCHES = ("assume_fits", "exact_batch")  # flags that are short for a key of launch:
_MOST_GPUS, _MOST_RAM_GIB = 64, 65_536  # limits for --gpus and --ram
# several cards, as a plan writes them (2x RTX 3090), or with the number behind (RTX 3090 x2); the x
# of RTX counts none
_SEVERAL = re.compile(r"(\d{1,3}) ?[xX*×] ?(.+)|(.+?) ?(?<![A-Za-z])[xX*×] ?(\d{1,3})")
_ALIKE = 0.8  # difflib's ratio for a flag without a section, which could be a key of any
EPILOG = """RECIPE is a name in configs/recipes/, or a file. BATCH is per_device_train_batch_size,
or auto: the fastest, found by short trials unless an earlier start has found it.

Every key of the recipe can be set, as --section.key=value or --section.key value:
    --training.learning_rate=2e-4 --model.shape=t5-tiny --lora.r=8
`python -m launch keys` lists them."""
# the arguments of the verbs that take keys of a recipe
USAGES = {
    "run": "RECIPE [BATCH] [--dry-run] [--explain] [--resume auto|never|PATH]",
    "plan": "RECIPE [BATCH] [--machine FILE | --gpu NAME --ram GIB [--gpus N]] [--rows-of TOKENS]"
    " [--explain | --json]",
    "show": "RECIPE [--rows N] [--file FILE] [--line N]",
    "tune": "RECIPE [--forget]",
    "submit": "local|cron|slurm|skypilot|dstack [...] RECIPE [BATCH]",
    "evaluate": "SOURCE (--file FILE [--json] | --tasks NAMES)",
}
Flags = Mapping[str, Mapping[str, Any]]  # options of add_argument() by the flag's name
RECIPE_FLAGS: Flags = {
    **{
        f"--{key.replace('_', '-')}": {
            "action": "store_true",
            "help": f"short for --launch.{key}=true",
        }
        for key in SWITCHES
    },
    "--download": {
        "action": "store_true",
        "help": "fetch a model or data named on a hub: --model.path=OWNER/NAME,"
        " --data.train_file=hf:OWNER/NAME",
    },
}
# flags that describe a machine to plan for, instead of this one
MACHINE_FLAGS: Flags = {
    "--machine": {
        "type": Path,
        "metavar": "FILE",
        "help": "a described machine (configs/machines/*.yaml) instead of this one",
    },
    "--gpu": {
        "metavar": "NAME",
        "help": 'a machine with this card instead, such as "RTX 3090" or "2x RTX 3090"'
        " (configs/cards.yaml has them)",
    },
    "--gpus": {"metavar": "N", "help": "how many of that card (default 1)"},
    "--ram": {"metavar": "GIB", "help": "that machine's RAM in GiB"},
}
EXPLAIN: Flags = {
    "--explain": {
        "action": "store_true",
        "help": "show the whole plan: every setting, its reason and the alternatives",
    }
}


@dataclass(frozen=True)
class RecipeArguments:
    """The recipe, the batch size and the keys that plan, run and tune take."""

    recipe: str
    is_auto: bool  # the batch size was typed as `auto`
    overrides: list[str]
    wishes: Wishes
    download: bool = False  # repositories on a hub that the recipe names


class Parser(ArgumentParser):
    """Raises ConfigError with one line instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        wrong = re.search(r"invalid choice: '?(.*?)'? \(choose from (.*)\)", message)
        choices = wrong[2].replace("'", "").split(", ") if wrong else ()
        near = did_you_mean(wrong[1], choices) if wrong else ""
        raise ConfigError(f"{self.prog}: {message}{near}; see {self.prog} --help")


def add_parser(subparsers: Any, verb: str, description: str) -> Parser:
    """The parser of a verb. read() takes the recipe, the batch size and keys, because argparse
    would take the value of an unknown flag for one of them."""
    takes_keys = {
        "usage": f"%(prog)s {USAGES.get(verb)} [--section.key=value ...]",
        "epilog": EPILOG,
        "formatter_class": RawDescriptionHelpFormatter,
    }
    return subparsers.add_parser(
        verb,
        help=description,
        description=description,
        allow_abbrev=False,
        **(takes_keys if verb in USAGES else {}),
    )


def add_flags(parser: ArgumentParser, flags: Flags) -> None:
    """Add flags to a parser."""
    for name, options in flags.items():
        parser.add_argument(name, **options)


def described_machine(arguments: Namespace) -> Machine | None:
    """The machine of --machine, or of --gpu, --gpus and --ram; None: this machine. Raises
    ConfigError."""
    flags = {name: getattr(arguments, name) for name in ("gpu", "gpus", "ram")}
    typed = [f"--{name}" for name, value in flags.items() if value is not None]
    if arguments.machine:
        if typed:
            raise ConfigError(
                f"--machine and {typed[0]}: expected one of them; a file has gpu, gpus and ram_gib"
            )
        return described.from_file(arguments.machine)
    if not typed:
        return None
    refuse(
        (flags["gpu"] is None, f"{typed[0]}: expected --gpu NAME beside it"),
        (flags["ram"] is None, f"{typed[0]}: expected --ram GIB beside it"),
    )
    several, flag = _SEVERAL.fullmatch(flags["gpu"]), "--gpus"
    if several:
        if flags["gpus"] is not None:
            raise ConfigError(f"--gpus {flags['gpus']}: --gpu has a number too; leave one out")
        count, name = several[1] or several[4], several[2] or several[3]
        flag, flags = "--gpu", {**flags, "gpus": count, "gpu": name}
    expected = f"a number from 1 to {_MOST_GPUS}"
    count = whole_number(flag, flags["gpus"] or "1", 1, _MOST_GPUS, expected)
    try:
        ram_gib = float(flags["ram"])
    except ValueError:
        ram_gib = math.nan
    if not 0 < ram_gib < _MOST_RAM_GIB:
        raise ConfigError(
            f"--ram {show(flags['ram'])[1:-1]}: expected the RAM in GiB, such as --ram 32"
        )
    return described.from_words(flags["gpu"], count, ram_gib)


def whole_number(flag: str, text: str, least: int, most: float, expected: str) -> int:
    """The number that was typed behind a flag. Raises ConfigError for one that is not `expected`,
    or no number."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise ConfigError(f"{flag} {show(text)[1:-1]}: expected {expected}")
    return int(text)


def read(
    arguments: Namespace, unparsed: Sequence[str], variables: Sequence[str] = ()
) -> RecipeArguments:
    """Read the recipe, the batch size and the keys that argparse has passed over. `variables` are
    overrides that keys replace. Raises ConfigError."""
    key_flags, names = _split(arguments, unparsed)
    is_tune = arguments.verb == "tune"
    if not names:
        raise _mistake(arguments, "expected a recipe")
    reject(arguments, names[1 if is_tune else 2 :])
    batch = names[1] if len(names) == 2 else None
    if batch and names[0].isdigit() and not batch.isdigit():
        raise _mistake(arguments, f"found {names[0]} before the recipe", f"{batch} {names[0]}")
    overrides = [
        *variables,
        *(f"--launch.{key}=true" for key in SWITCHES if getattr(arguments, key)),
        *key_flags,
    ]
    batch_keys = [
        text for text in overrides if text.partition("=")[0].replace("-", "_").endswith(_BATCH_KEY)
    ]
    if batch is not None and batch_keys:
        other = getattr(batch_keys[0], "typed", "") or f"--training.{_BATCH_KEY}"
        raise ConfigError(f"batch {batch} and {other} are both given; leave one of them out")
    if batch not in (None, AUTO):
        overrides.append(f"--training.{_BATCH_KEY}={load.check_batch(batch)}")
    wishes = Wishes(
        force_gloo=environment.asks_for_gloo(os.environ),
        free_batch=batch == AUTO,
        wants_tuned=batch in (None, AUTO) and not batch_keys and not is_tune,
    )
    return RecipeArguments(names[0], batch == AUTO, overrides, wishes, arguments.download)


def read_keys(arguments: Namespace, unparsed: Sequence[str]) -> list[str]:
    """The keys of a verb that takes no recipe. Raises ConfigError for other arguments."""
    key_flags, names = _split(arguments, unparsed)
    reject(arguments, names)
    return key_flags


def reject(arguments: Namespace, unparsed: Sequence[str]) -> None:
    """Refuse arguments that the verb does not take. Raises ConfigError."""
    for word in unparsed:
        if word.startswith("--"):
            flag = _flag(arguments, word.partition("=")[0][2:], "")
            raise _mistake(arguments, f"{word.partition('=')[0]}: no such flag", flag)
        raise _mistake(arguments, f"{show(word)[1:-1]} was not expected")


def refuse(*rows: tuple[object, str], error: type[LaunchError] = ConfigError) -> None:
    """Raise an error with the message of the first row whose condition is true."""
    for is_wrong, message in rows:
        if is_wrong:
            raise error(message)


def say(line: str) -> None:
    """Print a line at once, into a file too, without secrets."""
    print(shown(line), flush=True)


def _mistake(arguments: Namespace, problem: str, instead: str | None = None) -> ConfigError:
    fix = f"write {instead}" if instead else f"see python -m launch {arguments.verb} --help"
    return ConfigError(f"{arguments.verb}: {problem}; {fix}")


def _split(arguments: Namespace, unparsed: Sequence[str]) -> tuple[list[str], list[str]]:
    """Keys as `--key=value`, and the other arguments. A key without = takes the next argument.
    Raises ConfigError for a flag that is no key."""
    key_flags: list[str] = []
    names: list[str] = []
    problems: list[str] = []
    queue = list(unparsed)
    while queue:
        word = queue.pop(0)
        if not word.startswith("--"):
            if word.startswith("-") and not word[1:].isdigit():
                problems.append(str(_one_dash(arguments, word)))
            names.append(word)
            continue
        name, equals, value = word.partition("=")
        plain = name[2:].replace("-", "_")
        if plain == _BARE_KEY:
            value = value if equals else "true"
        elif not equals and queue and not queue[0].startswith("--"):
            value = queue.pop(0)
        is_key = "." in plain or (plain in Recipe.model_fields and plain not in SECTIONS)
        if not is_key or not (equals or value):
            problems.append(_advice(arguments, name, plain, value, is_key))
        key_flags.append(f"{name}={value}")
    if problems:
        raise ConfigError("\n".join(problems))
    return key_flags, names


def _one_dash(arguments: Namespace, word: str) -> ConfigError:
    name, equals, value = word.partition("=")
    shown_value = "=VALUE" if equals and holds_secret(value) else equals + value
    instead = f"-{name}{shown_value}" if "." in name else None
    return _mistake(arguments, f"{name}: flags have two dashes", instead)


def _advice(arguments: Namespace, name: str, plain: str, value: str, is_key: bool) -> str:
    """The error for an unknown flag or a key without a value, with what to type instead."""
    types = {key.name: key.type for key in key_reference.all_keys()}
    if value.startswith("{") and (sections := nearest(plain, SECTIONS, cutoff=_ALIKE)):
        return f"{name}: a section is no flag; {_of_section(sections[0], value, types)}"
    if is_key and plain in types:
        return f"{name}: a key of the recipe needs a value; write {_typed(plain, types[plain], '')}"
    section = plain.rpartition(".")[0]
    flag = None if section else _flag(arguments, plain, value)
    key = key_reference.likely(plain, section)
    if plain == "model" and (FILES / "configs" / "models" / f"{value}.yaml").is_file():
        key = "model.shape"
    if key is None and flag is None and not section:
        last_parts = {**key_reference.ALIASES, **key_reference.by_last_part()}
        key = next((last_parts[near] for near in nearest(plain, last_parts, cutoff=_ALIKE)), None)
    instead = flag or (_typed(key, types[key], value) if key else None)
    if instead:
        return f"{name}: no such {'key' if section else 'flag'}; write {instead}"
    lists = f"python -m launch keys {section if section in SECTIONS else ''}".rstrip()
    return f"{name}: no such {'key' if section else 'flag or key'}; {lists} lists the keys"


def _of_section(section: str, value: str, types: Mapping[str, str]) -> str:
    """Name the flags of a section that was typed as a mapping. Raises ConfigError where it is
    none."""
    values = strict_yaml.parse_value(value, (section,), f"--{section}", takes_section=True)
    texts = {f"{section}.{key}": strict_yaml.plain(inner) for key, inner in values.items()}
    unknown = [(section, key) for key in values if f"{section}.{key}" not in types]
    if unknown or not texts:
        problems = [
            strict_yaml.wrong(dotted(path), path, "an unknown key", *load.unknown_key(path))
            for path in unknown
        ]
        advice = "\n".join(map(str, problems)) or f"python -m launch keys {section} lists them"
        return f"write each of its keys as --{section}.KEY=VALUE; {advice}"
    return f"write {' '.join(_typed(key, types[key], text) for key, text in texts.items())}"


def _flag(arguments: Namespace, plain: str, value: str) -> str | None:
    """The flag of this verb that was meant, as it is typed."""
    flags = {
        name.replace("_", ""): name
        for name, default in vars(arguments).items()
        if name != "verb" and (default is None or isinstance(default, bool | str))
    }
    for near in nearest(plain.replace("_", "").replace("-", ""), flags, cutoff=_ALIKE):
        takes_value = not isinstance(getattr(arguments, flags[near]), bool)
        text = f"--{flags[near].replace('_', '-')}"
        return f"{text}={shlex.quote(value or 'VALUE')}" if takes_value else text
    return None


def _typed(key: str, kind: str, value: str) -> str:
    """A key of the recipe as it is typed; a value that may be a secret is not repeated."""
    is_switch = kind == "true or false"
    if not value or holds_secret(value) or (value in ("true", "false") and not is_switch):
        value = "true" if is_switch else "VALUE"
    return f"--{key}={shlex.quote(value)}"
