"""Correction of predicted seconds by the runs of this machine. Pure."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from launch.base.workspace import code_digest
from launch.predict.history.calibration import Measurement
from launch.schema.plan import NOT_CORRECTED, SecondsCorrection, Strategy
from launch.schema.result import ALONE

FEWEST, NEWEST = 3, 9  # runs of a median: a single odd one moves nothing, old ones fade
MOST = 200  # runs that are looked at
_QUIET = 0.25  # cores that other programs may keep busy on a machine that counts as quiet
_BOUND_BY_HOST = 0.2  # share of a step spent waiting; above it, the host is the bottleneck


def time_model() -> str:
    """A hash of the code that predicts seconds: figures of other code teach nothing."""
    return code_digest("launch/predict/time")


def of_machine(runs: Sequence[Measurement], machine_key: str) -> tuple[Measurement, ...]:
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
    return tuple(islice(those, MOST))


def compute(
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
        if len(group) >= FEWEST:
            return _median(group[:NEWEST], name)
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
