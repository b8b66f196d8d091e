"""Print the first text that a GGUF file's tokenizer splits otherwise than expected, as JSON: its
number and a line, or null. Arguments: FILE EXPECTED texts|prompts. A process of its own: a server
that follows one which could not load its file never ends (xllamacpp 2026.10)."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from llama_server import Llama, LlamaCpp, LlamaServer

CONTEXT = 512


def first_difference(
    server: LlamaServer | LlamaCpp, texts: Sequence[tuple[str, list[int]]]
) -> tuple[int, str] | None:
    split = server.split([text for text, _ in texts])
    for number, (ids, (text, expected)) in enumerate(zip(split, texts, strict=True)):
        if ids != expected:
            return number, f"{text!r} becomes {ids} instead of {expected}"
    return None


def main() -> None:
    file, expected_file, part = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    expected = json.loads(expected_file.read_text(encoding="utf-8"))
    texts = expected["texts"]
    if part == "prompts":
        texts = [(each["text"], each["ids"]) for each in expected["prompts"] if each["messages"]]
    print(json.dumps(first_difference(Llama(file, CONTEXT), texts)))


if __name__ == "__main__":
    main()
