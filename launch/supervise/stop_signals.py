"""Signals to the launcher: stop, stop at once, save."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, TypeVar

from launch.base.errors import Interrupted
from launch.base.interpreter import handled_signals

P = ParamSpec("P")
Result = TypeVar("Result")

ECHO_S = 1.0  # timeout(1) sends a signal twice; later, the same one again is impatience
AGAIN_S = 0.1  # pause between two tries to end what a stop interrupts


class StopSignals:
    """Signals that this process has received. Until collect() a stop ends it at once (Interrupted),
    because nothing runs yet."""

    def __init__(self) -> None:
        self.stop: int | None = None  # number of the first stop signal
        self.at_once = False  # the same signal came again
        self.save = False
        self._first_s: dict[int, float] = {}  # signal -> time of its first arrival
        self._raises = True

    def collect(self) -> None:
        """Collect signals from now on; the caller looks at `stop` and acts."""
        self._raises = False
        signal.setitimer(signal.ITIMER_REAL, 0)

    def interrupting(self, work: Callable[P, Result]) -> Callable[P, Result]:
        """The same function, which a stop ends at once (Interrupted), even a stop that came before
        the call."""

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
            finally:  # a stop may come just as the first collect() begins
                self.collect()

        return interruptible

    def wait(self, seconds: float) -> bool:
        """Wait; True if no stop came meanwhile."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and self.stop is None:
            time.sleep(min(0.2, max(until_s - time.monotonic(), 0)))
        return self.stop is None

    def receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self.save = True
            return
        first = self._first_s.setdefault(number, time.monotonic())
        self.at_once |= time.monotonic() - first > ECHO_S
        self.stop = self.stop or number
        if self._raises:
            signal.setitimer(signal.ITIMER_REAL, AGAIN_S, AGAIN_S)
            self.interrupt(number, frame)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Raise Interrupted, unless that is under way; called again and again (SIGALRM) until
        collect().

        Python prints and drops an exception in code that it runs beside the program (logging's hook
        after a fork, a destructor)."""
        beside = frame is not None and frame.f_globals.get("__name__") == "logging"
        if self._raises and self.stop is not None and not beside and not _is_under_way():
            raise Interrupted(self.stop)


def _is_under_way() -> bool:
    """True while an Interrupted is on its way up."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, Interrupted):
        error = error.__context__
    return error is not None


@contextmanager
def signals() -> Iterator[StopSignals]:
    """Collect signals instead of dying from them; SIGHUP that nohup has switched off stays off."""
    received = StopSignals()
    before = {number: signal.signal(number, received.receive) for number in handled_signals()}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, received.interrupt)
    try:
        yield received
    finally:
        received.collect()
        for number, handler in before.items():
            signal.signal(number, handler)
