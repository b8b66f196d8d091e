"""What signals tell the launcher: stop, stop at once, save."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from launch.errors import Interrupted

ECHO_S = 1.0  # timeout(1) sends a signal twice; later, the same one again is impatience
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)  # SIGUSR1: Slurm's early warning


class Told:
    """What signals have told this process. Until collect() a stop ends it at once (Interrupted): nothing runs yet."""

    def __init__(self) -> None:
        self.stop: int | None = None  # the first one's number
        self.at_once = False  # the same signal came again
        self.save = False
        self._heard: dict[int, float] = {}
        self._raises = True

    def collect(self) -> None:
        """From now on stops are obeyed by who asks."""
        self._raises = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR2:
            self.save = True
            return
        first = self._heard.setdefault(number, time.monotonic())
        self.at_once |= time.monotonic() - first > ECHO_S
        self.stop = self.stop or number
        if self._raises:
            self._raises = False
            raise Interrupted(number)


@contextmanager
def signals() -> Iterator[Told]:
    """Signals are collected instead of dying from them; SIGHUP that nohup has switched off stays off."""
    told = Told()
    numbers = [*STOPS, signal.SIGUSR2]
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)
    before = {number: signal.signal(number, told.receive) for number in numbers}
    try:
        yield told
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
