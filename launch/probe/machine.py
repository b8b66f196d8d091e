"""The resources of this machine that a run may use, each with its reason: host memory, CPUs,
/dev/shm and disk. GPUs are in gpus.py.
"""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from launch.base import files
from launch.base.errors import ConfigError, ResourceError
from launch.base.text import size

# Functions that build nouns import them: schema imports pydantic, 100 ms that oom_kills() avoids.
if TYPE_CHECKING:
    from launch.schema.machine import Machine

# v1 writes "no limit" as LONG_MAX rounded down to a page, which depends on the page size
UNLIMITED = 1 << 60
# sbatch(1): megabytes
_SLURM_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_OVERCOMMIT = "/proc/sys/vm/overcommit_memory"
_CAP_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
# Memory that cannot be dropped under pressure, which excludes page cache. Source: kernel docs,
# cgroup-v2.rst and cgroup-v1/memory.rst
_UNRECLAIMABLE = {
    1: ("total_rss", "total_shmem"),
    2: ("anon", "shmem", "slab_unreclaimable", "kernel_stack", "pagetables", "sock"),
}

_Cap = tuple[int, str]  # bytes, and their source


def machine(
    root: Path = Path("/"), env: Mapping[str, str] = os.environ, run_dir: Path = Path()
) -> Machine:
    """This machine. `root` holds proc, sys and dev, and the disk is that of `run_dir`."""
    from launch.probe import gpu_signs, gpus
    from launch.schema.machine import Machine

    limit = min(host_limits(root, env), key=_size)
    # Each plan counts the anonymous memory that this process has already
    own_bytes = _sizes(root, "/proc/self/status").get("RssAnon", 0) if root == Path("/") else 0
    host = (
        *limit,
        *host_available(root, env, own_bytes),
        *cpus(root, env),
        *_shm(root),
        *_disk(run_dir),
    )
    cards = gpus.find(env, gpu_signs.system_root(env) if root == Path("/") else root)
    # Machine's fields in order: each value, then its reason
    return Machine(
        *(os.uname().nodename, cards.gpus, cards.reason, *host, cards.obstacle, cards.cuda_driver),
        mappings_count=_mappings_count(root),
    )


def with_memory_of_now(before: Machine, run_dir: Path) -> Machine:
    """The same machine and cards, with the memory that is free now."""
    probed = machine(run_dir=run_dir)
    free_bytes = {(gpu.uuid, gpu.index): gpu.free_bytes for gpu in probed.gpus}
    gpus = tuple(
        replace(gpu, free_bytes=free_bytes.get((gpu.uuid, gpu.index), gpu.free_bytes))
        for gpu in before.gpus
    )
    return replace(
        before,
        gpus=gpus,
        host_available_bytes=probed.host_available_bytes,
        host_available_reason=probed.host_available_reason,
    )


def describe(machine: Machine) -> list[str]:
    """A line for each fact with its reason, as `python -m launch doctor` prints it."""
    return [
        f"machine: {machine.name}",
        *(
            f"GPU {gpu.index}: {gpu.name}, {size(gpu.free_bytes)} free of {size(gpu.total_bytes)},"
            f" {gpu.architecture or 'unknown architecture'}, driver {gpu.driver or 'unknown'}"
            f" ({gpu.reason})"
            for gpu in machine.gpus
        ),
        f"GPUs: {len(machine.gpus)} ({machine.gpus_reason})"
        + (f", the driver serves CUDA up to {machine.cuda_driver}" if machine.cuda_driver else ""),
        f"host memory limit: {size(machine.host_limit_bytes)} ({machine.host_limit_reason})",
        (
            f"host memory available: {size(machine.host_available_bytes)}"
            f" ({machine.host_available_reason})"
        ),
        f"CPUs: {machine.cpu_count} ({machine.cpu_reason})",
        f"/dev/shm: {size(machine.shm_bytes)} ({machine.shm_reason})",
        f"disk free: {size(machine.disk_free_bytes)} ({machine.disk_reason})",
    ]


# ---- host memory, CPUs, disk
# ---------------------------------------------------------------------------


def host_limits(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> list[_Cap]:
    """Every limit of this process's host memory: MemTotal, the cgroup chain, Slurm and the rlimits.
    The smallest limit applies."""
    caps = [(_meminfo(root)["MemTotal"], "MemTotal in /proc/meminfo")]
    caps += [(cap, f"{folder}/{name}") for cap, _, folder, name in _cgroup_caps(root)]
    caps += [*_slurm_caps(env), *_rlimit_caps()]
    return [(cap, f"{where} = {size(cap)}") for cap, where in caps]


def host_available(
    root: Path = Path("/"), env: Mapping[str, str] = os.environ, own_bytes: int = 0
) -> _Cap:
    """The bytes that a run can still use now, and the limit that applies. Page cache counts as
    free, and so do `own_bytes` of those in use."""
    memory = _meminfo(root)
    available = memory["MemAvailable"] + own_bytes
    free = [(available, f"MemAvailable in /proc/meminfo = {size(available)}")]
    for cap, version, folder, name in _cgroup_caps(root):
        use = _counters(root, f"{folder}/memory.stat")
        used = max(sum(use.get(key, 0) for key in _UNRECLAIMABLE[version]) - own_bytes, 0)
        use_text = (
            f"{size(used)} in use that cannot be reclaimed"
            if use
            else "nothing: its memory.stat cannot be read"
        )
        free.append((max(0, cap - used), f"{folder}/{name} = {size(cap)} less {use_text}"))
    free += [(cap, f"{of} = {size(cap)}") for cap, of in (*_slurm_caps(env), *_rlimit_caps())]
    if _read(root, _OVERCOMMIT) == "2":
        promised = max(memory["CommitLimit"] - memory["Committed_AS"], 0)
        free.append((promised, f"CommitLimit less Committed_AS = {size(promised)}"))
    return min(free, key=_size)


def largest_mapping(root: Path = Path("/")) -> _Cap | None:
    """The largest file that a process can map as its own; None: of any size. Source: kernel docs,
    overcommit-accounting.rst (mode 0 refuses one mapping above RAM and swap)."""
    if _read(root, _OVERCOMMIT) != "0":
        return None
    memory = _meminfo(root)
    most = memory["MemTotal"] + memory.get("SwapTotal", 0)
    return most, f"RAM and swap = {size(most)}, while vm.overcommit_memory = 0"


def check_mapping(folder: Path, file_bytes: int, root: Path = Path("/")) -> None:
    """Raise ResourceError if a folder's largest file of weights cannot be mapped."""
    most = largest_mapping(root)
    if most is not None and file_bytes > most[0]:
        raise ResourceError(
            f"{folder}: its largest file has {size(file_bytes)}, and none can be mapped that is"
            f" larger than {most[1]}; add swap, or allow it with `sysctl vm.overcommit_memory=1`"
        )


def _mappings_count(root: Path) -> str:
    """The limits that count mapped files as memory that was asked for; "": none."""
    limits = [where for _, where in _rlimit_caps()]
    if _read(root, _OVERCOMMIT) == "2":
        limits.append("vm.overcommit_memory = 2")
    return " and ".join(limits)


@dataclass(frozen=True)
class OomKills:
    """A counter of the kernel's kills for memory."""

    count: int | None  # None: none can be read
    is_of_machine: bool = False  # kills of all programs, not of a cgroup's alone


def oom_kills(root: Path = Path("/")) -> OomKills:
    """The oom_kill counter of the nearest cgroup that has such a counter, else that of the machine:
    in the root cgroup, and under WSL2. Version 2 counts descendants, version 1 does not."""
    for version, folder in _cgroups(root, "memory"):
        name = "memory.events" if version == 2 else "memory.oom_control"
        counters = _counters(root, f"{folder}/{name}")
        if "oom_kill" in counters:
            return OomKills(counters["oom_kill"])
    return OomKills(_counters(root, "proc/vmstat").get("oom_kill"), is_of_machine=True)


def cpus(root: Path = Path("/"), env: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """The number of CPUs that this process may use at once, and the limit that applies."""
    caps = [(len(os.sched_getaffinity(0)), "sched_getaffinity")]
    for version, folder in _cgroups(root, "cpu"):
        name = "cpu.max" if version == 2 else "cpu.cfs_quota_us"
        quota, *periods = (_read(root, f"{folder}/{name}") or "max").split()
        period = periods[0] if periods else _read(root, f"{folder}/cpu.cfs_period_us") or "100000"
        if quota.isdigit():  # neither "max" nor -1
            count = max(1, math.ceil(int(quota) / int(period)))
            caps.append((count, f"{folder}/{name} = {quota} of {period} us"))
    variables = ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE")
    caps += [(count, name) for name in variables if (count := _slurm_count(env, name))]
    return min(caps, key=_size)


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, str]]:
    """Yield (version, folder) of this process's own cgroup, then of each visible ancestor, in both
    versions if both are mounted.

    A container sees only a part of the hierarchy, which is mounted elsewhere. mountinfo names the
    part (its root field) and the mount point.
    """
    mounts: dict[int, list[tuple[PurePosixPath, PurePosixPath]]] = {1: [], 2: []}
    for line in _read(root, "/proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        kind, *options = after.split() or [""]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options[-1].split(",")):
            part, point = (PurePosixPath(_unescaped(text)) for text in before.split()[3:5])
            mounts[2 if kind == "cgroup2" else 1].append((part, point))
    for line in _read(root, "/proc/self/cgroup").splitlines():
        number, controllers, group = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        path = PurePosixPath(group)
        chains = [
            (point / path.relative_to(part), point)
            for part, point in mounts[version]
            if path.is_relative_to(part) and ".." not in path.parts
        ]
        # if our cgroup is not mounted here, the mount point is the nearest visible folder
        for folder, point in chains or [(point, point) for _, point in mounts[version][:1]]:
            yield from (
                (version, str(up)) for up in (folder, *folder.parents) if up.is_relative_to(point)
            )


def _cgroup_caps(root: Path) -> Iterator[tuple[int, int, str, str]]:
    """Yield (bytes, cgroup version, folder, file) for each memory limit on the chain."""
    for version, folder in _cgroups(root, "memory"):
        for name in _CAP_FILES[version]:
            text = _read(root, f"{folder}/{name}") or "max"
            if text.isdigit() and int(text) < UNLIMITED:
                yield int(text), version, folder, name


def _slurm_caps(env: Mapping[str, str]) -> Iterator[_Cap]:
    """Yield Slurm's memory limits for this node, which it may enforce by the sum of RSS without a
    cgroup. 0 is no limit."""
    if node := _slurm_bytes(env, "SLURM_MEM_PER_NODE"):
        yield node, "SLURM_MEM_PER_NODE"
    for share, count in (
        ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
        ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
    ):
        if cap := _slurm_bytes(env, share) * _slurm_count(env, count):
            yield cap, f"{share} x {count}"


def _slurm_bytes(env: Mapping[str, str], variable: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", env.get(variable, "0").strip().upper())
    if match is None:
        raise ConfigError(
            f'{variable}="{env[variable]}" is not a size; expected a number of MB, or one with K,'
            " M, G or T"
        )
    return int(match[1]) * _SLURM_UNITS[match[2]]


def _slurm_count(env: Mapping[str, str], variable: str) -> int:
    text = env.get(variable, "0").strip()
    if not text.isdigit():
        raise ConfigError(f'{variable}="{text}" is not a count; expected a number such as 8')
    return int(text)


def _rlimit_caps() -> list[_Cap]:
    soft = {
        name: resource.getrlimit(getattr(resource, name))[0]
        for name in ("RLIMIT_AS", "RLIMIT_DATA")
    }
    return [(cap, name) for name, cap in soft.items() if cap != resource.RLIM_INFINITY]


def _meminfo(root: Path) -> dict[str, int]:
    sizes = _sizes(root, "/proc/meminfo")
    for key in ("MemTotal", "MemAvailable"):
        if key not in sizes:
            raise ResourceError(
                f"/proc/meminfo has no {key}; host memory can be planned on Linux 3.14 or newer"
                " only"
            )
    return sizes


def _sizes(root: Path, path: str) -> dict[str, int]:
    """The bytes that a file names, in lines that end with kB."""
    lines = (line.split() for line in _read(root, path).splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in lines if line[-1:] == ["kB"]}


def _shm(root: Path) -> _Cap:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError as error:
        return 0, f"/dev/shm: {error.strerror}"
    return stat.f_blocks * stat.f_frsize, "size of /dev/shm"


def _disk(run_dir: Path) -> _Cap:
    folder = files.existing(run_dir.absolute())
    return files.free_bytes(folder), f"free to this user at {folder}"


def _read(root: Path, path: str) -> str:
    """The text of a file below root; "" where it cannot be read."""
    return files.system_text(root / path.lstrip("/"))


def _counters(root: Path, path: str) -> dict[str, int]:
    pairs = (line.split() for line in _read(root, path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs}


def _unescaped(text: str) -> str:
    # mountinfo writes a space as \040
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _size(cap: _Cap) -> int:
    return cap[0]
