"""What this machine has and what a run may use of it: GPUs, host memory, CPUs, /dev/shm, disk, a reason beside each."""

from __future__ import annotations

import math
import os
import re
import resource
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from launch.errors import ConfigError, ResourceError

if TYPE_CHECKING:  # at run time where a noun is built: schema brings pydantic, 100 ms that oom_kills() need not pay
    from launch.schema import Gpu, Machine

GIB = 1 << 30
UNLIMITED = 1 << 60  # v1 writes "no limit" as LONG_MAX rounded down to a page, which depends on the page size
MIN_VRAM_BYTES = 2 * GIB  # below it: the graphics of a Ryzen or an APU, which rocm-smi lists beside the real card
ROCM_SMI_TIMEOUT_S = 5.0
SLURM_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}  # sbatch(1): megabytes
CAP_FILES = {1: ("memory.limit_in_bytes",), 2: ("memory.max", "memory.high")}
# What cannot be dropped under pressure, so not page cache. Source: kernel docs, cgroup-v2.rst and cgroup-v1/memory.rst
UNRECLAIMABLE = {
    1: ("total_rss", "total_shmem"),
    2: ("anon", "shmem", "slab_unreclaimable", "kernel_stack", "pagetables", "sock"),
}

Cap = tuple[int, str]  # bytes, where they come from
Listed = list[tuple[str, "Gpu"]]  # (uuid, or "" when unknown; GPU) in the vendor's order


def machine(root: Path = Path("/"), env: Mapping[str, str] | None = None, run_dir: Path = Path()) -> Machine:
    """This machine. `root` holds proc, sys and dev; `env` defaults to os.environ; the disk is that of `run_dir`."""
    from launch.schema import Machine

    env = os.environ if env is None else env
    limit = min(host_limits(root, env), key=_size)
    host = (*limit, *host_available(root, env), *cpus(root, env), *_shm(root), *_disk(run_dir))
    return Machine(os.uname().nodename, *gpus(env), *host)  # in its fields' order: each value, then its reason


def describe(machine: Machine) -> list[str]:
    """One line per fact with its reason, as `python -m launch doctor` prints it."""
    return [
        f"machine: {machine.name}",
        *(
            f"GPU {gpu.index}: {gpu.name}, {_gib(gpu.free_bytes)} free of {_gib(gpu.total_bytes)}, "
            f"{gpu.architecture or 'unknown architecture'}, driver {gpu.driver or 'unknown'} ({gpu.reason})"
            for gpu in machine.gpus
        ),
        f"GPUs: {len(machine.gpus)} ({machine.gpus_reason})",
        f"host memory limit: {_gib(machine.host_limit_bytes)} ({machine.host_limit_reason})",
        f"host memory available: {_gib(machine.host_available_bytes)} ({machine.host_available_reason})",
        f"CPUs: {machine.cpu_count} ({machine.cpu_reason})",
        f"/dev/shm: {_gib(machine.shm_bytes)} ({machine.shm_reason})",
        f"disk free: {_gib(machine.disk_free_bytes)} ({machine.disk_reason})",
    ]


# ---- host memory, CPUs, disk ----------------------------------------------------------------------------------------


def host_limits(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> list[Cap]:
    """Every cap on this process's host memory: MemTotal, the cgroup chain, Slurm, the rlimits. The smallest binds."""
    caps = [(_meminfo(root)["MemTotal"], "MemTotal in /proc/meminfo")]
    caps += [(cap, f"{folder}/{name}") for cap, _, folder, name in _cgroup_caps(root)]
    caps += [*_slurm_caps(os.environ if env is None else env), *_rlimit_caps()]
    return [(cap, f"{where} = {_gib(cap)}") for cap, where in caps]


def host_available(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> Cap:
    """What a run can still use now, page cache counting as free, and what binds it."""
    available = _meminfo(root)["MemAvailable"]
    free = [(available, f"MemAvailable in /proc/meminfo = {_gib(available)}")]
    for cap, version, folder, name in _cgroup_caps(root):
        use = _counters(root, f"{folder}/memory.stat")
        used = sum(use.get(key, 0) for key in UNRECLAIMABLE[version])
        said = f"{_gib(used)} in use that cannot be reclaimed" if use else "nothing: its memory.stat cannot be read"
        free.append((max(0, cap - used), f"{folder}/{name} = {_gib(cap)} less {said}"))
    caps = [*_slurm_caps(os.environ if env is None else env), *_rlimit_caps()]
    free += [(cap, f"{where} = {_gib(cap)}") for cap, where in caps]
    return min(free, key=_size)


def oom_kills(root: Path = Path("/")) -> int:
    """The oom_kill counter of the nearest cgroup that has one, 0 without any. v2 counts descendants, v1 does not."""
    for version, folder in _cgroups(root, "memory"):
        counters = _counters(root, f"{folder}/{'memory.events' if version == 2 else 'memory.oom_control'}")
        if "oom_kill" in counters:
            return counters["oom_kill"]
    return 0


def cpus(root: Path = Path("/"), env: Mapping[str, str] | None = None) -> tuple[int, str]:
    """How many CPUs this process may use at once, and what binds it."""
    env = os.environ if env is None else env
    caps = [(len(os.sched_getaffinity(0)), "sched_getaffinity")]
    for version, folder in _cgroups(root, "cpu"):
        name = "cpu.max" if version == 2 else "cpu.cfs_quota_us"
        quota, *rest = (_read(root, f"{folder}/{name}") or "max").split()
        period = rest[0] if rest else _read(root, f"{folder}/cpu.cfs_period_us") or "100000"
        if quota.isdigit():  # neither "max" nor -1
            caps.append((max(1, math.ceil(int(quota) / int(period))), f"{folder}/{name} = {quota} of {period} us"))
    for variable in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if count := _slurm_count(env, variable):
            caps.append((count, variable))
    return min(caps, key=_size)


def _cgroups(root: Path, controller: str) -> list[tuple[int, str]]:
    """(version, folder) of this process's own cgroup, then of each ancestor that can be seen; both versions if hybrid.

    A container sees only a part of the tree, mounted elsewhere: mountinfo says which part (its root field) and where.
    """
    mounts: dict[int, list[tuple[PurePosixPath, PurePosixPath]]] = {1: [], 2: []}
    for line in (_read(root, "/proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        kind, *options = after.split() or [""]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options[-1].split(",")):
            part, point = (PurePosixPath(_unescaped(text)) for text in before.split()[3:5])
            mounts[2 if kind == "cgroup2" else 1].append((part, point))
    found = []
    for line in (_read(root, "/proc/self/cgroup") or "").splitlines():
        number, controllers, own = line.split(":", 2)
        version = 2 if number == "0" and not controllers else 1
        if version == 1 and controller not in controllers.split(","):
            continue
        path = PurePosixPath(own)
        inside = [mount for mount in mounts[version] if path.is_relative_to(mount[0]) and ".." not in path.parts]
        if inside:
            chains = [(point / path.relative_to(part), point) for part, point in inside]
        else:  # our cgroup lies outside what is mounted here: its mount point is the nearest folder there is
            chains = [(point, point) for _, point in mounts[version][:1]]
        for folder, point in chains:
            found += [(version, str(up)) for up in (folder, *folder.parents) if up.is_relative_to(point)]
    return found


def _cgroup_caps(root: Path) -> Iterator[tuple[int, int, str, str]]:
    """(bytes, cgroup version, folder, file) of each memory limit on the chain."""
    for version, folder in _cgroups(root, "memory"):
        for name in CAP_FILES[version]:
            text = _read(root, f"{folder}/{name}") or "max"
            if text.isdigit() and int(text) < UNLIMITED:
                yield int(text), version, folder, name


def _slurm_caps(env: Mapping[str, str]) -> Iterator[Cap]:
    """Slurm's memory limits for this node; it may enforce them by summing RSS, without a cgroup. 0 is no limit."""
    if node := _slurm_bytes(env, "SLURM_MEM_PER_NODE"):
        yield node, "SLURM_MEM_PER_NODE"
    for size, count in (("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"), ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE")):
        if cap := _slurm_bytes(env, size) * _slurm_count(env, count):
            yield cap, f"{size} x {count}"


def _slurm_bytes(env: Mapping[str, str], variable: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", env.get(variable, "0").strip().upper())
    if match is None:
        raise ConfigError(
            f'{variable}="{env[variable]}" is not a size; expected a number of MB, or one with K, M, G or T'
        )
    return int(match[1]) * SLURM_UNITS[match[2]]


def _slurm_count(env: Mapping[str, str], variable: str) -> int:
    text = env.get(variable, "0").strip()
    if not text.isdigit():
        raise ConfigError(f'{variable}="{text}" is not a count; expected a number such as 8')
    return int(text)


def _rlimit_caps() -> list[Cap]:
    soft = {name: resource.getrlimit(getattr(resource, name))[0] for name in ("RLIMIT_AS", "RLIMIT_DATA")}
    return [(cap, name) for name, cap in soft.items() if cap != resource.RLIM_INFINITY]


def _meminfo(root: Path) -> dict[str, int]:
    lines = (line.split() for line in (_read(root, "/proc/meminfo") or "").splitlines())
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    for key in ("MemTotal", "MemAvailable"):
        if key not in sizes:
            raise ResourceError(f"/proc/meminfo has no {key}; host memory can be planned on Linux 3.14 or newer only")
    return sizes


def _shm(root: Path) -> Cap:
    try:
        stat = os.statvfs(root / "dev/shm")
    except OSError as error:
        return 0, f"/dev/shm: {error.strerror}"
    return stat.f_blocks * stat.f_frsize, "size of /dev/shm"


def _disk(run_dir: Path) -> Cap:
    folder = next(path for path in (run_dir.absolute(), *run_dir.absolute().parents) if path.exists())
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize, f"free to this user at {folder}"


def _read(root: Path, path: str) -> str | None:
    """A file below root, None where it cannot be read: kernels and containers leave out most of them."""
    try:
        return (root / path.lstrip("/")).read_text(errors="surrogateescape").strip()
    except OSError:
        return None


def _counters(root: Path, path: str) -> dict[str, int]:
    pairs = (line.split() for line in (_read(root, path) or "").splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs}


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)  # mountinfo writes a space as \040


def _size(cap: Cap) -> int:
    return cap[0]


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


# ---- GPUs -----------------------------------------------------------------------------------------------------------


def gpus(env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs a child with this environment can use, in the order it will number them, and why these."""
    listed, reason = _nvidia()
    variables = ["CUDA_VISIBLE_DEVICES"]
    if not listed:
        listed, amd_reason = _amd(env)
        reason = amd_reason if listed else f"{reason}; {amd_reason}"
        # ROCR's list is numbered anew by HIP, which reads CUDA's variable where its own is not set. Source: ROCm docs
        variables = ["ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"]
        if "HIP_VISIBLE_DEVICES" not in env:
            variables[1] = "CUDA_VISIBLE_DEVICES"
    reasons = [reason]
    if (
        len({gpu.name for _, gpu in listed if gpu.vendor == "nvidia"}) > 1
        and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID"
    ):
        reasons.append("they differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA numbers the fastest first")
    for variable in variables:
        if variable in env:
            listed, said = visible(listed, env[variable])
            reasons.append(f'{variable}="{env[variable]}" {said}')
    small = [gpu for _, gpu in listed if gpu.total_bytes < MIN_VRAM_BYTES]
    reasons += [f"GPU {gpu.index} ({gpu.name}, {_gib(gpu.total_bytes)}) is too small to train on" for gpu in small]
    return tuple(gpu for _, gpu in listed if gpu not in small), "; ".join(reasons)


def visible(listed: Listed, value: str) -> tuple[Listed, str]:
    """What CUDA_VISIBLE_DEVICES or its AMD kin leaves, in its order: indices, or UUIDs which may be abbreviated.

    The list ends at the first entry that is no GPU. Source: CUDA C++ Programming Guide, CUDA environment variables.
    """
    chosen: Listed = []
    for entry in (text.strip() for text in value.split(",")):
        if entry.isdigit():
            matches = listed[int(entry) : int(entry) + 1]
        else:
            matches = [pair for pair in listed if entry and pair[0].startswith(entry)]
        if len(matches) != 1 or matches[0] in chosen:
            ends = f", the list ends at {entry}: no such GPU, or named before" if entry else ""
            return chosen, f"leaves {len(chosen)} of {len(listed)}{ends}"
        chosen += matches
    return chosen, f"leaves {len(chosen)} of {len(listed)}"


def _nvidia() -> tuple[Listed, str]:
    try:
        import pynvml
    except ImportError:
        return [], "no look for NVIDIA GPUs: nvidia-ml-py is not installed"
    from launch.schema import Gpu

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # no driver, or one that does not fit its library
        return [], f"NVML: {error}"
    listed: Listed = []
    problems = []
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
            except pynvml.NVMLError as error:  # fallen off the bus, or not ours under Slurm: the others still work
                problems.append(f"GPU {index}: {error}")
                continue
            sizes, capability = (int(memory.total), int(memory.free)), f"{major}.{minor}"
            listed.append((uuid, Gpu(index, name, "nvidia", *sizes, capability, driver, f"NVML device {index}")))
    except pynvml.NVMLError as error:
        problems.append(str(error))
    finally:
        pynvml.nvmlShutdown()
    return listed, "; ".join([f"NVML lists {len(listed)}", *problems])


def _amd(env: Mapping[str, str]) -> tuple[Listed, str]:
    try:
        import amdsmi  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return rocm_smi(env)
    except (ImportError, OSError, KeyError, AttributeError) as error:  # what its import raises without libamd_smi.so
        listed, reason = rocm_smi(env)
        return listed, f"amdsmi: {error!r}; {reason}"
    try:
        amdsmi.amdsmi_init()
        try:
            listed = [_amdsmi_gpu(amdsmi, *pair) for pair in enumerate(amdsmi.amdsmi_get_processor_handles())]
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException as error:
        listed, reason = rocm_smi(env)
        return listed, f"amdsmi: {error}; {reason}"
    return listed, f"amdsmi lists {len(listed)}"


def _amdsmi_gpu(amdsmi: Any, index: int, handle: object) -> tuple[str, Gpu]:
    from launch.schema import Gpu

    asic = amdsmi.amdsmi_get_gpu_asic_info(handle)
    vram = amdsmi.amdsmi_get_gpu_vram_usage(handle)  # MiB
    total_bytes, used_bytes = int(vram["vram_total"]) << 20, int(vram["vram_used"]) << 20
    driver = str(amdsmi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
    name, architecture = str(asic["market_name"]), str(asic.get("target_graphics_version", ""))
    sizes = total_bytes, total_bytes - used_bytes
    return _amd_uuid(str(asic["asic_serial"])), Gpu(index, name, "amd", *sizes, architecture, driver, f"amdsmi {index}")


def rocm_smi(env: Mapping[str, str], timeout_s: float = ROCM_SMI_TIMEOUT_S) -> tuple[Listed, str]:
    """What the rocm-smi on env's PATH lists; without it, or when it hangs or prints nonsense, nothing and why."""
    import contextlib
    import shutil
    import subprocess

    program = shutil.which("rocm-smi", path=env.get("PATH", ""))
    if program is None:
        return [], "no rocm-smi on PATH"
    asked = ["--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--showuniqueid", "--json"]
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    try:
        child = subprocess.Popen([program, *asked], env=dict(env), text=True, errors="replace", **pipes)
    except OSError as error:
        return [], f"{program}: {error.strerror}"
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=1)  # stuck inside the driver it dies later, and we do not wait for that
        return [], f"{program} did not answer within {timeout_s:g} s"
    try:
        listed = _rocm_cards(out)
    except ValueError as error:
        said = [*err.split("\n"), *out.split("\n")]
        said = next((line.strip()[:120] for line in said if line.strip()), "nothing")
        return [], f"{program} exited with {child.returncode} and printed no list of GPUs ({error}): {said}"
    return listed, f"{program} lists {len(listed)}"


def parse_rocm_smi(text: str) -> list[Gpu]:
    """The GPUs in what `rocm-smi --json` prints, as ROCm 3 to 7 spell it. Raises ValueError where there is no list."""
    return [gpu for _, gpu in _rocm_cards(text)]


def _rocm_cards(text: str) -> Listed:
    import json

    from launch.schema import Gpu

    document, _ = json.JSONDecoder().raw_decode(text[max(text.find("{"), 0) :])  # warnings are printed before it
    if not isinstance(document, dict) or not all(isinstance(card, dict) for card in document.values()):
        raise ValueError("expected an object of objects")
    spelled = {key: {name.lower(): str(value) for name, value in card.items()} for key, card in document.items()}
    listed: Listed = []
    for key, card in spelled.items():
        if not (match := re.fullmatch(r"card(\d+)", key)):
            continue
        total, used = (card.get(f"vram total {word}memory (b)", "") for word in ("", "used "))
        known = total.isdigit() and used.isdigit()  # "N/A" otherwise
        sizes = (int(total), int(total) - int(used)) if known else (0, 0)
        name = _first(card, "card series", "device name", "card model") or key
        driver = _first(card, "driver version") or _first(spelled.get("system", {}), "driver version")
        gfx = _first(card, "gfx version", "gfx ver", "target graphics version")
        gpu = Gpu(int(match[1]), name, "amd", *sizes, gfx, driver, f"rocm-smi {key}")
        listed.append((_amd_uuid(_first(card, "unique id")), gpu))
    return listed


def _first(card: Mapping[str, str], *names: str) -> str:
    return next((card[name].strip() for name in names if card.get(name, "N/A") not in ("N/A", "")), "")


def _amd_uuid(serial: str) -> str:
    """The 64-bit unique id as ROCR_VISIBLE_DEVICES wants it; cards without one are addressed by index only."""
    return f"GPU-{serial.lower().removeprefix('0x').zfill(16)}" if serial.lower().startswith("0x") else ""


# ---- a machine one does not have ------------------------------------------------------------------------------------


def described(path: Path) -> Machine:
    """The machine a file like those in configs/machines/ describes; its keys are Machine's and Gpu's, sizes in GiB."""
    import yaml

    from launch.schema import Gpu, Machine

    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ResourceError(f"{path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from error
    facts = _checked(path, values, Machine)
    parts = [_checked(path, gpu, Gpu, f"gpus[{index}].") for index, gpu in enumerate(facts.pop("gpus"))]
    return Machine(gpus=tuple(Gpu(**part) for part in parts), **facts)


def _checked(path: Path, values: object, noun: type, prefix: str = "") -> dict[str, Any]:
    """The values by field name, sizes in bytes; ConfigError for the first key that is unknown, missing or wrong."""
    import difflib
    import typing

    if not isinstance(values, dict):
        raise ConfigError(f"{path}: {prefix.rstrip('.') or 'the file'} is not a mapping of keys to values")
    fields = {name.replace("_bytes", "_gib"): (name, hint) for name, hint in typing.get_type_hints(noun).items()}
    for key in map(str, values):
        if key not in fields:
            near = difflib.get_close_matches(key, set(fields) - set(values), n=1)
            raise ConfigError(f"{path}: unknown key {prefix}{key}" + (f"; did you mean {near[0]}?" if near else ""))
    facts = {}
    for key, (name, hint) in fields.items():
        if key not in values:
            raise ConfigError(f"{path}: missing key {prefix}{key}")
        value = values[key]
        number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < UNLIMITED
        if key.endswith("_gib"):
            expected, good, value = "a size in GiB such as 19.6", number, int(value * GIB) if number else value
        elif hint is int:
            expected, good = "a whole number", number and isinstance(value, int)
        elif key == "gpus":
            expected, good = "a list, [] for none", isinstance(value, list)
        elif hint is str:
            expected, good = "text (a number in quotes)", isinstance(value, str)
        else:
            expected, good = " or ".join(typing.get_args(hint)), value in typing.get_args(hint)
        if not good:
            raise ConfigError(f"{path}: {prefix}{key} is {value!r}; expected {expected}")
        facts[name] = value
    return facts
