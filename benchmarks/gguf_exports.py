"""Families of models as GGUF files: which are converted, and which answer as they were trained.

A base folder of each family, as the hub has them (export_folders.py), is trained on a few rows
until the model knows them by heart, and `python -m launch export --to gguf` converts and compares
it. Needs .cache/export_tools (make export-tools)."""

from __future__ import annotations

import argparse
import json
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import yaml

from benchmarks import export_folders, recording
from benchmarks.export_folders import FOLDERS, PAIRS
from tests import builders

STORE = recording.CODE / ".cache" / "gguf_exports.json"
EPOCHS = 60


def attempted(family: str, folder: Path, file_type: str) -> dict[str, Any]:
    """The row of one family: the exit code and the last line of its export."""
    export_folders.write(family, folder / "base")
    trained = builders.launch(folder, "run", str(_recipe(family, folder)), OMP_NUM_THREADS="1")
    lines = (trained.stdout + trained.stderr).splitlines()
    if trained.returncode:
        said = next(line for line in lines if line.startswith("error:") or "cause" in line)
        return {"family": family, "exit_code": trained.returncode, "line": f"training: {said}"}
    done = builders.launch(
        *(folder, "export", str(folder / "model"), "--to", "gguf", "--type", file_type)
    )
    lines = (done.stdout + done.stderr).strip().splitlines()
    line = next(line for line in reversed(lines) if not line.startswith("written"))
    line = line.removeprefix("error: ").replace(f"{folder}/", "")
    return {"family": family, "type": file_type, "exit_code": done.returncode, "line": line}


def _recipe(family: str, folder: Path) -> Path:
    # composed characters: llama.cpp composes none, and tokenizers with a normaliser do
    pairs = [[unicodedata.normalize("NFC", text) for text in pair] for pair in PAIRS]
    rows = builders.write_parquet(
        folder / "rows.parquet", [{"prompt": prompt, "response": text} for prompt, text in pairs]
    )
    content = {
        "name": "full",
        "task": "sft",
        "model": {"path": str(folder / "base")},
        "tokenizer": dict(FOLDERS[family].recipe),
        "data": {"train_file": str(rows), "validation_file": str(rows), "max_length": 256},
        "training": {
            "per_device_train_batch_size": len(PAIRS),
            "num_train_epochs": EPOCHS,
            "learning_rate": 3e-3,
            "logging_steps": EPOCHS,
            **dict.fromkeys(("save_steps", "eval_steps"), 10 * EPOCHS),
        },
        "launch": {"mode": "cpu"},
        "output_dir": str(folder / "model"),
    }
    file = folder / "full.yaml"
    file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="families, by commas")
    parser.add_argument("--type", default="f16")
    parser.add_argument("--so-far", action="store_true", help="record the rows that are there")
    arguments = parser.parse_args()
    rows: dict[str, Any] = json.loads(STORE.read_text()) if STORE.exists() else {}
    only = [name for name in arguments.only.split(",") if name]
    for family in () if arguments.so_far else FOLDERS:
        if (only and family.split()[0] not in only) or (not only and family in rows):
            continue
        with tempfile.TemporaryDirectory() as place:
            rows[family] = attempted(family, Path(place), arguments.type)
        print(json.dumps(rows[family], ensure_ascii=False), flush=True)
        STORE.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    recorded = [rows[family] for family in FOLDERS if family in rows]
    agree = sum(not row["exit_code"] for row in recorded)
    lines = [[row["family"], row["exit_code"], row["line"][:300]] for row in recorded]
    text = f"{len(recorded)} families, {agree} are converted and answer as they were trained.\n\n"
    text += recording.table(["family", "exit code", "last line"], lines)
    recording.write("gguf_exports", {"rows": recorded}, text)


if __name__ == "__main__":
    main()
