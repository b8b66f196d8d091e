"""Damaged files of runs, caches, models and data sets, and hostile values of recipes: no command
may end in a traceback, hang, or train something else in silence.

A tiny run is trained on prompts, another on chats, a third goes on from the first's model, and one
is cut off. Their files are damaged one at a time (cut short, a bit flipped, JSON of another type, a
key dropped, nested deeply, replaced by a FIFO, a link or a folder, given to another user). After
each damage a command reads them: `report`, `samples`, `compare`, `show`, `plan --json`, `fit`,
`merge`, `watch`, `runs`, `queue`, `submit`, the child that tokenises, or `run --dry-run`, which
decides whether the run goes on. Some cases plan with a hostile value instead. They are called in a
child process, which is ended and started again where a command hangs. Exit codes are the documented
ones; None is a traceback. A plan of the same run that says something else, with exit code 0 and
without a word on the damaged file, is a fault too. Cases are drawn from `--seed`.

Recipes with hostile values are read besides, without a plan (fuzz_recipes.py).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from benchmarks import fuzz_recipes, recording
from launch.commands.submit.job import JobDir
from launch.run_folder.layout import RunDir
from tests import builders

HANG_S = 120.0  # a step may be traced, on a busy machine
LARGEST = 1 << 20  # bytes of a file that is damaged; tensors are the checkpoints' own tests'
DOCUMENTED = frozenset({0, 1, 2, 3, 4, 5, 9, 10})
OTHER_USER = 12345
WRONG_JSON = ("[]", "{}", "1", "null", '"text"', "[" * 3000, '{"a":' * 3000, "NaN", '{"step": []}')
JSON = ((), ("--json",))  # what scripts read too
RUNS = ("tiny", "chat", "other", "adapter")  # --fast trains the first two
LEAST = 10  # cases, however long the preparation took
VALUES = 10_000  # hostile recipes, or as many as there is time for
VALUES_SHARE, VALUES_S = 0.25, 3.0  # of the time for them, and the least seconds
PLAN_A_VALUE = 0.1  # of the cases
# lines of a dry run that say what is trained
DECIDED = re.compile(r"^  (model|data|tokens|batch|run) +(.*)$", re.MULTILINE)
CHILD = """
import json, os, sys
from tests.process.commands import many_starts
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # where children of a command print
for line in sys.stdin:
    words = json.loads(line)
    is_prepare = words[0] == "prepare"
    start = many_starts.prepare if is_prepare else many_starts.main
    print(json.dumps(many_starts.one(start, words[is_prepare:])), file=answers, flush=True)
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
            env=builders.environment(self._workspace, **own_traces(self._workspace)),
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


def trained(root: Path, names: Sequence[str]) -> tuple[Path, list[list[str]]]:
    """A workspace with complete runs and one that was cut off, and the commands that read them.

    Everything lies below the workspace: data sets and models too."""
    workspace = root / "workspace"
    files = {name: file for name, file in recipes(workspace).items() if name in names}
    for name, file in files.items():
        words = ["run", str(file), f"--output_dir={workspace / name}"]
        done = builders.launch(workspace, *words, **own_traces(workspace))
        assert done.returncode == 0, done.stdout + done.stderr
    runs = {name: str(next((workspace / "runs" / name).glob("[0-9]*"))) for name in files}
    begun = RunDir(Path(runs["tiny"]))
    begun.attempts()[-1].outcome_file.unlink()
    shutil.rmtree(sorted(begun.checkpoints.glob("checkpoint-*"))[-1])
    tokenised = next(Path(runs["chat"]).glob("attempts/*/tokenising.json")).parent
    scheduled(workspace, files["tiny"])
    adapters = [runs["adapter"]] if "adapter" in runs else []
    starts = [
        ["run", str(files[name]), f"--output_dir={workspace / name}", "--dry-run"] for name in files
    ]
    return workspace, [
        *starts,
        *(["samples", runs[name]] for name in files),
        ["report", "--calibration"],
        ["compare", runs["tiny"], runs["chat"], "--anyway"],
        *(["show", str(files[name]), "--rows", "3"] for name in files),
        *(["plan", str(files[name]), "--json"] for name in files),
        ["plan", str(files["tiny"]), "--explain", "--gpu", "RTX 4090", "--ram", "64"],
        ["fit", "--gpu", "RTX 4090", "--ram", "64", "--model", "llama-tiny", "--length", "64"],
        *(["merge", run, "--out", str(workspace / "merged")] for run in adapters),
        ["prepare", str(tokenised), "1"],
        *([*argv, *json] for argv in (["watch", "--once"], ["runs"], ["queue"]) for json in JSON),
        ["watch", "--once", runs["tiny"]],
        ["runs", "clean", "--dry-run", "--keep", "0"],
        ["submit", "cron", "list"],
        ["submit", "slurm", "--print", str(files["tiny"])],
    ]


def scheduled(workspace: Path, recipe: Path) -> None:
    """A job that cron starts, after its first start."""
    sbatch = workspace / "bin" / "sbatch"  # takes every job
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/sh\necho 7\n", encoding="utf-8")
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{os.environ['PATH']}"
    builders.launch(workspace, "submit", "slurm", str(recipe), PATH=path)
    (file,) = workspace.glob("submitted/*/job.json")
    job = {**json.loads(file.read_text()), "schedule": "0 2 * * *", "name": file.parent.name}
    file.write_text(json.dumps(job))
    with JobDir(file.parent).hold() as end:
        end(0)
    shutil.rmtree(workspace / "submitted" / "code")  # a change of it is a change of the program


def own_traces(workspace: Path) -> dict[str, str]:
    """The variable that keeps the traces below the workspace, where they are damaged too."""
    return {"LOWMEM_TRACES": str(workspace / "traces")}


def recipes(folder: Path) -> dict[str, Path]:
    """Recipes by name: prompts, twice; chats; an adapter on the model of the second."""
    first = builders.recipe(folder, training={"num_train_epochs": 1})
    content = yaml.safe_load(first.read_text("utf-8"))
    chats = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", **answer}]}
        for row in builders.rows(45)
        if (answer := {"content": row["response"]})
    ]
    lines = "".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in chats)
    (folder / "chat.jsonl").write_text(lines, encoding="utf-8")
    data = {"train_file": str(folder / "chat.jsonl"), "max_length": 64, "validation_size": 0.2}
    changes: dict[str, dict[str, Any]] = {
        "other": {},
        "chat": {"data": data},
        "adapter": {"model": {"path": str(folder / "other")}, "lora": {"r": 4}},
    }
    files = {"tiny": first}
    for name, change in changes.items():
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump({**content, **change, "name": name}), "utf-8")
    return files


def is_silent(before: dict[str, Any], after: dict[str, Any], file: Path) -> bool:
    """True if a dry run of the damaged file decides something else and does not name the file, or
    any cause."""
    if after["code"] != 0 or DECIDED.findall(before["out"]) == DECIDED.findall(after["out"]):
        return False
    said = set((after["out"] + after["err"]).splitlines()) - set(before["out"].splitlines())
    return not any(file.name in line or "damaged" in line for line in said)


def campaign(seed: int, seconds: float, names: Sequence[str] = RUNS) -> dict[str, Any]:
    """Damage one file after the other, until the time is up; counts and faults."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        workspace, commands = trained(Path(name), names)
        pristine = Path(name) / "pristine"
        shutil.copytree(workspace, pristine, symlinks=True)
        files = sorted(
            path.relative_to(pristine)
            for path in pristine.rglob("*")
            if path.is_file() and path.stat().st_size <= LARGEST
        )
        draw, child = random.Random(seed), Commands(workspace)
        undamaged = {}
        for argv in commands:
            answer = child.answer(argv)
            assert answer is not None and answer["code"] == 0, (argv, answer)
            undamaged[tuple(argv)] = answer
            _restore(workspace, pristine)
        codes: Counter[int | None] = Counter()
        faults, cases = [], 0
        while cases < LEAST or time.monotonic() - began < seconds * (1 - VALUES_SHARE):
            cases += 1
            file, damage, argv = draw.choice(files), draw.choice(DAMAGES), draw.choice(commands)
            if is_value := draw.random() < PLAN_A_VALUE:
                recipe = str(workspace / "chat.yaml")
                argv = ["plan", recipe, fuzz_recipes.override(draw), fuzz_recipes.override(draw)]
                case = ["value", " ".join(argv[2:])[:300]]
            else:
                damage(workspace / file, draw)
                case = [damage.__name__, str(file)]
            answer = child.answer(argv)
            code: int | None = answer["code"] if answer else None
            codes[code] += 1
            what: object = None
            if answer is None:
                what = "hangs or dies"
            elif code not in DOCUMENTED:
                what = answer["err"].strip().splitlines()[-1:]
            elif not is_value and argv[0] == "run" and file.suffix not in (".parquet", ".jsonl"):
                before = undamaged[tuple(argv)]
                what = "another run, in silence" if is_silent(before, answer, file) else None
            if what:
                faults.append([cases, *case, argv[0], what])
                print(*faults[-1], flush=True)
            _restore(workspace, pristine)
        child.close()
        left_s = max(seconds - (time.monotonic() - began), VALUES_S)
        values = fuzz_recipes.campaign(pristine / "tiny.yaml", pristine, seed, VALUES, left_s)
    return {
        "seed": seed,
        "files": len(files),
        "cases": cases,
        "exit_codes": {str(code): number for code, number in sorted(codes.items(), key=str)},
        "hostile_recipes": values["values"],
        "verdicts": values["verdicts"],
        "faults": faults + values["faults"],
    }


def table(measured: dict[str, Any]) -> str:
    counts = {
        "exit codes": {f"exit code {code}": n for code, n in measured["exit_codes"].items()},
        "hostile recipes": {"all": measured["hostile_recipes"], **measured["verdicts"]},
    }
    rows = [
        ["files that are damaged, one at a time", measured["files"]],
        ["commands after a damage, or with a hostile value", measured["cases"]],
        *(
            [key, ", ".join(f"{what}: {n}" for what, n in values.items())]
            for key, values in counts.items()
        ),
        ["tracebacks, hangs, other runs in silence", len(measured["faults"])],
    ]
    return recording.table(["what", f"seed {measured['seed']}"], rows)


def _restore(workspace: Path, pristine: Path) -> None:
    shutil.rmtree(workspace)
    shutil.copytree(pristine, workspace, symlinks=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--fast", action="store_true", help=f"with {RUNS[0]} and {RUNS[1]} only")
    parser.add_argument("--record", action="store_true", help="write the figures to results/")
    asked = parser.parse_args()
    measured = campaign(asked.seed, asked.seconds, RUNS[:2] if asked.fast else RUNS)
    if asked.record:
        recording.write("fuzz", measured, table(measured), "fuzz")
    print(json.dumps({key: value for key, value in measured.items() if key != "faults"}))
    return 1 if measured["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
