#!/usr/bin/env python3
"""Write conversations in which a calculator is called: data for docs/tool_calls.md.

A row is a question and the call of the calculator; every fourth training row goes on with the
result and an answer. No two rows have the same pair of numbers.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

NUMBERS = 100  # numbers are below it
_INTEGER = {"type": "integer"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calculate",
            "parameters": {
                "type": "object",
                "properties": {"a": _INTEGER, "op": {"enum": ["+", "-", "*"]}, "b": _INTEGER},
            },
        },
    }
]
_OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
}
# a blank before each number: the tokenizer makes one token of it there and in the call
QUESTIONS = {
    "+": ("What is {a} plus {b}?", "Add {a} and {b}.", "What is {a} + {b}?", "请算 {a} 加 {b}。"),
    "-": (
        *("What is {a} minus {b}?", "Take {b} from {a}.", "What is {a} - {b}?"),
        "请算 {a} 减 {b}。",
    ),
    "*": (
        *("What is {a} times {b}?", "Multiply {a} by {b}.", "What is {a} * {b}?"),
        "请算 {a} 乘 {b}。",
    ),
}


def conversation(op: str, question: str, a: int, b: int) -> list[dict[str, Any]]:
    result = _OPERATIONS[op](a, b)
    function = {"name": "calculate", "arguments": {"a": a, "op": op, "b": b}}
    call = {"type": "function", "function": function}
    return [
        {"role": "user", "content": question.format(a=a, b=b)},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": json.dumps({"result": result})},
        {"role": "assistant", "content": f"The result is {result}."},
    ]


def write(file: Path, rows: list[list[dict[str, Any]]]) -> None:
    lines = (json.dumps({"messages": row, "tools": TOOLS}, ensure_ascii=False) for row in rows)
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out-dir", type=Path, default=Path("data"))
    parser.add_argument("--validation-rows", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    arguments = parser.parse_args()
    draw = random.Random(arguments.seed)
    rows = []
    for place in draw.sample(range(NUMBERS**2), NUMBERS**2):  # each pair of numbers once
        op = draw.choice(list(_OPERATIONS))
        rows.append(conversation(op, draw.choice(QUESTIONS[op]), *divmod(place, NUMBERS)))
    held_out, trained = rows[: arguments.validation_rows], rows[arguments.validation_rows :]
    arguments.out_dir.mkdir(parents=True, exist_ok=True)
    write(
        arguments.out_dir / "tool_calls_train.jsonl",
        [row if number % 4 == 0 else row[:2] for number, row in enumerate(trained)],
    )
    write(arguments.out_dir / "tool_calls_validation.jsonl", [row[:2] for row in held_out])


if __name__ == "__main__":
    main()
