#!/usr/bin/env python3
"""Ask a GGUF file a question, on the CPU.

.cache/export_tools/bin/python scripts/export_tools/ask_gguf.py FILE "question" """

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llama_server import Llama


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("question")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    try:
        server = Llama(arguments.file, context=4096)
    except ModuleNotFoundError as error:
        sys.exit(f"no {error.name} here; type .cache/export_tools/bin/python (make export-tools)")
    except RuntimeError:
        sys.exit(f"{arguments.file}: llama.cpp cannot load it; expected a GGUF file")
    prompt = server.prompt([{"role": "user", "content": arguments.question}])
    print(server.complete(prompt, arguments.max_new_tokens)["content"])


if __name__ == "__main__":
    main()
