"""Each log in tests/data/logs has the verdict of its folder, and no pattern is there without a log
that needs it."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launch.base import errors
from launch.schema.result import AttemptRecord, Ended, Failure, RankError, Xid
from launch.supervise import attempt, failures
from launch.supervise.failure_patterns import PATTERNS

LOGS = Path(__file__).parents[2] / "data" / "logs"
CODES = {
    "device_oom": 12,
    "host_oom": 6,
    "pinned_oom": 6,
    "gpu_broken": 3,
    "gpu_busy": 3,
    "gpu_unsupported": 3,
    "gpu_resources": 3,
    "driver": 3,
    "shm": 3,
    "limit": 3,
    "library": 3,
    "data": 4,
    "configuration": 2,
    "disk": 10,
    "weights": 3,
    "CheckpointError": 5,
    "StorageError": 10,
    "port": 11,
    "join": 11,
    "nccl": 11,
    "network": 11,
    "collective_timeout": 11,
    "killed": 1,
    "signal": 1,
}
FAILED = sorted(path for path in LOGS.glob("*/*.txt") if path.parent.name != "innocent")
INNOCENT = sorted(LOGS.glob("innocent/*.txt"))
BOOM = RankError(0, "ValueError", "boom", 1.0)
# Something that a reader can do: a key of a recipe, a flag, a variable, a command.
DOABLE = re.compile(
    r"(training|tokenizer|data|model|launch)\.\w+|--[\w.]+|\b[A-Z_]{6,}\b|`[^`]+`|https://|log\.txt|again"
)


def read(path: Path) -> tuple[str, str]:
    """The line that proves it, and the log without the two lines that we put before it."""
    source, proof, text = path.read_text(encoding="utf-8").split("\n", 2)
    assert source.startswith("# "), path
    assert proof.startswith("# proof: "), path
    return proof.removeprefix("# proof: "), text


def evidence(log: str = "", **fields) -> AttemptRecord:
    ends = {name: fields.pop(name) for name in ("hang", "ended_ranks") if name in fields}
    ended = Ended(1, host_peak_bytes=2 << 30, **ends)
    nothing = AttemptRecord(ended, (), log, oom_kills=0, host_limit_bytes=3 << 30, completed=False)
    return replace(nothing, **fields)


def verdict(found: AttemptRecord) -> Failure:
    failure = failures.classify(found)
    assert failure is not None
    return failure


def name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


@pytest.mark.parametrize("path", FAILED, ids=name)
def test_a_log_has_the_verdict_of_its_folder_with_its_proof_and_something_to_do(path):
    proof, log = read(path)
    failure = verdict(evidence(log))
    assert (failure.kind, failure.exit_code) == (path.parent.name, CODES[path.parent.name])
    assert proof in failure.proof
    assert failure.proof in log or failure.kind == "killed"
    assert DOABLE.search(failure.fix), failure.fix
    assert failures.classify(evidence(log, completed=True)) is None


@pytest.mark.parametrize("path", FAILED, ids=name)
def test_an_exception_that_a_rank_left_as_its_word_has_the_verdict_of_the_log_it_came_from(path):
    proof, log = read(path)
    line = next(line for line in log.splitlines() if proof in line)
    exception = re.match(
        r"(?:\[rank\d+\]: *)?(?:\w+\.)*"
        r"(\w*(?:Error|Exception|ArrowInvalid|Failed|Unsupported|Missing))(?:: (.*))?$",
        line,
    )
    if exception is None or path.parent.name in (
        "signal",
        "killed",
        "StorageError",
    ):  # a library's, the launcher's line
        assert path.parent.name != "library" or line.startswith("/usr/bin/ld: ")
        assert path.parent.name != "data" or "Assertion" in line
        return
    word = replace(BOOM, type=exception[1], message=exception[2] or "", traceback=log)
    assert verdict(evidence(log, rank_errors=(word,))).kind == path.parent.name


@pytest.mark.parametrize("path", INNOCENT, ids=name)
def test_a_log_that_only_talks_of_failures_is_not_taken_for_one(path):
    _, log = read(path)
    assert verdict(evidence(log)).kind == "unknown"
    assert verdict(evidence(log, rank_errors=(BOOM,))).kind == "crash"
    assert failures.classify(evidence(log, completed=True)) is None
    for path in FAILED[::7]:
        proof, failed = read(path)
        failure = verdict(evidence(f"{log}\n{failed}"))
        assert (failure.kind, proof in failure.proof) == (path.parent.name, True)


def test_there_are_logs_of_every_kind_and_a_kind_for_every_log():
    assert {path.parent.name for path in FAILED} == set(CODES)
    assert {(pattern.kind, pattern.exit_code) for pattern in PATTERNS} <= set(CODES.items())
    assert set(CODES.values()) - {1} <= {
        kind.exit_code for kind in errors.LaunchError.__subclasses__()
    } | {3, 6, 12}
    assert len(FAILED) >= 60
    assert len(INNOCENT) >= 15


LINES = [(i, line) for i, pattern in enumerate(PATTERNS) for line in pattern.lines]


@pytest.mark.parametrize(
    ("at", "line"), LINES, ids=[f"{PATTERNS[i].kind}-{n}" for n, (i, _) in enumerate(LINES)]
)
def test_without_any_one_line_of_the_patterns_a_log_is_misjudged(at, line, monkeypatch):
    pattern = PATTERNS[at]
    without = replace(pattern, lines=tuple(other for other in pattern.lines if other != line))
    # a mutation of the product, to see that its logs notice; nobody else has use for a table of
    # their own
    monkeypatch.setattr(failures, "PATTERNS", (*PATTERNS[:at], without, *PATTERNS[at + 1 :]))
    logs = [read(path) for path in FAILED if path.parent.name == pattern.kind]
    found = [(verdict(evidence(log)), proof) for proof, log in logs]
    assert any(
        failure.kind != pattern.kind or proof not in failure.proof for failure, proof in found
    )


def test_a_pattern_that_were_a_consequence_or_a_root_instead_would_be_noticed():
    """One rank runs out of GPU memory and all others lose it: in their words, in any order, and in
    the log."""
    (memory,) = [read(path) for path in FAILED if path.stem == "torch-cuda"]
    oom = replace(BOOM, rank=1, type="OutOfMemoryError", message=memory[1].partition(": ")[2])
    for kind in ("network", "nccl", "collective_timeout"):
        for path in (path for path in FAILED if path.parent.name == kind):
            proof, log = read(path)
            lost = replace(BOOM, type="RuntimeError", message=proof)
            for words in ((lost, oom), (oom, lost)):
                assert verdict(evidence(log, rank_errors=words)).kind == "device_oom", path
            assert verdict(evidence(log + memory[1], rank_errors=(lost,))).kind == "device_oom", (
                path
            )
            assert verdict(evidence(log, rank_errors=(BOOM, lost))).kind in (
                "crash",
                "signal",
            ), path


def test_the_cause_that_an_exception_was_raised_from_is_found():
    chain = (
        "Traceback (most recent call last):\n  File x\n    write()\nOSError: [Errno 28] No space"
        " left on device\n\nThe above exception was the direct cause of the following"
        " exception:\n\nRuntimeError: boom\n"
    )
    assert verdict(evidence(rank_errors=(replace(BOOM, traceback=chain),))).kind == "disk"


def test_where_gpu_memory_runs_out_the_last_step_says_how_near_it_was():
    _, log = read(LOGS / "device_oom" / "torch-cuda.txt")
    failure = verdict(evidence(log, vram_reserved_bytes=15 << 30, vram_total_bytes=16 << 30))
    assert "15.00 of 16.00 GiB were reserved by the last step" in failure.cause
    assert "GiB" not in verdict(evidence(log)).cause


def test_a_signal_is_explained_and_beats_what_the_other_ranks_lost():
    _, log = read(LOGS / "signal" / "torchrun-sigsegv.txt")
    assert "Connection reset by peer" in log
    lost = replace(BOOM, message="Connection reset by peer")
    for words in ((), (lost,)):
        failure = verdict(evidence(log, rank_errors=words))
        assert failure.kind == "signal"
        assert "SIGSEGV: native code touched memory that is not its own" in failure.cause


QUOTING = [
    "ValueError: row 17: found 'CUDA out of memory. Tried to allocate 2 GiB', expected a number",
    "ValueError: row 17 has no target: CUDA out of memory. Tried to allocate 2 GiB",
    'RuntimeError: template failed on "Address already in use"',
    "KeyError: 'No space left on device'",
    "jinja2.exceptions.UndefinedError: 'Connection refused' is undefined",
    "pyarrow.lib.ArrowInvalid: Failed to parse string: 'Disk quota exceeded' as int64",
]


@pytest.mark.parametrize("line", QUOTING)
def test_a_text_that_an_error_quotes_decides_no_verdict(line):
    trace = f"Traceback (most recent call last):\n  File x\n{line}\n"
    kind, _, message = line.partition(": ")
    word = RankError(0, kind.rpartition(".")[2], message, 1.0, traceback=trace)
    assert verdict(evidence(trace, rank_errors=(word,))).kind == "crash"
    assert verdict(evidence(f"[rank0]: {line}\n")).kind == "unknown"
    _, oom = read(LOGS / "device_oom" / "torch-cuda.txt")
    assert verdict(evidence(f"{trace}{oom}")).kind == "device_oom"


@pytest.mark.parametrize(
    ("number", "name"), [(40, "SIGRTMIN+6"), (34, "SIGRTMIN"), (4096, "signal 4096")]
)
def test_a_signal_without_a_name_of_its_own_is_a_verdict_too(number, name):
    _, log = read(LOGS / "signal" / "torchrun-sigfpe.txt")
    log = log.replace("exitcode  : -8", f"exitcode  : -{number}")
    failure = verdict(evidence(log.replace("exitcode: -8", f"exitcode: -{number}")))
    assert failure.kind == "signal"
    assert name in failure.cause


def test_a_rank_that_left_without_an_error_is_named_but_none_that_was_ended():
    _, log = read(LOGS / "network" / "gloo-reset.txt")
    lost = replace(BOOM, type="RuntimeError", message="Connection reset by peer")
    failure = verdict(evidence(log, rank_errors=(lost,), silent_ranks=((1, 4711),)))
    assert failure.kind == "crash"
    assert "rank 1 ended without an error" in failure.cause
    closed = f"{log}W1121 api.py:1028] Sending process 4711 closing signal SIGTERM\n"
    for ended in (
        evidence(closed, rank_errors=(lost,), silent_ranks=((1, 4711),)),
        evidence(log, rank_errors=(lost,), silent_ranks=((1, 4711),), ended_ranks=[4711]),
    ):
        assert verdict(ended).kind == "network"


def test_the_last_whole_line_of_the_events_gives_the_gpu_memory(tmp_path):
    events = tmp_path / "events.jsonl"
    assert attempt.last_vram(events) == {}
    whole = '{"step": %d, "vram_reserved_bytes": %d, "vram_total_bytes": 90}'
    events.write_text("\n".join([whole % (1, 70), whole % (2, 80), (whole % (3, 85))[:30]]))
    assert attempt.last_vram(events) == {"vram_reserved_bytes": 80, "vram_total_bytes": 90}


@pytest.mark.parametrize(
    ("said", "proof"),
    [
        ("error: data.train_file: row 7 is empty", "error: data.train_file: row 7 is empty"),
        ("", ""),
    ],
)
def test_a_rank_that_could_not_write_its_error_is_told_by_its_exit_code(said, proof):
    """torchrun's line is the proof where the rank printed nothing."""
    line = "  exitcode  : 4 (pid: 7)"
    failure = verdict(evidence(f"{said}\n{line}\n"))
    assert (failure.kind, failure.exit_code) == ("DataError", 4)
    assert failure.proof == (proof or line.strip())


# ---- Xids
# ---------------------------------------------------------------------------

OFF_THE_BUS = Xid(79, "GPU 1 (NVIDIA A100)", "NVML: Xid 79 on GPU 1 (NVIDIA A100)")
PAGE_FAULT = Xid(31, "GPU 0 (NVIDIA A100)", "NVML: Xid 31 on GPU 0 (NVIDIA A100)")
LAUNCH_FAILURE = "torch.AcceleratorError: CUDA error: unspecified launch failure"
NVLINK = Xid(74, "GPU 0 (NVIDIA A100)", "NVML: Xid 74 on GPU 0 (NVIDIA A100)")
NAMED = "Xid 79 (the GPU has fallen off the bus) on GPU 1 (NVIDIA A100)"


@pytest.mark.parametrize(
    ("xids", "named"),
    [
        ((OFF_THE_BUS,), NAMED),
        ((PAGE_FAULT, OFF_THE_BUS), NAMED),
        ((PAGE_FAULT,), "Xid 31 on GPU 0"),
        ((PAGE_FAULT, NVLINK), "Xid 74 (NVLink error) on GPU 0"),
    ],
)
def test_a_failure_of_a_card_names_the_xid_of_the_hardware_first(xids, named):
    failure = verdict(evidence(LAUNCH_FAILURE, xids=xids))
    assert (failure.kind, failure.proof) == ("gpu_broken", LAUNCH_FAILURE)
    assert named in failure.cause


@pytest.mark.parametrize(
    "facts", [{"hang": "rank 1 is silent in step"}, {"log_tail": "exitcode  : -6 (pid: 7)"}, {}]
)
def test_ranks_that_a_lost_card_left_behind_are_the_cards_failure(facts):
    assert verdict(evidence(**facts)).kind != "gpu_broken"
    failure = verdict(evidence(**facts, xids=(OFF_THE_BUS,)))
    assert (failure.kind, failure.exit_code) == ("gpu_broken", 3)
    assert NAMED in failure.cause and failure.proof == OFF_THE_BUS.line


@pytest.mark.parametrize(
    ("xid", "facts", "kind"),
    [
        # a program can cause it
        (PAGE_FAULT, {"hang": "rank 1 is silent in step"}, "hang"),
        # whatever the card reported meanwhile
        (OFF_THE_BUS, {"oom_kills": 1}, "host_oom"),
        (OFF_THE_BUS, {"stopped_by": 15}, "stopped"),
        (
            OFF_THE_BUS,
            {"log_tail": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"},
            "device_oom",
        ),
    ],
)
def test_an_xid_takes_the_place_of_no_other_cause(xid, facts, kind):
    failure = verdict(evidence(**facts, xids=(xid,)))
    assert failure.kind == kind
    assert "Xid" not in failure.cause


ADVICE = Xid(
    154,
    "GPU 0",
    "NVRM: Xid (PCI:0000:44:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node"
    " Reboot Required)",
)
RECOVERED = replace(ADVICE, line=ADVICE.line.replace("0x2 (Node Reboot Required)", "0x0 (None)"))


def test_what_the_driver_advises_is_said():
    for facts in ({"hang": "rank 1 is silent in step"}, {"log_tail": LAUNCH_FAILURE}):
        failure = verdict(evidence(**facts, xids=(ADVICE, OFF_THE_BUS)))
        assert failure.kind == "gpu_broken" and "fallen off the bus" in failure.cause
        assert "the driver says: Node Reboot Required" in failure.cause
        assert "what the driver asks" in failure.fix
    alone = verdict(evidence(hang="rank 1 is silent in step", xids=(ADVICE,)))
    assert alone.kind == "gpu_broken" and "Xid 154 (GPU recovery action changed)" in alone.cause
    assert verdict(evidence(hang="rank 1 is silent", xids=(RECOVERED,))).kind == "hang"


@pytest.mark.parametrize(
    ("number", "meaning"),
    [
        (48, "double bit ECC error"),
        (74, "NVLink error"),
        (79, "the GPU has fallen off the bus"),
        (94, "contained memory error"),
        (119, "GSP RPC timeout"),
    ],
)
def test_an_xid_of_the_hardware_is_told_in_the_words_of_nvidias_catalog(number, meaning):
    failure = verdict(evidence(LAUNCH_FAILURE, xids=(replace(OFF_THE_BUS, number=number),)))
    assert f"Xid {number} ({meaning}) on GPU 1" in failure.cause


@pytest.mark.parametrize("number", [8, 109, 175])
def test_a_rank_that_hangs_behind_such_an_xid_is_the_cards_failure(number):
    xid = replace(OFF_THE_BUS, number=number)
    failure = verdict(evidence(hang="rank 1 is silent in step", xids=(xid,)))
    assert failure.kind == "gpu_broken" and f"Xid {number} (" in failure.cause


def test_a_cause_is_found_before_the_stacks_of_all_ranks(tmp_path):
    """98 KiB each, as faulthandler and C++ print them."""
    stack = '  File "/venv/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1 in f\n'
    frame = "frame #1: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x14d (in libtorch_cuda.so)\n"
    stacks = (stack + frame) * ((98 << 10) // len(stack + frame))
    path = tmp_path / "log.txt"
    path.write_text("OSError: [Errno 28] No space left on device\n" + stacks * 8)
    failure = verdict(evidence(attempt.log_tail(path)))
    assert (failure.kind, failure.exit_code) == ("disk", 10)


@pytest.mark.parametrize("text", ["x", "1234567890", "it's 'a \"b ", "a.", "[rank0]: \n", " "])
def test_a_log_of_one_long_word_is_judged_in_no_time_by_its_square(text):
    """A million letters took hours."""
    before = time.process_time()
    verdict(evidence(text * ((1 << 20) // len(text))))
    assert time.process_time() - before < 60
