#!/usr/bin/env python3
"""Write docs/keys.md: every key of a recipe, from the schema and TrainingArguments' fields."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent
# run as a script: launch/ is beside scripts/, so it is imported after this line
sys.path.insert(0, str(CODE))

from launch.recipe import key_reference  # noqa: E402
from launch.recipe.key_reference import Key  # noqa: E402

HEADING = """# Keys of a recipe

Each key stands in a recipe file, or on the command line as `--section.key=value`.
`python -m launch keys [SECTION]` prints the same. This page is generated:
`python scripts/render_docs.py`. The keys of `training` below `dataloader_num_workers` are fields
of the installed TrainingArguments, in transformers' own words.
"""
TABLE = "\n\n| key | type | default | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """The whole text of docs/keys.md."""
    parts = [HEADING]
    for section, section_keys in groupby(key_reference.all_keys(), _section):
        parts += [f"\n## {section or 'top level'}{TABLE}", *map(_row, section_keys)]
    return "".join(parts)


def _section(key: Key) -> str:
    return key.name.rpartition(".")[0]


def _row(key: Key) -> str:
    name = key.name.rpartition(".")[2]
    kind, meaning = (text.replace("|", "\\|") for text in (key.type, key.meaning))
    return f"| `{name}` | {kind} | `{key.default}` | {meaning} |\n"


if __name__ == "__main__":
    (CODE / "docs" / "keys.md").write_text(page(), encoding="utf-8")
    print("docs/keys.md")
