"""Decisions on failed attempts: restart, plan again, or stop. Pure."""

from dataclasses import dataclass, field
from typing import Literal

from launch.schema.result import Failure

# Kinds that may pass by themselves: a kill, a link that failed once, a port whose holder ends. A
# wrong configuration, bad data, a full disk, a shortage of memory, a number that is not finite and
# a machine that never joined come again.
PASSING = frozenset({"killed", "hang", "network", "nccl", "collective_timeout", "port"})
# Kinds that may pass if the attempt had trained steps: a card or native code that worked so long
# often works again.
_AFTER_PROGRESS = frozenset({"crash", "unknown", "signal", "gpu_broken"})
NO_PROGRESS = 3  # restarts in a row that committed no new step
# another plan may take less
MEMORY = frozenset({"device_oom", "host_oom", "host_pressure", "pinned_oom"})
# of kernels that are compiled where they run, if a plan chose them
KERNELS = frozenset({"library", "gpu_unsupported"})
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0


@dataclass(frozen=True)
class _Next:
    """The next action after a failure, and the line that says why."""

    action: Literal["again", "plan", "stop"]
    why: str = ""
    wait_s: float = 0.0


@dataclass
class History:
    """The failures of a start so far."""

    restarts: int = 0
    in_vain: int = 0  # restarts since the last newly committed step
    # (kind, last step) of each failed attempt
    ends: list[tuple[str, int]] = field(default_factory=list)


def decide(
    failure: Failure,
    history: History,
    began: int,
    reached: int,
    committed: int,
    limit: int,
    replans: bool = True,
    is_plans_fault: bool = True,
) -> _Next:
    """Decide what follows a failed attempt, and add it to `history`.

    The attempt began at the committed step `began` and reached step `reached`; `committed` is the
    newest step that a checkpoint holds now (0: none), `limit` is launch.max_restarts, `replans` is
    True for launch.on_oom: replan. Plans after a shortage of memory are not counted here, because
    each takes less than the one before. `is_plans_fault` is False for a shortage that other
    programs or tokenising caused, which may pass."""
    history.in_vain = 0 if committed > began else history.in_vain
    is_memory = failure.kind in MEMORY
    if is_memory and replans and is_plans_fault:
        return _Next("plan")
    has_progress = failure.kind in _AFTER_PROGRESS and reached > began
    obstacles = (
        (is_memory and not replans, "launch.on_oom: fail"),
        (not (failure.kind in PASSING or is_memory or has_progress), ""),  # it would come again
        (
            (failure.kind, reached) in history.ends and reached > 0,
            f"step {reached} ended in the same failure before ({failure.kind}): no further restart",
        ),
        (
            history.in_vain >= NO_PROGRESS,
            f"{NO_PROGRESS} restarts in a row committed no new step: no further restart",
        ),
        (
            history.restarts >= limit,
            f"launch.max_restarts {limit} is used up" if limit else "",
        ),
    )
    history.ends.append((failure.kind, reached))
    for is_met, why in obstacles:
        if is_met:
            return _Next("stop", why)
    wait_s = min(_FIRST_WAIT_S * 2**history.in_vain, _LONGEST_WAIT_S)
    history.restarts += 1
    history.in_vain += 1
    source = f"from step {committed}" if committed else "from the beginning"
    return _Next(
        "again",
        f"restart {history.restarts} of {limit} in {wait_s:.0f} s, {source}: {failure.cause}",
        wait_s,
    )
