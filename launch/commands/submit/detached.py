"""A job that goes on without the terminal that started it: by systemd where it may outlive its
user's logins, else in a session of its own."""

import getpass
import shutil
import subprocess
import time
from collections.abc import Callable

from launch.base.errors import ResourceError
from launch.base.text import shown
from launch.commands.submit.job import JobDir
from launch.queue import leases
from launch.queue.leases import Lease
from launch.supervise.screen import Tail

COMMAND_S = 30.0
_FOLLOW_S = 120.0  # for its lease, or its end
POLL_S = 0.2
STOP_S = 300  # for a checkpoint, before systemd kills it


def start(job_dir: JobDir, say: Callable[[str], None]) -> None:
    """Start the job's script, and say what keeps it. Raises ResourceError."""
    if shutil.which("systemd-run") and _says("systemctl", "--user", "is-active", "default.target"):
        lingers = _says("loginctl", "show-user", getpass.getuser(), "--property=Linger", "--value")
        if lingers == "yes":
            _by_systemd(job_dir)
            say(f"systemd keeps it: systemctl --user status {_unit(job_dir)}")
            return
        say("systemd would end it with your last login, so it has a session of its own instead")
        if _says("loginctl", "show-session", "--property=KillUserProcesses", "--value") == "yes":
            say("this machine ends all processes at logout: loginctl enable-linger keeps them")
    with job_dir.output.open("ab") as output:
        subprocess.Popen(
            [str(job_dir.script)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def follow(job_dir: JobDir, say: Callable[[str], None]) -> Lease | None:
    """Show what the job prints until it has or waits for a lease; None: it has ended, or plans
    longer than _FOLLOW_S."""
    until_s, lines = time.monotonic() + _FOLLOW_S, Tail(job_dir.output)
    while True:
        status = job_dir.read_status()
        lease = _lease(status.pid) if status else None
        for line in lines.new_lines():
            say(shown(line))
        has_ended = status is not None and not job_dir.runs
        if lease or has_ended or time.monotonic() > until_s:
            return lease
        time.sleep(POLL_S)


def _lease(pid: int) -> Lease | None:
    live = leases.live(leases.folder())
    return next((lease for lease in live if lease.pid == pid), None)


def _by_systemd(job_dir: JobDir) -> None:
    argv = ["systemd-run", "--user", "--collect", "--quiet", f"--unit={_unit(job_dir)}"]
    # A kill for memory is planned around here; by default systemd would stop the unit. Before 243
    # systemd does not look at such kills.
    if _says("systemctl", "--user", "show", "--property=DefaultOOMPolicy", "--value"):
        argv.append("--property=OOMPolicy=continue")
    properties = (
        f"StandardOutput=append:{job_dir.output}",
        f"StandardError=append:{job_dir.output}",
        "KillMode=mixed",  # SIGTERM to the launcher, which passes it on
        f"TimeoutStopSec={STOP_S}",
    )
    argv += [f"--property={text.replace('%', '%%')}" for text in properties]
    done = subprocess.run(
        [*argv, str(job_dir.script)], capture_output=True, text=True, timeout=COMMAND_S
    )
    if done.returncode:
        raise ResourceError(f"systemd-run: {done.stderr.strip()}")


def _unit(job_dir: JobDir) -> str:
    return f"lowmem-{job_dir.root.name}"


def _says(*argv: str) -> str:
    """The text that a program prints; "" if it fails or is not there."""
    if shutil.which(argv[0]) is None:
        return ""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_S)
    return "" if done.returncode else done.stdout.strip()
