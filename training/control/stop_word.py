"""The control word: what the outside wants of a run, obeyed by all ranks at the same point of it.

A signal that reaches a rank leaves a mark. At the end of each optimizer step, and between batches
of an evaluation, the ranks agree on the greatest word that any of them has: one signal to one rank
stops all of them after the same step. Where there is nothing to save yet (loading, tokenising) or
nothing to lose (writing the model) the signal ends the rank at once.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from enum import IntEnum
from types import FrameType
from typing import Any

# a launcher passes on what its ranks have been sent as well; later, the same signal again is
# impatience
ECHO_S = 1.0
# SIGUSR1: Slurm's early warning
STOPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT)


class Word(IntEnum):
    """Ordered: the greatest one that any rank has is obeyed by all."""

    NONE = 0
    SAVE = 1  # commit a checkpoint and go on; all greater words: commit one and stop
    TIME_UP = 2
    DISK_LOW = 3
    STOP = 4
    INTERRUPT = 5  # Ctrl-C

    @property
    def exit_code(self) -> int:
        return {Word.DISK_LOW: 10, Word.INTERRUPT: 130}.get(self, 75)

    @property
    def cause(self) -> str:
        return {
            Word.TIME_UP: "the time is nearly up",
            Word.DISK_LOW: "the disk has room for one more checkpoint only",
            Word.INTERRUPT: "SIGINT",
        }.get(self, "a stop signal")


class Halted(BaseException):
    """This rank ends now because it was told to; no Exception, which a library might catch."""

    def __init__(self, word: Word) -> None:
        is_told = word in (Word.STOP, Word.INTERRUPT)
        super().__init__(f"stopped {'by' if is_told else 'because'} {word.cause}")
        self.word = word


class Control:
    """What this rank was told, and what all ranks have agreed on."""

    def __init__(self) -> None:
        self.agreed = Word.NONE
        self.watch: Callable[[], Word] = lambda: Word.NONE  # rank 0's own reasons (obey.py)
        self._stop, self._save, self._raises = Word.NONE, False, False
        self._heard: dict[int, float] = {}  # signal -> when it came first
        self._pid, self._parent = os.getpid(), os.getppid()
        self._supervisor = (
            int(os.environ["LOWMEM_ROOT_PID"]) if "LOWMEM_SUPERVISED" in os.environ else None
        )
        self._group: Any = None
        self._ranks = 1

    def listen(self) -> None:
        """From now on signals are words. SIGHUP that nohup has switched off stays off."""
        for number in (*STOPS, signal.SIGUSR2):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._received)
        self._raises = True

    def _received(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked worker of a data loader: its rank decides
            if number == signal.SIGTERM:
                os._exit(128 + number)
            return
        if number == signal.SIGUSR2:
            self._save = True
            return
        first = self._heard.setdefault(number, time.monotonic())
        # the kernel's word that the launcher is gone (rundir.die_with_launcher)
        if os.getppid() != self._parent:
            self._parent = os.getppid()
            # nor is anybody left who could start us again
            if self._supervisor not in (None, self._parent):
                os.kill(self._pid, signal.SIGKILL)
        elif self._supervisor is None and time.monotonic() - first > ECHO_S:
            os.write(2, b"stopping at once; the last checkpoint is kept\n")
            os._exit(Word.INTERRUPT.exit_code if number == signal.SIGINT else Word.STOP.exit_code)
        self._stop = max(self._stop, Word.INTERRUPT if number == signal.SIGINT else Word.STOP)
        if self._raises:
            self._raises = False  # what cleans up now is not interrupted again
            raise Halted(self._stop)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, a signal only leaves its mark: ranks agree on it, or a swap of folders is
        finished first.

        Raises Halted behind it, where one came that the ranks have not agreed on."""
        self._raises = False
        yield
        if self.agreed:
            return
        self._raises = True
        if self._stop:
            self._raises = False
            raise Halted(self._stop)

    def is_left_alone(self, seconds: float) -> bool:
        """Whether no stop comes within `seconds`, which this waits: a launcher stops all ranks when
        one has ended."""
        self._raises = False
        until = time.monotonic() + seconds
        while not self._stop and time.monotonic() < until:
            time.sleep(0.05)
        return not self._stop

    def connect(self, timeout_s: float) -> None:
        """Once the process group is there. Collective.

        Words go through host memory: on the device a step would wait until the one before it is
        computed."""
        # not at the top: signals are listened to before torch is loaded
        from torch import distributed

        if not distributed.is_initialized():
            return
        self._ranks = distributed.get_world_size()
        if self._ranks > 1 and distributed.get_backend() != "gloo":
            self._group = distributed.new_group(
                backend="gloo", timeout=timedelta(seconds=timeout_s)
            )

    def agree(self) -> Word:
        """The greatest word of all ranks; a stop stays, a SAVE is answered once. Collective."""
        asked, self._save = self._save, False
        word = max(self._stop, self.watch(), Word.SAVE if asked else Word.NONE)
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
