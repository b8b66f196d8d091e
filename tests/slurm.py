"""A real Slurm of one node, for as long as tests run: munged, slurmctld, slurmd on ports and in a
folder of their own.

    with slurm.node(folder) as node:
        job = node.submit(environment, "--time=2", "script.sbatch", "python", "train.py")
        node.until(job, "COMPLETED", within_s=60)

It needs no systemd, no cgroup and no root. Jobs of the partition `urgent` preempt those of `main`,
which go back into the queue, and those of `lent`, which get their --signal two minutes before. Its
two GPUs are no GPUs. The partition `both` has a second node, which is this machine too.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from launch.base import processes

DAEMONS = ("munged", "slurmctld", "slurmd")
SYSTEM_PATH = "/usr/sbin:/sbin"  # where Debian puts them, and where a user's PATH may not lead
START_S = 30.0
STOP_S = 60.0  # KillWait, and what a save takes
# the least that Slurm takes; a requeued job waits for so long (120 s where nothing is said)
CREDENTIAL_S = 5
CONFIGURATION = """
ClusterName=lowmem-test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_s}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=sched_interval=2,bf_interval=2
SlurmctldParameters=preempt_send_user_signal
ReturnToService=1
KillWait=30
GresTypes=gpu
NodeName=node NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 RealMemory=100000 Gres=gpu:2
NodeName=other NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=100000
PartitionName=main Nodes=node Default=YES MaxTime=UNLIMITED PriorityTier=1
PartitionName=lent Nodes=node MaxTime=UNLIMITED PriorityTier=1 GraceTime=120
PartitionName=urgent Nodes=node MaxTime=UNLIMITED PriorityTier=9
PartitionName=both Nodes=node,other MaxTime=UNLIMITED PriorityTier=1
"""
NODES = ("node", "other")
GPUS = "NodeName=node Name=gpu File=/dev/zero\nNodeName=node Name=gpu File=/dev/full\n"


@dataclass(frozen=True)
class Node:
    """A running Slurm."""

    configuration: Path

    def ask(self, *words: str, environment: Mapping[str, str] = os.environ) -> str:
        """What one of Slurm's commands says."""
        variables = {**environment, "SLURM_CONF": str(self.configuration)}
        done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def submit(self, environment: Mapping[str, str], *words: str) -> str:
        """The number of the new job."""
        return self.ask("sbatch", "--parsable", *words, environment=environment).strip()

    def job(self, job: str) -> dict[str, str]:
        """What Slurm knows of a job, by its own names: JobState, Reason, Restarts, ExitCode."""
        said = self.ask("scontrol", "show", "job", "--oneliner", job)
        return dict(re.findall(r"(\S+?)=(\S*)", said))

    def until(self, job: str, *states: str, within_s: float) -> dict[str, str]:
        """The job once it is in one of the states."""
        found: dict[str, str] = {}

        def there() -> bool:
            found.update(self.job(job))
            return found["JobState"] in states

        assert waited(there, within_s), f"never {' or '.join(states)}: {found}"
        return found

    def cancel_all(self) -> None:
        """Until the queue is empty."""
        self.ask("scancel", "--user", pwd.getpwuid(os.getuid()).pw_name)
        assert waited(lambda: not self.ask("squeue", "--noheader"), STOP_S), self.ask("squeue")


def missing() -> str:
    """Why there is no Slurm here; empty where there can be one."""
    absent = [name for name in (*DAEMONS, "sbatch") if _where(name) is None]
    if not absent:
        return ""
    return f"no {', '.join(absent)}: apt-get install --no-install-recommends slurm-wlm munge"


def waited(true: Callable[[], object], within_s: float) -> bool:
    """Whether it came true in time."""
    deadline = time.monotonic() + within_s
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@contextmanager
def node(folder: Path) -> Iterator[Node]:
    """Start it; at the end its jobs are cancelled, and every process that it has started is
    gone."""
    (folder / "state").mkdir(parents=True)
    for name in NODES:
        (folder / f"spool-{name}").mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    text = CONFIGURATION.format(
        host=socket.gethostname().split(".")[0],
        ports=_free_ports(3),
        folder=folder,
        user=pwd.getpwuid(os.getuid()).pw_name,
        credential_s=CREDENTIAL_S,
    )
    configuration = folder / "slurm.conf"
    configuration.write_text(text, encoding="utf-8")
    (folder / "gres.conf").write_text(GPUS, encoding="utf-8")
    found = Node(configuration)
    files = {f"--{name}-file": f"{folder}/munged.{name}" for name in ("pid", "log", "seed")}
    files |= {"--key-file": str(key), "--socket": f"{folder}/munge.socket"}
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        # --force: the folder of a test is closed to other users
        words = ["--foreground", "--force", *(f"{name}={path}" for name, path in files.items())]
        daemons.append(_start(folder, "munged", *words))
        assert waited((folder / "munge.socket").exists, START_S), _said(folder)
        daemons.append(_start(folder, "slurmctld", "-D", "-f", str(configuration)))
        for name in NODES:
            daemons.append(_start(folder, "slurmd", "-D", "-N", name, "-f", str(configuration)))
        assert waited(lambda: _is_idle(found), START_S), _said(folder)
        try:
            yield found
        finally:
            found.cancel_all()
    finally:
        _end(folder, daemons)


def _is_idle(node: Node) -> bool:
    words = ("sinfo", "--noheader", "--partition=both", "--format=%T")
    variables = {**os.environ, "SLURM_CONF": str(node.configuration)}
    return (
        subprocess.run(words, env=variables, capture_output=True, text=True).stdout.strip()
        == "idle"
    )


def _start(folder: Path, name: str, *words: str) -> subprocess.Popen[bytes]:
    """A daemon; it works in the folder."""
    variables = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    with (folder / f"{name}.out").open("wb") as out:
        argv = [str(_where(name)), *words]
        return subprocess.Popen(
            argv,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=folder,
            start_new_session=True,
        )


def _end(folder: Path, daemons: list[subprocess.Popen[bytes]]) -> None:
    """SIGTERM to every process of this Slurm, then SIGKILL."""
    for process in _ours(folder):
        processes.send(process.pid, signal.SIGTERM)
    if not waited(lambda: not _ours(folder), STOP_S):
        for process in _ours(folder):
            processes.send(process.pid, signal.SIGKILL)
    for daemon in daemons:
        daemon.wait(timeout=STOP_S)
    assert waited(lambda: not _ours(folder), STOP_S), f"outlive SIGKILL: {_ours(folder)}"


def _ours(folder: Path) -> list[psutil.Process]:
    """The daemons, their children that watch over a job (they have overwritten their environment),
    and the jobs."""
    configuration = str(folder / "slurm.conf")
    found = []
    for process in psutil.process_iter():
        try:
            is_ours = process.environ().get("SLURM_CONF") == configuration or process.cwd() == str(
                folder
            )
            if is_ours and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone meanwhile, or another user's
    return found


def _where(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:{SYSTEM_PATH}")


def _free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in sockets]


def _said(folder: Path) -> str:
    return "\n".join(
        f"{path.name}:\n{path.read_text(errors='replace')}" for path in sorted(folder.glob("*.out"))
    )
