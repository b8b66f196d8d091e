"""Trainings whose exports are compared: a family's base folder is trained on a few rows until the
model knows them by heart, and the last checkpoint is put under the base folder's configuration."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from benchmarks import export_folders
from benchmarks.export_folders import FOLDERS, PAIRS
from benchmarks.families import LORA
from launch.data.rows import IGNORED
from launch.run_folder.layout import RunDir
from tests import builders
from training.data.batches import TokenRows

FULL, ADAPTER, MERGED = KINDS = ("full", "adapter", "merged")
EPOCHS = 60
COMPARED_ROWS = 2


@dataclass(frozen=True)
class Trained:
    """The rows and the model of a run."""

    family: str
    folder: Path  # it holds the base, the run, and a folder for each kind of export
    is_encoder_decoder: bool
    dtype: str  # of the base folder's weights
    inputs: Sequence[list[int]]
    labels: Sequence[list[int]]
    logits: Sequence[torch.Tensor]  # of the first COMPARED_ROWS rows, of weights in that dtype
    rounded_off: float  # what rounding the sums of merged weights to that dtype changes
    known: Sequence[int]  # rows whose every target is the likeliest token

    def prompt(self, row: int) -> list[int]:
        """The ids that the model is given before its answer."""
        if self.is_encoder_decoder:
            return self.inputs[row]
        masked = [label == IGNORED for label in self.labels[row]]
        return self.inputs[row][: masked.index(False)]

    def answer(self, row: int) -> list[int]:
        """The ids that the model was trained to answer."""
        return [label for label in self.labels[row] if label != IGNORED]


def train(family: str, folder: Path, is_lora: bool) -> Trained:
    """Train a family's base folder, and merge an adapter. AssertionError where that fails."""
    if not (folder / "base").exists():
        export_folders.write(family, folder / "base")
    name = "lora" if is_lora else "full"
    _launch(folder, "run", str(_recipe(name, family, folder, is_lora)))
    if is_lora:
        _launch(folder, "merge", str(folder / ADAPTER), "--out", str(folder / MERGED))
    return _read(family, folder, RunDir(builders.only_run(folder, name)))


def _recipe(name: str, family: str, folder: Path, is_lora: bool) -> Path:
    pairs = [{"prompt": prompt, "response": answer} for prompt, answer in PAIRS]
    rows = builders.write_parquet(folder / "rows.parquet", pairs)
    content: dict[str, Any] = {
        "name": name,
        "task": "sft",
        "model": {"path": str(folder / "base")},
        "tokenizer": dict(FOLDERS[family].recipe),
        "data": {"train_file": str(rows), "validation_file": str(rows), "max_length": 256},
        "training": {
            "per_device_train_batch_size": len(PAIRS),
            "num_train_epochs": EPOCHS,
            "learning_rate": 1e-2 if is_lora else 3e-3,
            "logging_steps": EPOCHS,
            **dict.fromkeys(("save_steps", "eval_steps"), 10 * EPOCHS),  # at the end alone
        },
        "launch": {"mode": "cpu"},
        "output_dir": str(folder / (ADAPTER if is_lora else FULL)),
    }
    if is_lora:
        content["lora"] = {**LORA, "lora_alpha": 16}
    file = folder / f"{name}.yaml"
    file.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    return file


def _launch(folder: Path, *words: str) -> None:
    argv = [sys.executable, "-m", "launch", *words]
    environment = builders.environment(folder, OMP_NUM_THREADS="1")
    done = subprocess.run(argv, env=environment, capture_output=True, text=True)
    lines = (done.stdout + done.stderr).splitlines()
    said = "; ".join(line.strip() for line in lines if line.startswith(("error:", "  proof")))
    assert done.returncode == 0, f"{words[0]}: exit code {done.returncode}: {said or lines[-1:]}"


def _read(family: str, folder: Path, run: RunDir) -> Trained:
    tokens = run.read_tokens()
    assert tokens is not None
    rows = [*TokenRows(Path(tokens.folder) / "train.arrow")]
    inputs, labels = [row.input_ids.tolist() for row in rows], [row.labels.tolist() for row in rows]
    (checkpoint,) = run.checkpoints.glob("checkpoint-*")
    model = CheckpointModel(folder / "base", checkpoint)
    every = [*zip(inputs, labels, strict=True)]
    exact = model.logits("float32", every)
    loss, known = _known_rows(exact, labels, model.is_encoder_decoder)
    outcome = run.attempts()[-1].read_outcome()
    assert outcome is not None and outcome.eval_loss is not None
    told = f"the last checkpoint has a loss of {loss:.5f}, the run said {outcome.eval_loss:.5f}"
    assert math.isclose(loss, outcome.eval_loss, rel_tol=1e-3, abs_tol=1e-5), told
    assert known, f"no row is known by heart (loss {loss:.4f})"
    dtype = json.loads((folder / "base/config.json").read_text(encoding="utf-8"))["torch_dtype"]
    compared = every[:COMPARED_ROWS]
    logits = model.logits(dtype, compared)
    rounded_off = 0.0
    if model.is_adapter:
        rounded_off = difference(model.logits(dtype, compared, is_merged=True), logits)
    return Trained(
        family, folder, model.is_encoder_decoder, dtype, inputs, labels, logits, rounded_off, known
    )


@dataclass(frozen=True)
class CheckpointModel:
    """The weights of a checkpoint under the config.json of the base folder."""

    base: Path
    checkpoint: Path

    @property
    def is_encoder_decoder(self) -> bool:
        return AutoConfig.from_pretrained(self.base).is_encoder_decoder

    @property
    def is_adapter(self) -> bool:
        return (self.checkpoint / "adapter_config.json").exists()

    def logits(
        self, dtype: str, rows: Sequence[tuple[list[int], list[int]]], is_merged: bool = False
    ) -> list[torch.Tensor]:
        """The logits of inputs and labels, in float32, of weights that are rounded to `dtype`."""
        network, found = self._loaded(is_merged).eval(), []
        for parameter in network.parameters():
            if not self.is_adapter or is_merged:
                parameter.data = parameter.data.to(getattr(torch, dtype)).float()
        for inputs, labels in rows:
            given = {"labels": torch.tensor([labels])} if self.is_encoder_decoder else {}
            with torch.no_grad():
                logits = network(input_ids=torch.tensor([inputs]), **given).logits
            found.append(logits[0])
        return found

    def _loaded(self, is_merged: bool) -> torch.nn.Module:
        family = AutoModelForSeq2SeqLM if self.is_encoder_decoder else AutoModelForCausalLM
        with tempfile.TemporaryDirectory() as place:
            if self.is_adapter:
                network = family.from_pretrained(self.base, dtype="float32")
                adapted: Any = PeftModel.from_pretrained(network, str(self.checkpoint))
                if not is_merged:
                    return adapted
                adapted.merge_and_unload().save_pretrained(place)
            else:
                for file in self.checkpoint.glob("model*.safetensors*"):
                    shutil.copy(file, place)
            shutil.copy(self.base / "config.json", place)
            return family.from_pretrained(place, dtype="float32")


def _known_rows(
    logits: Sequence[torch.Tensor], labels: Sequence[list[int]], is_encoder_decoder: bool
) -> tuple[float, list[int]]:
    """The mean loss of all targets, and the rows whose every target is the likeliest token."""
    total, count, known = 0.0, 0, []
    for number, (found, row) in enumerate(zip(logits, labels, strict=True)):
        targets = torch.tensor(row if is_encoder_decoder else row[1:])
        predicted = found if is_encoder_decoder else found[:-1]
        has_loss = targets != IGNORED
        predicted, targets = predicted[has_loss], targets[has_loss]
        total += torch.nn.functional.cross_entropy(predicted, targets, reduction="sum").item()
        count += len(targets)
        if torch.equal(predicted.argmax(dim=-1), targets):
            known.append(number)
    return total / count, known


def difference(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    """The largest difference of two logits, as a part of the largest logit."""
    parts = [
        ((one - other).abs().max() / other.abs().max()).item()
        for one, other in zip(found, expected, strict=True)
    ]
    return max(parts)
