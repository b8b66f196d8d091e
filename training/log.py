"""The log of a rank: `logger`, and where its lines go."""

import logging
import sys
from pathlib import Path

from transformers.utils import logging as transformers_logging

from launch.base.text import shown

logger = logging.getLogger("lowmem")


class _StandardOutput(logging.Handler):
    """Handler that prints. While there is a bar, standard output is its console."""

    def emit(self, record: logging.LogRecord) -> None:
        # a single write, because ranks share the terminal
        print(f"{self.format(record)}\n", end="", flush=True)


class _Shown(logging.Formatter):
    """Formatter of lines that may be shown in a log."""

    def format(self, record: logging.LogRecord) -> str:
        return shown(super().format(record))


def start_logging(files: list[Path], rank: int) -> None:
    """Start logging. Rank 0 logs to its standard output and to `files`. Other ranks only log
    warnings, to standard error."""
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)
    logger.propagate = False
    transformers_logging.disable_progress_bar()  # "Writing model shards" beside our bar
    plain = _Shown("%(asctime)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    handlers: list[logging.Handler] = [
        _StandardOutput() if rank == 0 else logging.StreamHandler(sys.stderr)
    ]
    for path in files if rank == 0 else []:
        path.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(path, encoding="utf-8"))
    for handler in handlers:
        handler.setFormatter(plain)
        logger.addHandler(handler)
