"""Write the table of injected faults in docs/faults.md.

The tests that inject a fault are marked `shows` (`pytest -m shows`, about an hour on two cores).
Each leaves a JSON line (tests/fault_log.py); `--log FILE` reads such lines and runs no test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import recording

FAULTS = {
    "F1": "kill -9 of the whole tree at random moments",
    "F2": "a kill at each system call of a save",
    "F3": "an I/O error at each write, sync or rename of a save",
    "F4": "kill -9 of one rank",
    "F5": "kill -9 of the launcher",
    "F6": "SIGTERM to the launcher",
    "F7": "SIGTERM to one rank, or to several ranks with seconds between",
    "F8": "SIGTERM during tokenising, loading, evaluating, saving, exporting",
    "F9": "SIGINT once and twice, SIGHUP, SIGUSR1",
    "F10": "less time left than a save takes",
    "F11": "the kernel's OOM killer kills a rank",
    "F12": "an allocation fails in a rank",
    "F13": "/dev/shm is full",
    "F14": "the disk is full before a run, or becomes full",
    "F15": "no free inodes; a limit on file size",
    "F16": "a read-only output folder, before and during the run",
    "F17": "a file of a checkpoint is truncated",
    "F18": "one bit of a file of a checkpoint is flipped",
    "F19": "a file of a checkpoint is missing",
    "F20": "one rank saves late",
    "F21": "code in a checkpoint's pickle",
    "F22": "a checkpoint that another user owns, can write to, or linked to",
    "F23": "the clock jumps back or forward",
    "F24": "the user's own folders beside the checkpoints",
    "F25": "two starts in one folder; a stale lock; a reused pid",
    "F26": "the port is in use",
    "F27": "a rank hangs",
    "F28": "a rank is slow",
    "F29": "a process that SIGKILL does not end",
    "F30": "the network between machines fails",
    "F31": "a machine never joins; a wrong name or interface",
    "F32": "NaN or infinity in loss, gradient, evaluation, weights",
    "F33": "a loss or gradient spike",
    "F34": "malformed JSON lines",
    "F35": "bytes that are not UTF-8, NUL bytes, incomplete characters",
    "F36": "missing columns, wrong types, null, duplicate keys",
    "F37": "a data file without rows",
    "F38": "giant rows",
    "F39": "a corrupt parquet file",
    "F40": "a data file changes while it is read, or before resume",
    "F41": "bad YAML",
    "F42": "bad numbers",
    "F43": "a model folder that cannot be loaded",
    "F44": "resume with another batch, dataset or seed",
    "F45": "cron, no HOME, no terminal, closed streams, umask 000",
    "F46": "POSIX and Latin-1 locales",
    "F47": "hostile names and paths",
    "F48": "links that another user created",
    "F49": "secrets in the environment",
    "F50": "Slurm: preemption, time limit, requeue, node failure",
    "F51": "a run that always crashes",
    "F52": "a full log disk, a closed pipe",
    "F53": "slow storage during a save",
    "F54": "a kill while files are rendered; an upgrade before resume",
    "F55": "too few processes and threads for the user",
}
BEGIN, END = "<!-- table: written by make faults-table -->", "<!-- end of table -->"
WORST = ("failed", "skipped", "passed")


def run(log: Path) -> int:
    """Run the marked tests, which write their lines to `log`; return pytest's exit code."""
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "shows"]
    return subprocess.run(
        argv, cwd=recording.CODE, env={**os.environ, "LOWMEM_FAULT_LOG": str(log)}
    ).returncode


def read(log: Path) -> list[dict[str, Any]]:
    """Read the newest line of each test."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    return list({line["test"]: line for line in lines}.values())


def table(lines: list[dict[str, Any]]) -> str:
    outcomes = [line["outcome"] for line in lines]
    counts = ", ".join(
        f"{outcomes.count(outcome)} {outcome}" for outcome in reversed(WORST) if outcome in outcomes
    )
    rows = [
        (
            f"{date.today()}, {recording.machine()}: {counts} of {len(lines)} tests; {_versions()}."
            " Exit codes are those of the runs in each test; 0 means that the run was completed."
            " Steps lost have to be trained again. Seconds are the time from the fault to the end"
            " of the attempt: median, worst."
        ),
        "",
        (
            "| | fault | what the tests do; how they know that it happened | verdict | exit codes |"
            " steps lost | s | tests |"
        ),
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, fault in FAULTS.items():
        shown = [line for line in lines if number in line["faults"]]
        rows.append(f"| {number} | {fault} | {_cells(number, shown)} |")
    return "\n".join(rows)


def _cells(number: str, lines: list[dict[str, Any]]) -> str:
    if not lines:
        return "not tested here: its test was not run | | | | | "
    proofs = "; ".join(dict.fromkeys(line["proof"] for line in lines)).replace("|", "\\|")
    kinds = sorted({kind for line in lines for kind in line["kinds"]})
    codes = sorted({code for line in lines for code in line["codes"]})
    lost = [line["lost_steps"] for line in lines if line["lost_steps"] is not None]
    seconds = sorted(line["detect_s"] for line in lines if line["detect_s"] is not None)
    worst = next(outcome for outcome in WORST if any(line["outcome"] == outcome for line in lines))
    passed = sum(line["outcome"] == "passed" for line in lines)
    cells = (
        proofs,
        ", ".join(kinds) or "-",
        ", ".join(map(str, codes)) or "-",
        f"at most {max(lost)}" if lost else "-",
        f"{seconds[len(seconds) // 2]:g}, {seconds[-1]:g}" if seconds else "-",
        (
            f"{passed} passed"
            if worst == "passed"
            else f"**{worst}**: {passed} of {len(lines)} passed"
        ),
    )
    return " | ".join(cells)


def _versions() -> str:
    return ", ".join(f"{name} {recording.installed(name)}" for name in recording.PACKAGES)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--log", type=Path, help="write the table from the lines of this file; run no test"
    )
    arguments = parser.parse_args()
    code = 0
    with tempfile.TemporaryDirectory() as folder:
        log = arguments.log or Path(folder) / "log.jsonl"
        if arguments.log is None:
            code = run(log)
        lines = read(log)
    page = recording.CODE / "docs" / "faults.md"
    head, _, tail = page.read_text(encoding="utf-8").partition(BEGIN)
    page.write_text(
        f"{head}{BEGIN}\n\n{table(lines)}\n\n{END}{tail.partition(END)[2]}", encoding="utf-8"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
