"""The GPUs that a run may use: as NVML, amdsmi, rocm-smi or amd-smi lists them, without those that
the environment hides."""

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.base.text import size
from launch.probe import gpu_signs
from launch.schema.machine import GIB, Gpu, Machine

# graphics of a Ryzen or an APU, which rocm-smi lists beside the real card, are smaller
_MIN_VRAM_BYTES = 2 * GIB
_VENDOR_TOOL_TIMEOUT_S = 5.0

_ALL_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_HIDES = re.compile(
    r"\s*(-\d.*|NoDevFiles|none|void)?\s*"
)  # values that hide every card on purpose

# Numbers of NVML's errors. Source: nvml.h, nvmlReturn_t
_NOT_SUPPORTED, _LIBRARY_NOT_FOUND = 3, 12
_FIXES = {
    4: (
        "you may not open /dev/nvidia*: a Slurm job asks for cards with --gres=gpu:1; elsewhere see"
        " its owner and mode"
    ),
    9: (
        "load the driver (sudo modprobe nvidia), or install the one for this kernel; a container"
        " needs --gpus all"
    ),
    15: (
        "restart the machine; if it repeats, see the card's power and seat, or leave it out"
        " (CUDA_VISIBLE_DEVICES)"
    ),
    18: (
        "restart the machine: the driver was updated while the old one is loaded (a container:"
        " start it anew)"
    ),
    999: (
        "start the container anew (a reload of systemd on its host takes the cards away), or"
        " restart the machine"
    ),
}
_UNIFIED = (
    "it shares the host's RAM (unified memory, as GB10 and Jetson have), for which lowmem has no"
    " figures yet; fix: use a card with memory of its own"
)
_SIZE_UNKNOWN = (
    "fix: update ROCm (amd-smi of a newer one knows it), or set HIP_VISIBLE_DEVICES to other cards"
)
_NO_LIBCUDA = "NVML lists cards, but libcuda.so.1, the driver's part that computes, is not here"
_COMPUTE_FIX = (
    "fix: a container needs NVIDIA_DRIVER_CAPABILITIES=compute,utility; elsewhere install the"
    " driver again"
)

_Listed = list[tuple[str, Gpu]]  # (uuid, or "" when unknown; GPU) in the vendor's order
_ROCM_SMI_QUERY = (
    "--showproductname",
    "--showmeminfo",
    "vram",
    "--showdriverversion",
    "--showuniqueid",
    "--json",
)
_AMD_SMI_QUERIES = (
    ("static", "--asic", "--driver", "--json"),
    ("metric", "--mem-usage", "--json"),
)


@dataclass(frozen=True)
class Found:
    """The GPUs that a process can use, the reason, and the obstacle to the use of other installed
    cards."""

    gpus: tuple[Gpu, ...]
    reason: str
    # reason with its fix; "" if there is no card, the cards work, or a variable hides them
    obstacle: str = ""
    cuda_driver: str = ""  # the newest CUDA that the NVIDIA driver supports


def find(env: Mapping[str, str], root: Path = Path("/")) -> Found:
    """The GPUs of the machine whose dev and sys are below `root`, in the order in which a child
    with this environment numbers them. GPUs that the environment hides are left out."""
    nvidia = _nvidia()
    listed, reason = nvidia.listed, nvidia.reason
    variables = ["CUDA_VISIBLE_DEVICES"]
    if not listed:
        listed, amd_reason = _amd(env)
        reason = amd_reason if listed else f"{reason}; {amd_reason}"
        # HIP numbers ROCR's list anew. It reads CUDA's variable if its own is not set.
        # Source: ROCm docs
        hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
        variables = ["ROCR_VISIBLE_DEVICES", hip]
        ids = gpu_signs.rocr_ids(root)
        listed = [(uuid, replace(gpu, uuid=uuid if uuid in ids else "")) for uuid, gpu in listed]
    notes = [reason]
    nvidia_names = {gpu.name for _, gpu in listed if gpu.vendor == "nvidia"}
    if len(nvidia_names) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "they differ: numbers here are nvidia-smi's (CUDA without CUDA_DEVICE_ORDER=PCI_BUS_ID"
            " numbers the fastest first)"
        )
    obstacles = [] if nvidia.listed else [*nvidia.obstacles, *_nvidia_signs(nvidia, root)]
    for variable in (name for name in variables if name in env):
        before = len(listed)
        listed, effect = visible(listed, env[variable])
        notes.append(f'{variable}="{env[variable]}" {effect}')
        if before and not listed:
            obstacles.append(_names_none(variable, env[variable], before))
        if variable == "ROCR_VISIBLE_DEVICES":
            # The index is HIP's number from here on, which the command line will use
            listed = [(uuid, replace(gpu, index=index)) for index, (uuid, gpu) in enumerate(listed)]
    small = [gpu for _, gpu in listed if gpu.total_bytes < _MIN_VRAM_BYTES]
    for gpu in small:
        if gpu.total_bytes:
            notes.append(
                f"GPU {gpu.index} ({gpu.name}, {size(gpu.total_bytes)}) is too small to train on"
            )
        else:
            notes.append(
                f"GPU {gpu.index} ({gpu.name}): {gpu.reason} does not say how much memory it has"
            )
            obstacles.append(f"{notes[-1]}; {_SIZE_UNKNOWN}")
    divided = [gpu for uuid, gpu in listed if uuid in nvidia.divided]
    for gpu in divided:
        notes.append(f"GPU {gpu.index} ({gpu.name}) is divided (MIG)")
        obstacles.append(f"{notes[-1]}, which lowmem cannot plan for yet; {_mig_fix(gpu.index)}")
    usable = tuple(gpu for _, gpu in listed if gpu not in (*small, *divided))
    if not usable and not nvidia.listed:
        signs, passed_over = gpu_signs.amd(root)
        notes += passed_over
        obstacles += [
            f"an AMD card is here ({sign}) and cannot be asked; fix: {gpu_signs.amd_fix(root)}"
            for sign in signs
        ]
    is_hidden = any(
        variable in env and _HIDES.fullmatch(env[variable]) for variable in _ALL_VARIABLES
    )
    obstacle = "" if usable or is_hidden or not obstacles else obstacles[0]
    return Found(usable, "; ".join(notes), obstacle, nvidia.cuda_driver)


def _names_none(variable: str, value: str, count: int) -> str:
    """The obstacle of a variable that hides all cards without intent."""
    if "MIG-" in value:
        return (
            f"{variable}={value} names a part of a card (MIG), which lowmem cannot plan for yet;"
            f" {_mig_fix('NUMBER')}"
        )
    return (
        f"{variable}={value} leaves none of the {count} GPU(s) that are listed; fix: unset it, or"
        " name cards that"
        f' nvidia-smi or rocm-smi lists; {variable}="" trains on the CPU'
    )


def _mig_fix(number: int | str) -> str:
    return (
        "fix: name undivided cards in CUDA_VISIBLE_DEVICES, by number or by GPU-..., or switch MIG"
        f" off (sudo nvidia-smi -i {number} -mig 0)"
    )


def _nvidia_signs(nvidia: "_Nvidia", root: Path) -> list[str]:
    """The obstacle of NVIDIA cards that leave signs but are not listed."""
    signs = gpu_signs.nvidia(root)
    fix = (
        "install nvidia-ml-py"
        if "nvidia-ml-py" in nvidia.reason
        else "install the NVIDIA driver; a container needs --gpus all"
    )
    obstacle = f"an NVIDIA card is here ({', '.join(signs)}) and cannot be asked ({nvidia.reason})"
    return [f"{obstacle}; fix: {fix}"] if signs else []


def visible(listed: _Listed, value: str) -> tuple[_Listed, str]:
    """The GPUs that CUDA_VISIBLE_DEVICES or a variable of AMD names, in its order. Entries are
    indices or UUIDs, which may be abbreviated.

    The list ends at the first entry that is no GPU. Source: CUDA C++ Programming Guide, CUDA
    environment variables.
    """
    chosen: _Listed = []
    for entry in (text.strip() for text in value.split(",")):
        matches = (
            listed[int(entry) : int(entry) + 1]
            if entry.isdigit()
            else [pair for pair in listed if entry and pair[0].startswith(entry)]
        )
        if len(matches) != 1 or matches[0] in chosen:
            ends = f", the list ends at {entry}: no such GPU, or named before" if entry else ""
            return chosen, f"leaves {len(chosen)} of {len(listed)}{ends}"
        chosen += matches
    return chosen, f"leaves {len(chosen)} of {len(listed)}"


@dataclass(frozen=True)
class _Nvidia:
    """The reply of NVML."""

    listed: _Listed
    reason: str
    obstacles: tuple[str, ...] = ()
    cuda_driver: str = ""
    divided: frozenset[str] = frozenset()  # uuids of the cards whose MIG mode is on


def _nvidia() -> _Nvidia:
    try:
        import pynvml
    except ImportError:
        return _Nvidia([], "no look for NVIDIA GPUs: nvidia-ml-py is not installed")
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:  # no driver, or one that does not fit its library
        is_absent = _code(error) == _LIBRARY_NOT_FOUND
        obstacles = () if is_absent else (_trouble("NVML cannot be asked", error),)
        return _Nvidia([], f"NVML: {error}", obstacles)
    listed: _Listed = []
    problems, obstacles, divided, cuda_driver = [], [], set[str](), ""
    try:
        driver = pynvml.nvmlSystemGetDriverVersion()
        for index in range(pynvml.nvmlDeviceGetCount()):
            name = f"GPU {index}"
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                name = pynvml.nvmlDeviceGetName(handle)
                memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
                major, minor = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
            except pynvml.NVMLError as error:
                # fallen off the bus, or not ours under Slurm: the other cards still work
                problems.append(f"GPU {index}: {error}")
                of = name if name == f"GPU {index}" else f"GPU {index} ({name})"
                unified = f"{of}: NVML says Not Supported of its memory; {_UNIFIED}"
                is_unified = _code(error) == _NOT_SUPPORTED
                obstacles.append(unified if is_unified else _trouble(of, error))
                continue
            sizes, capability = (int(memory.total), int(memory.free)), f"{major}.{minor}"
            reason = f"NVML device {index}"
            slowdown = gpu_signs.slowdown(pynvml, handle)
            gpu = Gpu(index, name, "nvidia", *sizes, capability, driver, reason, uuid, slowdown)
            listed.append((uuid, gpu))
            # CUDA gives out only parts of a divided card, of which NVML reports the sum
            mode = gpu_signs.ask(pynvml, "nvmlDeviceGetMigMode", handle)
            if mode and mode[0]:
                divided.add(uuid)
        cuda_driver = _cuda_driver(pynvml)
    except pynvml.NVMLError as error:
        problems.append(str(error))
        obstacles.append(_trouble("NVML cannot be asked", error))
    finally:
        pynvml.nvmlShutdown()
    reason = "; ".join([f"NVML lists {len(listed)}", *problems])
    if cuda_driver == _NO_LIBCUDA:
        return _Nvidia([], f"{reason}; {_NO_LIBCUDA}", (f"{_NO_LIBCUDA}; {_COMPUTE_FIX}",))
    return _Nvidia(listed, reason, tuple(obstacles), cuda_driver, frozenset(divided))


def _cuda_driver(pynvml: Any) -> str:
    """The newest CUDA that the driver's libcuda supports; "" if the driver does not report it,
    _NO_LIBCUDA if there is no libcuda."""
    # the user's nvidia-ml-py may be older
    ask = getattr(pynvml, "nvmlSystemGetCudaDriverVersion_v2", None)
    try:
        number = ask() if ask else None
    except pynvml.NVMLError as error:
        return _NO_LIBCUDA if _code(error) == _LIBRARY_NOT_FOUND else ""
    return f"{number // 1000}.{number % 1000 // 10}" if number is not None else ""


def _code(error: Exception) -> int | None:
    """The number of an NVML error."""
    return getattr(error, "value", None)


def _trouble(name: str, error: Exception) -> str:
    """The obstacle of an NVML error: its text and number, and the fix."""
    code = _code(error)
    number = "" if code is None else f" (NVML error {code})"
    fix = _FIXES.get(code or 0, "see what nvidia-smi says, and restart the machine")
    return f"{name}: {error}{number}; fix: {fix}"


def _amd(env: Mapping[str, str]) -> tuple[_Listed, str]:
    """The GPUs that the first of these lists: the amdsmi library, rocm-smi, amd-smi (newer ROCm has
    no rocm-smi)."""
    failures = []
    for ask in (_amdsmi, rocm_smi, amd_smi):
        listed, reason = ask(env)
        if listed:
            return listed, "; ".join([*failures, reason])
        failures += [reason] if reason else []
    return [], "; ".join(failures)


def _amdsmi(env: Mapping[str, str]) -> tuple[_Listed, str]:
    try:
        import amdsmi  # pyright: ignore[reportMissingImports]
    except ModuleNotFoundError:
        return [], ""
    except (ImportError, OSError, KeyError, AttributeError) as error:
        # its import raises these without libamd_smi.so
        return [], f"amdsmi: {error!r}"
    try:
        amdsmi.amdsmi_init()
        try:
            listed = [
                _amdsmi_gpu(amdsmi, *pair)
                for pair in enumerate(amdsmi.amdsmi_get_processor_handles())
            ]
        finally:
            amdsmi.amdsmi_shut_down()
    except amdsmi.AmdSmiException as error:
        return [], f"amdsmi: {error}"
    return listed, f"amdsmi lists {len(listed)}"


def _amdsmi_gpu(amdsmi: Any, index: int, handle: object) -> tuple[str, Gpu]:
    asic = amdsmi.amdsmi_get_gpu_asic_info(handle)
    vram = amdsmi.amdsmi_get_gpu_vram_usage(handle)  # MiB
    total_bytes, used_bytes = int(vram["vram_total"]) << 20, int(vram["vram_used"]) << 20
    driver = str(amdsmi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
    name, architecture = str(asic["market_name"]), str(asic.get("target_graphics_version", ""))
    sizes = total_bytes, total_bytes - used_bytes
    return _amd_uuid(str(asic["asic_serial"])), Gpu(
        index, name, "amd", *sizes, architecture, driver, f"amdsmi {index}"
    )


def rocm_smi(
    env: Mapping[str, str], timeout_s: float = _VENDOR_TOOL_TIMEOUT_S
) -> tuple[_Listed, str]:
    """The GPUs that the rocm-smi on env's PATH lists. If it is missing, hangs or prints nonsense:
    no GPUs, and the reason."""
    return _ask(
        "rocm-smi", [_ROCM_SMI_QUERY], env, timeout_s, parse_rocm_smi, lambda listed: listed
    )


def amd_smi(
    env: Mapping[str, str], timeout_s: float = _VENDOR_TOOL_TIMEOUT_S
) -> tuple[_Listed, str]:
    """The GPUs that the amd-smi on env's PATH lists. If it is missing, hangs or prints nonsense: no
    GPUs, and the reason."""
    return _ask("amd-smi", _AMD_SMI_QUERIES, env, timeout_s, _amd_smi_rows, _amd_smi_gpus)


def _ask(
    tool: str,
    queries: Sequence[Sequence[str]],
    env: Mapping[str, str],
    timeout_s: float,
    parse: Callable[[str], Any],
    combine: Callable[..., Iterable[tuple[str, Gpu]]],
) -> tuple[_Listed, str]:
    """Run a tool once for each query, parse its outputs and combine them into a list of GPUs. If
    that fails: no GPUs, and the reason. `parse` raises ValueError for nonsense."""
    program = shutil.which(tool, path=env.get("PATH", ""))
    if program is None:
        return [], f"no {tool} on PATH"
    parsed = []
    for query in queries:
        try:
            child = subprocess.Popen(
                [program, *query],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        except OSError as error:
            return [], f"{program}: {error.strerror}"
        try:
            out, err = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            child.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                # a child that is stuck inside the driver ends later, which we do not wait for
                child.wait(timeout=1)
            return [], f"{program} did not answer within {timeout_s:g} s"
        try:
            parsed.append(parse(out))
        except ValueError as error:
            lines = [line.strip()[:120] for line in f"{err}\n{out}".split("\n") if line.strip()]
            return [], (
                f"{program} exited with {child.returncode} and printed no list of GPUs ({error}):"
                f" {(lines or ['nothing'])[0]}"
            )
    listed = [*combine(*parsed)]
    return listed, f"{program} lists {len(listed)}"


def parse_rocm_smi(text: str) -> _Listed:
    """The GPUs in the output of `rocm-smi --json`, as ROCm 3 to 7 spell it. Raises ValueError if it
    has no list."""
    # warnings are printed before it
    document, _ = json.JSONDecoder().raw_decode(text[max(text.find("{"), 0) :])
    if not isinstance(document, dict) or not all(
        isinstance(card, dict) for card in document.values()
    ):
        raise ValueError("expected an object of objects")
    spelled = {
        key: {name.lower(): str(value) for name, value in card.items()}
        for key, card in document.items()
    }
    listed: _Listed = []
    for key, card in spelled.items():
        if not (match := re.fullmatch(r"card(\d+)", key)):
            continue
        total, used = (card.get(f"vram total {part}memory (b)", "") for part in ("", "used "))
        has_sizes = total.isdigit() and used.isdigit()  # "N/A" otherwise
        sizes = (int(total), int(total) - int(used)) if has_sizes else (0, 0)
        name = _first(card, "card series", "device name", "card model") or key
        driver = _first(card, "driver version") or _first(
            spelled.get("system", {}), "driver version"
        )
        gfx = _first(card, "gfx version", "gfx ver", "target graphics version")
        gpu = Gpu(int(match[1]), name, "amd", *sizes, gfx, driver, f"rocm-smi {key}")
        listed.append((_amd_uuid(_first(card, "unique id")), gpu))
    return listed


def _amd_smi_rows(text: str) -> dict[int, Mapping[str, Any]]:
    """The object of each GPU by its number. Since ROCm 7 the list is under gpu_data."""
    start = re.search(r"^[\[{]", text, re.MULTILINE)  # Python's warnings are printed before it
    document, _ = json.JSONDecoder().raw_decode(text[start.start() if start else 0 :])
    rows = document.get("gpu_data") if isinstance(document, dict) else document
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and isinstance(row.get("gpu"), int) for row in rows
    ):
        raise ValueError("expected a list of objects that have a gpu")
    return {row["gpu"]: row for row in rows}


def _amd_smi_gpus(
    static: Mapping[int, Mapping[str, Any]], metric: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[str, Gpu]]:
    for index, row in static.items():
        asic, usage = _part(row, "asic"), _part(metric.get(index, {}), "mem_usage")
        total, used = (_part(usage, key).get("value") for key in ("total_vram", "used_vram"))
        sizes = (
            (total << 20, (total - used) << 20)  # its MB are MiB
            if isinstance(total, int) and isinstance(used, int)  # "N/A" otherwise
            else (0, 0)
        )
        name = _first(asic, "market_name") or f"GPU {index}"
        gfx, driver = (
            _first(asic, "target_graphics_version"),
            _first(_part(row, "driver"), "version"),
        )
        yield (
            _amd_uuid(_first(asic, "asic_serial")),
            Gpu(index, name, "amd", *sizes, gfx, driver, f"amd-smi GPU {index}"),
        )


def _part(row: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return value if isinstance(value := row.get(key), dict) else {}  # "N/A" otherwise


def _first(card: Mapping[str, Any], *names: str) -> str:
    return next(
        (str(card[name]).strip() for name in names if card.get(name, "N/A") not in ("N/A", "")), ""
    )


def _amd_uuid(serial: str) -> str:
    """The 64-bit unique id as ROCR_VISIBLE_DEVICES expects it; "" for cards without it, which are
    addressed by index only."""
    digits = serial.lower().removeprefix("0x")
    return f"GPU-{digits.zfill(16)}" if digits != serial.lower() else ""


def visible_devices(machine: Machine, num_processes: int) -> dict[str, str]:
    """The variables that give a run its first `num_processes` GPUs in their order, one per rank."""
    chosen = machine.gpus[:num_processes]
    # CUDA numbers cards anew without those that are lost, that it may not open, or that MPS hides
    names = ",".join(gpu.uuid or str(gpu.index) for gpu in chosen)
    if chosen[0].vendor == "amd":
        # HIP reads its variable before CUDA_VISIBLE_DEVICES, and numbers the cards that
        # ROCR_VISIBLE_DEVICES names, as this module does. RCCL reads NCCL_* variables.
        if all(gpu.uuid for gpu in chosen):
            numbers = ",".join(map(str, range(len(chosen))))
            return {"ROCR_VISIBLE_DEVICES": names, "HIP_VISIBLE_DEVICES": numbers}
        return {"HIP_VISIBLE_DEVICES": ",".join(str(gpu.index) for gpu in chosen)}
    # NVML counts in this order
    return {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": names}
