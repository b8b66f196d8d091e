"""Errors as the user reads them: one line on stderr and a documented exit code, never a
traceback."""

import signal
import sys

EXIT_CODES = {
    0: "complete",
    1: "a fault of lowmem",
    2: "configuration",
    3: "resources",
    4: "data",
    5: "no usable checkpoint",
    6: "out of host RAM",
    7: "hang",
    8: "numbers that are not finite",
    9: "run in use",
    10: "storage",
    11: "network",
    12: "out of GPU memory",
    13: "the exported model differs",
    75: "stopped early, goes on",
    130: "stopped by Ctrl-C",
}
_WITHOUT_RANKS = ("merge", "download", "export", "evaluate")  # verbs that start none


class LaunchError(Exception):
    """A mistake or a shortage that the user can mend. The message says what was found, what was
    expected and what to do."""

    exit_code = 1

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix  # what to do, where a verdict says it in a line of its own


class ConfigError(LaunchError):
    """A recipe, an override or a flag is wrong."""

    exit_code = 2


class ResourceError(LaunchError):
    """A file, a folder, a device or memory that the run needs is missing or damaged."""

    exit_code = 3


class DoesNotFit(ResourceError):
    """No candidate fits the machine. The message names the nearest misses in GiB."""


class DataError(LaunchError):
    """A data file cannot be used as it is. The message names the file and the line or column."""

    exit_code = 4


class CheckpointError(LaunchError):
    """There are checkpoints, but this run may continue from none of them."""

    exit_code = 5


class NonFinite(LaunchError):
    """A loss, a gradient or a weight is NaN or infinite, or the gradients stay far above all
    earlier gradients."""

    exit_code = 8


class LockHeld(LaunchError):
    """Another process is using the run folder."""

    exit_code = 9


class StorageError(LaunchError):
    """The disk refused a write."""

    exit_code = 10


class NetworkError(LaunchError):
    """Machines or ranks cannot reach each other, or a download or an upload the hub."""

    exit_code = 11


class ExportError(LaunchError):
    """The exported folder is not the model that was trained."""

    exit_code = 13


class Stopped(LaunchError):
    """A signal ended the run. The exit code is 75, or 130 after Ctrl-C."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def stopped_by(number: int) -> str:
    """The line of a command that a signal has ended."""
    has_ranks = not (sys.argv[1:2] and sys.argv[1] in _WITHOUT_RANKS)
    stands = " while no rank ran; what is tokenised and saved stays" if has_ranks else ""
    return f"stopped by {signal.Signals(number).name}{stands}; run the same line again"


class Interrupted(BaseException):
    """A stop signal arrived before any rank ran. It is not an Exception, so that no handler of
    failed attempts catches it."""

    def __init__(self, number: int) -> None:
        super().__init__(stopped_by(number))
        self.exit_code = 130 if number == signal.SIGINT else 75
