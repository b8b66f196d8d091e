"""The lines of cron that lowmem has written: one for each job, marked with its name."""

import fcntl
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from launch.base import files, locks
from launch.base.errors import ConfigError, ResourceError
from launch.recipe.strict_yaml import show

REBOOT = "@reboot"
TIMES = re.compile(r"@(reboot|yearly|annually|monthly|weekly|daily|midnight|hourly)|\S+( \S+){4}")
_COMMAND_S = 30.0


def check(times: str) -> str:
    """Times as cron reads them, with single blanks. Raises ConfigError; crontab(1) checks them
    once more."""
    plain = " ".join(times.split())
    if not (plain.isascii() and plain.isprintable() and TIMES.fullmatch(plain)):
        raise ConfigError(
            f"submit cron {show(times)}: expected five fields in quotes, minute hour day month"
            ' weekday, such as "0 2 * * *", or @daily, @weekly, @reboot'
        )
    return plain


def add(workspace: Path, name: str, times: str, script: Path, output: Path) -> bool:
    """Let cron start a script at its times, with what it prints added to a file; in place of an
    earlier line of that name. False: the line was there already."""
    command = f"{shlex.quote(str(script))} >>{shlex.quote(str(output))} 2>&1"
    if "\n" in command:
        raise ConfigError(f"{script}: a path with a line break cannot be a line of cron")
    # of a command, cron takes % for the end of the line
    mark = _mark(workspace, name)
    line = os.fsencode(f"{times} {command.replace('%', chr(92) + '%')} ") + mark
    with _changing(f"the times {show(times)}") as lines:
        if line in lines:
            return False
        lines[:] = [*(each for each in lines if not each.endswith(mark)), line]
    return True


def remove(workspace: Path, name: str) -> None:
    """Remove the line of a job, if there is one."""
    if is_there(workspace, name):
        with _changing() as lines:
            lines[:] = [each for each in lines if not each.endswith(_mark(workspace, name))]


def is_there(workspace: Path, name: str) -> bool:
    """True if cron has a line of that job."""
    lines = _read() if _program() else []
    return any(line.endswith(_mark(workspace, name)) for line in lines)


def _mark(workspace: Path, name: str) -> bytes:
    """The end of a job's line: two workspaces may have jobs of one name."""
    return os.fsencode(f"# lowmem {shlex.quote(str(workspace))} {name}")


@contextmanager
def _changing(content: str = "the lines that stay") -> Iterator[list[bytes]]:
    """The lines of this user's crontab, written back if they were changed, one change at a time.
    `content` names what crontab may refuse."""
    if _program() is None:
        raise ResourceError(
            "cron: no crontab program; install it (Debian, Ubuntu: apt install cron)"
        )
    home = files.expanded("~")  # of the user, for every checkout
    with files.descriptor(home if home.is_dir() else "/", os.O_RDONLY) as lock:
        locks.flock(lock, fcntl.LOCK_EX, home)
        before = _read()
        lines = list(before)
        yield lines
        if lines != before:
            _write(lines, content)


def _program() -> str | None:
    return shutil.which("crontab")


def _read() -> list[bytes]:
    """The lines, of any bytes: only a line feed ends one."""
    done = _run("-l")
    if done.returncode:
        if b"no crontab for" in done.stderr:
            return []
        raise ResourceError(f"crontab -l: {_said(done)}")
    return done.stdout.removesuffix(b"\n").split(b"\n") if done.stdout else []


def _write(lines: list[bytes], content: str) -> None:
    """Raises ConfigError for a line that cron does not take."""
    if not lines:
        _run("-r")
        return
    done = _run("-", b"".join(line + b"\n" for line in lines))
    if done.returncode:
        raise ConfigError(f"crontab refuses {content}: {_said(done)}; man 5 crontab has the rules")


def _said(done: subprocess.CompletedProcess[bytes]) -> str:
    """The first line of an error of crontab."""
    return next(iter(done.stderr.decode(errors="replace").strip().splitlines()), "no reason given")


def _run(word: str, content: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(_program()), word],
        input=content,
        capture_output=True,
        check=False,
        timeout=_COMMAND_S,
    )
