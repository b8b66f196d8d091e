"""Memory of a job's processes after their imports: constants, or figures that `doctor` or
`selfcheck` has measured on this machine. Its card's figures are beside them.

The packages that few runs use are not counted; host_memory.py adds them."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from launch.base import environment, files, modules
from launch.base.errors import ResourceError
from launch.base.workspace import CODE
from launch.probe import packages
from launch.probe.torch_build import numbers
from launch.schema.machine import MIB, NOT_MEASURED, CardFigures, Device

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "tensorboard",
    "peft",
    "bitsandbytes",
    "pyarrow",
)
ROLES = ("launcher", "agent", "prepare", "rank")
CHILD_TIMEOUT_S = 120
_OLDEST_FLASH_ATTN = (2, 3, 3)  # the oldest version that transformers accepts


def measured_or_assumed(cache: Path, device: Device) -> "Imports":
    """The figures that were measured earlier, else the constants. Starts no process."""
    measured = files.read_or_none(figures_file(cache, device), Imports)
    return measured or (ASSUMED_CUDA if device == "cuda" else ASSUMED)


def measure(cache: Path, device: Device, forget: bool = False) -> "Imports":
    """Measure the figures now, in a child for each role (some seconds in all), and store them. What
    selfcheck has measured of the same card is kept, unless `forget`. Raises ResourceError if a
    child fails."""
    children = {role: _child(role, device) for role in ROLES}
    private = {f"{role}_bytes": child["private_bytes"] for role, child in children.items()}
    mapped = max(child["mapped_bytes"] for child in children.values())
    name, context_bytes = (children["rank"][key] for key in ("context_card", "context_bytes"))
    before, card = measured_or_assumed(cache, device).card, CardFigures(name, context_bytes)
    if before.name == name and not forget:
        is_more = before.context_source == "selfcheck" and before.context_bytes > context_bytes
        newer = replace(before, context_bytes=context_bytes, context_source=card.context_source)
        card = before if is_more else newer
    figures = Imports(**private, mapped_bytes=mapped, reason="measured here", card=card)
    files.store_json(figures_file(cache, device), figures)
    return figures


def keep_card(cache: Path, card: CardFigures) -> None:
    """Store figures of this machine's card for later plans."""
    figures = replace(measured_or_assumed(cache, "cuda"), card=card)
    files.store_json(figures_file(cache, "cuda"), figures)


def no_flash_attn(cache: Path) -> str | None:
    """The reason why the package flash_attn cannot compute attention here; None if it can.

    A flash_attn that was built for another torch cannot be imported. A child process tries the
    import once per version."""
    installed = packages.version("flash-attn")
    if not installed:
        return "the package flash_attn is not installed"
    if numbers(installed)[:3] < _OLDEST_FLASH_ATTN:
        return f"flash_attn {installed} is older than {'.'.join(map(str, _OLDEST_FLASH_ATTN))}"
    identity = [installed, packages.version("torch"), sys.version, sys.prefix]
    file = _file(cache, "flash-attn-", identity)
    result = files.read_or_none(file, dict[str, str])
    if result is None or "failure" not in result:
        result = {"failure": _import_failure("flash_attn")}
        files.store_json(file, result)
    failure = result["failure"]
    return f"flash_attn {installed} cannot be imported ({failure})" if failure else None


def _file(cache: Path, prefix: str, identity: Sequence[Any]) -> Path:
    """The cache file of a result; its name contains a hash of everything that the result depends
    on."""
    return cache / "imports" / f"{prefix}{files.digest(identity)}.json"


def _import_failure(package: str) -> str:
    """The last line of a Python process that fails to import the package; "" if it succeeds."""
    try:
        done = _python("-c", f"import {package}")
    except subprocess.TimeoutExpired:
        return f"not done after {CHILD_TIMEOUT_S} s"
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def _child(role: str, device: Device) -> dict[str, Any]:
    options = (role, "--device", device, "--without", *modules.OPTIONAL)
    try:
        done = _python(
            *("-m", "training.children.import_memory", *options),
            PYTHONPATH=str(CODE),
            HF_HUB_OFFLINE="1",
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


def _python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with these arguments and further variables to its end. Raises
    TimeoutExpired."""
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=environment.passed(os.environ) | variables,
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
    )


def _reason(stderr: str) -> str:
    """The line that names the exception: errors of CUDA and HIP end with advice without it."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    named = [
        line for line in lines if re.match(r"[A-Za-z_][\w.]*(Error|Exception|Warning)?: ", line)
    ]
    errors = [line for line in named if re.match(r"[\w.]*(Error|Exception): ", line)]
    return (errors or named or lines or [""])[-1]


def figures_file(cache: Path, device: Device) -> Path:
    """The file of the measured figures."""
    versions = [[package, packages.version(package)] for package in PACKAGES]
    machine = [sys.version, platform.machine(), platform.node(), device]
    return _file(cache, "", [versions, machine])


@dataclass(frozen=True)
class Imports:
    """Memory of each process of a job before there is a model: private bytes of each process, and
    mapped bytes that all share."""

    launcher_bytes: int
    agent_bytes: int  # accelerate launch, which imports torch too
    prepare_bytes: int
    rank_bytes: int  # memory of a rank, with the host memory of its device's runtime
    mapped_bytes: int
    reason: str
    card: CardFigures = NOT_MEASURED


# Measured on Linux, Python 3.11, torch 2.13 (CPU), transformers 5.23; a rank without peft,
# bitsandbytes, deepspeed, datasets.
ASSUMED = Imports(
    40 * MIB, 151 * MIB, 62 * MIB, 274 * MIB, 123 * MIB, "constants of torch 2.13 on a CPU"
)

# The same of torch 2.13 for CUDA 13.0, Python 3.12, on a driver without a card.
# And what a real driver adds, deduced: on an H200 (torch 2.11) the job of a T5 took 873 MiB more of
# PSS than these figures give, those of a gpt2-small without data workers 850 to 985, and seven
# others 950 to 1,210, of which a profiler took 130 to 200. How much of it is pages of libraries,
# which ranks share, was not seen: 100 MiB are assumed.
ASSUMED_CUDA = Imports(
    40 * MIB,
    277 * MIB,
    62 * MIB,
    (406 + 775) * MIB,
    (363 + 100) * MIB,
    "constants of torch 2.13 for CUDA 13.0, and 875 MiB of a context as on an H200",
)
