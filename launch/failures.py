"""From what an attempt left behind to one cause, the line that proves it, and one fix. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from launch.schema import GIB, Evidence, Failure

PROOF_CHARS = 400  # the HSA runtime says at the end of its line how much GPU memory was free


@dataclass(frozen=True)
class Pattern:
    """A line that names a cause, wherever a rank or a library wrote it."""

    kind: str
    exit_code: int
    regex: re.Pattern[str]
    cause: str
    fix: str


PATTERNS = (
    Pattern(
        "device_oom",
        12,
        re.compile(
            r"(CUDA|HIP) (error: )?out of memory|hipErrorOutOfMemory|CUBLAS_STATUS_ALLOC_FAILED"
            r"|(Cuda|HIP) failure (2\b|'out of memory')"  # NCCL and RCCL
            r"|Triton Error \[(CUDA|HIP)\]: out of memory|Error out of memory at line"
        ),
        "the GPU ran out of memory",
        "halve training.per_device_train_batch_size and double training.gradient_accumulation_steps",
    ),
    Pattern(
        "gpu_unsupported",
        3,
        re.compile(
            r"(CUDA|HIP) error: (invalid device function|no kernel image is available)"
            r"|hipErrorInvalidDeviceFunction|hipErrorNoBinaryForGpu"
        ),
        "this build of torch has no kernels for the GPU",
        "install a torch build whose torch.cuda.get_arch_list() names the card; a Radeon may run as a listed one of its"
        " generation, e.g. gfx1032 with HSA_OVERRIDE_GFX_VERSION=10.3.0",
    ),
    Pattern(
        "gpu_resources",
        3,
        re.compile(r"HSA_STATUS_ERROR_OUT_OF_RESOURCES"),
        "the ROCm runtime could not get a resource: GPU memory, a thread or a queue",
        "where the proof says that little memory is free, halve training.per_device_train_batch_size and double"
        " training.gradient_accumulation_steps; else see `ulimit -u` and dmesg",
    ),
    Pattern(
        "host_oom",
        6,
        re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|\bMemoryError\b|std::bad_alloc"),
        "the host ran out of memory",
        "halve training.per_device_train_batch_size and double training.gradient_accumulation_steps",
    ),
    Pattern(
        "shm",
        3,
        re.compile(r"unable to (allocate|open|resize|mmap) .*shared memory|DataLoader worker .* Bus error"),
        "/dev/shm is too small or full for the batches of the data workers",
        "enlarge /dev/shm (docker run --shm-size=1g; elsewhere mount -o remount,size=1g /dev/shm), or do without with"
        " --training.dataloader_num_workers=0",
    ),
    Pattern(
        "disk",
        10,
        re.compile(r"No space left on device|Disk quota exceeded|File too large|Read-only file system"),
        "the disk refused a write",
        "free space where runs/ and model_save/ are, then run the same line again",
    ),
    Pattern(
        "join",
        11,
        re.compile(r"DistStoreError: Timed out .* clients joined|client socket has timed out .* trying to connect to"),
        "the machines did not all join in time",
        "start the same line on every machine, each with its launch.machine_rank, and see that launch.main_process_port"
        " of machine 0 is reachable; launch.join_timeout_s says how long is waited",
    ),
    Pattern(
        "network",
        11,
        re.compile(
            r"EADDRINUSE|Connection refused|connectFullMesh failed|Timed out waiting .*ms for (recv|send)"
            r"|Connection (closed|reset) by peer|Broken pipe.*gloo|Timed out waiting \d+ms"
        ),
        "the ranks could not reach each other",
        "run the same line again; if it repeats, train on one process with --launch.num_processes=1",
    ),
)

# How torchrun and accelerate's launcher of one process name ranks that a signal ended. torchrun lists those that had
# ended when it looked, not those that it ends itself then; which of them it calls the root cause may be a tie.
KILLED_FIRST = re.compile(r"exitcode\s*:\s*-9\b|died with <Signals.SIGKILL: 9>")
CRASHED_FIRST = re.compile(r"exitcode\s*:\s*-(?!(9|15|2|1|10)\b)\d+")  # SIGSEGV, SIGABRT, ...; not by a stop
STOPPED = "Stopped"  # errors.Stopped, as ranks write it
CONTINUE = "run the same line again to continue"


def classify(evidence: Evidence) -> Failure | None:
    """The cause of an attempt's end; None when it left its model, even if a rank fell over while closing down."""
    if evidence.completed:
        return None
    if evidence.oom_kills > 0:
        limit, peak = evidence.host_limit_bytes / GIB, evidence.host_peak_bytes / GIB
        return Failure(
            "host_oom",
            6,
            f"the kernel killed a process of the run: host RAM limit {limit:.2f} GiB, job at {peak:.2f} GiB when last"
            " measured",
            f"the cgroup's oom_kill counter grew by {evidence.oom_kills}",
            "halve training.per_device_train_batch_size and double training.gradient_accumulation_steps, or give the"
            " run more memory",
        )
    if evidence.pressure:
        return Failure(
            "host_pressure",
            6,
            f"the ranks were stopped before the host ran out of RAM{_saved(evidence)}",
            evidence.pressure,
            "give the run more memory, or lower training.dataloader_num_workers (the limit: launch.host_stop_fraction)",
        )
    if evidence.hang:
        cause, fix = f"{evidence.hang}{_saved(evidence)}", "see ranks/*/stacks.txt in the attempt's folder"
        return Failure("hang", 7, cause, "its heartbeat file", fix)
    if evidence.stopped_by is not None:
        name = signal.Signals(evidence.stopped_by).name
        code = 130 if evidence.stopped_by == signal.SIGINT else 75
        return Failure("stopped", code, f"stopped by {name}{_saved(evidence)}", name, CONTINUE)
    if evidence.preempted is not None:
        return _preempted(evidence)
    is_killed = evidence.returncode == -9 or bool(KILLED_FIRST.search(evidence.log_tail))
    is_crashed = is_killed or bool(CRASHED_FIRST.search(evidence.log_tail))
    # one that was told to stop was told by the launcher, where another had failed before
    first = evidence.rank_errors[0] if evidence.rank_errors and not is_crashed else None
    errors = [error for error in evidence.rank_errors if error["type"] != STOPPED or error is first]
    for error in errors:
        if error.get("exit_code"):
            is_stop = error["type"] == STOPPED
            kind, fix = ("stopped", CONTINUE) if is_stop else (error["type"], error.get("fix") or "see the message")
            return Failure(kind, error["exit_code"], error["message"], f"rank {error['rank']}", fix)
    if is_killed:
        return Failure(
            "killed",
            1,
            "somebody killed a process of the run with SIGKILL; the kernel's out-of-memory counter did not grow",
            "SIGKILL is the launcher's first observed failure",
            CONTINUE,
        )
    named = _named(str(errors[0]["message"])) if errors else None
    if named is None or named.kind == "network":  # what a lost connection follows from may stand in the log
        others = _named(evidence.log_tail)
        is_consequence = others is not None and others.kind == "network" and errors
        named = named if others is None or is_consequence else others
    if named is not None:
        return named
    if errors:
        error = errors[0]
        return Failure(
            "crash",
            1,
            f"rank {error['rank']} failed: {error['type']}: {error['message']}",
            f"rank {error['rank']} error.json",
            "see the traceback in the attempt's ranks folder",
        )
    return Failure(
        "unknown",
        1,
        f"the launcher ended with {evidence.returncode} and no rank said why",
        _last_words(evidence.log_tail),
        "read the attempt's log.txt",
    )


def _named(text: str) -> Failure | None:
    """The failure that a line of the text names; the first pattern that has one."""
    for pattern in PATTERNS:
        for line in text.splitlines():
            if pattern.regex.search(line):
                return Failure(pattern.kind, pattern.exit_code, pattern.cause, line.strip()[:PROOF_CHARS], pattern.fix)
    return None


def _preempted(evidence: Evidence) -> Failure:
    """Where the ranks agreed to stop: told by a signal of their own, or by what rank 0 saw."""
    stops = [error for error in evidence.rank_errors if error["type"] == STOPPED]
    code, cause = (stops[0]["exit_code"], stops[0]["message"]) if stops else (75, "the ranks agreed to stop")
    fix = "free space where runs/ is, then run the same line again" if code == 10 else CONTINUE
    return Failure("disk" if code == 10 else "stopped", code, f"{cause}{_saved(evidence)}", "outcome.json", fix)


def _saved(evidence: Evidence) -> str:
    """What of a stopped attempt is kept, as the end of a sentence."""
    outcome = evidence.preempted or {}
    return f" at step {outcome['step']}; {outcome['checkpoint']} is kept" if outcome.get("checkpoint") else ""


def _last_words(log: str) -> str:
    """The line of a log that says most: the last with letters in it."""
    return next(
        (line.strip()[:PROOF_CHARS] for line in reversed(log.splitlines()) if re.search(r"[a-zA-Z]", line)), "no log"
    )
