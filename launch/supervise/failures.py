"""The cause of a failed attempt, the line that proves it, and one fix. Pure."""

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from launch.base import errors
from launch.schema.machine import GIB
from launch.schema.result import AttemptRecord, Failure, RankError, Xid
from launch.schema.run_sections import RESERVED_S
from launch.supervise.failure_patterns import (
    HARDWARE_XIDS,
    OWN_KINDS,
    PATTERNS,
    SMALLER,
    full_line,
)

_PROOF_CHARS = 400  # the HSA runtime says at the end of its line how much GPU memory was free

# Reports of ranks that a signal ended, by torchrun and by accelerate's launcher of one process.
# torchrun lists those that had ended when it looked, not those that it ends itself then; which of
# them it calls the root cause may be a tie.
_REPORTED_KILL = re.compile(
    r"^\s*rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*-9 \(pid: (\d+)\)", re.MULTILINE
)
# ranks that torchrun reports as failed, and processes that it ends itself
_REPORTED = re.compile(r"^\s*rank\s*:\s*(\d+) ", re.MULTILINE)
CLOSED = re.compile(r"Sending process (\d+) closing signal")
_WORKER_KILLED = "is killed by signal: Killed"  # torch's message on a worker of a data loader
_KILLED_FIRST = re.compile(r"exitcode\s*:\s*-9\b|died with <Signals.SIGKILL: 9>")
_CRASHED = re.compile(
    r"exitcode\s*:\s*-(?!(?:9|15|2|1|10)\b)(\d+)|died with <Signals\.(?!SIGKILL|SIGTERM)\w+: (\d+)>"
)
# exit code of a rank that wrote no error
_EXITED = re.compile(r"exitcode\s*:\s*(\d+)\b|returned non-zero exit status (\d+)")
KINDS = {kind.exit_code: kind.__name__ for kind in errors.LaunchError.__subclasses__()}
_MIXED_BUILDS = (
    "see the stacks in the attempt's log.txt; `pip install --force-reinstall -r requirements.txt`"
    " mends mixed builds; if it comes back anywhere else each time, test the machine's memory"
)
# Signals that end a rank: kind, exit code, what happened, fix
_SIGNALS = {
    "SIGSEGV": ("signal", 1, "native code touched memory that is not its own", _MIXED_BUILDS),
    "SIGBUS": (
        *("signal", 1, "a file or /dev/shm behind mapped memory is gone, cut short or full"),
        _MIXED_BUILDS,
    ),
    "SIGILL": ("signal", 1, "native code was built for another CPU", _MIXED_BUILDS),
    "SIGABRT": (
        *("signal", 1, "native code called abort(); its last message is in the log"),
        _MIXED_BUILDS,
    ),
    "SIGFPE": ("signal", 1, "native code divided by zero", _MIXED_BUILDS),
    "SIGXFSZ": (
        *("disk", 10, "a file grew past the limit of sizes"),
        "raise the limit (`ulimit -f unlimited` before the same line); `ulimit -f` shows it",
    ),
    "SIGXCPU": (
        *("limit", 3, "a process used up its limit of CPU time"),
        "raise the limit (`ulimit -t unlimited` before the same line); `ulimit -t` shows it",
    ),
}
_OTHER_SIGNAL = ("signal", 1, "a signal that the run does not use", _MIXED_BUILDS)
# Lines that are no failure: warnings, and lines that two step lines follow.
WARNING = re.compile(
    r"\b(WARNING|INFO|DEBUG)\b|(?<!NCCL )\bWARN\b|Warning: |^(\[rank\d+\]:)?\[[WI]\d*"
    r" |^\s*(warn|logger|raise|#)"
)
STEP = re.compile(r"  step \d+/\d+  epoch ")
# kinds that a card's failure leaves behind
_OF_A_CARD = (
    *("hang", "crash", "unknown", "signal", "nccl", "collective_timeout", "driver"),
    "library",  # kernels of cuBLAS, cuDNN, Triton, bitsandbytes
)
# The driver's words in Xid 154, which sums up the Xids before it
ADVICE = re.compile(r"GPU recovery action changed from .+ to 0x\w+ \((?!None)(.+?)\)")
_ADVISED = (
    "do what the driver asks, after the programs on that card have ended: `sudo nvidia-smi"
    " --gpu-reset` resets it, `sudo reboot` restarts the machine"
)
# section in which memory ran out -> what helps instead of a smaller batch
_FEWER_BYTES = (
    "let the run hold fewer bytes: lora with quantization.load_in_4bit, more"
    " training.streamed_layers beside it, or a launch.mode that shards or offloads the model"
)
_BESIDE_STEPS = {
    **dict.fromkeys(("load", "save", "export"), _FEWER_BYTES),
    "evaluation": "halve training.per_device_eval_batch_size",
}
_STOPPED = "Stopped"  # errors.Stopped, as ranks write it
YIELDED = "yielded"  # the kind of an end that waits for memory again
CONTINUE = "run the same line again to continue"


def classify(record: AttemptRecord) -> Failure | None:
    """The cause of an attempt's end; None when it left its model, even if a rank fell over while
    closing down."""
    if record.completed:
        return None
    failure = _with_xid(_cause(record), record.xids)
    less = _BESIDE_STEPS.get(record.section, SMALLER)  # what helps in that section
    return replace(failure, section=record.section, fix=failure.fix.replace(SMALLER, less))


def _with_xid(failure: Failure, xids: Sequence[Xid]) -> Failure:
    """The failure with the Xid that explains it: a broken card's, or that of a card that left the
    ranks behind it waiting or falling."""
    xids = [xid for xid in xids if not xid.line.endswith("(None)")]  # the card has recovered
    hardware = sorted(
        (xid for xid in xids if xid.number in HARDWARE_XIDS), key=lambda xid: xid.number == 154
    )
    advice = next((match[1] for xid in xids if (match := ADVICE.search(xid.line))), "")
    says = f"; the driver says: {advice}" if advice else ""
    if failure.kind == "gpu_broken" and xids:
        cause = f"{failure.cause}: {_described((hardware or xids)[0])}{says}"
        return replace(failure, cause=cause, fix=_ADVISED if advice else failure.fix)
    if failure.kind in _OF_A_CARD and hardware:
        broken = next(row for row in PATTERNS if row.kind == "gpu_broken")
        cause = f"{broken.cause}: {_described(hardware[0])}{says}; {failure.cause}"
        fix = _ADVISED if advice else broken.fix
        return Failure(broken.kind, broken.exit_code, cause, hardware[0].line, fix)
    return failure


def _described(xid: Xid) -> str:
    meaning = HARDWARE_XIDS.get(xid.number)
    return f"Xid {xid.number}{f' ({meaning})' if meaning else ''} on {xid.card}"


def _cause(record: AttemptRecord) -> Failure:
    """The cause of an attempt's end, from everything but Xids."""
    record = replace(record, log_tail=_without_ours(record))
    was_killed = _is_killed(record) or _WORKER_KILLED in record.log_tail
    if record.oom_kills and (was_killed or not record.oom_kills_of_machine):
        return _oom_kill(record)
    if record.ended.pressure:
        return Failure(
            "host_pressure",
            6,
            f"the ranks were stopped before the host ran out of RAM{_saved(record)}",
            record.ended.pressure,
            "give the run more memory, or lower training.dataloader_num_workers (the limit:"
            " launch.host_stop_fraction)",
        )
    if record.ended.hang:
        return Failure(
            "hang",
            7,
            f"{record.ended.hang}{_saved(record)}",
            "its heartbeat file",
            "see ranks/*/stacks.txt in the attempt's folder",
        )
    if record.stopped_by is not None:
        return stopped(record.stopped_by, _saved(record))
    if record.ended.is_yielded:
        return Failure(
            YIELDED,
            75,
            f"gave its memory to the runs that wait{_saved(record)}",
            "python -m launch queue yield",
            CONTINUE,
        )
    if _has_stopped(record):
        return _preempted(record)
    return _fallen(record)


def _has_stopped(record: AttemptRecord) -> bool:
    """Say whether the ranks stopped of themselves, or because the launcher stopped them when one
    of them had failed or was killed."""
    if record.preempted is None or record.ended.returncode == -signal.SIGKILL:
        return False
    types = [error.type for error in record.rank_errors]
    if _STOPPED in types[1:] and types[0] != _STOPPED:
        return False
    is_killed = _KILLED_FIRST.search(record.log_tail) or _CRASHED.search(record.log_tail)
    return record.preempted.checkpoint is not None or not is_killed


def _without_ours(record: AttemptRecord) -> str:
    """The log without the launcher's lines on ranks that the supervisor has ended with SIGKILL."""
    if not record.ended.ended_ranks:
        return record.log_tail
    ours = re.compile(
        rf"(-9\b.*\(pid: |Signal 9 .* PID )({'|'.join(map(str, record.ended.ended_ranks))})\b"
    )
    return "\n".join(line for line in record.log_tail.splitlines() if not ours.search(line))


def stopped(number: int, ending: str = "") -> Failure:
    """A stop by a signal; `ending` is the end of the sentence."""
    name = signal.Signals(number).name
    return Failure(
        "stopped",
        130 if number == signal.SIGINT else 75,
        f"stopped by {name}{ending}",
        name,
        CONTINUE,
    )


def too_little_time(
    failure: Failure, missing_s: float, limit_s: float | None, is_of_slurm: bool
) -> Failure:
    """The stop of a start whose time was up before its first step, with what it takes. `limit_s` is
    launch.time_limit_s; `is_of_slurm`: the job of Slurm that it runs in has an end too."""
    cause = (
        f"{failure.cause}, and no step was made: {missing_s:.0f} s are missing for one, as the last"
        f" {RESERVED_S:.0f} s are kept for a checkpoint"
    )
    limits = []
    if limit_s is not None:
        limits.append(f"launch.time_limit_s above {limit_s + missing_s:.0f} (it is {limit_s:g})")
    if is_of_slurm:
        limits.append(f"the time of the Slurm job by more than {missing_s:.0f} s")
    fix = f"raise {' and '.join(limits)}: the same line would end here again"
    return replace(failure, cause=cause, fix=fix)


def _oom_kill(record: AttemptRecord) -> Failure:
    limit, peak = record.host_limit_bytes / GIB, record.ended.host_peak_bytes / GIB
    measured = f", job at {peak:.2f} GiB when last measured" if peak else ""
    return Failure(
        "host_oom",
        6,
        f"the kernel killed a process of the run: host RAM limit {limit:.2f} GiB{measured}",
        f"the {'machine' if record.oom_kills_of_machine else 'cgroup'}'s oom_kill counter grew by"
        f" {record.oom_kills}",
        f"{SMALLER}, or give the run more memory",
    )


def _fallen(record: AttemptRecord) -> Failure:
    """The failure of ranks that nobody stopped: a mistake that a rank names itself, a kill, or a
    cause in what the ranks and the libraries printed."""
    is_killed = _is_killed(record)
    is_crashed = is_killed or bool(_CRASHED.search(record.log_tail))
    # the launcher stops the other ranks once a rank has failed
    first = record.rank_errors[0] if record.rank_errors and not is_crashed else None
    rank_errors = [
        error for error in record.rank_errors if error.type != _STOPPED or error is first
    ]
    for error in rank_errors:
        if error.exit_code:
            is_stop = error.type == _STOPPED
            kind, fix = ("stopped", CONTINUE) if is_stop else (error.type, error.fix)
            return Failure(kind, error.exit_code, error.message, f"rank {error.rank}", fix)
    if is_killed:
        return Failure(
            "killed",
            1,
            "a process of the run was killed with SIGKILL,"
            + (
                " nobody can say by whom: no counter of the kernel's OOM kills can be read here"
                if record.oom_kills is None
                else " but not by the kernel's OOM killer"
            ),
            _killed(record.log_tail),
            CONTINUE,
        )
    return _from_texts(record, rank_errors)


def _is_killed(record: AttemptRecord) -> bool:
    """True if SIGKILL ended the launcher, or the rank that failed first."""
    return record.ended.returncode == -9 or bool(_KILLED_FIRST.search(record.log_tail))


def _killed(log: str) -> str:
    """Ranks that SIGKILL ended, as torchrun's agent reports them."""
    named = [f"rank {rank} (process {pid})" for rank, pid in _REPORTED_KILL.findall(log)]
    if not named:
        return "SIGKILL is the launcher's first observed failure"
    return f"the launcher reports SIGKILL for {', '.join(named)}"


def _from_texts(record: AttemptRecord, rank_errors: Sequence[RankError]) -> Failure:
    """The failure that the ranks' errors name, earliest first, or the log."""
    # a traceback has the errors that caused a rank's too
    texts = [f"{each.type}: {each.message}\n{_relevant(each.traceback)}" for each in rank_errors]
    log = _relevant(record.log_tail)
    if root := _named([*texts, log], "root", bool(rank_errors)):
        return _with_reserved(root, record)
    crash = _signal(record)
    if crash is not None and "SIGABRT" not in crash.cause:  # libraries print why before they abort
        return crash
    if ended := _exit_code(record):
        return ended
    lost = _named(texts[:1] or [log], "consequence", bool(rank_errors))
    if lost is not None and crash is None and (silent := _silent(record)):
        return Failure(
            "crash",
            1,
            f"{silent} ended without an error, and the other ranks lost it: its code, or a"
            " library's, called exit",
            lost.proof,
            "see that rank's last lines in the attempt's log.txt",
        )
    if lost is not None and (
        crash is None or lost.kind != "network" or "nccl" in lost.proof.lower()
    ):
        return lost
    if crash is not None or not rank_errors:
        return crash or _unknown(record)
    error = rank_errors[0]
    return Failure(
        "crash",
        1,
        f"rank {error.rank} failed: {error.type}: {error.message}",
        f"rank {error.rank} error.json",
        "see the traceback in the attempt's ranks folder",
    )


def _silent(record: AttemptRecord) -> str:
    """The first rank that ended before the others and left no error, whose end torchrun neither
    caused nor calls a failure; "" if there is none."""
    ended = {int(pid) for pid in CLOSED.findall(record.log_tail)} | {*record.ended.ended_ranks}
    failed = {int(rank) for rank in _REPORTED.findall(record.log_tail)}
    ranks = (rank for rank, pid in record.silent_ranks if rank not in failed and pid not in ended)
    return next((f"rank {rank}" for rank in ranks), "")


def _relevant(log: str) -> str:
    """The log without warnings, and without what training went on after."""
    lines = log.splitlines()
    steps = [i for i, line in enumerate(lines) if STEP.search(line)]
    return "\n".join(
        line for line in lines[steps[-2] if len(steps) > 1 else 0 :] if not WARNING.search(line)
    )


def _named(
    texts: Sequence[str], role: Literal["root", "consequence"], has_error: bool
) -> Failure | None:
    """The failure that the first text with a pattern of that role names; the last text is the
    log."""
    for text in texts:
        for pattern in PATTERNS:
            if pattern.role != role or (
                has_error and text is texts[-1] and pattern.kind in OWN_KINDS and len(texts) > 1
            ):
                continue
            if proof := pattern.find(text):
                return Failure(
                    pattern.kind,
                    pattern.exit_code,
                    pattern.cause,
                    _proof(proof),
                    pattern.fix,
                )
    return None


def _with_reserved(failure: Failure, record: AttemptRecord) -> Failure:
    """The failure; where GPU memory ran out, with the memory that the last step had reserved."""
    if failure.kind != "device_oom" or not record.vram_total_bytes:
        return failure
    reserved, total = record.vram_reserved_bytes / GIB, record.vram_total_bytes / GIB
    return replace(
        failure,
        cause=f"{failure.cause}: {reserved:.2f} of {total:.2f} GiB were reserved by the last step",
    )


def _signal(record: AttemptRecord) -> Failure | None:
    """The signal that ended a rank, where the launcher names one that nobody sends."""
    match = _CRASHED.search(record.log_tail)
    if match is None:
        return None
    name = _signal_name(int(match[1] or match[2]))
    kind, code, meaning, fix = _SIGNALS.get(name, _OTHER_SIGNAL)
    cause = f"a rank was ended by {name}: {meaning}"
    return Failure(kind, code, cause, _proof(full_line(match)), fix)


def _signal_name(number: int) -> str:
    """The name of a signal; of a real-time signal its distance from the first one."""
    if number not in signal.valid_signals():
        return f"signal {number}"
    beyond = number - signal.SIGRTMIN
    return f"SIGRTMIN+{beyond}" if beyond > 0 else signal.Signals(number).name


def _exit_code(record: AttemptRecord) -> Failure | None:
    """The failure that a rank's documented exit code names, where the rank could not write its
    error, for instance because the disk is full."""
    for match in _EXITED.finditer(record.log_tail):
        code = int(match[1] or match[2])
        if code in KINDS and code > 1:
            message = re.search(r"^error: .+", record.log_tail, re.MULTILINE)
            return Failure(
                KINDS[code],
                code,
                f"a rank ended with exit code {code}: {errors.EXIT_CODES[code]}",
                _proof(message[0] if message else full_line(match)),
                "see the message, and log.txt",
            )
    return None


def _proof(line: str) -> str:
    return line.strip()[:_PROOF_CHARS]


def _unknown(record: AttemptRecord) -> Failure:
    lines = [line for line in record.log_tail.splitlines() if re.search(r"[a-zA-Z]", line)]
    return Failure(
        "unknown",
        1,
        f"the launcher ended with exit code {record.ended.returncode} and no rank left a reason",
        _proof(lines[-1]) if lines else "no log",
        "read the attempt's log.txt",
    )


def _preempted(record: AttemptRecord) -> Failure:
    """The end of ranks that agreed to stop, by a signal of their own or by what rank 0 saw."""
    stops = [error for error in record.rank_errors if error.type == _STOPPED]
    code = stops[0].exit_code or 75 if stops else 75
    cause = f"{stops[0].message if stops else 'the ranks agreed to stop'}{_saved(record)}"
    free_space = "free space where runs/ is, then run the same line again"
    kind, fix = ("disk", free_space) if code == 10 else ("stopped", CONTINUE)
    return Failure(kind, code, cause, "outcome.json", fix)


def _saved(record: AttemptRecord) -> str:
    """The checkpoint that a stopped attempt has saved, as the end of a sentence."""
    outcome = record.preempted
    if outcome is None or outcome.checkpoint is None:
        return ""
    return f" at step {outcome.step}; {outcome.checkpoint} is kept"
