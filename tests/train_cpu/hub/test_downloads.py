"""A model and data that are named on a hub: downloaded, trained, and taken again without a
request."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from launch.schema.model_sections import TokenizerSection
from tests import builders
from tests.process.hub import server
from training.data import tokenizer as data_tokenizer

pytestmark = pytest.mark.train_cpu

SMALL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
TOKEN = "hf_" + "aB3" * 10


def model_folder(folder: Path) -> Path:
    """A Llama of 30 thousand parameters with a tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SMALL))
    texts = (f"{row['prompt']} {row['response']}" for row in builders.rows(45))
    data_tokenizer.train(texts, TokenizerSection(), SMALL["vocab_size"]).save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def parquet(count: int, seed: int) -> bytes:
    stream = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(builders.rows(count, seed)), stream)
    return stream.getvalue()


def test_two_names_are_downloaded_and_trained_and_a_second_start_asks_for_nothing(tmp_path):
    recipe = builders.recipe(tmp_path, training={"max_steps": 3, "save_steps": 3})
    content = yaml.safe_load(recipe.read_text())
    content["model"] = {"path": "Tiny/Llama"}
    content["data"] |= {"train_file": "hf:tiny/rows", "validation_file": "hf:tiny/rows"}
    recipe.write_text(yaml.safe_dump(content))
    source = model_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    rows = {"data/train-0.parquet": parquet(45, 0), "data/validation-0.parquet": parquet(10, 1)}
    with server.hub() as hub:
        files |= {"pytorch_model.bin": b"a pickle", "modeling_llama.py": b"raise SystemExit(1)"}
        hub.repositories["models/Tiny/Llama"] = server.Repository(files, {"license": "mit"})
        hub.repositories["datasets/tiny/rows"] = server.Repository(rows, {"license": "cc0-1.0"})
        extra = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
        line = (tmp_path / "workspace", "run", str(recipe))
        refused = builders.launch(*line, **extra)
        assert (refused.returncode, hub.requests) == (4, [])
        assert "type python -m launch download hf:tiny/rows" in refused.stderr
        shutil.rmtree(source)

        done = builders.launch(*line, "--download", **extra)
        assert done.returncode == 0, done.stderr
        assert "Tiny/Llama at commit 7ae557604adf, licence: mit" in done.stdout
        licences = "mit (Tiny/Llama); cc0-1.0 (hf:tiny/rows); cc0-1.0 (hf:tiny/rows:validation)"
        assert f"  licence    {licences}\n" in done.stdout
        assert not hub.asked(".bin") and not hub.asked(".py")
        assert len(hub.asked("/api/")) == 3
        num_requests = len(hub.requests)

        again = builders.launch(*line, "--resume=never", "--dry-run", HF_HUB_OFFLINE="1")
        assert again.returncode == 0, again.stderr
        assert len(hub.requests) == num_requests
    commit = server.COMMIT
    hub_folder = tmp_path / "workspace/data/hub"
    assert (hub_folder / f"models/Tiny/Llama/{commit}/Llama/model.safetensors").is_file()
    exported = json.loads((tmp_path / "model" / "lowmem.json").read_text())
    card = (tmp_path / "model" / "README.md").read_text()
    origins = [f"Tiny/Llama at commit {commit[:12]}, licence: mit"]
    origins += [
        f"hf:tiny/rows{split} at commit {commit[:12]}, licence: cc0-1.0"
        for split in ("", ":validation")
    ]
    assert exported["downloaded"] == origins
    assert all(f"- downloaded: {origin}\n" in card for origin in origins)
    assert "\nlicense: mit\n" in card
    runs = [*(tmp_path / "workspace" / "runs" / "tiny").glob("[!.]*")]
    assert len(runs) == 2
    for run in runs:
        pinned = json.loads((run / "recipe.json").read_text())
        assert commit in pinned["model"]["path"] and commit in pinned["data"]["train_file"]
    written = [path for path in (tmp_path / "workspace").rglob("*") if path.is_file()]
    assert not [path for path in written if TOKEN.encode() in path.read_bytes()]
    assert TOKEN not in done.stdout + done.stderr


@pytest.mark.modes
def test_a_merged_model_is_pushed_without_paths_and_trains_again_by_its_name(tmp_path):
    source = model_folder(tmp_path / "source")
    files = {path.name: path.read_bytes() for path in source.iterdir()}
    training = {"max_steps": 1, "save_steps": 1}
    recipe = builders.recipe(tmp_path, lora={"r": 2}, training=training)
    content = yaml.safe_load(recipe.read_text())
    content["model"] = {"path": "Tiny/Llama"}
    recipe.write_text(yaml.safe_dump(content))
    with server.hub() as hub:
        hub.repositories["models/Tiny/Llama"] = server.Repository(files, {"license": "mit"})
        extra = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": TOKEN}
        workspace = tmp_path / "workspace"
        done = builders.launch(workspace, "run", str(recipe), "--download", **extra)
        assert done.returncode == 0, done.stderr
        line = ("export", str(tmp_path / "model"), "--to", "merged", "--push", "me/merged")
        dry = builders.launch(workspace, *line, "--dry-run")
        assert dry.returncode == 0, dry.stderr
        written = (tmp_path / "model-merged" / "model.safetensors").stat().st_mtime_ns
        pushed = builders.launch(workspace, *line, **extra)
        assert pushed.returncode == 0, pushed.stderr
        # nothing was merged again
        assert (tmp_path / "model-merged" / "model.safetensors").stat().st_mtime_ns == written
        sent = hub.repositories["models/me/merged"].files
        assert not [name for name, text in sent.items() if str(tmp_path).encode() in text]
        assert b"- base: Tiny/Llama\n" in sent["README.md"]
        other = (tmp_path / "other", "run", str(recipe), "--model.path=me/merged", "--download")
        again = builders.launch(*other, **extra)
        assert again.returncode == 0, again.stderr
        assert "me/merged at commit 7ae557604adf" in again.stdout
