"""`python -m launch keys`: every key of a recipe with its type, default and meaning."""

import textwrap
from argparse import Namespace

from launch.base.errors import ConfigError
from launch.base.text import nearest
from launch.recipe import key_reference
from launch.recipe.strict_yaml import show
from launch.schema.recipe_keys import SECTIONS

WIDTH = 100  # columns


FLAGS = {"section": {"nargs": "?", "help": "of this section alone, or this key alone"}}


def main(arguments: Namespace) -> None:
    section: str = arguments.section or ""
    listed = [
        key
        for key in key_reference.all_keys()
        if not section or f"{key.name}.".startswith(f"{section}.")
    ]
    if not listed:
        near = nearest(section, SECTIONS) or [key_reference.likely(section) or ""]
        hint = f"did you mean {near[0]}?" if near[0] else "python -m launch keys lists all"
        raise ConfigError(f"keys: {show(section)} is no section and no key of a recipe; {hint}")
    indent = " " * 4
    for key in listed:
        print(f"{key.name}: {key.type}; default {key.default}")
        print(textwrap.fill(key.meaning, WIDTH, initial_indent=indent, subsequent_indent=indent))
