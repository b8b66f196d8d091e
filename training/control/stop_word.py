"""Agree on the control word: a request from outside the run, which all ranks follow after the same
step.

A signal that reaches a rank is noted. At the end of each optimizer step, and between batches of an
evaluation, the ranks agree on the greatest word of all ranks: a signal to a single rank stops all
of them after the same step. While there is nothing to save yet (loading, tokenising) or nothing to
lose (writing the model), the signal ends the rank at once.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from types import FrameType
from typing import Any

from launch.base import processes

# a launcher repeats a signal to its ranks within this time; the same signal later is the user's
ECHO_S = 1.0
# SIGUSR1: Slurm's early warning
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


class Word(IntEnum):
    """Words in order: all ranks follow the greatest word of any rank."""

    NONE = 0
    SAVE = 1  # commit a checkpoint and continue; greater words: commit a checkpoint and stop
    TIME_UP = 2
    DISK_LOW = 3
    STOP = 4
    LAUNCHER_GONE = 5  # accelerate or torchrun, by a signal that they do not handle
    INTERRUPT = 6  # Ctrl-C

    @property
    def exit_code(self) -> int:
        return {Word.DISK_LOW: 10, Word.INTERRUPT: 130}.get(self, 75)

    @property
    def cause(self) -> str:
        return {
            Word.TIME_UP: "the time is nearly up",
            Word.DISK_LOW: "the disk has room for one more checkpoint only",
            Word.LAUNCHER_GONE: "the process that started the ranks has ended",
            Word.INTERRUPT: "SIGINT",
        }.get(self, "a stop signal")


class Halted(BaseException):
    """The end of this rank because of a word. No Exception, which a library might catch."""

    def __init__(self, word: Word) -> None:
        preposition = "by" if word in (Word.STOP, Word.INTERRUPT) else "because"
        super().__init__(f"stopped {preposition} {word.cause}")
        self.word = word


class Control:
    """The word of this rank, and the word that all ranks have agreed on."""

    def __init__(self) -> None:
        self.agreed = Word.NONE
        self.conditions: Callable[[], Word] = lambda: Word.NONE  # rank 0's own (stop_callback.py)
        self._stop, self._save, self._raises = Word.NONE, False, False
        self._first_signals_s: dict[int, float] = {}  # signal -> the time of the first
        self._pid, self._parent = os.getpid(), os.getppid()
        self._supervisor = (
            int(os.environ["LOWMEM_ROOT_PID"]) if "LOWMEM_SUPERVISED" in os.environ else None
        )
        self._group: Any = None
        self._ranks = 1

    def listen(self) -> None:
        """Turn signals into words from now on. SIGHUP stays off if nohup has switched it off."""
        for number in (*STOPS, signal.SIGUSR2):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._received)
        # a request that came before this rank could take it is taken now
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR2})
        self._raises = True

    def _received(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked worker of a data loader: its rank decides
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGUSR2:
            self._save = True
            return
        word = Word.INTERRUPT if number == signal.SIGINT else Word.STOP
        first_s = self._first_signals_s.setdefault(number, time.monotonic())
        # the kernel's signal that the launcher is gone (processes.die_with_launcher)
        if os.getppid() != self._parent:
            self._parent = os.getppid()
            # the supervisor, which could start this rank again, is gone too
            if self._supervisor not in (None, self._parent):
                os.kill(self._pid, signal.SIGKILL)
            word = Word.LAUNCHER_GONE
        # the kernel's too: it comes at the end of each of the launcher's threads, and only the last
        # changes this rank's parent
        elif not processes.is_alive(self._parent):
            word = Word.LAUNCHER_GONE
        elif self._supervisor is None and time.monotonic() - first_s > ECHO_S:
            os.write(2, b"stopping at once; the last checkpoint is kept\n")
            os._exit(word.exit_code)
        self._stop = max(self._stop, word)
        self._halt()

    def _halt(self) -> None:
        """Raise the stop, once: the clean-up is not interrupted again."""
        if self._raises and self._stop:
            self._raises = False
            raise Halted(self._stop)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Only note signals inside: ranks agree on them, or a swap of folders is finished first.

        Raises Halted at its end for a stop that the ranks have not agreed on."""
        self._raises = False
        yield
        if not self.agreed:
            self._raises = True
            self._halt()

    def is_undisturbed(self, seconds: float) -> bool:
        """Wait `seconds`; False at once if a stop comes: a launcher stops all ranks when a rank has
        ended."""
        self._raises = False
        until = time.monotonic() + seconds
        while not self._stop and time.monotonic() < until:
            time.sleep(0.05)
        return not self._stop

    def connect(self, timeout_s: float) -> None:
        """Connect the ranks, after the process group is made. Collective.

        Words are exchanged through host memory: on the device, a step would wait for the step
        before it."""
        # not at the top: signals are listened to before torch is loaded
        from torch import distributed

        if distributed.is_initialized():
            self._ranks = distributed.get_world_size()
        if self._ranks > 1 and distributed.get_backend() != "gloo":
            self._group = distributed.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s)
            )

    def agree(self) -> Word:
        """The greatest word of all ranks. A stop stays; a SAVE is returned once. Collective."""
        is_requested, self._save = self._save, False
        word = max(self._stop, self.conditions(), Word.SAVE if is_requested else Word.NONE)
        if self._ranks > 1:
            import torch

            shared = torch.tensor([int(word)])
            torch.distributed.all_reduce(
                shared, op=torch.distributed.ReduceOp.MAX, group=self._group
            )
            word = Word(shared.item())
        if word > Word.SAVE:
            self.agreed = word
        return word
