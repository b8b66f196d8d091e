"""Damaged files of runs and caches: no command may end in a traceback, hang, or train something
else.

A tiny run is trained, another is cut off, and their files are damaged one at a time (cut short, a
bit flipped, JSON of another type, a key dropped, nested deeply, replaced by a FIFO, a link or a
folder, given to another user). After each damage a command reads them: `report`, `samples`,
`compare`, or `run --dry-run`, which decides whether the run goes on. They are called in a child
process, which is ended and started again where a command hangs. Exit codes are the documented
ones; None is a traceback. Cases are drawn from `--seed`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import recording
from launch.run_folder.layout import RunDir
from tests import builders

HANG_S = 120.0  # a step may be traced, on a busy machine
LARGEST = 1 << 20  # bytes of a file that is damaged; tensors are the checkpoints' own tests'
DOCUMENTED = frozenset({0, 1, 2, 3, 4, 5, 9, 10})
OTHER_USER = 12345
WRONG_JSON = ("[]", "{}", "1", "null", '"text"', "[" * 3000, '{"a":' * 3000, "NaN", '{"step": []}')
CHILD = """
import json, sys
from tests.process.commands import many_starts
for line in sys.stdin:
    print(json.dumps(many_starts.one(many_starts.main, json.loads(line))), flush=True)
"""

Damage = Callable[[Path, random.Random], None]


# ---- damages
# ---------------------------------------------------------------------------


def cut_short(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(max(path.stat().st_size, 1))])


def flip(path: Path, draw: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(draw.randrange(1, 4)):
        if content:
            content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(bytes(content))


def retype(path: Path, draw: random.Random) -> None:
    """JSON of another type: of the whole file, or of one of its lines."""
    text = draw.choice(WRONG_JSON)
    lines = path.read_bytes().splitlines()
    if path.suffix == ".jsonl" and lines:
        lines[draw.randrange(len(lines))] = text.encode()
        path.write_bytes(b"\n".join(lines) + b"\n")
    else:
        path.write_text(text, encoding="utf-8")


def change_value(path: Path, draw: random.Random) -> None:
    """One value of a JSON file: dropped, or of another type."""
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        return retype(path, draw)
    places = list(_places(content))
    if not places:
        return retype(path, draw)
    holder, key = draw.choice(places)
    if draw.random() < 0.4:
        del holder[key]
    else:
        holder[key] = draw.choice([None, [], {}, -1, 1e308, "text", "../../etc", True, [[0]]])
    path.write_text(json.dumps(content), encoding="utf-8")
    return None


def _places(content: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of each value inside."""
    if isinstance(content, dict | list):
        keys = list(content) if isinstance(content, dict) else range(len(content))
        for key in keys:
            yield content, key
            yield from _places(content[key])


def fifo(path: Path, _: random.Random) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, draw: random.Random) -> None:
    path.unlink()
    path.symlink_to(draw.choice(["/dev/zero", path.parent / "nowhere", path.name, "/etc/passwd"]))


def folder(path: Path, _: random.Random) -> None:
    path.unlink()
    path.mkdir()


def other_owner(path: Path, _: random.Random) -> None:
    os.chown(path, OTHER_USER, OTHER_USER)


DAMAGES: tuple[Damage, ...] = (
    cut_short,
    flip,
    retype,
    change_value,
    fifo,
    link,
    folder,
    other_owner,
)


# ---- the commands
# ---------------------------------------------------------------------------


class Commands:
    """A child process that runs commands of `python -m launch`, one after the other."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace
        self._child: subprocess.Popen[bytes] | None = None

    def answer(self, argv: list[str]) -> dict[str, Any] | None:
        """The answer of a command (many_starts.one); None if it hangs, or ends the process."""
        child = self._child or self._start()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps(argv).encode() + b"\n")
        child.stdin.flush()
        readable, _, _ = select.select([child.stdout], [], [], HANG_S)
        line = child.stdout.readline() if readable else b""
        if not line:
            self.close()
            return None
        return json.loads(line)

    def _start(self) -> subprocess.Popen[bytes]:
        self._child = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env=builders.environment(self._workspace),
            cwd=builders.CODE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._child

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
        self._child = None


def trained(root: Path) -> tuple[Path, list[list[str]]]:
    """A workspace with a complete run and one that was cut off, and the commands that read them."""
    workspace = root / "workspace"
    recipe = builders.recipe(root, training={"num_train_epochs": 1})
    other = root / "other.yaml"
    other.write_text(recipe.read_text("utf-8").replace("name: tiny", "name: other"), "utf-8")
    for file in (recipe, other):
        words = [f"--output_dir={root / file.stem}"]
        done = builders.launch(workspace, "run", str(file), *words)
        assert done.returncode == 0, done.stdout + done.stderr
    runs = {name: next((workspace / "runs" / name).glob("[0-9]*")) for name in ("tiny", "other")}
    begun = RunDir(runs["tiny"])
    begun.attempts()[-1].outcome_file.unlink()
    shutil.rmtree(sorted(begun.checkpoints.glob("checkpoint-*"))[-1])
    return workspace, [
        ["run", str(recipe), f"--output_dir={root / 'tiny'}", "--dry-run"],
        ["run", str(other), f"--output_dir={root / 'other'}", "--dry-run"],
        ["report", "--calibration"],
        ["samples", str(runs["tiny"])],
        ["samples", str(runs["other"])],
        ["compare", str(runs["tiny"]), str(runs["other"]), "--anyway"],
    ]


def campaign(seed: int, seconds: float) -> dict[str, Any]:
    """Damage one file after the other, until the time is up; counts and faults."""
    with tempfile.TemporaryDirectory() as name:
        workspace, commands = trained(Path(name))
        pristine = Path(name) / "pristine"
        shutil.copytree(workspace, pristine, symlinks=True)
        files = sorted(
            path.relative_to(pristine)
            for path in pristine.rglob("*")
            if path.is_file() and path.stat().st_size <= LARGEST
        )
        draw, child = random.Random(seed), Commands(workspace)
        for argv in commands:
            answer = child.answer(argv)
            assert answer is not None and answer["code"] == 0, (argv, answer)
        codes: Counter[int | None] = Counter()
        faults, began, cases = [], time.monotonic(), 0
        while time.monotonic() - began < seconds:
            cases += 1
            file, damage, argv = draw.choice(files), draw.choice(DAMAGES), draw.choice(commands)
            damage(workspace / file, draw)
            answer = child.answer(argv)
            code: int | None = answer["code"] if answer else None
            codes[code] += 1
            if answer is None or code not in DOCUMENTED:
                what = (
                    "hangs or dies" if answer is None else answer["err"].strip().splitlines()[-1:]
                )
                faults.append([cases, damage.__name__, str(file), argv[0], what])
                print(*faults[-1], flush=True)
            shutil.rmtree(workspace)
            shutil.copytree(pristine, workspace, symlinks=True)
        child.close()
    return {
        "seed": seed,
        "files": len(files),
        "cases": cases,
        "exit_codes": {str(code): number for code, number in sorted(codes.items(), key=str)},
        "faults": faults,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--record", action="store_true", help="write the figures to results/")
    asked = parser.parse_args()
    measured = campaign(asked.seed, asked.seconds)
    if asked.record:
        rows = [[key, str(value)] for key, value in measured.items() if key != "faults"]
        text = recording.table(["", ""], rows)
        recording.write("fuzz", measured, text, "fuzz")
    print(json.dumps({key: value for key, value in measured.items() if key != "faults"}))
    return 1 if measured["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
