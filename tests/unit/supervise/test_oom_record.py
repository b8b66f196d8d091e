"""What ran out of memory rules out what would take as much of it, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.predict import budgets, estimate
from launch.predict.history.calibration import Comparison
from launch.predict.oom_history import CLEARLY_BELOW, MUCH_BELOW, OomEvent, OomHistory
from launch.run_folder.layout import RunDir
from launch.schema.machine import GIB
from launch.schema.plan import MemoryEstimate, Peak
from launch.schema.result import Failure, RunResult
from launch.supervise import oom_record
from tests.builders import changed, facts_of, gpu, machine, plan, recipe_of

STRATEGY = plan().strategy
HALF = replace(STRATEGY, per_device_train_batch_size=STRATEGY.per_device_train_batch_size // 2)
STEP = OomEvent("device", "step", STRATEGY, 10 * GIB)


def test_only_what_takes_clearly_less_is_left():
    assert STEP.rules_out(HALF, int(CLEARLY_BELOW * 10 * GIB) - 1, is_traced=True) is None
    words = STEP.rules_out(HALF, int(9.9 * GIB), is_traced=True)
    assert words == "9.90 GiB, and a plan of 10.00 GiB ran out of memory in step"


def test_where_nothing_else_is_left_fewer_samples_are_less_if_nothing_else_is_given_back():
    def ruled_out(candidate):
        return STEP.rules_out(candidate, 11 * GIB, is_traced=True, fewer_is_less=True)

    assert ruled_out(HALF) is None
    assert ruled_out(STRATEGY)
    recomputing = replace(STEP, candidate=STRATEGY.with_levers(every_n_layers=1))
    assert recomputing.rules_out(HALF, 11 * GIB, is_traced=True, fewer_is_less=True)
    assert replace(STEP, of="host").rules_out(HALF, 11 * GIB, is_traced=True, fewer_is_less=True)


def test_without_a_trace_a_smaller_micro_batch_or_checkpointing_is_less():
    assert STEP.rules_out(STRATEGY, 10 * GIB, is_traced=False)
    assert STEP.rules_out(HALF, 10 * GIB, is_traced=False) is None
    assert STEP.rules_out(STRATEGY.with_levers(every_n_layers=1), 10 * GIB, is_traced=False) is None


def test_an_evaluation_that_ran_out_rules_out_its_batch_and_not_the_training():
    failed = OomEvent(
        "device", "evaluation", replace(STRATEGY, per_device_eval_batch_size=8), 10 * GIB
    )
    assert (
        failed.rules_out(replace(STRATEGY, per_device_eval_batch_size=4), 10 * GIB, is_traced=True)
        is None
    )
    assert failed.rules_out(
        replace(STRATEGY, per_device_eval_batch_size=8), 1 * GIB, is_traced=True
    )
    alone = OomEvent(
        "device", "evaluation", replace(STRATEGY, per_device_eval_batch_size=1), 10 * GIB
    )
    assert alone.rules_out(alone.candidate, 10 * GIB, is_traced=True), "one sample cannot be halved"


def test_what_ran_out_of_the_host_says_nothing_of_the_card():
    oom_history = OomHistory(ran_out=(replace(STEP, of="host"),))
    states = MemoryEstimate(10 * GIB, 0, 0)
    assert oom_history.rules_out("device", STRATEGY, 10 * GIB, states) is None
    assert oom_history.rules_out("host", STRATEGY, 10 * GIB, states)


@pytest.mark.parametrize("section", ["save", "export"])
def test_a_card_that_ran_out_in_writing_needs_other_states_and_no_other_batch(section):
    recipe = recipe_of(training={"per_device_train_batch_size": 8})
    two = machine(gpus=2)
    first = plan(recipe, two)
    assert first.strategy.mode == "dual_gpu_nccl"
    failed = OomEvent("device", section, first.strategy, first.estimate.model_state_bytes)
    again = plan(recipe, two, oom=OomHistory(ran_out=(failed,)))
    assert again.strategy.launch_mode.zero_stage == 1
    assert again.strategy.per_device_train_batch_size == 8
    # which ranks that share states have not been tested with
    assert again.strategy.levers == replace(first.strategy.levers, fused_norms=False)
    assert f"ran out of memory in {section}" in " ".join(again.rejected)


@pytest.mark.parametrize("section", ["step", "evaluation"])
def test_the_plan_after_it_holds_the_effective_batch(section):
    recipe = recipe_of(training={"per_device_train_batch_size": 8, "per_device_eval_batch_size": 6})
    first = plan(recipe)
    failed = OomEvent("device", section, first.strategy, first.estimate.device_bytes)
    again = plan(recipe, oom=OomHistory(ran_out=(failed,)))
    assert again.strategy.effective_batch_size == first.strategy.effective_batch_size
    batches = again.strategy.per_device_train_batch_size, again.strategy.per_device_eval_batch_size
    assert batches == ((8, 3) if section == "evaluation" else batches)
    assert section == "evaluation" or batches[0] < 8 or again.strategy.levers.every_n_layers


def test_the_next_start_of_an_unfinished_run_knows_what_ran_out(tmp_path):
    (tmp_path / "tiny" / "20261121-000000").mkdir(parents=True)
    run = RunDir(tmp_path / "tiny" / "20261121-000000")
    assert oom_record.of_unfinished(tmp_path, "tiny") == OomHistory()
    run.plan_file.write_text("{}")
    oom_record.write(run, (STEP,))
    assert oom_record.of_unfinished(tmp_path, "tiny") == OomHistory(ran_out=(STEP,))


# ---- the last plan, and what a second step has shown
# ---------------------------------------------------------------------------


def test_the_last_plan_of_a_start_takes_much_less_in_fewer_samples():
    def ruled_out(candidate, needed_bytes):
        return STEP.rules_out(
            candidate, needed_bytes, is_traced=True, is_last=True, below=MUCH_BELOW
        )

    assert ruled_out(HALF, int(MUCH_BELOW * 10 * GIB) - 1) is None
    assert ruled_out(HALF, int(MUCH_BELOW * 10 * GIB) + 1)
    samples = STRATEGY.per_device_train_batch_size
    assert (
        ruled_out(STRATEGY, 1 * GIB)
        == f"1.00 GiB, and the last plan of a start takes fewer samples than {samples}, which"
        " ran out"
    )


def host_misses(oom_history: OomHistory, needed_bytes: int) -> str | None:
    """Of a plan on CPUs with so many predicted bytes of host RAM, where the budgets do not
    count."""
    recipe = recipe_of()
    facts = facts_of(recipe, machine())
    facts = changed(facts, oom=oom_history, assume_fits=True)
    memory = MemoryEstimate(
        1, 1, 1, peak=Peak("backward", "mm", {"weights": 1}), host={"model": needed_bytes}
    )
    return budgets.misses_host(facts, STRATEGY, memory)


def test_a_plan_that_step_2_has_refuted_bounds_the_next_one_also_where_it_is_assumed_to_fit(
    tmp_path,
):
    """31 GiB ran out; then 1.86 GiB were planned and 2.44 taken: 2.2 GiB come to 2.9."""
    run = RunDir(tmp_path)
    first = OomEvent("host", "first step", STRATEGY, 31 * GIB)
    seen = plan()
    seen = replace(seen, estimate=replace(seen.estimate, host={"model": int(1.86 * GIB)}))
    compared = Comparison(
        (), host_exceeded=2.44 / 1.86 - 1, over="too much", needs={"host": int(2.44 * GIB)}
    )
    found = oom_record.add_refuted(OomHistory(ran_out=(first,)), compared, seen, machine(), run)
    assert (
        host_misses(found, int(2.2 * GIB))
        == "2.20 GiB, and a plan of 1.86 GiB took 2.44 GiB of host RAM, which is too much"
    )
    assert host_misses(found, int(1.85 * GIB))
    assert host_misses(found, int(1.7 * GIB)) is None
    assert [one.predicted_bytes for one in oom_record.read(run)] == [int(1.86 * GIB)]


def test_what_the_job_took_corrects_later_predictions(tmp_path):
    one = OomEvent("host", "step", STRATEGY, 2 * GIB)
    assert oom_record.add(
        OomHistory(), one, RunDir(tmp_path), int(2.5 * GIB)
    ).host == pytest.approx(0.25)
    assert oom_record.add(OomHistory(host=0.1), one, RunDir(tmp_path), 1 * GIB).host == 0.1


@pytest.mark.parametrize("section", ["load", "step", "evaluation"])
@pytest.mark.parametrize("predicted_bytes", [0, 5 << 30])  # 0: the step was not traced
def test_what_the_host_did_not_lock_is_not_pinned_again(section, predicted_bytes):
    recipe = recipe_of(launch={"mode": "deepspeed_zero2_offload"})
    first = plan(recipe, machine(1)).strategy
    event = OomEvent("pinned", section, first, predicted_bytes)
    again = plan(recipe, machine(1), oom=OomHistory(ran_out=(event,)))
    assert first.pin_memory
    assert again.strategy == replace(first, pin_memory=False)
    (change,) = [each for each in again.changes if each.key == "pin_memory"]
    assert ("5.00 GiB of RAM" in change.reason) == bool(predicted_bytes)


# ---- what says nothing about plans
# ---------------------------------------------------------------------------


def shortage(
    tmp_path, predicted: int, peak: int, left: int = 0, before: int = 12 * GIB, ranks: bool = True
) -> OomEvent:
    """An attempt that ended for want of host RAM: bytes planned, taken, left for the job, and free
    before."""
    run = RunDir(tmp_path)
    attempt = run.new_attempt()
    if ranks:
        attempt.log_file.touch()
    made = plan()
    made = replace(made, estimate=replace(made.estimate, host={"model": predicted}))
    result = RunResult("", 6, None, 1.0, peak, host_left_bytes=left)
    failure = Failure("host_oom", 6, "the kernel killed it", "proof", "fix")
    return oom_record.of_attempt(run, failure, made, machine(host_available_bytes=before), result)


def test_what_others_took_is_no_evidence_against_the_plan(tmp_path):
    """3 MiB were planned, all that the job took; only 2 were left to it: the test's machine has
    more free now."""
    mib = 1 << 20
    assert not shortage(tmp_path, 3 * mib, 3 * mib, left=2 * mib).is_own
    assert not shortage(tmp_path, 3 * mib, 2 * mib, left=3 * mib - 1, before=3 * mib).is_own, (
        "the byte too much was not the job's"
    )
    assert shortage(tmp_path, 3 * mib, 4 * mib, left=2 * mib, before=3 * mib).is_own, (
        "it took as much beyond its plan"
    )
    assert shortage(tmp_path, 3 * mib, 3 * mib, left=9 * mib).is_own, "nobody else took anything"
    assert shortage(tmp_path, 3 * mib, 3 * mib, left=2 * mib, before=2 * mib).is_own, (
        "the plan never fitted"
    )


def test_a_shortage_has_the_most_memory_that_was_free_before_or_after_it(tmp_path):
    assert shortage(tmp_path, 1, 1, before=1 << 60).available_bytes == 1 << 60
    assert shortage(tmp_path, 1, 1, before=1).available_bytes > 1, "the test's machine has some"


@pytest.mark.parametrize(
    ("kind", "cards", "limit_gib"),
    [
        ("device_oom", (10, 8), 8),  # of the smallest card
        ("host_oom", (10, 8), 16),
        ("pinned_oom", (10, 8), 16),
        ("host_oom", (), 16),
        ("device_oom", (), 16),
    ],
)
def test_the_limit_of_a_shortage_is_of_the_memory_that_ran_out(tmp_path, kind, cards, limit_gib):
    gpus = (gpu(i, total_bytes=size * GIB) for i, size in enumerate(cards))
    on, run = machine(cards=tuple(gpus)), RunDir(tmp_path)
    run.new_attempt()
    failure = Failure(kind, 6, "it ran out", "proof", "fix")
    result = RunResult("", 6, None, 1.0, 1)
    event = oom_record.of_attempt(run, failure, plan(on=on), on, result)
    assert event.limit_bytes == limit_gib * GIB


def test_a_shortage_counts_until_there_is_clearly_more_memory():
    one = replace(STEP, of="host", limit_bytes=12 * GIB, available_bytes=8 * GIB)
    known = OomHistory(ran_out=(one,))
    assert oom_record.counting(known, machine(host_available_bytes=int(8.1 * GIB))) == known
    assert oom_record.counting(known, machine(host_available_bytes=int(8.9 * GIB))) == OomHistory()
    assert (
        oom_record.counting(OomHistory(ran_out=(replace(one, is_own=False),)), machine())
        == OomHistory()
    )
    card = replace(one, of="device", candidate=replace(STRATEGY, device="cuda"))
    assert not card.counts(machine(gpus=1, host_available_bytes=1)), "more is free on the card"
    assert replace(card, available_bytes=19 * GIB).counts(machine(gpus=1))


def test_the_error_names_the_shortage_and_what_overrides_it():
    one = replace(STEP, of="host", limit_bytes=12 * GIB, available_bytes=8 * GIB)
    said = oom_record.sentence(OomHistory(ran_out=(one,)), machine(host_available_bytes=8 * GIB))
    assert f"{estimate.describe(STRATEGY)} ran out of host RAM in step" in said
    assert "with 8.00 GiB of 12.00 GiB available, now 8.00 GiB" in said
    assert "--assume-fits starts all the same" in said


def test_damaged_evidence_costs_an_attempt_and_no_run(tmp_path):
    run = RunDir(tmp_path)
    oom_record.write(run, (STEP,))
    run.evidence_file.write_bytes(run.evidence_file.read_bytes()[:20])
    assert oom_record.read(run) == ()
