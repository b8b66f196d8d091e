#!/usr/bin/env python3
"""Write docs/keys.md, every key of a recipe, from the schema and TrainingArguments' fields; and
docs/plan.schema.json, the JSON schema of a plan, from its dataclasses."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

CODE = Path(__file__).resolve().parent.parent
# run as a script: launch/ is beside scripts/, so it is imported after this line
sys.path.insert(0, str(CODE))

from launch.recipe import key_reference  # noqa: E402
from launch.recipe.key_reference import Key  # noqa: E402
from launch.report.plan_lines import Fact  # noqa: E402
from launch.schema.plan import Plan  # noqa: E402

HEADING = """# Keys of a recipe

Each key stands in a recipe file, or on the command line as `--section.key=value`.
`python -m launch keys [SECTION]` prints the same. This page is generated:
`python scripts/render_docs.py`. The keys of `training` below `dataloader_num_workers` are fields
of the installed TrainingArguments, in transformers' own words: those that have an effect here. Any
other field is refused with the reason. A key that nothing reads beside the recipe's other choices,
such as `warmup_steps` with a constant rate, is named in a line of the plan.
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


class _AllKeys(GenerateJsonSchema):
    """A schema in which every key is required: a default is written too."""

    def field_is_required(self, field: Any, total: bool) -> bool:
        return True


@dataclass(frozen=True)
class Printed(Plan):
    """The object of `python -m launch plan --json`: a plan, and the rows that `--explain` shows."""

    facts: tuple[Fact, ...] = ()


def plan_schema() -> str:
    """The whole text of docs/plan.schema.json."""
    schema = TypeAdapter(Printed).json_schema(mode="serialization", schema_generator=_AllKeys)
    schema["required"].remove("facts")  # plan.json in a run is without
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return f"{json.dumps(dialect | schema, ensure_ascii=False, indent=1)}\n"


if __name__ == "__main__":
    for name, text in (("keys.md", page()), ("plan.schema.json", plan_schema())):
        (CODE / "docs" / name).write_text(text, encoding="utf-8")
        print(f"docs/{name}")
