"""Installed packages: those that are too old, and those that a rank of a run does not use."""

import shlex
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from launch.base import modules
from launch.base.errors import ResourceError
from launch.probe.torch_build import numbers
from launch.schema.plan import Strategy
from launch.schema.recipe import Recipe
from launch.schema.training_section import Tracker

# The oldest versions that are tested (make test-oldest). With those before torch 2.10 and
# transformers 5.3 a file of somebody else can run code or corrupt memory (CVE-2026-24747;
# CVE-2026-4372, -1839)
OLDEST = {"torch": (2, 11), "transformers": (5, 17)}
# version of transformers; before it, all layers or none are checkpointed
_WITH_EVERY_N_LAYERS = (5, 23)
_WITHOUT_NO_RUN = (0, 8)  # version of swanlab; before it, get_run() is None where there is no run
_PIP_NAMES = {"swanlab": "swanlab<0.8"}
# variables that make transformers' callbacks send weights
UPLOADS = ("WANDB_LOG_MODEL", "HF_MLFLOW_LOG_ARTIFACTS", "SWANLAB_LOG_MODEL")
# version of torch; before it, no grouped heads, and in 2.10 no scale or window
_WITH_VARLEN_ATTN = (2, 12)


def refuse_old() -> None:
    """Raises ResourceError for an installed package that is older than those that are tested."""
    for package, oldest in OLDEST.items():
        installed = version(package)
        if installed and numbers(installed)[:2] < oldest:
            expected = ".".join(map(str, oldest))
            raise ResourceError(
                f"{package} {installed} is installed, expected {expected} or newer: older versions"
                " are not tested, and some run code that a model folder brings; pip install"
                f" '{package}>={expected}'"
            )


def version(package: str) -> str:
    """The version of an installed package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def no_compiler(on_gpu: bool, environ: Mapping[str, str]) -> str | None:
    """The reason why torch.compile's inductor cannot build its kernels here; None if it can.

    Source: torch 2.13 _inductor/cpp_builder.py (g++, or CXX; Python's headers), triton's
    runtime/build.py (CC, gcc or clang)."""
    if on_gpu and find_spec("triton") is None:
        return "the package triton is not installed"
    programs = [environ.get("CC"), "gcc", "clang"] if on_gpu else [environ.get("CXX") or "g++"]
    if not any(name and shutil.which(name, path=environ.get("PATH")) for name in programs):
        names = " or ".join(filter(None, programs))
        return f"there is no compiler ({names}); install one, for example: apt-get install g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"Python's headers are not installed ({header})"


def no_liger(environ: Mapping[str, str]) -> str | None:
    """The reason why Liger's kernels cannot be built here; None if they can."""
    if find_spec("liger_kernel") is None:
        return "the package liger_kernel is not installed: pip install liger-kernel"
    return no_compiler(True, environ)


def no_every_n_layers() -> str | None:
    """The reason why transformers cannot checkpoint only every n-th layer here; None if it can."""
    return _older_than("transformers", _WITH_EVERY_N_LAYERS, "checkpoints all layers or none")


def no_varlen_attn() -> str | None:
    """The reason why torch's varlen_attn cannot compute attention here; None if it can."""
    return _older_than("torch", _WITH_VARLEN_ATTN, "has no varlen_attn with grouped heads")


def _older_than(package: str, least: tuple[int, int], lack: str) -> str | None:
    installed = version(package)
    if not installed or numbers(installed)[:2] >= least:
        return None
    return f"{package} {installed} {lack}, as all before {'.'.join(map(str, least))}"


def _pip_install(requirement: str) -> str:
    """The line that installs a package for the Python that runs this."""
    return f"{shlex.quote(sys.executable)} -m pip install {shlex.quote(requirement)}"


def refuse_missing(recipe: Recipe) -> None:
    """Raises ResourceError if a package that the recipe needs is not installed."""
    for package, key in {
        "peft": "lora" if recipe.lora else "",
        "bitsandbytes": "quantization" if recipe.quantization else _bitsandbytes_key(recipe),
    }.items():
        if key and find_spec(package) is None:
            raise ResourceError(
                f"{key} needs the package {package}, which is not installed;"
                f" {_pip_install(package)}"
            )
    for tracker in recipe.training.report_to:
        _refuse_tracker(tracker, recipe.launch.pass_env)


def _refuse_tracker(tracker: Tracker, pass_env: Sequence[str]) -> None:
    """Raises ResourceError for a tracker that cannot do what the recipe asks."""
    key = f"training.report_to: {tracker}"
    if find_spec(tracker) is None:
        raise ResourceError(
            f"{key} is not installed; {_pip_install(_PIP_NAMES.get(tracker, tracker))}"
        )
    if tracker == "swanlab" and numbers(installed := version(tracker))[:2] >= _WITHOUT_NO_RUN:
        raise ResourceError(
            f"{key} {installed} does not work with the callback of transformers;"
            f" {_pip_install(_PIP_NAMES[tracker])}"
        )
    for name in UPLOADS:
        if name in pass_env:
            raise ResourceError(
                f"launch.pass_env: {name} asks {tracker} for a copy of the model, which is not"
                " made while it trains; leave it out, and publish the finished folder"
            )


def _bitsandbytes_key(recipe: Recipe) -> str:
    """The key that selects an optimizer of bitsandbytes; "" if none does."""
    optim = recipe.training.optim
    is_its_own = any(part in optim for part in ("8bit", "32bit", "bnb", "paged"))
    return f"training.optim: {optim}" if is_its_own else ""


def unused(recipe: Recipe, strategy: Strategy | None) -> list[str]:
    """Packages that transformers and accelerate import if they are installed, and that this run
    does not use.

    `strategy` is None for any run without DeepSpeed. benchmarks/start_up.py measures the time that
    these packages cost a rank.
    """
    is_used = {
        "peft": recipe.lora is not None,
        "bitsandbytes": bool(_bitsandbytes_key(recipe)) or recipe.quantization is not None,
        "deepspeed": strategy is not None and strategy.launch_mode.engine == "deepspeed",
        "datasets": False,
    }
    return [package for package in modules.OPTIONAL if not is_used[package]]
