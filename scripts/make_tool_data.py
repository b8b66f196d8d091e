#!/usr/bin/env python3
"""Write conversations in which a calculator is called: data for docs/tool_calls.md.

A row of the training file has several questions, each with a call of the calculator, its result and
an answer. A row of the validation file is a question and the call. No two questions have the same
numbers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Calculates with two whole numbers.",
            "parameters": {
                "type": "object",
                "properties": {
                    "operation": {"type": "string", "enum": ["add", "subtract", "multiply"]},
                    "a": {"type": "integer"},
                    "b": {"type": "integer"},
                },
                "required": ["operation", "a", "b"],
            },
        },
    }
]
QUESTIONS_A_ROW = 4
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "multiply": lambda a, b: a * b,
}
QUESTIONS = {
    "add": ("What is {a} plus {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "{a}加{b}是多少?"),
    "subtract": (
        *("What is {a} minus {b}?", "Subtract {b} from {a}.", "{a} - {b} = ?", "{a}减{b}是多少?"),
    ),
    "multiply": (
        *("What is {a} times {b}?", "Multiply {a} by {b}.", "{a} * {b} = ?", "{a}乘以{b}是多少?"),
    ),
}


def conversation(operation: str, question: str, a: int, b: int) -> list[dict[str, Any]]:
    result = OPERATIONS[operation](a, b)
    arguments = {"operation": operation, "a": a, "b": b}
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        {"role": "user", "content": question.format(a=a, b=b)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculator", "content": str(result)},
        {"role": "assistant", "content": f"The result is {result}."},
    ]


def write(file: Path, rows: list[list[dict[str, Any]]]) -> None:
    lines = (json.dumps({"messages": row, "tools": TOOLS}, ensure_ascii=False) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", type=Path, default=Path("data"))
    parser.add_argument("--train-rows", type=int, default=2000)
    parser.add_argument("--validation-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    num_questions = arguments.train_rows * QUESTIONS_A_ROW + arguments.validation_rows
    questions = []
    for place in draw.sample(range(1_000_000), num_questions):  # each pair of numbers once
        operation = draw.choice(list(OPERATIONS))
        a, b = divmod(place, 1000)
        questions.append(conversation(operation, draw.choice(QUESTIONS[operation]), a, b))
    held_out = [messages[:2] for messages in questions[: arguments.validation_rows]]
    rest = questions[arguments.validation_rows :]
    rows = [
        [message for messages in rest[start : start + QUESTIONS_A_ROW] for message in messages]
        for start in range(0, len(rest), QUESTIONS_A_ROW)
    ]
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    write(arguments.out_dir / "tool_calls_train.jsonl", rows)
    write(arguments.out_dir / "tool_calls_validation.jsonl", held_out)


if __name__ == "__main__":
    main()
