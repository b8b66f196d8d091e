"""A training on several sources with weights and held-out rows; killed, it goes on in the same
order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from launch.data import token_cache
from launch.run_folder import manifest, sample_audit
from launch.run_folder.layout import RunDir
from tests import builders
from tests.train_cpu.test_resume import kill_after
from training.data import tokenizer as data_tokenizer
from training.data.batches import TokenRows


def mixture(folder: Path, weight: float = 1.5) -> str:
    """A recipe of 20 alpaca-like rows and 20 conversations, which begin with their number."""
    train = folder / "train.parquet"
    sources = [{"path": str(train), "weight": weight}, {"path": str(folder / "talks.jsonl")}]
    path = builders.recipe(
        folder,
        count=20,
        data={"train_file": sources, "validation_file": None, "validation_size": 0.2},
        training={"num_train_epochs": 3, "save_steps": 3, "eval_steps": 3},
    )
    roles = ("user", "assistant")
    talks = [
        {"messages": [{"role": role, "content": f"{i}: blue river"} for role in roles]}
        for i in range(100, 120)
    ]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    return str(path)


def trained(run: RunDir) -> list[str]:
    """The text of each row in the order in which it was trained."""
    tokens = run.read_tokens()
    assert tokens is not None
    rows = TokenRows(*token_cache.token_files(tokens.folder, "train"))
    tokenizer = data_tokenizer.load(tokens.folder / "tokenizer")
    texts = [tokenizer.decode(row.input_ids.tolist()) for row in rows]
    return [texts[row] for _, step in sorted(sample_audit.taken(run).items()) for row in step]


@pytest.mark.campaign
def test_a_killed_run_on_two_sources_goes_on_in_the_same_order(tmp_path):
    recipe = mixture(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    done = builders.launch(whole, "run", recipe)
    assert done.returncode == 0, done.stderr
    assert "2 sources: 40 rows and 8 held out" in done.stdout
    assert "rows an epoch: train.parquet x 1.5 24, talks.jsonl 16" in done.stdout
    weights = builders.weights(tmp_path / "model")
    order = trained(RunDir(builders.only_run(whole)))
    epoch = Counter(text.removeprefix("<|user|>").partition(":")[0] for text in order[:40])
    assert Counter(times for name, times in epoch.items() if len(name) < 3) == {1: 8, 2: 8}
    assert {times for name, times in epoch.items() if len(name) == 3} == {1}
    assert len(order) == 120

    kill_after(killed, ["run", recipe], 6)
    # another weight is another job
    other = builders.launch(killed, "run", mixture(tmp_path, weight=2), "--dry-run")
    assert other.returncode != 0
    assert "the sources of data.train_file, their weights or columns are not the same" in (
        other.stderr
    )
    again = builders.launch(killed, "run", mixture(tmp_path))
    assert again.returncode == 0, again.stderr
    run = RunDir(builders.only_run(killed))
    assert len(run.attempts()) == 2
    assert trained(run) == order
    ours = builders.weights(tmp_path / "model")
    assert all(bool((ours[name] == weights[name]).all()) for name in weights)
    tokens = run.read_tokens()
    assert tokens is not None
    newest = sorted(run.checkpoints.glob("checkpoint-*"))[-1]
    assert manifest.read(newest)["tokens"] == tokens.folder.name
    made_of = json.loads((tokens.folder / token_cache.TOKENS_MADE_OF).read_text())
    assert ["weights", 1.5, 1.0] in made_of["limits"]
    assert len(made_of["train"].split(", ")) == 2
