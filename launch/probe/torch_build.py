"""The installed build of torch, read without importing it: its support for this machine's cards,
and the build that supports them.

A card needs kernels of its own architecture, and a driver that supports the build's CUDA. Sources:
CUDA C++ Programming Guide, "Binary Compatibility" (code for 8.0 runs on 8.6 and 8.9, not on 9.0);
torch/cuda/__init__.py, DEVICE_REQUIREMENT (Jetson's own capabilities run their own code only);
NVIDIA's "CUDA Compatibility" (since CUDA 11 a driver of the same major version supports every
minor version, except for PTX, which a driver older than the build cannot compile).
"""

import ast
import mmap
import os
import platform
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from launch.base.errors import ResourceError
from launch.base.workspace import CODE
from launch.schema.machine import Gpu, Machine

ROCM, ROCM_FOLDER = "rocm", "rocm7.2"  # in LOWMEM_TORCH; in PyTorch's index, for torch 2.13
# A build's architectures stand in this file, as torch.cuda.get_arch_list() would return them.
LIBRARY = Path("lib", "libtorch_python.so")
NAMES = re.compile(
    rb"\0((?:(?:sm|compute)_\d+[af]?|gfx[0-9a-f]+)(?: (?:(?:sm|compute)_\d+[af]?|gfx[0-9a-f]+))*)\0"
)
_JETSON = ((5, 3), (6, 2), (7, 2), (8, 7), (10, 1))

# A value of LOWMEM_TORCH -> the architectures of torch 2.13's build, by platform.machine(). Source:
# torch 2.13's torch/cuda/__init__.py, PYTORCH_RELEASES_CODE_CC; those of cu130 on x86_64 measured
# with torch.cuda.get_arch_list()
CUDA_BUILDS: dict[str, dict[str, str]] = {
    "cu130": {
        "x86_64": "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120",
        "aarch64": "sm_80 sm_90 sm_100 sm_110 sm_120",
    },
    "cu126": {
        "x86_64": "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90",
        "aarch64": "sm_80 sm_90",
    },
}
_OLDEST_DRIVER = {13: "580", 12: "525"}  # CUDA's major version -> its oldest driver
# The gfx names of torch 2.13's rocm7.2 build. Source: pytorch release/2.13,
# .ci/docker/manywheel/build.sh
ROCM_BUILD = (
    "gfx900 gfx906 gfx908 gfx90a gfx942 gfx950 gfx1030 gfx1100 gfx1101 gfx1102 gfx1103 gfx1150"
    " gfx1151 gfx1200 gfx1201"
)
_OVERRIDE = "HSA_OVERRIDE_GFX_VERSION"  # ROCm's: a card runs as another of its generation


@dataclass(frozen=True)
class TorchBuild:
    """A build of torch."""

    version: str
    cuda: str = ""  # the CUDA it was built with, such as "13.0"
    hip: str = ""
    architectures: tuple[str, ...] = ()  # sm_86, compute_90, gfx1100; () if they are not known


def installed() -> TorchBuild | None:
    """The build that this Python would import; None if there is none."""
    spec = find_spec("torch")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    return read(Path(folders[0])) if folders else None


def read(folder: Path) -> TorchBuild | None:
    """The build in the folder torch of site-packages; None if the folder holds no torch."""
    try:
        module = ast.parse((folder / "version.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    constants = {
        target.id: line.value.value
        for line in module.body
        if isinstance(line, ast.Assign | ast.AnnAssign) and isinstance(line.value, ast.Constant)
        for target in (line.targets if isinstance(line, ast.Assign) else [line.target])
        if isinstance(target, ast.Name)
    }
    version, cuda, hip = (str(constants.get(name) or "") for name in ("__version__", "cuda", "hip"))
    names = _architectures(folder / LIBRARY) if cuda or hip else ()
    return TorchBuild(version, cuda, hip, names) if version else None


def _architectures(library: Path) -> tuple[str, ...]:
    """The names in the file; () if it has none, or if there is no file."""
    with (
        suppress(OSError, ValueError),  # ValueError: an empty file
        library.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        for first in (b"\0sm_", b"\0compute_", b"\0gfx"):
            start = content.find(first)
            while start >= 0:
                if match := NAMES.match(content, start):
                    return tuple(match[1].decode("ascii").split())
                start = content.find(first, start + 1)
    return ()


# ---- the build that a card needs
# ---------------------------------------------------------------------------


def serves(architectures: Sequence[str], gpu: Gpu, compiles_ptx: bool = True) -> bool:
    """True if code for these architectures runs on a card, or if the card does not report its
    architecture.

    `compiles_ptx`: the driver is as new as the build, so it can compile kernels that the build has
    as PTX only."""
    if gpu.vendor == "amd":
        name = gpu.architecture.partition(":")[0]
        return not name.startswith("gfx") or name in architectures
    if not (match := re.fullmatch(r"(\d+)\.(\d+)", gpu.architecture)):
        return True
    card = int(match[1]), int(match[2])
    for name in architectures:
        if not (parts := re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", name)):
            continue
        code = int(parts[2]), int(parts[3])
        is_same = card == code or {card, code} == {(10, 1), (11, 0)}
        is_compatible = parts[1] == "sm" and parts[4] != "a" and card not in _JETSON
        is_ptx = parts[1] == "compute" and not parts[4] and compiles_ptx
        if (
            is_same
            or (is_compatible and card[0] == code[0] and card > code)
            or (is_ptx and card >= code)
        ):
            return True
    return False


def refusal(
    build: TorchBuild | None, gpus: Sequence[Gpu], cuda_driver: str, environ: Mapping[str, str]
) -> str:
    """The reason why this build cannot compute on these cards, and the line that installs a build
    that can; "" if it can."""
    if build is None or not gpus:
        return ""
    for gpu in gpus:
        why = (
            _amd_trouble(build, gpu, environ)
            if gpu.vendor == "amd"
            else _nvidia_trouble(build, gpu, cuda_driver)
        )
        if why:
            card = f"{gpu.name} (GPU {gpu.index}, {gpu.architecture or 'architecture unknown'})"
            fix = _fix(build, gpus, gpu, cuda_driver)
            return f"torch {build.version} cannot use {card}: {why}; fix: {fix}"
    return ""


def refuse(machine: Machine, gpus: Sequence[Gpu]) -> None:
    """Raises ResourceError if the installed torch cannot compute on these cards of this machine."""
    if message := refusal(installed(), gpus, machine.cuda_driver, os.environ):
        raise ResourceError(message)


def _nvidia_trouble(build: TorchBuild, gpu: Gpu, cuda_driver: str) -> str:
    if not build.cuda:
        return f"it is a build for {'AMD cards' if build.hip else 'CPUs'}"
    built, driver = numbers(build.cuda), numbers(cuda_driver)
    if driver and built[:1] > driver[:1]:
        driver_note = (
            f" ({_OLDEST_DRIVER[built[0]]} or newer)" if built[0] in _OLDEST_DRIVER else ""
        )
        return (
            f"driver {gpu.driver} serves CUDA up to {cuda_driver}, this build needs"
            f" {built[0]}.x{driver_note}"
        )
    is_new = not driver or driver >= built
    return _lacking_kernels(build, serves(build.architectures, gpu, is_new))


def _amd_trouble(build: TorchBuild, gpu: Gpu, environ: Mapping[str, str]) -> str:
    if not build.hip:
        return f"it is a build for {'NVIDIA cards' if build.cuda else 'CPUs'}"
    is_served = bool(environ.get(_OVERRIDE)) or serves(build.architectures, gpu)
    return _lacking_kernels(build, is_served)


def _lacking_kernels(build: TorchBuild, is_served: bool) -> str:
    """The trouble of a card that the kernels of a build, where they are known, do not serve."""
    names = "" if is_served else " ".join(build.architectures)
    return f"it has kernels for {names}" if names else ""


def _fix(build: TorchBuild, gpus: Sequence[Gpu], gpu: Gpu, cuda_driver: str) -> str:
    """The line that installs the right build. If no build supports the card, other advice."""
    name = best(gpus, cuda_driver)
    if name and name != installed_name(build):
        return _install_line(name, build)
    if gpu.vendor == "amd":
        return (
            "no published build has kernels for it; if you know that those of a relative run on"
            f" it, set {_OVERRIDE} (10.3.0 is gfx1030); or train on the CPU: --launch.mode=cpu"
        )
    if len(gpus) > 1 and best([gpu], cuda_driver):
        return (
            "no one build serves all of these cards; leave some out with CUDA_VISIBLE_DEVICES, and"
            f" for {gpu.name} alone: {_install_line(best([gpu], cuda_driver), build)}"
        )
    newer = best(gpus, "")
    if newer and numbers(cuda_driver):
        driver = _OLDEST_DRIVER[numbers(_cuda_of(newer))[0]]
        return f"update the NVIDIA driver to {driver} or newer, then {_install_line(newer, build)}"
    return "no build of torch 2.13 has kernels for it; train on the CPU: --launch.mode=cpu"


def best(gpus: Sequence[Gpu], cuda_driver: str) -> str:
    """The value of LOWMEM_TORCH for a build that supports all of these cards with this driver; ""
    if there is none."""
    if gpus[0].vendor == "amd":
        return ROCM if all(serves(ROCM_BUILD.split(), gpu) for gpu in gpus) else ""
    driver = numbers(cuda_driver)
    for name, by_machine in CUDA_BUILDS.items():
        names = by_machine.get(platform.machine(), "").split()
        if (not driver or driver[0] >= numbers(_cuda_of(name))[0]) and all(
            serves(names, gpu) for gpu in gpus
        ):
            return name
    return ""


def installed_name(build: TorchBuild) -> str:
    """The value of LOWMEM_TORCH for this build."""
    if build.hip:
        return ROCM
    return f"cu{build.cuda.replace('.', '')}" if build.cuda else "cpu"


def _install_line(name: str, build: TorchBuild) -> str:
    """A line to paste that replaces this build with another build, in .venv or in the user's own
    Python."""
    if is_own_venv():
        return f"LOWMEM_TORCH={name} {shlex.quote(str(CODE / 'scripts' / 'install.sh'))}"
    folder = ROCM_FOLDER if name == ROCM else name
    requirement = f"torch=={build.version.partition('+')[0]}+{folder}"
    return (
        f"{shlex.quote(sys.executable)} -m pip install {requirement} --index-url"
        f" https://download.pytorch.org/whl/{folder}"
    )


def is_own_venv() -> bool:
    """True if this Python is that of .venv, which scripts/lib/bootstrap.sh fills."""
    return Path(sys.prefix).resolve() == (CODE / ".venv").resolve()


def numbers(version: str) -> tuple[int, ...]:
    """The numbers in a version: "2.13.0" -> (2, 13, 0)."""
    return tuple(map(int, re.findall(r"\d+", version)))


def _cuda_of(name: str) -> str:
    """cu126 -> 12.6"""
    return f"{name[2:-1]}.{name[-1]}"
