"""What the processes of a job hold once they are imported, measured here once per set of versions and kept."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from launch import environment, rundir
from launch.host_memory import ASSUMED, ASSUMED_CUDA_BYTES, Imports
from launch.schema import Device

PACKAGES = ("torch", "transformers", "accelerate", "datasets", "tensorboard", "peft", "bitsandbytes", "pyarrow")
ROLES = ("launcher", "agent", "prepare", "rank")
CHILD_TIMEOUT_S = 120


def known(cache: Path, without: Sequence[str], device: Device) -> Imports:
    """As measured before, else the constants. Starts nothing; `without`: packages that the run leaves out."""
    kept = rundir.read_json(kept_file(cache, without, device))
    if kept:
        return Imports(**kept)
    on_device = ASSUMED_CUDA_BYTES if device == "cuda" else 0
    return Imports(**{**asdict(ASSUMED), "rank_bytes": ASSUMED.rank_bytes + on_device})


def measured(cache: Path, without: Sequence[str], device: Device) -> Imports:
    """As measured before, else measured now in one child per role, some seconds in all, and kept."""
    file = kept_file(cache, without, device)
    if not file.exists():
        children = {role: _child(role, without, device) for role in ROLES}
        private = {f"{role}_bytes": child["private_bytes"] for role, child in children.items()}
        mapped = max(child["mapped_bytes"] for child in children.values())
        file.parent.mkdir(parents=True, exist_ok=True)
        rundir.write_json(file, {**private, "mapped_bytes": mapped, "reason": "measured here"})
    return known(cache, without, device)


def _child(role: str, without: Sequence[str], device: Device) -> dict[str, int]:
    argv = [sys.executable, "-P", "-m", "training.imports", role, "--device", device]
    variables = {**environment.passed(os.environ), "PYTHONPATH": str(rundir.CODE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*argv, "--without", *without],
        env=variables,
        stdout=subprocess.PIPE,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def kept_file(cache: Path, without: Sequence[str], device: Device) -> Path:
    """Where the figures are kept: a name made of all that they depend on."""
    identity = [
        [[package, _version(package)] for package in PACKAGES],
        [sys.version, platform.machine(), platform.node(), device, sorted(without)],
    ]
    return cache / "imports" / f"{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]}.json"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
