"""From what an attempt left behind to one cause, the line that proves it, and one fix. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from launch.base import errors
from launch.schema.machine import GIB
from launch.schema.result import Evidence, Failure, RankError
from launch.supervise.failure_patterns import PATTERNS, SMALLER

PROOF_CHARS = 400  # the HSA runtime says at the end of its line how much GPU memory was free

# How torchrun and accelerate's launcher of one process name ranks that a signal ended. torchrun
# lists those that had ended when it looked, not those that it ends itself then; which of them it
# calls the root cause may be a tie.
REPORTED_KILL = re.compile(
    r"^\s*rank\s*:\s*(\d+) .*\n\s*exitcode\s*:\s*-9 \(pid: (\d+)\)", re.MULTILINE
)
KILLED_FIRST = re.compile(r"exitcode\s*:\s*-9\b|died with <Signals.SIGKILL: 9>")
CRASHED = re.compile(
    r"exitcode\s*:\s*-(?!(?:9|15|2|1|10)\b)(\d+)|died with <Signals\.(?!SIGKILL|SIGTERM)\w+: (\d+)>"
)
# a rank's, where it left no word
EXITED = re.compile(r"exitcode\s*:\s*(\d+)\b|returned non-zero exit status (\d+)")
KINDS = {kind.exit_code: kind.__name__ for kind in errors.LaunchError.__subclasses__()}
SIGNALS = {
    "SIGSEGV": "native code touched memory that is not its own",
    "SIGBUS": "a file or /dev/shm behind mapped memory is gone, cut short or full",
    "SIGILL": "native code was built for another CPU",
    "SIGABRT": "native code called abort(); its last message is in the log",
    "SIGFPE": "native code divided by zero",
}
SIGNAL_FIX = (
    "see the stacks in the attempt's log.txt; `pip install --force-reinstall -r requirements.txt`"
    " mends mixed builds; if it comes back anywhere else each time, test the machine's memory"
)
# What is no failure: warnings, and what two step lines follow.
WARNING = re.compile(
    r"\b(WARNING|INFO|DEBUG)\b|(?<!NCCL )\bWARN\b|\w*Warning: |^(\[rank\d+\]:)?\[[WI]\d*"
    r" |^\s*(warn|logger|raise|#)"
)
STEP = re.compile(r"  step \d+/\d+  epoch ")
# exceptions: a rank that left word would have named them itself
OWN_WORDS = ("data", "configuration", "library")
STOPPED = "Stopped"  # errors.Stopped, as ranks write it
CONTINUE = "run the same line again to continue"


def classify(evidence: Evidence) -> Failure | None:
    """The cause of an attempt's end; None when it left its model, even if a rank fell over while
    closing down."""
    if evidence.completed:
        return None
    evidence = replace(evidence, log_tail=_without_ours(evidence))
    if evidence.oom_kills > 0:
        return _oom_kill(evidence)
    if evidence.pressure:
        return Failure(
            "host_pressure",
            6,
            f"the ranks were stopped before the host ran out of RAM{_saved(evidence)}",
            evidence.pressure,
            "give the run more memory, or lower training.dataloader_num_workers (the limit:"
            " launch.host_stop_fraction)",
        )
    if evidence.hang:
        cause, fix = (
            f"{evidence.hang}{_saved(evidence)}",
            "see ranks/*/stacks.txt in the attempt's folder",
        )
        return Failure("hang", 7, cause, "its heartbeat file", fix)
    if evidence.stopped_by is not None:
        return stopped(evidence.stopped_by, _saved(evidence))
    # else nobody told the ranks to stop
    if evidence.preempted is not None and evidence.returncode != -signal.SIGKILL:
        return _preempted(evidence)
    return _fallen(evidence)


def _without_ours(evidence: Evidence) -> str:
    """The log without the launcher's lines on ranks that the supervisor ended: their SIGKILL is
    nobody else's."""
    if not evidence.ended_ranks:
        return evidence.log_tail
    ours = re.compile(
        rf"(-9\b.*\(pid: |Signal 9 .* PID )({'|'.join(map(str, evidence.ended_ranks))})\b"
    )
    return "\n".join(line for line in evidence.log_tail.splitlines() if not ours.search(line))


def stopped(number: int, words: str = "") -> Failure:
    """A stop by a signal; `words` end the sentence."""
    name = signal.Signals(number).name
    return Failure(
        "stopped",
        130 if number == signal.SIGINT else 75,
        f"stopped by {name}{words}",
        name,
        CONTINUE,
    )


def _oom_kill(evidence: Evidence) -> Failure:
    limit, peak = evidence.host_limit_bytes / GIB, evidence.host_peak_bytes / GIB
    return Failure(
        "host_oom",
        6,
        f"the kernel killed a process of the run: host RAM limit {limit:.2f} GiB, job at {peak:.2f}"
        " GiB when last measured",
        f"the cgroup's oom_kill counter grew by {evidence.oom_kills}",
        f"{SMALLER}, or give the run more memory",
    )


def _fallen(evidence: Evidence) -> Failure:
    """Of ranks that nobody stopped: a mistake that one names itself, a kill, or what all of them
    said."""
    is_killed = evidence.returncode == -9 or bool(KILLED_FIRST.search(evidence.log_tail))
    is_crashed = is_killed or bool(CRASHED.search(evidence.log_tail))
    # one that was told to stop was told by the launcher, where another had failed before
    first = evidence.rank_errors[0] if evidence.rank_errors and not is_crashed else None
    left = [error for error in evidence.rank_errors if error.type != STOPPED or error is first]
    for error in left:
        if error.exit_code:
            is_stop = error.type == STOPPED
            kind, fix = (
                ("stopped", CONTINUE) if is_stop else (error.type, error.fix or "see the message")
            )
            return Failure(kind, error.exit_code, error.message, f"rank {error.rank}", fix)
    if is_killed:
        return Failure(
            "killed",
            1,
            "a process of the run was killed with SIGKILL, but not by the kernel's OOM killer",
            _killed(evidence.log_tail),
            CONTINUE,
        )
    return _from_words(evidence, left)


def _killed(log: str) -> str:
    """Ranks that SIGKILL ended, as torchrun's agent reports them."""
    named = [f"rank {rank} (process {pid})" for rank, pid in REPORTED_KILL.findall(log)]
    if not named:
        return "SIGKILL is the launcher's first observed failure"
    return f"the launcher reports SIGKILL for {', '.join(named)}"


def _from_words(evidence: Evidence, left: Sequence[RankError]) -> Failure:
    """From what ranks left as their last word, earliest first, and from what they and their
    libraries printed."""
    said, log = [_said(error) for error in left], _relevant(evidence.log_tail)
    if root := _named([*said, log], "root", bool(left)):
        return _near(root, evidence)
    crash = _signal(evidence)
    if crash is not None and "SIGABRT" not in crash.cause:  # libraries abort after they said why
        return crash
    if ended := _exit_code(evidence):
        return ended
    lost = _named(said[:1] or [log], "consequence", bool(left))
    if lost is not None and (
        crash is None or lost.kind != "network" or "nccl" in lost.proof.lower()
    ):
        return lost
    if crash is not None or not left:
        return crash or _unknown(evidence)
    error = left[0]
    return Failure(
        "crash",
        1,
        f"rank {error.rank} failed: {error.type}: {error.message}",
        f"rank {error.rank} error.json",
        "see the traceback in the attempt's ranks folder",
    )


def _said(error: RankError) -> str:
    """A rank's last word: the exception, where it came from, and from which others."""
    return f"{error.type}: {error.message}\n{_relevant(error.traceback)}"


def _relevant(log: str) -> str:
    """The log without warnings, and without what training went on after."""
    lines = log.splitlines()
    steps = [i for i, line in enumerate(lines) if STEP.search(line)]
    return "\n".join(
        line for line in lines[steps[-2] if len(steps) > 1 else 0 :] if not WARNING.search(line)
    )


def _named(
    texts: Sequence[str], role: Literal["root", "consequence"], has_word: bool
) -> Failure | None:
    """What the first text with a pattern of that role names; the last of the texts is the log."""
    for text in texts:
        for pattern in PATTERNS:
            if pattern.role != role or (
                has_word and text is texts[-1] and pattern.kind in OWN_WORDS and len(texts) > 1
            ):
                continue
            if proof := pattern.find(text):
                return Failure(
                    pattern.kind,
                    pattern.exit_code,
                    pattern.cause,
                    proof.strip()[:PROOF_CHARS],
                    pattern.fix,
                )
    return None


def _near(failure: Failure, evidence: Evidence) -> Failure:
    """Where GPU memory ran out, how near to it the last step was."""
    if failure.kind != "device_oom" or not evidence.vram_total_bytes:
        return failure
    reserved, total = evidence.vram_reserved_bytes / GIB, evidence.vram_total_bytes / GIB
    return replace(
        failure,
        cause=f"{failure.cause}: {reserved:.2f} of {total:.2f} GiB were reserved by the last step",
    )


def _signal(evidence: Evidence) -> Failure | None:
    """The signal that ended a rank, where the launcher names one that nobody sends."""
    found = CRASHED.search(evidence.log_tail)
    if found is None:
        return None
    name = signal.Signals(int(found[1] or found[2])).name
    cause = f"a rank was ended by {name}: {SIGNALS.get(name, 'a signal that the run does not use')}"
    return Failure("signal", 1, cause, _line(found), SIGNAL_FIX)


def _exit_code(evidence: Evidence) -> Failure | None:
    """A rank that could not leave word, its disk being full for instance, said it by its documented
    exit code."""
    for found in EXITED.finditer(evidence.log_tail):
        code = int(found[1] or found[2])
        if code in KINDS and code > 1:
            words = re.search(r"^error: .+", evidence.log_tail, re.MULTILINE)
            proof = words[0][:PROOF_CHARS] if words else _line(found)
            return Failure(
                KINDS[code],
                code,
                f"a rank ended with exit code {code}",
                proof,
                "see the message, and log.txt",
            )
    return None


def _line(found: re.Match[str]) -> str:
    """The whole line in which something was found."""
    before, after = (
        found.string[: found.start()].rpartition("\n")[2],
        found.string[found.end() :].partition("\n")[0],
    )
    return f"{before}{found[0]}{after}".strip()[:PROOF_CHARS]


def _unknown(evidence: Evidence) -> Failure:
    return Failure(
        "unknown",
        1,
        f"the launcher ended with exit code {evidence.returncode} and no rank left a reason",
        _last_words(evidence.log_tail),
        "read the attempt's log.txt",
    )


def _preempted(evidence: Evidence) -> Failure:
    """Where the ranks agreed to stop: told by a signal of their own, or by what rank 0 saw."""
    stops = [error for error in evidence.rank_errors if error.type == STOPPED]
    code, cause = (
        (stops[0].exit_code or 75, stops[0].message) if stops else (75, "the ranks agreed to stop")
    )
    fix = "free space where runs/ is, then run the same line again" if code == 10 else CONTINUE
    return Failure(
        "disk" if code == 10 else "stopped", code, f"{cause}{_saved(evidence)}", "outcome.json", fix
    )


def _saved(evidence: Evidence) -> str:
    """What of a stopped attempt is kept, as the end of a sentence."""
    outcome = evidence.preempted
    if outcome is None or outcome.checkpoint is None:
        return ""
    return f" at step {outcome.step}; {outcome.checkpoint} is kept"


def _last_words(log: str) -> str:
    """The line of a log that says most: the last with letters in it."""
    return next(
        (
            line.strip()[:PROOF_CHARS]
            for line in reversed(log.splitlines())
            if re.search(r"[a-zA-Z]", line)
        ),
        "no log",
    )
