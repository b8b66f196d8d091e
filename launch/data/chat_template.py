"""The place where a recipe's chat template comes from."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from launch.schema.plan import DataFormat
from launch.schema.recipe import Recipe

FILES = ("chat_template.jinja", "chat_template.json")  # of a tokenizer's folder
CONFIG, FOLDER = "tokenizer_config.json", "additional_chat_templates"


def source(recipe: Recipe, is_encoder_decoder: bool, data_format: DataFormat) -> str:
    """The place, in words."""
    if recipe.task == "pretrain" and data_format.kind == "text":
        return "none: texts are trained as they are"
    if is_encoder_decoder:
        return "none: T5 reads the turns before the last answer, a line each"
    folder = recipe.tokenizer.path or recipe.model.path
    if folder is None:
        return "of the tokenizer that is trained on the data: a token for each role"
    if _has_template(Path(folder)):
        return f"of {folder}"
    return f"{folder} has none: a line for each turn, an end token after each answer"


def _has_template(folder: Path) -> bool:
    if any((folder / name).exists() for name in (*FILES, FOLDER)):
        return True
    with suppress(OSError, ValueError):
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        return isinstance(config, dict) and bool(config.get("chat_template"))
    return False
