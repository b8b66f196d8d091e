"""Linux namespaces of a line's own: mounts, processes, network; together a container."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import builders

# The root of a container: this machine's folders but /tmp, and what is mounted over them. PID 1 of
# it is the line itself. Its user is a number without a name, as docker's --user gives it, and may
# not write into the root.
CONTAINER = """
set -euo pipefail
hostname {name}
mount -t tmpfs none {root}
for entry in /*; do
    if [[ -L $entry ]]; then cp -a "$entry" {root}/
    elif [[ -d $entry && $entry != /tmp && $entry != /proc ]]; then
        mkdir {root}"$entry"; mount --rbind "$entry" {root}"$entry"
    fi
done
mkdir -m 1777 {root}/tmp
mkdir {root}/proc; mount -t proc proc {root}/proc
mount -t tmpfs none {root}/run; mkdir {root}/run/lock  # no leases of this machine
{mounts}
chmod 555 {root}
exec unshare --user --map-user={user} --map-group={group} --root={root} --wd={workdir} \
    env -i {variables} {line}
"""


def bash(
    line: str, *flags: str, workspace: Path, within_s: float = 120, **extra: str
) -> subprocess.CompletedProcess[str]:
    """`bash -c LINE` as root of new namespaces (flags of unshare), in the environment of a
    launch."""
    return subprocess.run(
        [*_unshare(*flags), "bash", "-c", line],
        env=builders.environment(workspace, **extra),
        capture_output=True,
        text=True,
        timeout=within_s,
    )


@dataclass
class Container:
    """A container as docker makes one, or a pod's: what its flags say."""

    argv: tuple[str, ...]
    user: int = 0
    group: int = 0
    workdir: str = "/"
    shm_size: str = "64m"  # docker's default
    variables: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, Path] = field(default_factory=dict)  # place there: folder or file here
    tmpfs: dict[str, str] = field(default_factory=dict)  # place there: options
    memory: str = ""
    stop_s: float = 10.0  # docker's default

    def popen(
        self, root: Path, name: str = "box", cgroup: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start it in an empty folder; `cgroup` is one of this test, for the limit of memory."""
        root.mkdir(exist_ok=True)
        variables = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": "/", **self.variables}
        script = CONTAINER.format(
            **{"name": name, "root": shlex.quote(str(root)), "user": self.user},
            **{"group": self.group, "workdir": self.workdir, "line": shlex.join(self.argv)},
            mounts="\n".join(self._mounts(shlex.quote(str(root)))),
            variables=shlex.join(f"{key}={value}" for key, value in variables.items()),
        )
        if self.memory and cgroup:
            (cgroup / "memory.limit_in_bytes").write_text(self.memory)
        enter = f"echo $$ >{cgroup}/cgroup.procs; " if cgroup else ""
        unshare = _unshare(*("--mount", "--pid", "--ipc", "--uts", "--fork", "--kill-child"))
        argv = ["bash", "-c", f'{enter}exec "$@"', "bash", *unshare, "bash", "-c", script]
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, root: Path, **options: Any) -> tuple[int, str]:
        """Its exit code, and what it said."""
        child = self.popen(root, **options)
        try:
            said, _ = child.communicate(timeout=200)
        finally:
            child.kill()
        return child.returncode, said

    def _mounts(self, root: str) -> list[str]:
        shm = f"mount -t tmpfs -o size={self.shm_size},mode=1777 none {root}/dev/shm"
        lines = [shm]
        for place, options in self.tmpfs.items():
            # docker's own options stand before those that are given
            options = f"noexec,nosuid,nodev,mode=1777,{options}".rstrip(",")
            lines.append(f"mount -t tmpfs -o {options} none {root}{place}")
        for place, source in self.volumes.items():
            there, here = f"{root}{place}", shlex.quote(str(source))
            above = there if source.is_dir() else f"{root}{Path(place).parent}; touch {there}"
            lines.append(f"mkdir -p {above}; mount --bind {here} {there}")
        return lines


def stop(child: subprocess.Popen[str], within_s: float) -> tuple[int, str]:
    """`docker stop`: SIGTERM to the first process of a container, SIGKILL later."""
    with suppress(psutil.NoSuchProcess):  # it has just ended
        (first,) = psutil.Process(child.pid).children()
        first.terminate()
    try:
        said, _ = child.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
    return child.returncode, said


def copy_of_checkout(folder: Path, python: Mapping[str, str]) -> Path:
    """The files with which a container trains, and the environment of tests as its .venv."""
    names = ("launch", "training", "configs", "config", "scripts", "train_low_mem.py")
    folder.mkdir()
    for name in (*names, "pyproject.toml", "requirements.txt", "train_sft_custom.sh"):
        subprocess.run(["cp", "-r", builders.CODE / name, folder], check=True)
    for name, target in python.items():
        (folder / name).symlink_to(target)
    return folder


def _unshare(*flags: str) -> list[str]:
    argv = ["unshare", "--user", "--map-root-user", *flags]
    if subprocess.run([*argv, "true"], capture_output=True, timeout=60).returncode:
        # a kernel without user namespaces; CI has them
        pytest.skip(f"this machine lets nobody make namespaces: {' '.join(argv)}")
    return argv
