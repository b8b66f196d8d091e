"""What the processes of a job hold once they are imported: constants, or what `doctor` has measured on this machine.

Without the packages that few runs use; host_memory.py adds those."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launch import environment, packages, rundir
from launch.errors import ResourceError
from launch.host_memory import ASSUMED, ASSUMED_CUDA_BYTES, Imports
from launch.schema import Device

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tensorboard", "peft", "bitsandbytes", "pyarrow")
ROLES = ("launcher", "agent", "prepare", "rank")
CHILD_TIMEOUT_S = 120


def known(cache: Path, device: Device) -> Imports:
    """As measured before, else the constants. Starts nothing."""
    kept = rundir.read_json(kept_file(cache, device))
    if kept:
        return Imports(**kept)
    on_device = ASSUMED_CUDA_BYTES if device == "cuda" else 0
    return Imports(**{**asdict(ASSUMED), "rank_bytes": ASSUMED.rank_bytes + on_device})


def measure(cache: Path, device: Device) -> Imports:
    """Measured now, in one child per role, some seconds in all, and kept. Raises ResourceError where a child fails."""
    children = {role: _child(role, device) for role in ROLES}
    private = {f"{role}_bytes": child["private_bytes"] for role, child in children.items()}
    mapped = max(child["mapped_bytes"] for child in children.values())
    file = kept_file(cache, device)
    file.parent.mkdir(parents=True, exist_ok=True)
    rundir.write_json(file, {**private, "mapped_bytes": mapped, "reason": "measured here"})
    return known(cache, device)


def _child(role: str, device: Device) -> dict[str, int]:
    argv = [sys.executable, "-P", "-m", "training.imports", role, "--device", device, "--without", *packages.OPTIONAL]
    variables = {**environment.passed(os.environ), "PYTHONPATH": str(rundir.CODE), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(argv, env=variables, capture_output=True, text=True, timeout=CHILD_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ResourceError(f"what a {role} imports is not there after {CHILD_TIMEOUT_S} s") from None
    if done.returncode:
        words = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ResourceError(f"what a {role} imports fails: {words[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def kept_file(cache: Path, device: Device) -> Path:
    """Where the figures are kept: a name made of all that they depend on."""
    identity = [
        [[package, _version(package)] for package in PACKAGES],
        [sys.version, platform.machine(), platform.node(), device],
    ]
    return cache / "imports" / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
