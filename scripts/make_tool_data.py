#!/usr/bin/env python3
"""Write conversations in which a calculator is called: data for docs/tool_calls.md.

A row of the training file is a question, a call of the calculator, its result and an answer. A row
of the validation file ends with the call. No question of one file is in the other.
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


def write(file: Path, numbers: list[tuple[int, int]], draw: random.Random, turns: int) -> None:
    with file.open("w", encoding="utf-8") as rows:
        for a, b in numbers:
            operation = draw.choice(list(OPERATIONS))
            messages = conversation(operation, draw.choice(QUESTIONS[operation]), a, b)[:turns]
            row = {"messages": messages, "tools": TOOLS}
            rows.write(json.dumps(row, ensure_ascii=False) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", type=Path, default=Path("data"))
    parser.add_argument("--train-rows", type=int, default=4000)
    parser.add_argument("--validation-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    count = arguments.train_rows + arguments.validation_rows
    numbers = [divmod(place, 1000) for place in draw.sample(range(1_000_000), count)]
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    write(arguments.out_dir / "tool_calls_train.jsonl", numbers[: arguments.train_rows], draw, 4)
    held_out = numbers[arguments.train_rows :]
    write(arguments.out_dir / "tool_calls_validation.jsonl", held_out, draw, 2)


if __name__ == "__main__":
    main()
