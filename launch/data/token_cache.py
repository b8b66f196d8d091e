"""Tokenised rows of a recipe: the facts that decide their bytes, and the folder that keeps them.

A flipped bit or half a file would be trained on, so a folder has the hashes of its files, which are
verified when it is opened."""

import hashlib
import json
import stat
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.base import files
from launch.data import chat_templates, sources
from launch.data.files import shards
from launch.schema.plan import DataFormat, ModelSize
from launch.schema.recipe import Recipe

_TOKEN_CACHE_VERSION = 8  # raise when training/ tokenises the same input to other rows

TOKENS_MADE_OF = "made_of.json"  # file of a token cache with TokenCache.identity

# Key of an identity that no earlier version wrote. With it, rows have the ids that AutoTokenizer
# gives beside a config.json of this type, and pairs the tokens that the tokenizer's own call adds.
# Without it, the ids are those of tokenizer.json, with an end token alone around the texts of a
# pair.
BESIDE_CONFIG = "model_type"

# File of a token cache with the facts of its rows. The cache's folder is renamed when it is
# complete.
TOKENS_READY = "counts.json"

# rows with the most targets, whose counts are kept
NUM_MOST_TARGETS = 1024

SHOWN_ROWS = "rows.json"  # file of a token cache with the ShownRows of its first rows
HASHES = "hashes.json"  # {"files": {relative path: {"bytes", "sha256"}}}
_THREADS = 4  # sha256 of one file is one core's work
_CHUNK_BYTES = 8 << 20
_POLL_S = 0.2


def folder_fingerprint(folder: Path) -> str:
    """sha256 over the small files of a tokenizer folder (weights do not change tokens)."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in {".json", ".model", ".txt", ".jinja"}:
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class TokenCache:
    """Rows of one content, tokenised in one way."""

    recipe: Recipe
    model: ModelSize
    data_format: DataFormat
    identity: Mapping[str, Any]  # everything that decides the bytes of the tokenised rows
    folder: Path
    rows: int | None = None  # trained rows; None: not counted
    row_counts: sources.RowCounts | None = None  # None: every row is trained once

    def of_part(self, part: sources.Part) -> tuple[sources.Source, ...]:
        """The sources of a part, none if nothing is held out."""
        return sources.of_part(self.recipe.data, self.data_format, self.row_counts, part)


def token_cache(
    cache: Path, recipe: Recipe, model: ModelSize, data_format: DataFormat
) -> TokenCache:
    """The tokenised rows of a recipe. Reads data files whose content is not known yet."""
    identity = _identity(cache, recipe, model, data_format)
    row_counts = None
    if sources.are_counted(recipe.data):
        row_counts = sources.count_rows(recipe.data, data_format, known_files(cache))
        sources.trained_rows(recipe.data, row_counts)  # raises DataError if a part would be empty
    folder = cache / "tokens" / files.digest(identity)
    return TokenCache(recipe, model, data_format, identity, folder, row_counts=row_counts)


def _identity(
    cache: Path, recipe: Recipe, model: ModelSize, data_format: DataFormat
) -> dict[str, Any]:
    data, facts = recipe.data, known_files(cache)
    # rows of one unit are not packed with those of another
    units = [
        shards.unit_bytes(file)
        for file in data.paths
        if shards.stored_bytes(file) > shards.UNIT_BYTES
    ]
    tokenizer_path = recipe.tokenizer.path or recipe.model.path
    splits = recipe.tokenizer.split_special_tokens
    train = ", ".join(
        shards.ends_fingerprint(Path(source.path))
        if data.streaming
        else shards.fingerprint(Path(source.path), facts)
        for source in data.sources
    )
    validation = None
    if data.validation_file:
        validation = shards.fingerprint(Path(data.validation_file), facts)
    elif data.validation_size:
        validation = f"{data.validation_size} of {train}"
    return {
        "version": _TOKEN_CACHE_VERSION,
        "train": train,
        "validation": validation,
        "columns": _columns(data_format),
        "limits": (
            [data.max_length, data.max_train_samples, data.max_validation_samples]
            + ([data.max_bad_rows] if data.max_bad_rows else [])
            + ([f"truncated {data.truncation_side}"] if data.truncation_side != "right" else [])
            + (["special tokens", splits] if splits is not None else [])
            + (["packed"] if data.packing else [])
            + ([["streaming", data.stream_unit_bytes]] if data.streaming else [])
            + ([["held out", data.validation_size]] if data.validation_size else [])
            + ([["weights", *(source.weight for source in data.sources)]] if data.is_mixed else [])
            + [["units", size] for size in units if data.packing]
        ),
        "task": recipe.task,
        "encoder_decoder": model.is_encoder_decoder,
        BESIDE_CONFIG: model.config["model_type"],
        "tokenizer": (
            folder_fingerprint(Path(tokenizer_path))
            if tokenizer_path
            else [recipe.tokenizer.split, recipe.tokenizer.vocab_size or model.config["vocab_size"]]
        ),
        **_changes_of_tokenizer(recipe),
    }


def _columns(data_format: DataFormat) -> list[Any]:
    return [
        *(data_format.kind, data_format.file_type, dict(data_format.columns)),
        # Ignored columns decide which later rows are refused
        *([sorted(data_format.ignored)] if data_format.ignored else []),
        *(["source", *_columns(source)] for source in data_format.of_sources),
    ]


def _changes_of_tokenizer(recipe: Recipe) -> dict[str, Any]:
    section, named = recipe.tokenizer, recipe.tokenizer.chat_template
    languages = [section.src_lang, section.tgt_lang]
    changes = {
        "loading": section.loading,
        "chat_template": named and hashlib.sha256(chat_templates.read(named).encode()).hexdigest(),
        "add_tokens": list(section.add_tokens),
        "languages": languages if any(languages) else [],
    }
    return {key: value for key, value in changes.items() if value}


def token_files(folder: Path, part: str) -> list[Path]:
    """The tokenised rows of a part, "train" or "validation", in their order: one file, or one of
    each unit."""
    alone = folder / f"{part}.arrow"
    return [alone] if alone.exists() else sorted(folder.glob(f"{part}-*.arrow"))


def known_files(cache: Path) -> shards.FileFacts:
    """Facts of data files that earlier starts have read."""
    return shards.FileFacts(cache / "files.json")


# ---- hashes
# ---------------------------------------------------------------------------


def write_hashes(folder: Path, goes_on: Callable[[], None] = lambda: None) -> None:
    """Write the hashes of all files of a finished token cache."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != HASHES)
    hashes = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": digest}
        for path, digest in zip(paths, _digests(paths, goes_on), strict=True)
    }
    files.write_json(folder / HASHES, {"files": hashes})


def fault(folder: Path, goes_on: Callable[[], None] = lambda: None) -> str | None:
    """The first damage of a token cache, or None: every file is as it was written.

    `goes_on` is called several times a second; what it raises ends the reading."""
    hashes = _read_hashes(folder)
    if hashes is None:
        return f"{HASHES} is missing or cannot be read"
    if added := {path.name for path in folder.glob("*.arrow")} - hashes.keys():
        return f"{min(added)} was added to it"
    try:
        for name, (expected_bytes, _) in hashes.items():
            status = (folder / name).stat()
            if not stat.S_ISREG(status.st_mode):
                return f"{name} is not a regular file"
            if status.st_size != expected_bytes:
                return f"{name} has {status.st_size} bytes, expected {expected_bytes}"
        digests = _digests([folder / name for name in hashes], goes_on)
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    changed = [
        name
        for (name, (_, expected)), digest in zip(hashes.items(), digests, strict=True)
        if digest != expected
    ]
    return f"{changed[0]} was changed after it was written" if changed else None


def counts(folder: Path) -> dict[str, Any] | None:
    """Counts of the rows of a token cache; None: there is none, or this part is damaged."""
    _, expected = (_read_hashes(folder) or {}).get(TOKENS_READY, (0, ""))
    try:
        content = files.regular_bytes(folder / TOKENS_READY)
    except OSError:
        return None
    return json.loads(content) if hashlib.sha256(content).hexdigest() == expected else None


def _read_hashes(folder: Path) -> dict[str, tuple[int, str]] | None:
    """{relative path: (bytes, sha256)}; None where there is no such file, or it is damaged."""
    try:
        described = json.loads(files.regular_bytes(folder / HASHES))
        hashes = {
            str(name): (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in described["files"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return hashes if TOKENS_READY in hashes else None


def _digests(paths: list[Path], goes_on: Callable[[], None]) -> list[str]:
    is_over = threading.Event()
    with ThreadPoolExecutor(_THREADS) as pool:
        futures = [pool.submit(_sha256, path, is_over) for path in paths]
        pending: set[Future[str]] = set(futures)
        try:
            while pending:
                pending = wait(pending, _POLL_S, FIRST_COMPLETED).not_done
                goes_on()
            return [future.result() for future in futures]
        finally:
            is_over.set()
            pool.shutdown(cancel_futures=True)


def _sha256(path: Path, is_over: threading.Event) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while not is_over.is_set() and (chunk := file.read(_CHUNK_BYTES)):
            digest.update(chunk)
    return digest.hexdigest()
