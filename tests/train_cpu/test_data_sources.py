"""Rows that the training file holds out are evaluated, and never trained."""

from __future__ import annotations

import json

import pyarrow.parquet as pq
import pytest

from launch.data import token_cache
from launch.run_folder.layout import RunDir
from tests import builders
from training.data import tokenizer as data_tokenizer
from training.data.batches import TokenRows


def prompts(folder, part: str) -> set[int]:
    """The numbers with which the prompts of a part begin."""
    tokenizer = data_tokenizer.load(folder / "tokenizer")
    rows = TokenRows(*token_cache.token_files(folder, part))
    texts = [tokenizer.decode(row.input_ids.tolist()) for row in rows]
    return {int(text.removeprefix("<|user|>").partition(":")[0]) for text in texts}


@pytest.mark.modes
def test_held_out_rows_of_the_training_file_are_evaluated_and_never_trained(tmp_path):
    recipe = builders.recipe(
        tmp_path,
        data={"validation_file": None, "validation_size": 9},
        training={"num_train_epochs": 1, "load_best_model_at_end": True, "eval_steps": 2},
        evaluation={"exact_match_rows": 9},
    )
    done = builders.launch(tmp_path / "workspace", "run", str(recipe))
    assert done.returncode == 0, done.stderr + done.stdout
    assert "train.parquet: 36 rows and 9 held out, " in done.stdout
    assert "exact match after training: 0.0 % of 9 held-out rows" in done.stdout
    run = RunDir(builders.only_run(tmp_path / "workspace"))
    tokens = run.read_tokens()
    assert tokens is not None
    held_out = prompts(tokens.folder, "validation")
    assert len(held_out) == 9
    assert prompts(tokens.folder, "train") == set(range(45)) - held_out
    assert pq.read_metadata(tmp_path / "train.parquet").num_rows == 45
    (attempt,) = run.attempts()
    evaluations = [json.loads(line) for line in attempt.held_out_file.read_text().splitlines()]
    assert [evaluation["step"] for evaluation in evaluations] == [2, 4, 5]
    (made_of,) = [json.loads((tokens.folder / token_cache.TOKENS_MADE_OF).read_text())]
    assert made_of["validation"].startswith("9 of ")
