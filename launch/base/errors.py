"""What can be wrong, as the user reads it: one line on stderr and a documented exit code, never a
traceback."""

from __future__ import annotations

import signal


class LaunchError(Exception):
    """A mistake or a shortage the user can mend; the message says what was found, what was
    expected, what to do."""

    exit_code = 1


class ConfigError(LaunchError):
    """A recipe, an override or a flag is wrong."""

    exit_code = 2


class ResourceError(LaunchError):
    """A file, a folder, a device or memory that the run needs is not there."""

    exit_code = 3


class DoesNotFit(ResourceError):
    """No candidate fits the machine; the message names the nearest misses in GiB."""


class DataError(LaunchError):
    """A data file cannot be used as it is; the message names file and line or column."""

    exit_code = 4


class CheckpointError(LaunchError):
    """There are checkpoints, but none that this run may continue from."""

    exit_code = 5


class NonFinite(LaunchError):
    """A loss, a gradient or a weight is NaN or infinite, or the gradients stay far above all
    before."""

    exit_code = 8

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class LockHeld(LaunchError):
    """Another process is using the run folder."""

    exit_code = 9


class StorageError(LaunchError):
    """The disk refused a write."""

    exit_code = 10


class NetworkError(LaunchError):
    """Machines or ranks that cannot reach each other."""

    exit_code = 11


class Stopped(LaunchError):
    """A signal ended it: 75, or 130 where it was Ctrl-C."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Interrupted(BaseException):
    """A stop signal while nothing runs yet; no Exception, so that nobody takes it for an answer to
    what was tried."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} while no rank ran")
        self.exit_code = 130 if number == signal.SIGINT else 75
