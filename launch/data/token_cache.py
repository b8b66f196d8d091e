"""Name and files of the token cache of a recipe's rows; launch/ and training/ both read it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launch.data import shards
from launch.schema.plan import DataFormat, ModelSize
from launch.schema.recipe import Recipe

TOKEN_CACHE_VERSION = 2  # raise when training/ tokenises the same input to other rows

TOKENS_MADE_OF = "made_of.json"  # of a token cache: token_identity()

# of a token cache: what its rows are; its folder is renamed when all is written
TOKENS_READY = "counts.json"


def folder_fingerprint(folder: Path) -> str:
    """sha256 over the small files of a tokenizer folder (weights do not change how text is cut)."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in {".json", ".model", ".txt", ".jinja"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def token_identity(
    cache: Path, recipe: Recipe, shape: ModelSize, data_format: DataFormat
) -> dict[str, Any]:
    """Everything that decides the bytes of a run's tokenised rows. Reads files that the cache does
    not know yet."""
    data, known = recipe.data, known_files(cache)
    files = [Path(file) for file in (data.train_file, data.validation_file) if file]
    # rows of one unit are not packed with those of another
    units = [
        shards.unit_bytes(file) for file in files if shards.stored_bytes(file) > shards.UNIT_BYTES
    ]
    tokenizer_path = recipe.tokenizer.path or recipe.model.path
    return {
        "version": TOKEN_CACHE_VERSION,
        "train": (
            shards.ends_fingerprint(Path(data.train_file))
            if data.streaming
            else shards.fingerprint(Path(data.train_file), known)
        ),
        "validation": (
            shards.fingerprint(Path(data.validation_file), known) if data.validation_file else None
        ),
        "columns": (
            [data_format.kind, data_format.file_type, dict(data_format.columns)]
            # where later rows may hold more than they
            + ([sorted(data_format.ignored)] if data_format.ignored else [])
        ),
        "limits": (
            [data.max_length, data.max_train_samples, data.max_validation_samples]
            + ([data.max_bad_rows] if data.max_bad_rows else [])
            + (["packed"] if data.packing else [])
            + ([["streaming", data.stream_unit_bytes]] if data.streaming else [])
            + [["units", size] for size in units if data.packing]
        ),
        "task": recipe.task,
        "encoder_decoder": shape.is_encoder_decoder,
        "tokenizer": (
            folder_fingerprint(Path(tokenizer_path))
            if tokenizer_path
            else [recipe.tokenizer.split, recipe.tokenizer.vocab_size or shape.config["vocab_size"]]
        ),
    }


def token_cache(cache: Path, recipe: Recipe, shape: ModelSize, data_format: DataFormat) -> Path:
    """The folder of this run's tokenised rows."""
    return token_folder(cache, token_identity(cache, recipe, shape, data_format))


def token_files(folder: Path, part: str) -> list[Path]:
    """The tokenised rows of a part, "train" or "validation", in their order: one file, or one of
    each unit."""
    alone = folder / f"{part}.arrow"
    return [alone] if alone.exists() else sorted(folder.glob(f"{part}-*.arrow"))


def known_files(cache: Path) -> shards.FileFacts:
    """What earlier starts have read of data files."""
    return shards.FileFacts(cache / "files.json")


def token_folder(cache: Path, identity: Mapping[str, Any]) -> Path:
    """The folder of rows that were made of this."""
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
    return cache / "tokens" / name
