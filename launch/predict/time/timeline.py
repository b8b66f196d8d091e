"""Seconds of a step, replayed operator by operator: the host reaches one when it is done with all
before it, and the device begins it then, or when it is done with the one before.

What a run of operators does to both clocks is four numbers, since each clock ends at the later of
two sums (max-plus algebra: Baccelli et al., Synchronization and Linearity, 1992): like layers, and
like micro-steps, are replayed at once. Pure."""

import math
from collections.abc import Callable, Iterable
from functools import cache, reduce
from typing import NamedTuple

from launch.schema.recorded_step import Operator, Passes, Runs

# repetitions of a step: in the last, a device behind its host falls back by a steady time
TURNS = 3


class Cost(NamedTuple):
    """The seconds of an operator."""

    host_s: float
    device_s: float
    is_product: bool = False  # a product, or attention
    waits: bool = False  # the host waits for the device


class Seconds(NamedTuple):
    """The seconds of a step, which are a sum."""

    products_s: float
    others_s: float  # the device's other kernels
    waiting_s: float  # time of the micro-steps in which the device waits for the host
    update_s: float = 0.0  # time behind the last micro-step


class _Effect(NamedTuple):
    """The ends of a run: the later of (host's clock + first, device's clock + second)."""

    host: tuple[float, float]
    device: tuple[float, float]
    products_s: float = 0.0
    others_s: float = 0.0


_NOTHING = _Effect((0.0, -math.inf), (-math.inf, 0.0))


def replayed(
    passes: Passes,
    cost_of: Callable[[Operator], Cost],
    num_micro_steps: int = 1,
    hooks_s: float = 0.0,
    update_cost_of: Callable[[Operator], Cost] | None = None,
    update_hooks_s: float = 0.0,
) -> Seconds:
    """The seconds of a step among many; `hooks_s` are those of its engine's hooks in a micro-step,
    `update_hooks_s` in the update, which wait for the device."""
    hooks, section_of = _effect([Cost(hooks_s, 0.0)]), _sections(passes, cost_of)
    micro_steps = [_then(section_of(step), hooks) for step in passes.micro_steps] or [hooks]
    step = _then(micro_steps[0], _repeated(micro_steps[-1], num_micro_steps - 1))
    hooks = _effect([Cost(0.0, 0.0, waits=update_hooks_s > 0), Cost(update_hooks_s, 0.0)])
    update = _then(hooks, _sections(passes, update_cost_of or cost_of)(passes.update))
    before = _repeated(_then(step, update), TURNS - 1)
    behind_passes = _then(before, step)
    turn = before, behind_passes, _then(behind_passes, update)
    begin, middle, end = (max(*each.host, *each.device) for each in turn)
    waiting_s = max(middle - begin - step.products_s - step.others_s, 0.0)
    return Seconds(step.products_s, step.others_s, waiting_s, end - middle)


def _sections(passes: Passes, cost_of: Callable[[Operator], Cost]) -> Callable[[Runs], _Effect]:
    """The effect of runs of these passes."""
    cost = cache(lambda number: cost_of(passes.operators[number]))
    effect = cache(lambda number: _effect(map(cost, passes.runs[number])))
    return lambda runs: reduce(
        _then, (_repeated(effect(run), times) for run, times in runs), _NOTHING
    )


def _effect(costs: Iterable[Cost]) -> _Effect:
    host, device = _NOTHING.host, _NOTHING.device
    busy = {True: 0.0, False: 0.0}
    for host_s, device_s, is_product, waits in costs:
        host = host[0] + host_s, host[1] + host_s
        if device_s:
            device = max(host[0], device[0]) + device_s, max(host[1], device[1]) + device_s
            busy[is_product] += device_s
        if waits:
            host = max(host[0], device[0]), max(host[1], device[1])
    return _Effect(host, device, busy[True], busy[False])


def _then(first: _Effect, second: _Effect) -> _Effect:
    """The effect of two runs, one behind the other."""
    (host_0, host_1), (device_0, device_1), products_s, others_s = first
    (to_host_0, to_host_1), (to_device_0, to_device_1), more_products_s, more_others_s = second
    return _Effect(
        (
            max(host_0 + to_host_0, device_0 + to_host_1),
            max(host_1 + to_host_0, device_1 + to_host_1),
        ),
        (
            max(host_0 + to_device_0, device_0 + to_device_1),
            max(host_1 + to_device_0, device_1 + to_device_1),
        ),
        products_s + more_products_s,
        others_s + more_others_s,
    )


def _repeated(effect: _Effect, times: int) -> _Effect:
    """The effect of a run that is repeated."""
    if times < 2:
        return effect if times else _NOTHING
    half = _repeated(effect, times // 2)
    even = _then(half, half)
    return _then(even, effect) if times % 2 else even
