"""Ask each question of the READMEs, and each that the end of the quick start names, to the model of
the quick start, as a reader would type it, and compare the answers. Run it after
./quick_start_sft_fast.sh on a machine without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import make_sample_data  # noqa: E402  it is beside .ci/

PAGES = (ROOT / "README.md", ROOT / "README.zh-CN.md")
QUESTION = re.compile(r"^\$ (\S+ scripts/chat\.py \S+ \"(.+)\")\n(.+)$", re.MULTILINE)
CHAT = '.venv/bin/python scripts/chat.py model_save/sft_fast "{}"'


def commands(page: Path) -> list[tuple[str, str, str]]:
    """List (command line, question, answer) for each question of `page`."""
    matches = QUESTION.finditer(page.read_text(encoding="utf-8"))
    return [(match[1], match[2], match[3]) for match in matches]


def printed() -> list[tuple[str, str, str]]:
    """List the same for each question that the end of the quick start names."""
    answers = dict(row for kind in make_sample_data.KINDS for row in kind())
    return [(CHAT.format(each), each, answers[each]) for each in make_sample_data.QUESTIONS]


def main() -> int:
    asked = [*printed(), *(command for page in PAGES for command in commands(page))]
    expected = {line: answer for line, _, answer in asked}
    wrong = 0
    for line, answer in expected.items():
        done = subprocess.run(
            ["bash", "-c", line], cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True
        )
        is_right = done.returncode == 0 and done.stdout.strip() == answer
        wrong += not is_right
        note = "" if is_right else f"  WRONG: expected {answer!r}"
        print(f"{line}\n    {done.stdout.strip()}{note}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
