"""A damaged record of an earlier attempt is left out of the report with a line that names its file;
nothing fails."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from launch.base import files
from launch.base.errors import CheckpointError
from launch.commands.ending import attempt_row
from launch.run_folder import steps
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.result import AttemptEnd, Failure, HeldOut, Outcome
from tests.builders import plan
from tests.unit.report.test_compare import START, step, write

FAILURE = Failure("killed", 137, "somebody killed it", "SIGKILL", "run it again")


@pytest.fixture
def attempt(tmp_path) -> AttemptDir:
    found = RunDir(tmp_path / "run").new_attempt()
    write(found.events_file, [step(n, START + n) for n in (1, 2)])
    write(found.held_out_file, [HeldOut(n, 8 * n, 0.5, 3.0, START + n) for n in (1, 2)])
    files.write_json(found.plan_file, asdict(plan()))
    files.write_json(found.supervisor_file, AttemptEnd(137, FAILURE, 1.5))
    files.write_json(found.outcome_file, Outcome(complete=False, ended="preempted"))
    return found


def flips(file: Path, every: int):
    """The file with every so many-th of its bits flipped in turn, then as it was."""
    content = file.read_bytes()
    for bit in range(0, len(content) * 8, every):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        yield bit
    file.write_bytes(content)


@pytest.mark.parametrize("read", [steps.events, steps.evaluations])
def test_a_flipped_bit_costs_the_records_of_its_line_and_is_said(attempt, read):
    complete = read(attempt)
    file = attempt.events_file if read is steps.events else attempt.held_out_file
    for _ in flips(file, 7):
        said: list[str] = []
        found = read(attempt, said.append)
        assert len(found) >= len(complete) - 2  # a newline that is lost joins two lines
        assert len(found) == len(complete) or said or not file.read_bytes().endswith(b"\n")
        assert all(f"{file}: " in line and "damaged line(s)" in line for line in said)
    assert read(attempt) == complete


@pytest.mark.parametrize(
    "line", ["[" * 5000, '{"step": ' + "9" * 400 + "}"], ids=["deep", "a number of 400 digits"]
)
def test_a_line_that_no_record_can_be_is_damage(attempt, line):
    complete = steps.events(attempt)
    attempt.events_file.write_text(f"{line}\n{attempt.events_file.read_text()}")
    said: list[str] = []
    assert steps.events(attempt, said.append) == complete
    assert said == [
        f"{attempt.events_file}: 1 damaged line(s), the first is line 1; missing from the report"
    ]


def test_numbers_that_json_lacks_and_the_longest_numbers_of_a_short_line_can_be_drawn(attempt):
    """A short line is read in one go; none of its numbers is too long for a float."""
    first = json.loads(attempt.events_file.read_text().splitlines()[0])
    lines = [json.dumps({**first, "loss": "nan", "grad_norm": "-inf"})]
    fields = dict.fromkeys(first, 0)
    shortest = len(json.dumps({**fields, "step": 1}))
    digits = steps.PLAIN_BYTES - shortest
    lines.append(json.dumps({**fields, "step": int("9" * digits)}))
    attempt.events_file.write_text("".join(f"{line}\n" for line in lines))
    nan, long = steps.events(attempt)
    assert math.isnan(nan.loss)
    assert nan.grad_norm == -math.inf
    assert len(lines[1]) < steps.PLAIN_BYTES
    assert math.isfinite(float(long.step))


def test_a_damaged_outcome_names_the_checkpoint_to_go_on_from(attempt):
    run = RunDir(attempt.root.parent.parent)
    (run.checkpoints / "checkpoint-000002").mkdir(parents=True)
    files.write_json(attempt.outcome_file, {"complete": "q"})
    with pytest.raises(CheckpointError, match=r"--resume=.*checkpoint-000002 goes on from there"):
        run.outcome()


def test_a_value_of_another_type_is_damage(attempt):
    broken = json.loads(attempt.events_file.read_text().splitlines()[0]) | {"loss": ""}
    attempt.events_file.write_text(json.dumps(broken) + "\n" + attempt.events_file.read_text())
    said: list[str] = []
    assert [one.step for one in steps.events(attempt, said.append)] == [1, 2]
    assert said == [
        f"{attempt.events_file}: 1 damaged line(s), the first is line 1; missing from the report"
    ]


def test_the_row_of_an_attempt_is_made_of_what_can_be_read(attempt):
    complete = attempt_row(attempt, pytest.fail)
    assert complete[1] == "somebody killed it (SIGKILL)"
    for file, every in (
        (attempt.supervisor_file, 13),
        (attempt.outcome_file, 5),
        (attempt.plan_file, 4999),
    ):
        for _ in flips(file, every):
            said: list[str] = []
            ran, ending = attempt_row(attempt, said.append)
            assert (ran == "not readable") + (ending == "not readable") == len(said)
            assert all(
                str(attempt.root) in line and "missing from the report" in line for line in said
            )
    assert attempt_row(attempt, pytest.fail) == complete


def test_only_the_last_attempts_outcome_says_whether_a_run_is_complete(attempt):
    run = RunDir(attempt.root.parent.parent)
    outcome = Outcome(complete=True, ended="complete", model_dir="/out")
    complete = files.to_json(vars(outcome)).encode()
    attempt.outcome_file.write_bytes(complete.replace(b'"complete"', b'"cnmplete"'))
    with pytest.raises(CheckpointError, match=r"attempts/01/outcome\.json: missing or damaged"):
        run.outcome()
    run.new_attempt()  # which none follows that is complete
    assert run.outcome() is None
    run.attempts()[-1].outcome_file.write_bytes(complete)
    assert run.outcome() == outcome
