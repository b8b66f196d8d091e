"""A real cron daemon with tables of its own, in a mount namespace: nothing of the machine's cron is
touched. Needs root and cron (Debian: cron).

    with cron.daemon() as cron:
        cron.run([...], environment)  # a program that sees its tables
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

# what cron takes for the first start after a boot is in /run
NAMESPACE = (
    "mount -t tmpfs none /var/spool/cron && mkdir -m 1730 /var/spool/cron/crontabs"
    " && mount -t tmpfs none /run && echo ready && exec sleep infinity"
)


@dataclass
class Cron:
    """A place with its own tables of cron."""

    holder: subprocess.Popen[str]
    daemons: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def argv(self, words: Sequence[str]) -> list[str]:
        return ["nsenter", "--mount", f"--target={self.holder.pid}", "--wdns=/", *words]

    def run(
        self, words: Sequence[str], environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a program there to its end."""
        return subprocess.run(
            self.argv(words), env=environment, capture_output=True, text=True, timeout=300
        )

    def boot(self) -> None:
        """Start the daemon; its first start runs what @reboot says."""
        self.daemons.append(subprocess.Popen(self.argv(["cron", "-f"]), start_new_session=True))


def missing() -> str:
    """Why there can be no cron here; empty where there can."""
    absent = [name for name in ("cron", "crontab", "nsenter") if shutil.which(name) is None]
    if absent:
        return f"no {', '.join(absent)}: apt-get install --no-install-recommends cron"
    return "" if os.geteuid() == 0 else "only root can give cron a namespace"


@contextmanager
def daemon() -> Iterator[Cron]:
    """A place for a cron that boot() starts; all that it has started ends with it."""
    argv = ["unshare", "--mount", "sh", "-c", NAMESPACE]
    holder = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    found = Cron(holder)
    try:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        yield found
    finally:
        for each in found.daemons:
            each.terminate()
            each.wait()
        holder.kill()
        holder.wait()
