"""Which installed packages are too old, and which a rank of a run has no use for."""

from __future__ import annotations

import re
import shutil
import sysconfig
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from launch.base.errors import ResourceError
from launch.schema.plan import Strategy
from launch.schema.recipe import Recipe

# Below these a file that somebody else made can run code, or corrupt memory (CVE-2026-24747;
# CVE-2026-4372, -1839)
OLDEST = {"torch": (2, 10), "transformers": (5, 3)}

OPTIONAL = ("peft", "bitsandbytes", "deepspeed")


def refuse_old() -> None:
    """Raises ResourceError for an installed package that is too old to be trusted with files."""
    for package, oldest in OLDEST.items():
        try:
            found = version(package)
        except PackageNotFoundError:
            continue  # a machine that only plans
        numbers = tuple(int(part) for part in re.findall(r"\d+", found)[:2])
        if numbers < oldest:
            wanted = ".".join(map(str, oldest))
            raise ResourceError(
                f"{package} {found} is installed, expected {wanted} or newer: older ones run code"
                f" that a checkpoint or a model folder brings; pip install '{package}>={wanted}'"
            )


def no_compiler(on_gpu: bool, environ: Mapping[str, str]) -> str | None:
    """Why torch.compile's inductor cannot build its kernels here; None where it can. Source: torch
    2.13 _inductor/cpp_builder.py (g++, or CXX; Python's headers), triton's runtime/build.py (CC,
    gcc or clang)."""
    if on_gpu and find_spec("triton") is None:
        return "the package triton is not installed"
    wanted = [environ.get("CC"), "gcc", "clang"] if on_gpu else [environ.get("CXX") or "g++"]
    if not any(name and shutil.which(name, path=environ.get("PATH")) for name in wanted):
        names = " or ".join(name for name in wanted if name)
        return f"there is no compiler ({names}); install one, as by apt-get install g++"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return None if header.exists() else f"Python's headers are not installed ({header})"


def no_liger(environ: Mapping[str, str]) -> str | None:
    """Why Liger's kernels cannot be built here; None where they can."""
    if find_spec("liger_kernel") is None:
        return "the package liger_kernel is not installed: pip install liger-kernel"
    return no_compiler(True, environ)


def refuse_missing(recipe: Recipe) -> None:
    """Raises ResourceError for a package that the recipe needs and that is not installed."""
    for package, key in {
        "peft": "lora" if recipe.lora else "",
        "bitsandbytes": "quantization" if recipe.quantization else _bitsandbytes_key(recipe),
    }.items():
        if key and find_spec(package) is None:
            raise ResourceError(
                f"{key} needs the package {package}, which is not installed; pip install {package}"
            )


def _bitsandbytes_key(recipe: Recipe) -> str:
    """The key that asks for bitsandbytes' optimizer."""
    is_asked = any(word in recipe.training.optim for word in ("8bit", "32bit", "bnb", "paged"))
    return f"training.optim: {recipe.training.optim}" if is_asked else ""


def unused(recipe: Recipe, strategy: Strategy | None) -> list[str]:
    """Packages that transformers and accelerate import wherever they are installed, and this run
    does not use.

    `strategy` None: whatever runs without DeepSpeed. What they cost a rank at its start:
    benchmarks/start_up.py.
    """
    uses_bitsandbytes = bool(_bitsandbytes_key(recipe)) or recipe.quantization is not None
    is_used = (
        recipe.lora is not None,
        uses_bitsandbytes,
        strategy is not None and strategy.engine == "deepspeed",
    )
    return [package for package, used in zip(OPTIONAL, is_used, strict=True) if not used]
