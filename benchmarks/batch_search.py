"""Finding the micro-batch inside a real memory limit: trials, kernel OOM kills, seconds, and what
was found.

Three searchers look for the micro-batch of an effective batch of 64, each in a fresh cgroup that
holds its whole job: `python -m launch tune`; Accelerate's find_executable_batch_size; the binary
search over 1..64 that guides recommend. The latter two try transformers.Trainer on the same model
and rows, a child an attempt, for on a CPU the kernel kills where a GPU's allocator would raise: a
killed child is reported to Accelerate's decorator as the error it knows. That decorator and the
binary search stand outside the limit. Which divisors of 64 really fit under our launcher, and how
fast they are, is tried one by one. Needs root and a memory controller; seconds depend on what else
the machine does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import recording
from benchmarks.cpu_memory import GPT2, QWEN, Case, write_data

LIMIT_BYTES = 2 << 30
EFFECTIVE = 64
LIMIT_FILES = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}
# v1 counts memory with swap
SWAP_FILES = {"memory.memsw.limit_in_bytes": LIMIT_BYTES, "memory.swap.max": 0}
KILLS_FILES = {"cgroup": "memory.oom_control", "cgroup2": "memory.events"}
TRIAL_TIMEOUT_S, SEARCH_TIMEOUT_S = 180, 600
NARROW = {"vocab_size": 2048}
CASES = (
    Case(
        "gpt2",
        {**GPT2, **NARROW, "n_layer": 2, "n_embd": 192},
        EFFECTIVE,
        {"activation_checkpointing": False},
    ),
    Case(
        "qwen2",
        {**QWEN, **NARROW, "num_hidden_layers": 4, "hidden_size": 192, "intermediate_size": 512}
        | {"num_attention_heads": 6},
        EFFECTIVE,
        {"activation_checkpointing": False},
    ),
)
TRIED = re.compile(
    r"^trial \d+: .*?batch (\d+) x (\d+).*\n\s+(\w+)(?:, ([\d.]+) s a step)?", re.MULTILINE
)
# as accelerate/utils/memory.py looks for
CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True)
class Cgroup:
    """A memory cgroup of LIMIT_BYTES without swap."""

    kind: str
    folder: Path

    @property
    def oom_kills(self) -> int:
        lines = (self.folder / KILLS_FILES[self.kind]).read_text(encoding="utf-8").splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def run(self, argv: list[str], env: dict[str, str], log: Path, timeout_s: float) -> int:
        """Run a child in here to its end; returns its exit code."""
        inside = [
            "/bin/sh",
            "-c",
            'echo $$ > "$0/cgroup.procs"; exec "$@"',
            str(self.folder),
            *argv,
        ]
        with log.open("wb") as file:
            done = subprocess.run(
                inside,
                env=env,
                cwd=recording.CODE,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
            )
        return done.returncode


@contextlib.contextmanager
def cgroup() -> Iterator[Cgroup]:
    """A new one right below a mount point, so that nothing else binds; what is left in it at the
    end is killed."""
    made = next(filter(None, (_made(kind, mount) for kind, mount in _mounts())), None)
    if made is None:
        raise SystemExit(
            "no memory cgroup can be made here: root and a memory controller are needed"
        )
    try:
        yield made
    finally:
        while left := (made.folder / "cgroup.procs").read_text(encoding="utf-8").split():
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), 9)
            time.sleep(0.1)
        made.folder.rmdir()


def _mounts() -> Iterator[tuple[str, Path]]:
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        before, after = line.split(" - ")
        kind, options = after.split()[0], after.split()[-1].split(",")
        if (kind == "cgroup" and "memory" in options) or kind == "cgroup2":
            yield kind, Path(before.split()[4])


def _made(kind: str, mount: Path) -> Cgroup | None:
    folder = mount / f"lowmem-search-{uuid.uuid4().hex[:8]}"
    try:
        if kind == "cgroup2":
            (mount / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        (folder / LIMIT_FILES[kind]).write_text(str(LIMIT_BYTES))
        for name, size in SWAP_FILES.items():
            if (folder / name).exists():
                (folder / name).write_text(str(size))
    except OSError:
        if folder.exists():
            folder.rmdir()
        return None
    return Cgroup(kind, folder)


@dataclass
class Search:
    """What one searcher did."""

    searcher: str
    load_before: float
    trials: list[dict[str, Any]] = field(default_factory=list)  # batch, fits, step_s, samples
    oom_kills: int = 0
    seconds: float = 0.0
    batch: int | None = None  # None: none was found

    @property
    def found(self) -> dict[str, Any]:
        return next(one for one in self.trials if one["batch"] == self.batch and one["fits"])

    @property
    def step_s(self) -> float:
        """Seconds of as many samples as the effective batch has."""
        return self.found["step_s"] * EFFECTIVE / self.found["samples"]


def tuned(recipe_file: Path, place: Path) -> Search:
    """Ours, with nothing traced or tokenised before. The reserve is zero: a container's limit is
    for the job alone."""
    search = Search("python -m launch tune", os.getloadavg()[0])
    argv = [sys.executable, "-m", "launch", "tune", str(recipe_file), "--launch.host_reserve_gib=0"]
    log = place / "tune.txt"
    began = time.monotonic()
    with cgroup() as limited:
        status = limited.run(argv, recording.environment(place / "tuned"), log, SEARCH_TIMEOUT_S)
        search.oom_kills = limited.oom_kills
    search.seconds = time.monotonic() - began
    said = log.read_text(encoding="utf-8")
    for batch, steps, ended, seconds in TRIED.findall(said):
        step_s = float(seconds) if seconds else None
        search.trials.append(
            {
                "batch": int(batch),
                "fits": ended == "fits",
                "step_s": step_s,
                "samples": int(batch) * int(steps),
            }
        )
    assert status == 0, said
    best = re.search(r"^tuned: .*?batch (\d+) x", said, re.MULTILINE)
    assert best is not None, said
    search.batch = int(best[1])
    return search


class Trials:
    """Runs benchmarks.batch_trial in a cgroup and writes down how each trial ended."""

    def __init__(
        self, program: str, recipe_file: Path, place: Path, limited: Cgroup, search: Search
    ) -> None:
        self._program, self._recipe_file, self._place = program, recipe_file, place
        self._limited, self._search = limited, search

    def fits(self, batch: int) -> bool:
        argv = [
            sys.executable,
            "-m",
            "benchmarks.batch_trial",
            self._program,
            str(self._recipe_file),
            str(batch),
        ]
        log, kills = self._place / f"{self._program}.txt", self._limited.oom_kills
        status = self._limited.run(
            argv, recording.environment(self._place / self._program), log, TRIAL_TIMEOUT_S
        )
        said = log.read_text(encoding="utf-8")
        self._search.oom_kills = self._limited.oom_kills
        is_killed = self._limited.oom_kills > kills
        assert status == 0 or is_killed, said
        ended = json.loads(said.strip().splitlines()[-1]) if status == 0 else {}
        assert is_killed == ("step_s" not in ended), said
        self._search.trials.append(
            {"batch": batch, "fits": not is_killed, "step_s": None, "samples": None} | ended
        )
        return not is_killed


def halving(fits: Callable[[int], bool]) -> int:
    """Accelerate's own rule, from the effective batch down."""
    from accelerate.utils import find_executable_batch_size

    def attempt(batch_size: int) -> int:
        if not fits(batch_size):
            raise RuntimeError(CPU_OUT_OF_MEMORY)
        return batch_size

    return find_executable_batch_size(attempt, starting_batch_size=EFFECTIVE)()


def binary(fits: Callable[[int], bool]) -> int:
    """The largest of 1..EFFECTIVE that fits."""
    low, high = 0, EFFECTIVE
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def every_divisor(fits: Callable[[int], bool]) -> int:
    return max([size for size in range(1, EFFECTIVE + 1) if EFFECTIVE % size == 0 and fits(size)])


SEARCHERS: dict[str, tuple[str, Callable[[Callable[[int], bool]], int]]] = {
    "find_executable_batch_size": ("plain", halving),
    "binary search, 1..64": ("plain", binary),
    "every divisor": ("ours", every_divisor),
}


def searched(name: str, recipe_file: Path, place: Path) -> Search:
    program, look = SEARCHERS[name]
    search = Search(name, os.getloadavg()[0])
    began = time.monotonic()
    with cgroup() as limited:
        search.batch = look(Trials(program, recipe_file, place, limited, search).fits)
    search.seconds = time.monotonic() - began
    return search


def measured(case: Case, place: Path) -> list[Search]:
    recipe_file = write_data(place, case)
    searches = []
    for look in (tuned, *SEARCHERS):
        searches.append(
            searched(look, recipe_file, place)
            if isinstance(look, str)
            else look(recipe_file, place)
        )
        print(case.name, searches[-1], flush=True)
    return searches


def found_row(name: str, one: Search) -> list[Any]:
    assert one.batch is not None
    samples = one.found["samples"]
    found = f"{one.batch} x {samples // one.batch}" + (
        "" if samples == EFFECTIVE else f" = {samples}"
    )
    figures = [f"{one.seconds:.0f}", found, f"{one.step_s:.2f}", f"{one.load_before:.1f}"]
    return [name, one.searcher, len(one.trials), one.oom_kills, *figures]


def divisor_rows(name: str, truth: Search, ours: Search) -> Iterator[list[Any]]:
    for one in truth.trials:
        marks = ["largest that fits"] if one["batch"] == truth.batch else []
        marks += ["found by tune"] if one["batch"] == ours.batch else []
        yield [
            name,
            one["batch"],
            f"{one['step_s']:.2f}" if one["fits"] else "killed",
            ", ".join(marks),
        ]


def text(cases: dict[str, list[Search]]) -> str:
    rows = [found_row(name, one) for name, searches in cases.items() for one in searches[:-1]]
    truths = [
        row
        for name, searches in cases.items()
        for row in divisor_rows(name, searches[-1], searches[0])
    ]
    seconds = f"s per {EFFECTIVE} samples"
    head = [
        "case",
        "searcher",
        "trials",
        "OOM kills",
        "seconds",
        "found: batch x accumulation",
        seconds,
        "load before",
    ]
    return (
        f"Micro-batch of an effective batch of {EFFECTIVE} x {CASES[0].length} tokens in a cgroup"
        f" of {LIMIT_BYTES / (1 << 30):.0f} GiB.\n\n"
        + recording.table(head, rows)
        + "\nSearchers but the first train in one process without a launcher, so more fits there;"
        f" what they find may not divide {EFFECTIVE}, and then trains another effective batch."
        " Seconds of a step were taken as busy as the machine was (load before) and compare no"
        " trainers.\n\nEvery divisor under our launcher:\n\n"
        + recording.table(["case", "batch", seconds, ""], truths)
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default="", help="cases whose name holds this; nothing is recorded"
    )
    arguments = parser.parse_args()
    cases: dict[str, list[Search]] = {}
    for case in (case for case in CASES if arguments.only in case.name):
        with tempfile.TemporaryDirectory() as place:
            cases[case.name] = measured(case, Path(place))
    if arguments.only:
        print(text(cases))
    else:
        found = {name: [asdict(one) for one in searches] for name, searches in cases.items()}
        limits = {"limit_bytes": LIMIT_BYTES, "effective_batch_size": EFFECTIVE}
        recording.write("batch_search", {**limits, "cases": found}, text(cases))


if __name__ == "__main__":
    main()
