"""What signals tell the launcher: stop, stop at once, save."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

from launch.base.errors import Interrupted
from launch.base.interpreter import STOPS

P = ParamSpec("P")
Result = TypeVar("Result")

ECHO_S = 1.0  # timeout(1) sends a signal twice; later, the same one again is impatience
AGAIN_S = 0.1  # between two tries to end what a stop interrupts


class StopSignals:
    """What signals have told this process. Until collect() a stop ends it at once (Interrupted):
    nothing runs yet."""

    def __init__(self) -> None:
        self.stop: int | None = None  # the first one's number
        self.at_once = False  # the same signal came again
        self.save = False
        self._heard: dict[int, float] = {}
        self._raises = True

    def collect(self) -> None:
        """From now on stops are obeyed by who asks."""
        self._raises = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def interrupting(self, work: Callable[P, Result]) -> Callable[P, Result]:
        """The same function, which a stop ends at once (Interrupted), even one that came before it
        was called."""

        def interruptible(*args: P.args, **kwargs: P.kwargs) -> Result:
            if self._raises:
                return work(*args, **kwargs)
            self._raises = True
            try:
                try:
                    if self.stop is not None:
                        raise Interrupted(self.stop)
                    return work(*args, **kwargs)
                finally:
                    self.collect()
            finally:  # where a stop came just as the first one began
                self.collect()

        return interruptible

    def wait(self, seconds: float) -> bool:
        """Wait; whether no stop came meanwhile."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and self.stop is None:
            time.sleep(min(0.2, max(until_s - time.monotonic(), 0)))
        return self.stop is None

    def receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self.save = True
            return
        first = self._heard.setdefault(number, time.monotonic())
        self.at_once |= time.monotonic() - first > ECHO_S
        self.stop = self.stop or number
        if self._raises:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
            self.interrupt(number, frame)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise Interrupted, unless that is under way; asked again and again (SIGALRM) until
        collect().

        An exception that comes while Python runs what it runs beside the program (logging's hook
        after a fork, a destructor) is printed and lost."""
        beside = frame is not None and frame.f_globals.get("__name__") == "logging"
        if self._raises and self.stop is not None and not beside and not _is_under_way():
            raise Interrupted(self.stop)


def _is_under_way() -> bool:
    """Whether the program is closing what it has open because of an Interrupted."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


@contextmanager
def signals() -> Iterator[StopSignals]:
    """Signals are collected instead of dying from them; SIGHUP that nohup has switched off stays
    off."""
    told = StopSignals()
    numbers = [*STOPS, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, told.receive) for number in numbers}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, told.interrupt)
    try:
        yield told
    finally:
        told.collect()
        for number, handler in before.items():
            signal.signal(number, handler)
