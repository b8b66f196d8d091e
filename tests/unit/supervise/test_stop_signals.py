"""A stop ends what it may interrupt at once, and only that."""

from __future__ import annotations

import os
import signal
import time

import pytest

from launch.base.errors import Interrupted
from launch.supervise import stop_signals


def stop_here() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0)  # where the handler runs


def test_a_stop_before_anything_runs_ends_the_start_at_once():
    with stop_signals.signals() as heard, pytest.raises(Interrupted, match="stopped by SIGTERM"):
        stop_here()
    assert heard.stop == signal.SIGTERM


def test_a_stop_ends_what_it_may_interrupt_and_nothing_else():
    with stop_signals.signals() as heard:
        heard.collect()
        stop_here()
        assert heard.stop == signal.SIGTERM
        with pytest.raises(Interrupted, match="stopped by SIGTERM"):
            heard.interrupting(pytest.fail)("it was called after a stop")
        time.sleep(3 * stop_signals.AGAIN_S)  # nothing comes later


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_stop_that_python_swallows_comes_again():
    class Swallowing:
        def __del__(self) -> None:
            stop_here()  # Python prints what a destructor raises, and goes on

    def work() -> None:
        one = Swallowing()
        del one
        time.sleep(60)

    with stop_signals.signals() as heard:
        heard.collect()
        with pytest.raises(Interrupted):
            heard.interrupting(work)()


def test_what_is_closed_because_of_a_stop_is_closed_in_peace():
    closed = []

    def work() -> None:
        try:
            stop_here()
            time.sleep(60)
        finally:
            time.sleep(5 * stop_signals.AGAIN_S)
            closed.append(True)

    with stop_signals.signals() as heard, pytest.raises(Interrupted):
        heard.interrupting(work)()
    assert closed
