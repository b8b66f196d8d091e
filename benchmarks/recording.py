"""What every benchmark records beside its figures: where they were taken, with what, and how busy
the machine was."""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

CODE = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGES = ("torch", "transformers", "accelerate", "datasets")
QUIET_LOAD = 1.0
QUIET_WAIT_S = 60.0


def machine() -> str:
    """CPU, cores, RAM and GPUs in words; no host name."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    from launch.probe import machine as probe_machine

    cards = "".join(f", {gpu.name}" for gpu in probe_machine.machine().gpus)
    return (
        f"{cpu}, {len(os.sched_getaffinity(0))} cores, {ram_bytes / (1 << 30):.1f} GiB RAM{cards}"
    )


def commit() -> str:
    """The commit of the code here, with "+" if it was changed since; "" where there is no git."""
    names = ("describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*")
    done = subprocess.run(["git", *names], cwd=CODE, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def command(module: str) -> str:
    """The command line that was typed; of a whole path the last part, since where it lies is this
    machine's own."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return " ".join(["python", "-m", f"benchmarks.{module}", *words])


def installed(package: str) -> str | None:
    """Its version, or None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment(workspace: Path) -> dict[str, str]:
    """The environment of a launch whose runs, logs and caches go under `workspace`."""
    workspace.mkdir(parents=True, exist_ok=True)
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "LOWMEM_"))
    }
    return {
        **inherited,
        "PYTHONPATH": str(CODE),
        "LOWMEM_ROOT": str(workspace),
        "HF_HUB_OFFLINE": "1",
    }


def quiet() -> float:
    """The load average now, after waiting at most QUIET_WAIT_S for it to fall to QUIET_LOAD."""
    until = time.monotonic() + QUIET_WAIT_S
    while os.getloadavg()[0] > QUIET_LOAD and time.monotonic() < until:
        time.sleep(1)
    return round(os.getloadavg()[0], 2)


def _busy_s() -> float:
    """CPU seconds of all processes since the machine started, and those that its host kept from
    it."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, interrupt, soft_interrupt, stolen = map(int, fields)
    return (user + nice + system + interrupt + soft_interrupt + stolen) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Timing:
    """One child from start to end."""

    load_before: float
    wall_s: float
    cpu_s: float  # of the child and its descendants
    others_cores: float  # cores that other processes kept busy meanwhile


def timed(argv: Sequence[str], env: Mapping[str, str], log: Path, wait: bool = True) -> Timing:
    """Run a child to its end, output into `log`; it has to succeed."""
    load = quiet() if wait else round(os.getloadavg()[0], 2)
    used, busy, began = resource.getrusage(resource.RUSAGE_CHILDREN), _busy_s(), time.monotonic()
    with log.open("wb") as file:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )
    wall_s = time.monotonic() - began
    assert done.returncode == 0, said(log)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    others = max(_busy_s() - busy - cpu_s, 0.0) / wall_s
    return Timing(load, round(wall_s, 3), round(cpu_s, 2), round(others, 2))


def said(log: Path) -> str:
    """What a failed child printed, and the newest log of the ranks in the workspace beside it."""
    logs = sorted(
        (log.parent / "workspace/runs").glob("*/*/attempts/*/log.txt"),
        key=lambda path: path.stat().st_mtime,
    )
    return "\n".join(path.read_text(encoding="utf-8") for path in [log, *logs[-1:]])


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines) + "\n"


def write(
    name: str,
    measured: Mapping[str, Any],
    text: str,
    module: str | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """results/<name>.json and .md: the circumstances, then the figures; of the benchmark `module`,
    or of that name. `about` are the circumstances of a measurement elsewhere."""
    about = about or {
        "date": date.today().isoformat(),
        "machine": machine(),
        "versions": {
            "python": platform.python_version(),
            **{name: installed(name) for name in PACKAGES},
        },
        "command": command(module or name),
        "commit": commit(),
    }
    RESULTS.mkdir(exist_ok=True)
    content = json.dumps({**about, **measured}, ensure_ascii=False, indent=1)
    (RESULTS / f"{name}.json").write_text(content + "\n", encoding="utf-8")
    versions = ", ".join(f"{key} {value}" for key, value in about["versions"].items())
    of_code = f"; commit {about['commit']}" if about.get("commit") else ""
    head = f"# {name}\n\n{about['date']}, {about['machine']}; {versions}{of_code}\n\n"
    head += f"`{about['command']}`\n\n"
    (RESULTS / f"{name}.md").write_text(head + text, encoding="utf-8")
    print("\n" + text)


def rows(name: str) -> dict[str, dict[str, Any]]:
    """The rows of earlier measurements, by case; none before the first."""
    file = RESULTS / f"{name}.json"
    recorded = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return {row["case"]: row for row in recorded}


def put_between(page: Path, begin: str, end: str, text: str) -> None:
    """Write a text between two marks of a page, which keeps the rest."""
    head, _, rest = page.read_text(encoding="utf-8").partition(begin)
    tail = rest.partition(end)[2]
    page.write_text(f"{head}{begin}\n\n{text}\n\n{end}{tail}", encoding="utf-8")
