"""What ran out of memory in the attempts of a run: kept in its folder, so that the next start knows it too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from pydantic import TypeAdapter

from launch import estimate, heartbeats, rundir
from launch.estimate import Exceeded, RanOut
from launch.rundir import RunDir
from launch.schema import Failure, Plan

FILE = TypeAdapter(tuple[RanOut, ...])


def add(exceeded: Exceeded, failure: Failure, plan: Plan, run: RunDir) -> Exceeded:
    """With the attempt that has just ended in `failure`; written down."""
    of_host = failure.kind != "device_oom"
    beats = heartbeats.read_all(run.attempts()[-1])
    section = max(beats, key=lambda beat: beat.monotonic_s).section if beats else "load"
    if of_host:
        predicted = estimate.host_bytes(plan.strategy, plan.estimate)
    else:
        predicted = plan.estimate.model_state_bytes if section in estimate.WRITING else plan.estimate.device_bytes
    one = RanOut("host" if of_host else "device", section, plan.strategy, predicted)
    found = replace(exceeded, ran_out=(*exceeded.ran_out, one))
    write(run, found)
    return found


def write(run: RunDir, exceeded: Exceeded) -> None:
    rundir.write_atomic(run.evidence_file, FILE.dump_json(exceeded.ran_out).decode())


def of_unfinished(runs: Path, recipe_name: str) -> Exceeded:
    """Of the recipe's newest run, where that is not complete."""
    folders = [path.parent for path in (runs / recipe_name).glob("*/plan.json")]
    run = RunDir(max(folders)) if folders else None
    if run is None or run.outcome() or not run.evidence_file.exists():
        return Exceeded()
    return Exceeded(ran_out=FILE.validate_json(run.evidence_file.read_bytes()))
