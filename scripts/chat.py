#!/usr/bin/env python3
"""Talk to a trained model.

chat.py FOLDER answers each line of the input; chat.py FOLDER "question" answers once."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# E402: the modules below are in the folder above. `interpreter` needs only the standard library;
# the other modules may need packages that this Python lacks, so another Python may have to go on
# first.
from launch.base import interpreter

interpreter.go_on_with_packages()

from launch.base import compile_caches, modules  # noqa: E402
from launch.base.errors import LaunchError  # noqa: E402
from launch.base.text import visible  # noqa: E402
from launch.commands.model import finished  # noqa: E402
from launch.schema.result import FinishedModel  # noqa: E402


def load(folder: Path):  # noqa: ANN201  torch is imported late, so its types cannot be named here
    """Load (model, tokenizer) from a folder that a run wrote. The base of an adapter is loaded as
    it was in training, also in 4 bits."""
    return load_finished(finished.find(folder))


def load_finished(model: FinishedModel):  # noqa: ANN201
    with modules.uncollected():
        import torch

        from training.data import tokenizer
        from training.model import build
        from training.model import finished as finished_model

    build.folder_config(model.base)  # of a type that transformers has
    loaded_tokenizer = tokenizer.load(model.tokenizer)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return finished_model.load(model, loaded_tokenizer, device), loaded_tokenizer


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the model's folder, or a run's")
    parser.add_argument(
        "question",
        nargs="*",
        help="the question; without it, questions are read from standard input, line by line",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    arguments = parser.parse_args()
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is ever downloaded
    try:
        compile_caches.settle()
        source = finished.find(arguments.folder)
        finished.leave_out_unused(source)
        model, tokenizer = load_finished(source)
    except LaunchError as error:
        print(f"error: {visible(str(error))}", file=sys.stderr)
        return error.exit_code
    from launch.data.conversation import Conversation
    from training.loop.evaluate import greedy_answers

    def reply(question: str) -> str:
        return greedy_answers(
            model,
            tokenizer,
            [Conversation([{"role": "user", "content": question}])],
            arguments.max_new_tokens,
        )[0]

    if arguments.question:
        print(visible(reply(" ".join(arguments.question))))
        return 0
    interactive = sys.stdin.isatty()
    sys.stdin.reconfigure(errors="replace")
    while True:
        try:
            question = input("> " if interactive else "").strip()
        except (EOFError, KeyboardInterrupt):
            return 0
        if question:
            try:
                print(visible(reply(question)), flush=True)
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                return 141


if __name__ == "__main__":
    sys.exit(main())
