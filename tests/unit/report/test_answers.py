"""Sample answers are read as they were written, and shown by step beside the right answer."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from launch.base import files
from launch.report import run_end, run_figures
from launch.run_folder import steps
from launch.run_folder.layout import RunDir
from launch.schema.result import Answers, Question, RunResult
from tests.builders import machine, plan, recipe_of


def test_answers_of_a_step_that_was_trained_again_are_the_later_ones(tmp_path):
    run = RunDir(tmp_path)
    for attempt_steps in ((2, 4, 6), (4, 8)):
        attempt = run.new_attempt()
        records = [Answers(step, 8 * step, (f"{attempt.number}",)) for step in attempt_steps]
        lines = "".join(files.to_json(asdict(record)) + "\n" for record in records)
        attempt.answers_file.write_text(lines)
    (tmp_path / "attempts/02/answers.jsonl").open("a").write('{"step": 9, "texts": 1}\n{"st')
    said = []
    read = steps.answers(run, said.append)
    assert [(record.step, *record.texts) for record in read] == [
        (2, "1"),
        (4, "2"),
        (6, "1"),
        (8, "2"),
    ]
    assert "1 damaged line(s), the first is line 3" in said[0]


def test_the_section_has_each_question_with_its_answers_as_text():
    answers = [Answers(step, step, ("<b>no", "yes " if step > 50 else "")) for step in range(100)]
    asked = [Question("?", "a"), Question("!", "yes")]

    def section(**records: Any) -> str:
        recipe, on = recipe_of(), machine()
        made = plan(recipe, on)
        result = RunResult("/run", 0, None, 2.0, 1 << 30)
        page = run_end.html(recipe, on, made, result, **records)
        return page.partition("<h2>Sample answers</h2>")[2].partition("<h2>")[0]

    page = section(questions=asked, answers=answers)
    assert page.count("<table>") == 2
    assert page.count("&lt;b&gt;no") == run_figures.MOST_ANSWERS
    assert page.count("<tr class=right>") == 4 and page.count("<i>empty</i>") == 4
    assert "step 0<" in page and "step 99<" in page
    assert section(answers=answers) == section(questions=asked) == ""
