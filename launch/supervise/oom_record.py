"""What ran out of memory in the attempts of a run: kept in its folder, so that the next start knows
it too."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from launch.base import files
from launch.base.errors import CheckpointError
from launch.base.text import size
from launch.predict import estimate, oom_history
from launch.predict.history.calibration import Comparison
from launch.predict.oom_history import OomEvent, OomHistory, available_bytes
from launch.probe import machine as probe_machine
from launch.run_folder.layout import RunDir
from launch.schema.machine import Machine
from launch.schema.plan import Plan
from launch.schema.result import Failure, RunResult
from launch.supervise import heartbeats


def of_attempt(
    run: RunDir, failure: Failure, plan: Plan, planned_on: Machine, result: RunResult
) -> OomEvent:
    """The shortage in which the run's last attempt has just ended; `planned_on`: the machine when
    it was planned."""
    of_host = failure.kind != "device_oom"
    attempt = run.attempts()[-1]
    beats = [beat for beat in heartbeats.read_all(attempt) if beat.section != "tokenise"]
    section = max(beats, key=lambda beat: beat.monotonic_s).section if beats else "load"
    memory = plan.estimate
    predicted = memory.device_bytes - memory.margin_bytes
    if of_host:
        predicted = estimate.host_bytes(plan.strategy, memory)
    elif section in oom_history.WRITING:
        predicted = memory.model_state_bytes
    one = OomEvent("host" if of_host else "device", section, plan.strategy, predicted)
    now, limit = probe_machine.machine(run_dir=run.root), planned_on.host_limit_bytes
    if one.of == "device" and plan.strategy.device == "cuda":
        limit = min(gpu.total_bytes for gpu in planned_on.gpus)
    before, after = (
        available_bytes(one.of, machine, plan.strategy) for machine in (planned_on, now)
    )
    return replace(
        one,
        limit_bytes=limit,
        available_bytes=max(before, after),
        is_own=_is_own(one, before, after, result),
    )


def _is_own(one: OomEvent, before: int, after: int, result: RunResult) -> bool:
    """Whether the job took the memory, not others: they did where the plan fitted, less than it
    needs was left to the job meanwhile or is now that it has ended, and they took more than the job
    did beyond its plan."""
    left, beyond = after, 0
    if one.of == "host":
        beyond = max(result.host_peak_bytes - one.predicted_bytes, 0)
        left = min(after, result.host_left_bytes or after)
    fitted = 0 < one.predicted_bytes <= before
    return not fitted or left >= one.predicted_bytes or beyond >= before - left


def add(
    oom_history: OomHistory, one: OomEvent, run: RunDir, host_peak_bytes: int = 0
) -> OomHistory:
    """With another shortage; written down. One that says nothing about plans is written down and
    changes nothing.

    Where the job took more host RAM than was predicted, predictions are corrected by that share
    from now on."""
    write(run, (*read(run), one))
    if not one.is_own:
        return oom_history
    host = oom_history.host
    if one.of == "host" and one.predicted_bytes:
        host = max(host, host_peak_bytes / one.predicted_bytes - 1)
    return replace(oom_history, host=host, ran_out=(*oom_history.ran_out, one))


def add_refuted(
    oom_history: OomHistory, compared: Comparison, plan: Plan, planned_on: Machine, run: RunDir
) -> OomHistory:
    """With a plan whose second step took more than there is; written down."""
    memory = plan.estimate
    predicted = {
        "device": memory.device_bytes - memory.margin_bytes,
        "host": estimate.host_bytes(plan.strategy, memory),
    }
    found = oom_history
    for of, measured in compared.needs.items():
        available = available_bytes(of, planned_on, plan.strategy)
        limit = planned_on.host_limit_bytes
        if of == "device" and plan.strategy.device == "cuda":
            limit = min(gpu.total_bytes for gpu in planned_on.gpus)
        one = OomEvent(of, "step", plan.strategy, predicted[of], measured, limit, available)
        found = add(found, one, run)
    return replace(
        found,
        device=max(found.device, compared.exceeded),
        host=max(found.host, compared.host_exceeded),
    )


def read(run: RunDir) -> tuple[OomEvent, ...]:
    """Every shortage that was written down for a run; nothing where the file is not there or
    damaged, which costs another attempt."""
    return files.read_or_none(run.evidence_file, tuple[OomEvent, ...]) or ()


def write(run: RunDir, ran_out: tuple[OomEvent, ...]) -> None:
    files.write_json(run.evidence_file, [asdict(event) for event in ran_out])


def of_unfinished(runs: Path, recipe_name: str, output_dir: str | None = None) -> OomHistory:
    """Of the recipe's newest run, of those that write to that folder, where it is not complete."""
    for run in RunDir.all(runs, recipe_name):
        with suppress(CheckpointError):  # resume.decide() says so, where it is the run that goes on
            if output_dir is not None and not run.writes_to(output_dir):
                continue
            if run.outcome():
                return OomHistory()
            return OomHistory(ran_out=read(run))
    return OomHistory()


def counting(oom_history: OomHistory, machine: Machine) -> OomHistory:
    """What still counts of an earlier start's shortages, on the machine as it is now."""
    ran_out = tuple(one for one in oom_history.ran_out if one.counts(machine))
    return replace(oom_history, ran_out=ran_out)


def words(oom_history: OomHistory, machine: Machine) -> str:
    """The sentence of an error that names the shortages which rule plans out, and what overrides
    them."""
    said = []
    for one in oom_history.ran_out:
        where = "host RAM" if one.of == "host" else "memory of the card"
        now = available_bytes(one.of, machine, one.candidate)
        took = f"took {size(one.measured_bytes)}" if one.measured_bytes else "ran out"
        then = (
            f" with {size(one.available_bytes)} of {size(one.limit_bytes)} available"
            if one.limit_bytes
            else ""
        )
        said.append(
            f"{estimate.describe(one.candidate)} {took} of {where} in {one.section}{then}, now"
            f" {size(now)}"
        )
    return (
        "This counts what earlier attempts of this run have shown (evidence.json in its folder):"
        f" {'; '.join(said)}. --assume-fits starts all the same, from the last checkpoint"
    )
