"""Predicted beside measured figures: the margin that past errors give the next prediction, the
correction of its seconds, and the lines that people read. Pure."""

import math
import statistics
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, pairwise
from typing import Literal

from launch.base.workspace import code_digest
from launch.schema.machine import GIB, Device
from launch.schema.modes import Mode
from launch.schema.plan import NOT_CORRECTED, Plan, SecondsCorrection, Strategy
from launch.schema.result import ALONE, SecondStep
from launch.schema.training_section import Precision

_Quantity = Literal["allocated_bytes", "reserved_bytes", "host_pss_bytes", "step_s"]
WORDS: dict[_Quantity, str] = {
    "allocated_bytes": "allocated",
    "reserved_bytes": "reserved",
    "host_pss_bytes": "host RAM",
    "step_s": "seconds per step",
}
_UNDER = 0.03  # an error from which a run counts as under-predicted
_EDGES = (-0.1, -0.03, -0.01, 0.01, 0.03, 0.1)  # limits between the histogram's bars
BAR = 30  # characters of the longest one
_LEVEL = 0.95  # share of runs that a margin covers
NEWEST = 500  # residuals that a margin looks at: predictions get better, old errors say less
# runs of the median that corrects seconds: a single odd one moves nothing, old ones fade
_FEWEST_CORRECTING, _MOST_CORRECTING = 3, 9
_MOST_COMPARED = 200  # runs that a correction looks at
_QUIET = 0.25  # cores that other programs may keep busy on a machine that counts as quiet
_BOUND_BY_HOST = 0.2  # share of a step spent waiting; above it, the host is the bottleneck


@dataclass(frozen=True)
class Figures:
    """One side, predicted or measured, of a run: per rank on its device, host RAM of the whole job.
    None: not known."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    host_pss_bytes: int | None = None
    step_s: float | None = None  # seconds of an optimizer step


@dataclass(frozen=True, kw_only=True)
class Keyed:
    """A line of the ledger, by the keys of cache_keys."""

    machine_key: str
    model_key: str
    recipe_key: str


@dataclass(frozen=True, kw_only=True)
class Measurement(Keyed):
    """The predicted and the measured figures of an ended attempt."""

    time: float  # unix time
    run_id: str
    device: Device
    device_name: str
    mode: Mode
    num_processes: int
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    max_length: int
    mixed_precision: Precision
    gradient_checkpointing: bool
    versions: Mapping[str, str]  # package -> version
    predicted: Figures
    measured: Figures
    time_model: str = ""  # the code that predicted the seconds (time_model())
    correction: float = 1.0  # factor of earlier runs in the predicted seconds
    # predicted share of the seconds in which the device waits for its host
    waits_share: float = 0.0
    # share of the time in which its threads had the cores that they could use
    core_share: float = 1.0
    kind: Literal["measurement"] = "measurement"


@dataclass(frozen=True)
class Margin:
    """The share of itself by which a prediction may be exceeded; below 0 if predictions were always
    too high."""

    fraction: float
    reason: str
    is_assumed: bool = False


NO_MARGIN = Margin(0.0, "no run was measured yet", is_assumed=True)


@dataclass(frozen=True)
class Comparison:
    """A step in the steady state, compared with its plan."""

    lines: tuple[str, ...]  # figures that were predicted too low by more than _UNDER
    exceeded: float = 0.0  # share of the device's prediction
    host_exceeded: float = 0.0  # share of the host's prediction
    over: str = ""  # budget that the plan will exceed if it goes on like that
    # device or host -> bytes that it will need, where its budget is smaller
    needs: Mapping[Literal["device", "host"], int] = field(default_factory=dict)


def compare(plan: Plan, measured: SecondStep, host_budget_bytes: int) -> Comparison:
    """A steady step's figures beside the plan's of a training step:
    no evaluation has happened by then. The step's rows may be shorter than the longest: that it
    took less says nothing. Nor does what is reserved, where the allocator gives cached blocks back
    only when memory ends."""
    estimate, budget = plan.estimate, plan.budget_bytes
    allocated, reserved = estimate.step_allocated_bytes, estimate.step_reserved_bytes
    may_reserve = 0 if estimate.gives_cache_back else reserved
    of_step = estimate.device_bytes - estimate.reserved_bytes + reserved
    pairs = [
        ("reserved", may_reserve, measured.reserved_bytes, of_step, budget),
        ("allocated", allocated, measured.allocated_bytes, of_step, budget),
        (
            "host RAM",
            estimate.host_bytes,
            measured.host_pss_bytes,
            estimate.host_bytes,
            host_budget_bytes,
        ),
    ]
    lines, over = [], ""
    needs: dict[Literal["device", "host"], int] = {}
    shares = dict.fromkeys((name for name, *_ in pairs), 0.0)
    for name, predicted, took, planned_bytes, limit in pairs:
        if not predicted or not took or estimate.peak is None or took <= predicted * (1 + _UNDER):
            continue
        shares[name] = took / predicted - 1
        lines.append(
            f"step 2: {name} {took / GIB:.2f} GiB, predicted {predicted / GIB:.2f}"
            f" ({shares[name]:+.1%})"
        )
        if planned_bytes * (1 + shares[name]) > limit:
            over = f"{lines[-1]}; going on would exceed the budget of {limit / GIB:.2f} GiB"
            of: Literal["device", "host"] = "host" if name == "host RAM" else "device"
            needs[of] = max(needs.get(of, 0), int(planned_bytes * (1 + shares[name])))
    return Comparison(
        tuple(lines), max(shares["reserved"], shares["allocated"]), shares["host RAM"], over, needs
    )


def margin(
    runs: Sequence[Measurement],
    quantity: _Quantity,
    device: Device,
    machine_key: str,
    prior: float,
    level: float = _LEVEL,
) -> Margin:
    """The allowance above a prediction: from residuals of this machine, else of this kind of
    device, else `prior`; `runs` are those of the ledger, oldest first.

    The bound is split-conformal: the next residual, if it is like these, stays below it with
    probability `level`. Source: Lei et al., Distribution-Free Predictive Inference for Regression,
    JASA 2018, section 2.2; Angelopoulos and Bates, arXiv:2107.07511, section 1.
    """
    newest = residuals(reversed(runs), quantity, device)
    of_machine = [residual for run, residual in newest if run.machine_key == machine_key]
    everywhere = [residual for _, residual in newest]
    for among, where in (
        (of_machine[:NEWEST], "this machine"),
        (everywhere[:NEWEST], f"every {device} machine in the ledger"),
    ):
        if (bound := conformal_bound(among, level)) is not None:
            return Margin(bound, f"{level:.0%} bound of {len(among)} runs on {where}")
    needed = math.ceil(round(level / (1 - level), 9))
    return Margin(
        prior,
        f"assumed: {len(everywhere)} run(s) measured so far, a {level:.0%} bound needs {needed}",
        is_assumed=True,
    )


def residuals(
    runs: Iterable[Measurement], quantity: _Quantity, device: Device
) -> list[tuple[Measurement, float]]:
    """measured / predicted - 1 of the runs that have both; a prediction of 0 has no residual."""
    return [
        (run, measured / predicted - 1)
        for run in runs
        if run.device == device
        and (predicted := getattr(run.predicted, quantity) or 0) > 0
        and (measured := getattr(run.measured, quantity)) is not None
    ]


def conformal_bound(residuals: Sequence[float], level: float) -> float | None:
    """The ceil((n + 1) * level)-th smallest of n residuals; None: n is too small for that level."""
    assert 0 < level < 1
    rank = math.ceil(round((len(residuals) + 1) * level, 9))  # 0.07 * 100 is 7.000000000000001
    return sorted(residuals)[rank - 1] if rank <= len(residuals) else None


def lines(quantity: _Quantity, device: Device, runs: Sequence[tuple[str, float]]) -> Iterator[str]:
    """(run_id, residual) of at least one run: figures, a histogram and the worst five."""
    residuals = [residual for _, residual in runs]
    sizes = sorted(map(abs, residuals))
    p95 = sizes[math.ceil(0.95 * len(sizes)) - 1]
    yield (
        f"{WORDS[quantity]} on {device}: {len(runs)} run(s), error median"
        f" {statistics.median(sizes):.1%}, p95 {p95:.1%}, max {sizes[-1]:.1%}, bias"
        f" {statistics.fmean(residuals):+.1%}; {sum(residual > _UNDER for residual in residuals)}"
        f" under-predicted by more than {_UNDER:.0%}"
    )
    yield from _histogram(residuals)
    worst = sorted(runs, key=lambda run: -abs(run[1]))[:5]
    yield f"  worst: {', '.join(f'{run_id} {residual:+.1%}' for run_id, residual in worst)}"


def _histogram(residuals: Sequence[float]) -> Iterator[str]:
    ends = [f"{edge:+.0%}" for edge in _EDGES]
    names = [
        f"below {ends[0]}",
        *(f"{low} to {high}" for low, high in pairwise(ends)),
        f"above {ends[-1]}",
    ]
    counts = Counter(bisect_right(_EDGES, residual) for residual in residuals)
    for index, name in enumerate(names):
        bar = "#" * math.ceil(BAR * counts[index] / max(counts.values()))
        yield f"  {name:>12} {counts[index]:>5} {bar}".rstrip()


# ---- seconds


def time_model() -> str:
    """A hash of the code that predicts seconds: figures of other code teach nothing."""
    return code_digest("launch/predict/time")


def comparable_runs(runs: Sequence[Measurement], machine_key: str) -> tuple[Measurement, ...]:
    """The runs that corrections are made of, newest first, of `runs`, oldest first."""
    those = (
        run
        for run in reversed(runs)
        if run.machine_key == machine_key
        and run.time_model == time_model()
        and run.core_share >= ALONE
        and run.predicted.step_s
        and run.measured.step_s
    )
    return tuple(islice(those, _MOST_COMPARED))


def seconds_correction(
    runs: Sequence[Measurement], model_key: str, strategy: Strategy, waits_share: float
) -> SecondsCorrection:
    """The median of measured over uncorrected seconds: of this model in this mode, else of this
    mode, else of all on this device. A device that waits for its host is like others that do."""
    like = [
        run
        for run in runs
        if run.device == strategy.device
        and (run.waits_share > _BOUND_BY_HOST) == (waits_share > _BOUND_BY_HOST)
    ]
    in_mode = [
        run
        for run in like
        if (run.mode, run.num_processes) == (strategy.mode, strategy.num_processes)
    ]
    of_model = [run for run in in_mode if run.model_key == model_key]
    groups = (
        (of_model, f"of this model by {strategy.mode}"),
        (in_mode, f"by {strategy.mode}"),
        (like, f"on its {'cards' if strategy.device == 'cuda' else 'CPU'}"),
    )
    for group, name in groups:
        if len(group) >= _FEWEST_CORRECTING:
            return _median(group[:_MOST_CORRECTING], name)
    return NOT_CORRECTED


def beside_others(
    correction: Callable[[Strategy, float], SecondsCorrection], cores_taken: float, num_cores: int
) -> Callable[[Strategy, float], SecondsCorrection]:
    """A correction, with what other programs on the cores do to steps on a CPU: a rank waits for
    its slowest thread, which has half of a core if one program keeps it busy. Ranks of one thread
    get equal shares of all cores."""
    if cores_taken < _QUIET:
        return correction

    def corrected(strategy: Strategy, waits_share: float) -> SecondsCorrection:
        alone = correction(strategy, waits_share)
        if strategy.device == "cuda":
            return alone
        has_threads = num_cores > strategy.processes_per_machine
        slowest = min(cores_taken, 1.0) if has_threads else 0.0
        slowdown = 1 + max(slowest, cores_taken / num_cores)
        return replace(alone, factor=slowdown * alone.factor, slowdown=slowdown)

    return corrected


def _median(runs: Sequence[Measurement], name: str) -> SecondsCorrection:
    ratios = sorted(
        (run.measured.step_s or 0.0) * run.correction / (run.predicted.step_s or 1.0)
        for run in runs
    )
    middle = statistics.median(ratios)
    return SecondsCorrection(middle, ratios[0] / middle, ratios[-1] / middle, len(ratios), name)
