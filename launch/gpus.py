"""The GPUs a run may use: as NVML, amdsmi or rocm-smi lists them, less those that the environment hides."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from typing import Any

from launch.schema import GIB, Gpu

MIN_VRAM_BYTES = 2 * GIB  # below it: the graphics of a Ryzen or an APU, which rocm-smi lists beside the real card
ROCM_SMI_TIMEOUT_S = 5.0

Listed = list[tuple[str, Gpu]]  # (uuid, or "" when unknown; GPU) in the vendor's order


def usable(env: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """The GPUs a child with this environment can use, in the order it will number them, and why these."""
    listed, reason = _nvidia()
    variables = ["CUDA_VISIBLE_DEVICES"]
    if not listed:
        listed, amd_reason = _amd(env)
        reason = amd_reason if listed else f"{reason}; {amd_reason}"
        # ROCR's list is numbered anew by HIP, which reads CUDA's variable where its own is not set. Source: ROCm docs
        hip = "HIP_VISIBLE_DEVICES" if "HIP_VISIBLE_DEVICES" in env else "CUDA_VISIBLE_DEVICES"
        variables = ["ROCR_VISIBLE_DEVICES", hip]
    reasons = [reason]
    nvidia_names = {gpu.name for _, gpu in listed if gpu.vendor == "nvidia"}
    if len(nvidia_names) > 1 and env.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        reasons.append("they differ: set CUDA_DEVICE_ORDER=PCI_BUS_ID, or CUDA numbers the fastest first")
    for variable in variables:
        if variable in env:
            listed, said = visible(listed, env[variable])
            reasons.append(f'{variable}="{env[variable]}" {said}')
    small = [gpu for _, gpu in listed if gpu.total_bytes < MIN_VRAM_BYTES]
    for gpu in small:
        reasons.append(f"GPU {gpu.index} ({gpu.name}, {gpu.total_bytes / GIB:.1f} GiB) is too small to train on")
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
    asic = amdsmi.amdsmi_get_gpu_asic_info(handle)
    vram = amdsmi.amdsmi_get_gpu_vram_usage(handle)  # MiB
    total_bytes, used_bytes = int(vram["vram_total"]) << 20, int(vram["vram_used"]) << 20
    driver = str(amdsmi.amdsmi_get_gpu_driver_info(handle)["driver_version"])
    name, architecture = str(asic["market_name"]), str(asic.get("target_graphics_version", ""))
    sizes = total_bytes, total_bytes - used_bytes
    return _amd_uuid(str(asic["asic_serial"])), Gpu(index, name, "amd", *sizes, architecture, driver, f"amdsmi {index}")


def rocm_smi(env: Mapping[str, str], timeout_s: float = ROCM_SMI_TIMEOUT_S) -> tuple[Listed, str]:
    """What the rocm-smi on env's PATH lists; without it, or when it hangs or prints nonsense, nothing and why."""
    program = shutil.which("rocm-smi", path=env.get("PATH", ""))
    if program is None:
        return [], "no rocm-smi on PATH"
    asked = ["--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--showuniqueid", "--json"]
    try:
        child = subprocess.Popen(
            [program, *asked],
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
            child.wait(timeout=1)  # stuck inside the driver it dies later, and we do not wait for that
        return [], f"{program} did not answer within {timeout_s:g} s"
    try:
        listed = parse_rocm_smi(out)
    except ValueError as error:
        said = next((line.strip()[:120] for line in f"{err}\n{out}".split("\n") if line.strip()), "nothing")
        return [], f"{program} exited with {child.returncode} and printed no list of GPUs ({error}): {said}"
    return listed, f"{program} lists {len(listed)}"


def parse_rocm_smi(text: str) -> Listed:
    """The GPUs in what `rocm-smi --json` prints, as ROCm 3 to 7 spell it. Raises ValueError where there is no list."""
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
