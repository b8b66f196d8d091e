"""The run that tests of different files read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import builders


@pytest.fixture(scope="session")
def finished(tmp_path_factory) -> tuple[Path, str]:
    """(folder, what was printed) of one run of eight epochs, after which the model can answer
    something; its rows include two that teach nothing."""
    folder = tmp_path_factory.mktemp("finished")
    training = {"num_train_epochs": 8, "learning_rate": 0.01, "warmup_steps": 4}
    training |= {"eval_steps": 6, "save_steps": 7}  # an epoch has 6 steps
    evaluation = {"exact_match_rows": 10, "max_new_tokens": 12}
    recipe = builders.recipe(folder, training=training, evaluation=evaluation)
    useless = [{"prompt": "red blue " * 99, "response": "y"}, {"prompt": "empty", "response": ""}]
    builders.write_parquet(folder / "train.parquet", [*builders.rows(45), *useless])
    (folder / "tmp").mkdir()
    done = builders.launch(folder / "workspace", "run", str(recipe), TMPDIR=str(folder / "tmp"))
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, done.stdout
