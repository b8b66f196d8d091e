"""Shortages of memory in the attempts of a run, written to its folder for the next start."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from launch.base import files
from launch.base.errors import CheckpointError
from launch.base.text import size
from launch.predict import budgets, estimate, oom_history
from launch.predict.history.calibration import Comparison
from launch.predict.oom_history import Memory, OomEvent, OomHistory, available_bytes
from launch.probe import machine as probe_machine
from launch.run_folder.layout import RunDir
from launch.schema.machine import Machine
from launch.schema.plan import Plan
from launch.schema.result import Failure, RunResult
from launch.supervise import heartbeats

# kinds of failures, and the memory that they speak of; other kinds speak of the host's
_OF_KINDS: Mapping[str, Memory] = {"device_oom": "device", "pinned_oom": "pinned"}


def of_attempt(
    run: RunDir, failure: Failure, plan: Plan, planned_on: Machine, result: RunResult
) -> OomEvent:
    """The shortage in which the run's last attempt has just ended; `planned_on` is the machine as
    it was at the time of the plan."""
    of = _OF_KINDS.get(failure.kind, "host")
    beats = [beat for beat in heartbeats.read_all(run.attempts()[-1]) if beat.section != "tokenise"]
    section = max(beats, key=lambda beat: beat.monotonic_s).section if beats else "load"
    predicted = _predicted_bytes(plan)[of]
    if of == "device" and section in oom_history.WRITING:
        predicted = plan.estimate.model_state_bytes
    machine_after = probe_machine.machine(run_dir=run.root)
    before, after = (
        available_bytes(of, machine, plan.strategy) for machine in (planned_on, machine_after)
    )
    return OomEvent(
        of,
        section,
        plan.strategy,
        predicted,
        limit_bytes=_limit_bytes(of, planned_on, plan),
        available_bytes=max(before, after),
        is_own=_is_own(of, predicted, before, after, result),
    )


def _predicted_bytes(plan: Plan) -> dict[Memory, int]:
    """The bytes that a plan takes of each memory."""
    memory, strategy = plan.estimate, plan.strategy
    return {
        "device": memory.device_bytes - memory.margin_bytes,
        "host": budgets.host_bytes(strategy, memory),
        "pinned": memory.pinned_bytes * strategy.processes_per_machine,
    }


def _limit_bytes(of: str, planned_on: Machine, plan: Plan) -> int:
    """The size of that memory: of the smallest card, or of the host's limit."""
    if of == "device" and plan.strategy.device == "cuda":
        return min(gpu.total_bytes for gpu in planned_on.gpus)
    return planned_on.host_limit_bytes


def _is_own(of: str, predicted: int, before: int, after: int, result: RunResult) -> bool:
    """True if the job took the memory, False if other programs did.

    Others did where the plan fitted `before`, the job had less than the plan needs meanwhile or
    `after` its end, and others took more than the job took beyond its plan."""
    available, excess = after, 0
    if of == "host":
        excess = max(result.host_peak_bytes - predicted, 0)
        available = min(after, result.host_left_bytes or after)
    fitted = 0 < predicted <= before
    return not fitted or available >= predicted or excess >= before - available


def add(
    oom_history: OomHistory, event: OomEvent, run: RunDir, host_peak_bytes: int = 0
) -> OomHistory:
    """Write a shortage to the run's folder, and return the history with it; unchanged where other
    programs caused it.

    Where the job took more host RAM than was predicted, predictions are corrected by that share
    from now on."""
    write(run, (*read(run), event))
    if not event.is_own:
        return oom_history
    host = oom_history.host
    if event.of == "host" and event.predicted_bytes:
        host = max(host, host_peak_bytes / event.predicted_bytes - 1)
    return replace(oom_history, host=host, ran_out=(*oom_history.ran_out, event))


def add_refuted(
    oom_history: OomHistory, compared: Comparison, plan: Plan, planned_on: Machine, run: RunDir
) -> OomHistory:
    """Add a plan whose second step took more memory than there is."""
    predicted = _predicted_bytes(plan)
    for of, measured in compared.needs.items():
        event = OomEvent(
            *(of, "step", plan.strategy, predicted[of], measured),
            limit_bytes=_limit_bytes(of, planned_on, plan),
            available_bytes=available_bytes(of, planned_on, plan.strategy),
        )
        oom_history = add(oom_history, event, run)
    return replace(
        oom_history,
        device=max(oom_history.device, compared.exceeded),
        host=max(oom_history.host, compared.host_exceeded),
    )


def read(run: RunDir) -> tuple[OomEvent, ...]:
    """The shortages in a run's folder; none where the file is missing or damaged, which costs
    another attempt."""
    return files.read_or_none(run.evidence_file, tuple[OomEvent, ...]) or ()


def write(run: RunDir, ran_out: tuple[OomEvent, ...]) -> None:
    files.write_json(run.evidence_file, [asdict(event) for event in ran_out])


def of_unfinished(runs: Path, recipe_name: str, output_dir: str | None = None) -> OomHistory:
    """The history of the run that unfinished() finds; empty if there is none."""
    run = unfinished(runs, recipe_name, output_dir)
    return OomHistory(ran_out=read(run) if run else ())


def unfinished(runs: Path, recipe_name: str, output_dir: str | None = None) -> RunDir | None:
    """The recipe's newest run that writes to that folder; None if it is complete."""
    for run in RunDir.all(runs, recipe_name):
        with suppress(CheckpointError):
            if output_dir is None or run.writes_to(output_dir):
                return None if run.outcome() else run
    return None


def counting(oom_history: OomHistory, machine: Machine) -> OomHistory:
    """The shortages of an earlier start that still count on the machine as it is now."""
    ran_out = tuple(event for event in oom_history.ran_out if event.counts(machine))
    return replace(oom_history, ran_out=ran_out)


def sentence(oom_history: OomHistory, machine: Machine) -> str:
    """The part of an error that names the shortages which rule plans out, and the flag that
    ignores them."""
    shortages = "; ".join(_describe(event, machine) for event in oom_history.ran_out)
    return (
        "Earlier attempts of this run ran out of memory (evidence.json in its folder):"
        f" {shortages}. --assume-fits starts all the same, from the last checkpoint"
    )


def _describe(event: OomEvent, machine: Machine) -> str:
    memory = oom_history.MEMORIES.get(event.of, "memory of the card")
    took = f"took {size(event.measured_bytes)}" if event.measured_bytes else "ran out"
    then = f" with {size(event.available_bytes)} of {size(event.limit_bytes)} available"
    available = size(available_bytes(event.of, machine, event.candidate))
    return (
        f"{estimate.describe(event.candidate)} {took} of {memory} in {event.section}"
        f"{then if event.limit_bytes else ''}, now {available}"
    )
