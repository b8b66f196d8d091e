"""Evidence names one cause."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from launch.schema.result import AttemptRecord, Ended, Outcome, RankError
from launch.supervise import failures

ALLOCATOR = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't"
    " allocate memory: you tried to allocate 8589934592 bytes. Error code 12 (Cannot allocate"
    " memory)"
)
CUDA = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total"
    " capacity of 19.70 GiB of which 1.10 GiB is free."
)
KILLED = """Failures:
  <NO_OTHER_FAILURES>
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 77)
  traceback : Signal 9 (SIGKILL) received by PID 77"""
ALONE = (
    "subprocess.CalledProcessError: Command '['python', 'train_low_mem.py']' died with"
    " <Signals.SIGKILL: 9>."
)


def evidence(**fields) -> AttemptRecord:
    ends = {name: fields.pop(name) for name in ("returncode", "ended_ranks") if name in fields}
    facts = {
        "ended": Ended(**{"returncode": 1, "host_peak_bytes": 2 << 30, **ends}),
        "rank_errors": (),
        "log_tail": "",
        "oom_kills": 0,
        "host_limit_bytes": 3 << 30,
        "completed": False,
    }
    return AttemptRecord(**{**facts, **fields})


def error(message: str, exit_code: int | None = None, rank: int = 0) -> RankError:
    return RankError(rank, "RuntimeError", message, 1.0, exit_code)


PREEMPTED = Outcome(complete=False, ended="preempted", step=5, checkpoint="checkpoint-000005")


def test_ranks_that_were_stopped_behind_a_failed_rank_do_not_hide_it():
    memory = RankError(1, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB", 1.0)
    stop = RankError(0, "Stopped", "stopped by a stop signal", 2.0, 75)
    loading = Outcome(complete=False, ended="preempted")
    found = failures.classify(evidence(rank_errors=(memory, stop), preempted=loading))
    assert found is not None and found.kind == "device_oom"
    log = TWO_ENDS.format(end="75")
    found = failures.classify(evidence(log_tail=log, rank_errors=(stop,), preempted=loading))
    assert found is not None and found.kind == "killed"
    both = (stop, replace(stop, rank=1))
    found = failures.classify(evidence(rank_errors=both, preempted=PREEMPTED))
    assert found is not None and found.kind == "stopped"


def test_ranks_that_stopped_before_their_first_checkpoint_are_stopped_unless_one_was_killed():
    loading = Outcome(complete=False, ended="preempted")
    for log, kind in (("", "stopped"), (KILLED, "killed")):
        found = failures.classify(evidence(log_tail=log, preempted=loading))
        assert found is not None and found.kind == kind


def test_an_error_counts_until_training_has_gone_on_for_two_steps():
    """The first line may be of another rank, which was in that step already."""
    log = CUDA
    for number, kind in enumerate(("device_oom", "device_oom", "unknown")):
        found = failures.classify(evidence(log_tail=log))
        assert found is not None and (number, found.kind) == (number, kind)
        log += f"\n  step {number + 6}/90  epoch 0.06"


# A real report of torchrun (torch 2.13): rank 1 got SIGKILL; rank 0, which took no SIGTERM, was
# ended after it.
TWO_ENDS = """E1122 13:14:45.339000 14429 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: -9) local_rank: 0 (pid: 14440) of binary: /venv/bin/python
Failures:
[1]:
  time      : 2026-11-22_13:14:45
  rank      : 1 (local_rank: 1)
  exitcode  : {end} (pid: 14441)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_13:14:45
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 14440)  (SIGKILL)
  error_file: <N/A>
  traceback : Signal 9 (SIGKILL) received by PID 14440"""  # noqa: E501


def test_a_rank_that_was_killed_is_named_and_the_one_that_the_supervisor_ended_after_it_is_not():
    found = failures.classify(evidence(log_tail=TWO_ENDS.format(end="-9"), ended_ranks=[14440]))
    assert found is not None
    assert (found.kind, found.proof) == (
        "killed",
        "the launcher reports SIGKILL for rank 1 (process 14441)",
    )


@pytest.mark.parametrize(
    ("end", "left", "kind"),
    [
        ("-11", (), "signal"),
        ("1", (error("boom", rank=1),), "crash"),
        ("1", (error(CUDA, rank=1),), "device_oom"),
        ("2", (error("3 ranks were asked for", exit_code=2, rank=1),), "RuntimeError"),
    ],
)
def test_what_the_supervisor_ended_hides_no_other_cause(end, left, kind):
    found = failures.classify(
        evidence(log_tail=TWO_ENDS.format(end=end), ended_ranks=[14440], rank_errors=left)
    )
    assert found is not None
    assert found.kind == kind


@pytest.mark.parametrize(
    ("found", "kind", "exit_code"),
    [
        (evidence(log_tail=CUDA), "device_oom", 12),
        (evidence(log_tail="RuntimeError: HIP out of memory. Tried"), "device_oom", 12),
        (evidence(rank_errors=(error("CUDA error: out of memory"),)), "device_oom", 12),
        (evidence(rank_errors=(error(ALLOCATOR),)), "host_oom", 6),
        (evidence(oom_kills=1, log_tail=KILLED), "host_oom", 6),
        (evidence(oom_kills=1, oom_kills_of_machine=True, log_tail=KILLED), "host_oom", 6),
        # of another program
        (evidence(oom_kills=1, oom_kills_of_machine=True, log_tail=CUDA), "device_oom", 12),
        (evidence(oom_kills=None, log_tail=KILLED), "killed", 1),
        (evidence(log_tail=KILLED), "killed", 1),
        (evidence(log_tail=ALONE), "killed", 1),
        (
            evidence(log_tail=KILLED, rank_errors=(error("Connection closed by peer", rank=1),)),
            "killed",
            1,
        ),
        (evidence(log_tail="OSError: [Errno 28] No space left on device"), "disk", 10),
        (evidence(rank_errors=(error("3 ranks were asked for", exit_code=2),)), "RuntimeError", 2),
        (evidence(rank_errors=(error("boom"),)), "crash", 1),
        (evidence(stopped_by=int(signal.SIGINT)), "stopped", 130),
        (evidence(stopped_by=int(signal.SIGTERM)), "stopped", 75),
        (evidence(preempted=PREEMPTED), "stopped", 75),
        (
            evidence(returncode=-9, preempted=PREEMPTED),
            "killed",
            1,
        ),
        (evidence(returncode=3), "unknown", 1),
        (evidence(returncode=0, log_tail="all done"), "unknown", 1),
    ],
)
def test_each_end_has_one_cause(found, kind, exit_code):
    failure = failures.classify(found)
    assert failure is not None
    assert (failure.kind, failure.exit_code) == (kind, exit_code)
    assert failure.proof
    # a mistake that a rank names says itself what to do
    assert failure.fix or any(error.exit_code for error in found.rank_errors)


def test_the_earliest_rank_is_the_cause_and_the_others_follow():
    failure = failures.classify(
        evidence(rank_errors=(error("first", rank=1), error("Connection closed", rank=0)))
    )
    assert failure is not None
    assert "rank 1 failed" in failure.cause


def test_triton_out_of_shared_memory_is_not_vram():
    failure = failures.classify(
        evidence(log_tail="triton: out of resource: shared memory, Required: 180224")
    )
    assert failure is not None
    assert failure.kind != "device_oom"


def test_a_complete_run_has_no_failure():
    assert failures.classify(evidence(returncode=0, completed=True)) is None


def test_a_rank_that_falls_over_after_the_model_was_written_does_not_make_the_run_a_failure():
    assert failures.classify(evidence(returncode=1, completed=True, log_tail=KILLED)) is None


def test_the_proof_of_an_unknown_end_is_a_line_with_words():
    failure = failures.classify(evidence(log_tail="ValueError: odd\n======\n"))
    assert failure is not None
    assert failure.proof == "ValueError: odd"


def test_a_kill_by_the_kernel_names_the_limit_and_what_the_job_held():
    failure = failures.classify(evidence(oom_kills=1, log_tail=KILLED))
    assert failure is not None
    assert failure.cause.endswith("limit 3.00 GiB, job at 2.00 GiB when last measured")


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ("step", "halve training.per_device_train_batch_size"),
        ("evaluation", "halve training.per_device_eval_batch_size"),
        *((name, "training.streamed_layers") for name in ("load", "save", "export")),
    ],
)
def test_what_helps_where_memory_ran_out_is_of_its_section(section, says):
    failure = failures.classify(evidence(oom_kills=1, log_tail=KILLED, section=section))
    assert failure is not None and failure.section == section
    assert says in failure.fix and failure.fix.endswith("or give the run more memory")
    assert ("per_device_train_batch_size" in failure.fix) == (section == "step")


def test_a_kill_of_which_no_counter_can_be_read_is_nobodys():
    failure = failures.classify(evidence(oom_kills=None, log_tail=KILLED))
    assert failure is not None and "nobody can say by whom" in failure.cause
    failure = failures.classify(evidence(log_tail=KILLED))
    assert failure is not None and "not by the kernel's OOM killer" in failure.cause
