"""Seconds of forward and backward passes, replayed operator by operator: the host reaches one when
it is done with all before it, and the device begins it then, or when it is done with the one
before.

What a run of operators does to both clocks is four numbers, since each clock ends at the later of
two sums (max-plus algebra: Baccelli et al., Synchronization and Linearity, 1992): like layers are
replayed at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from launch.schema.recorded_step import Operator, Passes

# repetitions of the passes: in the last, a device behind its host falls back by a steady time
TURNS = 3


class Cost(NamedTuple):
    """The seconds of an operator."""

    host_s: float
    device_s: float
    is_product: bool = False  # a product, or attention
    waits: bool = False  # the host waits for the device


class Seconds(NamedTuple):
    """The seconds of a micro-step, which are a sum."""

    products_s: float
    others_s: float  # the device's other kernels
    waiting_s: float  # time in which the device waits for the host

    @property
    def device_s(self) -> float:
        return self.products_s + self.others_s


class _Effect(NamedTuple):
    """The ends of a run: the later of (host's clock + first, device's clock + second)."""

    host: tuple[float, float]
    device: tuple[float, float]
    products_s: float
    others_s: float


def replayed(passes: Passes, cost_of: Callable[[Operator], Cost], hooks_s: float = 0.0) -> Seconds:
    """The mean seconds of a micro-step among many; `hooks_s` are those of its engine's hooks."""
    costs = [cost_of(operator) for operator in passes.operators]
    effects = [_effect(run, costs) for run in passes.runs]
    host = device = begin = products_s = others_s = 0.0
    for _ in range(TURNS):
        begin, products_s, others_s = max(host, device), 0.0, 0.0
        for step in passes.micro_steps:
            for run, times in step:
                effect = effects[run]
                for _ in range(times):
                    host, device = (
                        max(host + effect.host[0], device + effect.host[1]),
                        max(host + effect.device[0], device + effect.device[1]),
                    )
                products_s += times * effect.products_s
                others_s += times * effect.others_s
            host += hooks_s
    number = max(len(passes.micro_steps), 1)
    waiting_s = max(host, device) - begin - products_s - others_s
    return Seconds(products_s / number, others_s / number, max(waiting_s, 0.0) / number)


def _effect(run: Sequence[int], costs: Sequence[Cost]) -> _Effect:
    host, device = (0.0, -math.inf), (-math.inf, 0.0)
    busy = {True: 0.0, False: 0.0}
    for number in run:
        host_s, device_s, is_product, waits = costs[number]
        host = host[0] + host_s, host[1] + host_s
        if device_s:
            device = max(host[0], device[0]) + device_s, max(host[1], device[1]) + device_s
            busy[is_product] += device_s
        if waits:
            host = max(host[0], device[0]), max(host[1], device[1])
    return _Effect(host, device, busy[True], busy[False])
