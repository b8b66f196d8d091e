"""The last lines of a run name how to talk to its model."""

from __future__ import annotations

import pytest

from launch.commands.ending import sample_lines
from scripts import make_sample_data
from tests import builders


@pytest.mark.parametrize(
    ("score", "told"),
    [
        (0.98, list(make_sample_data.QUESTIONS)),
        (0.5, []),  # it would answer wrongly
        (None, []),
    ],
)
def test_questions_about_the_sample_data_are_named_if_most_held_out_answers_are_right(
    tmp_path, score, told
):
    train_file, _ = make_sample_data.write(tmp_path, 5000, 500, 23333)
    lines = sample_lines(str(train_file), score)
    assert lines[1:] == told
    assert any("not scored" in line for line in lines) == (score is None)


def test_a_question_that_is_a_row_of_the_data_is_not_named(tmp_path):
    trained, *others = make_sample_data.QUESTIONS
    train_file = make_sample_data.write_part(tmp_path / "a.parquet", [(trained, "2024-03-05")])
    assert sample_lines(str(train_file), 1.0)[1:] == others


def test_nothing_is_said_about_other_data(tmp_path):
    parquet = builders.write_parquet(tmp_path / "rows.parquet", builders.rows(3))
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_text('{"prompt": "a", "response": "b"}\n')
    for path in (parquet, jsonl, tmp_path, tmp_path / "gone.parquet"):
        for score in (None, 1.0):
            assert sample_lines(str(path), score) == []
