#!/usr/bin/env python3
"""Write docs/quick_start.svg, the picture of the READMEs: run the quick start in an empty
workspace, without a GPU, and draw lines that it prints. Takes as long as the quick start."""

from __future__ import annotations

import html
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import dropwhile, takewhile
from pathlib import Path

CODE = Path(__file__).resolve().parent.parent
PICTURE = CODE / "docs" / "quick_start.svg"
COMMAND = "./quick_start_sft_fast.sh"
FOLDER = "~/lowmem"  # stands for the checkout and for the workspace
LEFT_OUT = "..."
_FONT_SIZE, LETTER, LINE, _MARGIN = 14, 8.43, 19, 14  # pixels


def plan(printed: Sequence[str]) -> list[str]:
    """The lines of the first screen, from the plan's first one to the name of the log."""
    lines = list(dropwhile(lambda line: not line.startswith("plan for "), printed))
    before_log = list(takewhile(lambda line: not line.startswith("  log "), lines))
    return lines[: len(before_log) + 1]


def shown(printed: Sequence[str]) -> list[str]:
    """The lines of the picture: the command, the plan, and how the run ended."""
    (done,) = (line for line in printed if line.startswith("done: "))
    chat = dropwhile(lambda line: not line.startswith("  chat "), printed)
    chat = takewhile(lambda line: not line.startswith("  run "), chat)
    return [f"$ {COMMAND}", LEFT_OUT, *plan(printed), LEFT_OUT, done, LEFT_OUT, *chat]


def picture(lines: Sequence[str]) -> str:
    """The lines on a dark ground, a text element each."""
    width = max(map(len, lines)) * LETTER + 2 * _MARGIN
    height = len(lines) * LINE + 2 * _MARGIN
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}"'
            f' width="{width:.0f}" height="{height}" font-size="{_FONT_SIZE}" fill="#e6edf3"'
            ' font-family="ui-monospace,Menlo,Consolas,DejaVu Sans Mono,monospace">',
            '<rect width="100%" height="100%" rx="6" fill="#0d1117"/>',
            *(_text(number, line) for number, line in enumerate(lines)),
            "</svg>\n",
        )
    )


def _text(number: int, line: str) -> str:
    y = _MARGIN + number * LINE + _FONT_SIZE
    colour = ' fill="#7ee787"' if line.startswith(("$ ", "done: ")) else ""
    return f'<text x="{_MARGIN}" y="{y}" xml:space="preserve"{colour}>{html.escape(line)}</text>'


def texts(svg: str) -> list[str]:
    """The lines of a picture that picture() made."""
    return [html.unescape(line) for line in re.findall(r"<text [^>]*>(.*)</text>", svg)]


def run(workspace: Path) -> Iterator[str]:
    """Yield what the quick start prints in an empty workspace."""
    environment = {**os.environ, "LOWMEM_ROOT": str(workspace), "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        [CODE / COMMAND],
        cwd=workspace,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            yield line.rstrip("\n").replace(str(workspace), FOLDER).replace(str(CODE), FOLDER)
    if process.returncode:
        sys.exit(f"{COMMAND} ended with exit code {process.returncode}; the picture stays as it is")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        printed = list(run(Path(folder).resolve()))
    PICTURE.write_text(picture(shown(printed)), encoding="utf-8")
    print(f"docs/{PICTURE.name}")
