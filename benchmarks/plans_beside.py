"""Plans of another commit beside those of this tree, for the same questions.

A change of the planner is judged by what it plans: recipes (shape, method, length of rows) are
planned on described machines by both trees, and each pair is the same plan, another one that is
faster or slower by its own seconds, or one that only one of them has. Both have one cache of
traces. 324 pairs take an hour and a half; --every 11 plans each eleventh.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import recording

SHAPES = (
    *("qwen2.5-0.5b", "gpt2-medium", "t5-chatlm-0.2b"),
    *("qwen2.5-3b", "llama3.1-8b", "qwen2.5-14b"),
)
MACHINES = ("2x3080-20g-16g", "a5000-16g", "a6000-48g", "h200", "r9700-32g", "cpu")
METHODS = {"full": (), "lora": ("--lora.r=16",)}
METHODS["qlora"] = (*METHODS["lora"], "--quantization.load_in_4bit=true")
LENGTHS = (512, 2048, 8192)
SLOWER = 1.01  # times the seconds of the other plan
TIME_LIMIT_S = 600
RESULT = "plans_beside"


@dataclass(frozen=True)
class Case:
    """A training that is planned."""

    shape: str
    machine: str
    method: str
    length: int

    @property
    def argv(self) -> list[str]:
        machine = recording.CODE / "configs" / "machines" / f"{self.machine}.yaml"
        words = [f"--model.shape={self.shape}", f"--data.max_length={self.length}"]
        words += ["--machine", str(machine), "--json", *METHODS[self.method]]
        return [sys.executable, "-P", "-m", "launch", "plan", "sft_fast", *words]


def cases() -> list[Case]:
    return [Case(*names) for names in itertools.product(SHAPES, MACHINES, METHODS, LENGTHS)]


def planned(case: Case, tree: Path, workspace: Path) -> dict[str, Any]:
    """The plan's choice and figures, or why there is none."""
    environment = recording.environment(workspace) | {"PYTHONPATH": str(tree)}
    environment["LOWMEM_LEASES"] = str(workspace / "leases")
    done = subprocess.run(
        case.argv, env=environment, cwd=tree, capture_output=True, text=True, timeout=TIME_LIMIT_S
    )
    if done.returncode:
        text = (done.stdout + done.stderr).strip().splitlines()
        return {"exit_code": done.returncode, "refused": text[0] if text else ""}
    plan = json.loads(done.stdout)
    return {name: plan[name] for name in ("strategy", "seconds_per_step", "estimate")}


def verdict(base: dict[str, Any], here: dict[str, Any]) -> str:
    """The relation of the two plans in words; fields that only one tree has do not count."""
    if "refused" in base and "refused" in here:
        is_same = base["exit_code"] == here["exit_code"]
        return "refused by both" if is_same else "refused with another exit code"
    if "refused" in base or "refused" in here:
        return "only the other tree has a plan" if "refused" in here else "only this tree has one"
    seconds = [round(each["seconds_per_step"] or 0.0, 9) for each in (here, base)]
    if not is_alike(base["strategy"], here["strategy"]):
        ratio = seconds[0] / seconds[1] if all(seconds) else 1.0
        way = "slower" if ratio > SLOWER else "faster" if ratio < 1 / SLOWER else "about as fast"
        return f"another plan, {way}"
    is_same = is_alike(base["estimate"], here["estimate"]) and seconds[0] == seconds[1]
    return "the same plan" if is_same else "the same choice, other figures"


def is_alike(base: dict[str, Any], here: dict[str, Any]) -> bool:
    return all(base[key] == here[key] for key in base.keys() & here.keys())


def campaign(chosen: list[Case], tree: Path, workspace: Path) -> Iterator[dict[str, Any]]:
    for case in chosen:
        base, here = (planned(case, each, workspace) for each in (tree, recording.CODE))
        found = verdict(base, here)
        print(f"{case.shape}, {case.machine}, {case.method}, {case.length}: {found}", flush=True)
        row: dict[str, Any] = {**asdict(case), "verdict": found}
        if found not in ("the same plan", "refused by both"):
            row |= {"base": base, "here": here}
        yield row


def table(rows: list[dict[str, Any]]) -> str:
    """The number of pairs with each verdict, and the pairs that differ."""
    counts = Counter(row["verdict"] for row in rows)
    text = recording.table(["pair", "number"], [[name, str(n)] for name, n in counts.most_common()])
    differing = [row for row in rows if "base" in row]
    lines = [
        [f"{row['shape']}, {row['method']}, {row['length']}", row["machine"], row["verdict"]]
        for row in differing
    ]
    return text + ("\n" + recording.table(["training", "machine", "pair"], lines) if lines else "")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", help="the other commit")
    parser.add_argument("--every", type=int, default=1, help="plan each n-th question alone")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        tree = folder / "tree"
        clone = ["git", "clone", "-q", "--shared", str(recording.CODE), str(tree)]
        subprocess.run(clone, check=True)
        subprocess.run(["git", "-C", str(tree), "checkout", "-q", arguments.base], check=True)
        rows = list(campaign(cases()[:: arguments.every], tree, folder / "workspace"))
    recording.write(RESULT, {"base": arguments.base, "rows": rows}, table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
