"""What the processes of a job hold once they are imported: constants, or what `doctor` has measured
on this machine.

Without the packages that few runs use; host_memory.py adds those."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launch.base import environment, files
from launch.base.errors import ResourceError
from launch.base.workspace import CODE
from launch.probe import packages
from launch.schema.machine import MIB, Device

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "datasets",
    "tensorboard",
    "peft",
    "bitsandbytes",
    "pyarrow",
)
ROLES = ("launcher", "agent", "prepare", "rank")
CHILD_TIMEOUT_S = 120
OLDEST_FLASH_ATTN = (2, 3, 3)  # transformers takes no older one


def known(cache: Path, device: Device) -> Imports:
    """As measured before, else the constants. Starts nothing."""
    measured = files.read_or_none(kept_file(cache, device), Imports)
    if measured:
        return measured
    on_device = ASSUMED_CUDA_BYTES if device == "cuda" else 0
    return Imports(**{**asdict(ASSUMED), "rank_bytes": ASSUMED.rank_bytes + on_device})


def measure(cache: Path, device: Device) -> Imports:
    """Measured now, in one child per role, some seconds in all, and kept. Raises ResourceError
    where a child fails."""
    children = {role: _child(role, device) for role in ROLES}
    private = {f"{role}_bytes": child["private_bytes"] for role, child in children.items()}
    mapped = max(child["mapped_bytes"] for child in children.values())
    file = kept_file(cache, device)
    file.parent.mkdir(parents=True, exist_ok=True)
    files.write_json(file, {**private, "mapped_bytes": mapped, "reason": "measured here"})
    return known(cache, device)


def no_flash_attn(cache: Path) -> str | None:
    """Why attention cannot be the package flash_attn's here; None where it can.

    One built for another torch is installed and cannot be imported: that is tried in a child, once
    per version."""
    try:
        found = version("flash-attn")
    except PackageNotFoundError:
        return "the package flash_attn is not installed"
    if tuple(int(part) for part in re.findall(r"\d+", found)[:3]) < OLDEST_FLASH_ATTN:
        return f"flash_attn {found} is older than {'.'.join(map(str, OLDEST_FLASH_ATTN))}"
    identity = json.dumps([found, _version("torch"), sys.version, sys.prefix])
    kept = (
        cache / "imports" / f"flash-attn-{hashlib.sha256(identity.encode()).hexdigest()[:24]}.json"
    )
    known = files.read_or_none(kept, dict[str, str])
    if known is None or "failure" not in known:
        known = {"failure": _import_failure("flash_attn")}
        kept.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(kept, known)
    return (
        f"flash_attn {found} cannot be imported ({known['failure']})" if known["failure"] else None
    )


def _import_failure(package: str) -> str:
    """The last line of a Python that imports it and fails; "" where it does not."""
    argv = [sys.executable, "-P", "-c", f"import {package}"]
    try:
        done = subprocess.run(
            argv,
            env=environment.passed(os.environ),
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {CHILD_TIMEOUT_S} s"
    words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return words[-1] if done.returncode else ""


def _child(role: str, device: Device) -> dict[str, int]:
    argv = [
        sys.executable,
        "-P",
        "-m",
        "training.children.import_memory",
        role,
        "--device",
        device,
        "--without",
        *packages.OPTIONAL,
    ]
    variables = {
        **environment.passed(os.environ),
        "PYTHONPATH": str(CODE),
        "HF_HUB_OFFLINE": "1",
    }
    try:
        done = subprocess.run(
            argv, env=variables, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"what a {role} imports is not there after {CHILD_TIMEOUT_S} s"
        ) from None
    if done.returncode:
        raise ResourceError(
            f"what a {role} imports fails: {_reason(done.stderr) or f'exit code {done.returncode}'}"
        )
    return json.loads(done.stdout.splitlines()[-1])


def _reason(stderr: str) -> str:
    """The line that names the exception; CUDA's and HIP's go on with advice that says nothing of
    the cause."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [
        line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Warning)?: ", line)
    ]
    errors = [line for line in named if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (errors or named or lines or [""])[-1]


def kept_file(cache: Path, device: Device) -> Path:
    """Where the figures are kept: a name made of all that they depend on."""
    identity = [
        [[package, _version(package)] for package in PACKAGES],
        [sys.version, platform.machine(), platform.node(), device],
    ]
    return (
        cache / "imports" / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]}.json"
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True)
class Imports:
    """What each process of a job holds before there is a model: private bytes each, mapped bytes
    once for all."""

    launcher_bytes: int
    agent_bytes: int  # of accelerate launch, which imports torch too
    prepare_bytes: int
    rank_bytes: int  # with what its device's runtime takes on the host
    mapped_bytes: int
    reason: str


# Measured on Linux, Python 3.11, torch 2.13 (CPU), transformers 5.23; a rank without peft,
# bitsandbytes, deepspeed.
ASSUMED = Imports(
    35 * MIB, 151 * MIB, 182 * MIB, 309 * MIB, 140 * MIB, "constants of torch 2.13 on a CPU"
)

ASSUMED_CUDA_BYTES = 300 * MIB  # host side of a context: not measured by us
