"""The section of a run's page with answers to a few held-out questions, over time."""

from __future__ import annotations

from collections.abc import Sequence

from launch.report.page import escaped
from launch.schema.result import Answers, Question

EMPTY = "<i>empty</i>"
MOST_SHOWN = 8  # evaluations: the first, the last, and some between
STYLE = """
.answers{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(17rem,100%),1fr));gap:1rem}
.answers table{font-size:.85rem}.answers td:first-child{white-space:nowrap;color:#52606d}
.answers th{width:1%}
.answers td{white-space:pre-line}.answers .right td{background:#e3f4e8}
"""


def section(questions: Sequence[Question], answers: Sequence[Answers]) -> str:
    """A table for each question, side by side: its answers by step, and the right answer."""
    if not questions or not answers:
        return ""
    drawn = "".join(
        f"<table><tr><th>question</th><td>{escaped(question.prompt)}</td></tr>"
        + "".join(
            _row(f"step {record.step:,}", record.texts[number], question.reference)
            for record in shown(answers)
            if number < len(record.texts)
        )
        + f"<tr><th>expected</th><td>{escaped(question.reference)}</td></tr></table>"
        for number, question in enumerate(questions)
    )
    return f'<div class="answers">{drawn}</div>'


def _row(step: str, text: str, reference: str) -> str:
    is_right = text.strip() == reference.strip()
    reply = escaped(text.strip()) or EMPTY
    return f"<tr{' class=right' if is_right else ''}><td>{step}</td><td>{reply}</td></tr>"


def shown(answers: Sequence[Answers]) -> list[Answers]:
    """Those of a few evaluations, at about equal distances."""
    if len(answers) <= MOST_SHOWN:
        return list(answers)
    last = len(answers) - 1
    return [answers[round(number * last / (MOST_SHOWN - 1))] for number in range(MOST_SHOWN)]
