"""Ours beside plain Trainer, TRL with Liger and Unsloth on one card: speed of a step, in turns.

    gpu_speed_bundle makes a folder; there: run.sh OUT SECONDS [options of this module]
    python -m benchmarks.gpu_speed --record OUT/results.jsonl     # into benchmarks/results

Every training starts at once and stops before it touches the card: what imports, tokenises, plans
and traces runs side by side. Then, group by group, the trainings of a group load and warm up
together, stay on the card together, and take turns: one at a time runs a segment of steps between
two synchronisations, round after round, and nobody else computes meanwhile. The first step of a
segment is not timed. Last, each runs a profiled segment. A training that fails or hangs loses its
own row only. OUT/results.jsonl gets a line for each segment as it comes and one for each training.
Cases and groups: gpu_speed_cases.py; the inside of a training: gpu_speed_hook.py.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks import gpu_speed_hook, recording
from benchmarks.gpu_speed_cases import GROUPS, Group, Training
from benchmarks.gpu_speed_hook import Files, Segments
from launch.schema.machine import CUDNN_LAST

RESULT = "gpu_speed"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "bitsandbytes", "triton")
PACKAGES += ("liger_kernel", "trl", "unsloth", "datasets")
SEGMENT_S, PROFILE_S = 20.0, 30.0  # a training that takes longer in its turn is given up
GROUP_S = 30.0  # a group is begun only if so much time is left
CARD_SHARE = 0.92  # of the card's memory, for the trainings of a group
# on a driver without a card cuDNN does not start, and Inductor's own launcher finds no card
REHEARSED = {CUDNN_LAST: "1", "TORCHINDUCTOR_USE_STATIC_CUDA_LAUNCHER": "0"}
TAIL = 1500  # characters of a log


@dataclass(frozen=True)
class Place:
    """The folders of a campaign, and the time until which it may run."""

    work: Path
    out: Path
    python: Path
    unsloth_python: Path
    began: float
    until: float

    @property
    def data(self) -> Path:
        return self.work / "data"

    @property
    def gates(self) -> Path:
        return self.work / "gates"

    def model(self, training: Training) -> Path:
        return self.work / "models" / training.case.name

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:6.1f}] {text}", flush=True)

    def record(self, row: Mapping[str, Any]) -> None:
        with (self.out / "results.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()


def await_(condition: Callable[[], bool], seconds: float, poll_s: float = 0.02) -> bool:
    """True if the condition holds before the seconds are over."""
    until = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < until:
        time.sleep(poll_s)
    return holds


def start(
    argv: Sequence[str], log: Path, env: Mapping[str, str], cwd: Path
) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env=env,
            cwd=cwd,
            start_new_session=True,
        )


def kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    """End children with all that they started; they hold no memory of the card afterwards."""
    trees: list[psutil.Process] = []
    for child in children:
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(child.pid)
            trees += [launcher, *launcher.children(recursive=True)]
    for process in trees:  # launchers first: they restart nothing
        with suppress(psutil.NoSuchProcess):
            process.kill()
    for child in children:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait(5)
    psutil.wait_procs(trees, timeout=5)


# ---- one training
# ---------------------------------------------------------------------------


class Running:
    """A training that has been started."""

    def __init__(self, place: Place, training: Training) -> None:
        self.place, self.training = place, training
        self.folder = place.work / "runs" / training.name
        self.files = Files(place.gates, training.name)
        self.log = self.folder / "log.txt"
        self.child: subprocess.Popen[bytes] | None = None
        self.failed, self.is_recorded = "", False
        self.ready_after_s: float | None = None
        self._staged = 0.0

    @property
    def name(self) -> str:
        return self.training.name

    def stage(self) -> None:
        """Start it; it goes as far as its gate."""
        self.folder.mkdir(parents=True)
        self._staged = time.monotonic()
        place, training = self.place, self.training
        env = environment(place, training)
        if training.is_ours:
            recipe = self.folder / f"{self.name}.yaml"
            content = training.recipe(place.data, place.model(training), self.folder)
            recipe.write_text(yaml.safe_dump(content), encoding="utf-8")
            env |= {
                "LOWMEM_ROOT": str(self.folder / "workspace"),
                "LOWMEM_LEASES": str(self.folder / "leases"),
                "LOWMEM_TRACES": str(place.work / "traces"),
            }
            (self.folder / "leases").mkdir()
            words = ["-P", "-m", "launch", "run", str(recipe), "--resume", "never"]
            argv = [str(place.python), *words]
        else:
            asked = self.folder / "asked.json"
            content = training.asked(place.data, place.model(training), self.folder)
            asked.write_text(json.dumps(content), encoding="utf-8")
            is_unsloth = training.way.kind == "unsloth"
            python = place.unsloth_python if is_unsloth else place.python
            argv = [str(python), "-P", "-m", "benchmarks.gpu_speed_peer", str(asked)]
        self.child = start(argv, self.log, env, self.folder)

    def is_ready(self) -> bool:
        if self.ready_after_s is None and self.files.ready.exists():
            self.ready_after_s = round(time.monotonic() - self._staged, 1)
        return self.ready_after_s is not None

    def is_alive(self) -> bool:
        return not self.failed and self.child is not None and self.child.poll() is None

    def said(self, at: str) -> list[dict[str, Any]]:
        return [line for line in self.files.lines() if line["at"] == at]

    def allow(self, permit: int) -> None:
        self.files.allow(permit)

    def fail(self, reason: str) -> None:
        """Give it up."""
        if self.failed:
            return
        code = self.child.poll() if self.child else None
        self.failed = reason if code is None else f"{reason} (exit code {code})"
        self.place.say(f"{self.name}: FAILED: {self.failed}\n{self.tail()}")
        self.end()

    def end(self) -> None:
        if self.child is not None:
            kill([self.child])

    def turn(self, permit: int, at: str, count: int, seconds: float) -> bool:
        """Let it go on until it has said so many lines; whether it has."""
        self.allow(permit)
        seconds = min(seconds, max(self.place.left_s, 1.0))
        await_(lambda: len(self.said(at)) >= count or not self.is_alive(), seconds, 0.01)
        if len(self.said(at)) >= count:
            return True
        self.fail(f"no {at} within {seconds:.0f} s")
        return False

    def tail(self) -> str:
        """The ends of its logs."""
        ranks = sorted(self.folder.glob("workspace/runs/*/*/attempts/*/log.txt"))[-1:]
        texts = [
            log.read_text(encoding="utf-8", errors="replace")[-TAIL:]
            for log in (self.log, *ranks)
            if log.exists()
        ]
        errors = [line.get("error", "") for line in self.said("failed")]
        return "\n--- rank: ".join(texts + errors)

    def load_s(self) -> float | None:
        """Seconds from its first permit to its first step."""
        began, loaded = self.said("began"), self.said("loaded")
        return round(loaded[0]["time"] - began[0]["time"], 2) if began and loaded else None

    def row(self) -> dict[str, Any]:
        """Everything that was measured of it."""
        training, segments = self.training, self.said("segment")
        found: dict[str, Any] = {
            "stage": "training",
            "name": self.name,
            "case": training.case.name,
            "about": training.case.about,
            "way": asdict(training.way),
            "batch": training.batch,
            "steps": training.case.segments.text,
            "ready_after_s": self.ready_after_s,
            "load_s": self.load_s(),
            "loaded": (self.said("loaded") or [None])[-1],
            "warm": (self.said("warm") or [None])[-1],
            "segments": segments,
        }
        if segments:
            found |= medians(segments)
        last = (self.said("profile") or [{}])[-1]
        found |= {key: value for key, value in last.items() if key != "at"}
        if training.is_ours:
            found |= planned(self.folder)
            found |= {
                f"peak_{figure}": max(
                    peaks[figure] for part, peaks in last["phases"].items() if "step" in part
                )
                for figure in ("allocated", "reserved")
                if last.get("phases")
            }
        if self.failed:
            found |= {"failed": self.failed, "log": self.tail()}
        return found


def environment(place: Place, training: Training) -> dict[str, str]:
    """Variables of a training, without those of this process's own launches."""
    inherited = {
        key: value for key, value in os.environ.items() if not key.startswith(("LOWMEM_", "SLURM_"))
    }
    way = dict(training.way.environment)
    if os.environ.get("NVIDIA_FAKE_CUDA"):
        way = REHEARSED
    return {
        **inherited,
        "PYTHONPATH": str(recording.CODE),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        gpu_speed_hook.NAME: training.name,
        gpu_speed_hook.FOLDER: str(place.gates),
        gpu_speed_hook.STEPS: training.case.segments.text,
        **way,
    }


def medians(segments: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The median of the segments of a training, and how far they are apart."""
    found: dict[str, Any] = {}
    for key in ("ms_a_step", "tokens_per_s", "tokens_a_step", "computed_tokens_a_step"):
        values = [segment[key] for segment in segments]
        found[key] = round(statistics.median(values), 3)
        found[f"{key}_spread"] = [min(values), max(values)]
    for key in ("peak_allocated", "peak_reserved"):
        found[key] = max(segment[key] for segment in segments)
    first, last = segments[0], segments[-1]
    found["cuda_mallocs_in_segments"] = last["cuda_mallocs"] - first["cuda_mallocs"]
    return found


def planned(folder: Path) -> dict[str, Any]:
    """The predictions of our plan, and the host memory that its rank had."""
    plans = sorted(folder.glob("workspace/runs/*/*/plan.json"))
    if not plans:
        return {}
    plan = json.loads(plans[-1].read_text(encoding="utf-8"))
    events = plans[-1].parent / "attempts/01/events.jsonl"
    lines = events.read_text(encoding="utf-8").splitlines() if events.exists() else []
    host = [json.loads(line)["host_pss_bytes"] for line in lines]
    keys = ("seconds_per_step", "phases", "estimate", "host", "allocator_settings", "why")
    return {
        "strategy": plan["strategy"],
        **{f"predicted_{key}": plan.get(key) for key in keys},
        "changes": plan.get("changes"),
        "measured_host_pss": max((value for value in host if value), default=None),
    }


# ---- all of them
# ---------------------------------------------------------------------------


def make_models(place: Place, trainings: Sequence[Training]) -> dict[str, subprocess.Popen[bytes]]:
    """Start making the model folder of each case."""
    (place.work / "models").mkdir(parents=True)
    makers: dict[str, subprocess.Popen[bytes]] = {}
    for training in trainings:
        name = training.case.name
        if name not in makers:
            content = json.dumps(training.case.model())
            words = [content, str(place.data / "tokenizer"), str(place.model(training))]
            argv = [str(place.python), "-P", "-m", "benchmarks.gpu_speed_models", *words]
            env = {**os.environ, "PYTHONPATH": str(recording.CODE), "HF_HUB_OFFLINE": "1"}
            makers[name] = start(argv, place.out / f"model_{name}.log", env, place.work)
    return makers


def stage_all(place: Place, running: Sequence[Running], patience_s: float) -> None:
    """Bring every training to its gate; those that do not get there are given up."""
    until = time.monotonic() + patience_s
    makers = make_models(place, [one.training for one in running])
    for one in running:
        if not one.training.is_ours:
            one.stage()
    waiting = [one for one in running if one.training.is_ours]
    while waiting and time.monotonic() < until:
        for one in [one for one in waiting if place.model(one.training).is_dir()]:
            one.stage()
            waiting.remove(one)
        for one in [
            one for one in waiting if makers[one.training.case.name].poll() not in (None, 0)
        ]:
            one.fail("its model could not be made")
            waiting.remove(one)
        time.sleep(0.05)
    place.say("all are started")

    def is_settled() -> bool:
        settled = [one.is_ready() or not one.is_alive() for one in running]
        return all(settled)

    await_(is_settled, until - time.monotonic(), 0.1)
    for one in running:
        if not one.is_ready():
            one.fail(f"not ready after {patience_s:.0f} s")
    for name, maker in makers.items():
        maker.wait(10)
        log = place.out / f"model_{name}.log"
        place.say(f"model {name}: exit code {maker.returncode} {log.read_text()[-300:]}")
        log.unlink()
    ready = {one.name: one.ready_after_s for one in running if one.is_ready()}
    place.say(f"ready: {ready}")


def run_group(place: Place, members: Sequence[Running], group: Group) -> None:
    """Load and warm up together, then take turns."""
    began = time.monotonic()
    for one in members:
        one.allow(1)
    until = began + min(group.warm_up_s, place.left_s)
    is_warm = [lambda one=one: bool(one.said("warm")) or not one.is_alive() for one in members]
    await_(lambda: all(check() for check in is_warm), until - time.monotonic(), 0.05)
    for one in members:
        if not one.said("warm"):
            one.fail(f"not warm after {time.monotonic() - began:.0f} s")
    place.say(f"warm after {time.monotonic() - began:.1f} s")
    take_turns(place, members)
    kill([one.child for one in members if one.child is not None])
    for one in members:
        row = one.row()
        place.record(row)
        one.is_recorded = True
        place.say(line_of(row))
    place.say(f"{group.name} took {time.monotonic() - began:.1f} s")


def take_turns(place: Place, members: Sequence[Running]) -> None:
    """Rounds of timed segments, then the profiles."""
    rounds = max(one.training.case.segments.rounds for one in members)
    for number in range(rounds):
        for one in [one for one in members if one.is_alive()]:
            if place.left_s < 5:
                one.fail("no time for its segments")
            elif one.turn(2 + number, "segment", number + 1, SEGMENT_S):
                said = one.said("segment")[-1]
                place.record({"stage": "segment", "name": one.name, **said})
    for one in [one for one in members if one.is_alive()]:
        if place.left_s > 8:
            one.turn(2 + rounds, "profiled", 1, PROFILE_S)
    settled = [one for one in members if one.is_alive() and one.said("profiled")]
    await_(
        lambda: all(one.said("profile") or not one.is_alive() for one in settled),
        min(30.0, max(place.left_s, 1.0)),
    )


def chosen_groups(
    cases: Sequence[str], only: str, is_small: bool, change: Callable[[Segments], Segments]
) -> Iterator[Group]:
    """The groups with the trainings that are asked for, and their segments as `change` makes
    them."""
    for group in GROUPS:
        kept = []
        for training in group.trainings:
            case = training.case.small() if is_small else training.case
            case = replace(case, segments=change(case.segments))
            if case.name in cases and re.search(only, training.name):
                kept.append(replace(training, case=case))
        if kept:
            yield replace(group, trainings=tuple(kept))


def card_gb() -> float:
    """GB that the trainings of a group may hold."""
    from launch.probe import machine as probe_machine

    gpus = probe_machine.machine().gpus
    if not gpus:
        sys.exit(f"needs a GPU: {probe_machine.machine().gpus_reason}")
    return CARD_SHARE * gpus[0].free_bytes / 1e9


def about(place: Place) -> dict[str, Any]:
    """The machine and the versions that the figures are of."""
    code = (
        "from importlib import metadata; import json;"
        "found = [(d.metadata['Name'], d.version) for d in metadata.distributions()];"
        "print(json.dumps(dict(reversed(found))))"  # of two, the first is imported
    )
    found: dict[str, dict[str, str]] = {}
    for name, python in (("ours", place.python), ("unsloth", place.unsloth_python)):
        done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
        versions = json.loads(done.stdout) if done.returncode == 0 else {}
        found[name] = {package: versions[package] for package in PACKAGES if package in versions}
    return {
        "stage": "about",
        "date": date.today().isoformat(),
        "machine": recording.machine(),
        "python": sys.version.split()[0],
        "versions": found,
        "is_rehearsal": bool(os.environ.get("NVIDIA_FAKE_CUDA")),
    }


def pack_logs(place: Place, running: Sequence[Running]) -> None:
    """Logs, plans and events of all trainings, and the work of traced steps, in one file."""
    names = ("log.txt", "plan.json", "events.jsonl", "train.log", "*.yaml")
    with tarfile.open(place.out / "logs.tar.gz", "w:gz") as packed:
        for trace in (place.work / "traces").glob("*.json"):
            packed.add(trace, f"traces/{trace.name}")
        for one in running:
            for path in (path for name in names for path in one.folder.rglob(name)):
                if path.is_file() and path.stat().st_size < 1 << 20:
                    packed.add(path, str(path.relative_to(place.work / "runs")))


def measure(place: Place, groups: Sequence[Group], patience_s: float) -> list[dict[str, Any]]:
    """Stage all, then group after group."""
    capacity = card_gb()
    parts = [part for group in groups for part in group.parts(capacity)]
    place.gates.mkdir(parents=True)
    by_part = [[Running(place, one) for one in part.trainings] for part in parts]
    running = [one for members in by_part for one in members]
    place.say(f"{len(running)} trainings in {len(parts)} groups; {capacity:.0f} GB for each group")
    try:
        stage_all(place, running, patience_s)
        place.record(about(place))
        for part, members in zip(parts, by_part, strict=True):
            alive = [one for one in members if one.is_alive()]
            if place.left_s < GROUP_S:
                place.say(f"no time for {part.name}")
            elif alive:
                place.say(f"group {part.name}: {', '.join(one.name for one in alive)}")
                run_group(place, alive, part)
    finally:
        kill([one.child for one in running if one.child is not None])
        for one in running:
            if not one.is_recorded:
                place.record(one.row())
        pack_logs(place, running)
    return [one.row() for one in running]


# ---- results
# ---------------------------------------------------------------------------


def idle_share(row: Mapping[str, Any]) -> float | None:
    """Share of a timed step in which the card had no kernel, as the profile's kernels say."""
    busy = (row.get("profile") or {}).get("gpu_busy_ms_a_step")
    return 1 - busy / row["ms_a_step"] if busy and row.get("ms_a_step") else None


def line_of(row: Mapping[str, Any]) -> str:
    """A training in one line."""
    if not row.get("ms_a_step"):
        return f"{row['name']:30s} {row.get('failed') or 'not measured'}"
    low, high = row["ms_a_step_spread"]
    idle, profile = idle_share(row), row.get("profile") or {}
    predicted = row.get("predicted_seconds_per_step")
    return (
        f"{row['name']:30s} {row['tokens_per_s']:9,.0f} tok/s {row['ms_a_step']:8.2f} ms"
        f" ({low:.1f} to {high:.1f}) {row['tokens_a_step']:7,.0f} tok"
        f" alloc {row['peak_allocated'] / 1e9:6.2f} res {row['peak_reserved'] / 1e9:6.2f} GB"
        f" predicted {1e3 * predicted if predicted else 0:7.1f} ms"
        f" busy {profile.get('gpu_busy_ms_a_step') or 0:8.2f} ms"
        f" idle {'' if idle is None else f'{idle:.0%}'}"
        f" launches {profile.get('launches_a_step') or 0:6.0f} {row.get('failed') or ''}"
    )


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The trainings as a table of a page."""
    head = ["training", "tokens/s", "(of segments)", "ms a step", "tokens a step", "computed"]
    head += ["allocated, GB", "reserved, GB", "predicted ms", "GPU busy, ms", "idle", "launches"]
    lines = []
    for row in rows:
        if not row.get("ms_a_step"):
            lines.append([row["name"], str(row.get("failed") or "not measured"), *[""] * 10])
            continue
        profile, idle = row.get("profile") or {}, idle_share(row)
        predicted = row.get("predicted_seconds_per_step")
        low, high = row["tokens_per_s_spread"]
        lines.append(
            [
                row["name"],
                f"{row['tokens_per_s']:,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                f"{row['ms_a_step']:.1f}",
                f"{row['tokens_a_step']:,.0f}",
                f"{row['computed_tokens_a_step']:,.0f}",
                f"{row['peak_allocated'] / 1e9:.2f}",
                f"{row['peak_reserved'] / 1e9:.2f}",
                f"{1e3 * predicted:.1f}" if predicted else "",
                f"{profile.get('gpu_busy_ms_a_step') or 0:.1f}",
                "" if idle is None else f"{idle:.0%}",
                f"{profile.get('launches_a_step') or 0:,.0f}",
            ]
        )
    return recording.table(head, lines)


def record(file: Path, folder: Path = recording.RESULTS) -> None:
    """Make results/gpu_speed.json and .md of the lines of a run on a card."""
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    circumstances = next(line for line in lines if line["stage"] == "about")
    if circumstances["is_rehearsal"]:
        sys.exit(f"{file}: a rehearsal without a card, whose numbers mean nothing")
    rows = [line for line in lines if line["stage"] == "training"]
    content = json.dumps({**circumstances, "rows": rows}, ensure_ascii=False, indent=1)
    (folder / f"{RESULT}.json").write_text(content + "\n", encoding="utf-8")
    versions = ", ".join(
        f"{key} {value}" for key, value in circumstances["versions"]["ours"].items()
    )
    head = f"# {RESULT}\n\n{circumstances['date']}, {circumstances['machine']}; {versions}\n\n"
    text = (
        "Medians of segments in which one training at a time runs while the others of its group"
        " wait on the card; idle: share of a timed step that the profile's kernels do not fill.\n\n"
    )
    (folder / f"{RESULT}.md").write_text(head + text + table(rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, help="a folder with data/, for all that is made")
    parser.add_argument("--out", type=Path, help="receives results.jsonl, table.txt, logs.tar.gz")
    parser.add_argument("--unsloth-python", type=Path, default=Path(sys.executable))
    parser.add_argument("--seconds", type=float, default=450)
    parser.add_argument("--cases", default="c1,c2,c3,c4")
    parser.add_argument("--only", default="", help="trainings whose name this expression matches")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profiled", type=int, help="steps of a profile; 0: none")
    parser.add_argument("--patience", type=float, default=110, help="seconds until all are ready")
    parser.add_argument("--small", action="store_true", help="small models, for a rehearsal")
    parser.add_argument("--record", type=Path, metavar="RESULTS.jsonl", help="write the results")
    arguments = parser.parse_args()
    if arguments.record:
        record(arguments.record)
        return
    if not arguments.work or not arguments.out:
        parser.error("--work and --out are needed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # its children end with it
    began = time.monotonic()
    place = Place(
        *(arguments.work.resolve(), arguments.out.resolve()),
        *(Path(sys.executable), arguments.unsloth_python.absolute()),
        *(began, began + arguments.seconds),
    )
    cases = arguments.cases.split(",")

    def change(segments: Segments) -> Segments:
        profiled = segments.profiled if arguments.profiled is None else arguments.profiled
        return replace(segments, rounds=arguments.rounds, profiled=profiled)

    groups = list(chosen_groups(cases, arguments.only, arguments.small, change))
    rows = measure(place, groups, arguments.patience)
    text = "\n".join(map(line_of, rows))
    print(f"\n{text}", flush=True)
    (place.out / "table.txt").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
