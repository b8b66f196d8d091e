"""`python -m launch merge`: a LoRA adapter and its base become one ordinary model folder, written
by a child."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launch.base import compile_caches, environment, files
from launch.base.errors import ConfigError, ResourceError
from launch.base.text import size
from launch.base.workspace import CODE
from launch.commands import recipe_arguments
from launch.predict import model_config, weight_files
from launch.probe import machine
from launch.run_folder import layout

ADAPTER = "adapter_config.json"


def add_parser(subparsers: Any, verb: str) -> ArgumentParser:
    text = "merge a LoRA adapter into its base: one ordinary model folder"
    parser = recipe_arguments.add_simple_parser(subparsers, verb, text)
    parser.add_argument("source", type=Path, help="the folder of an adapter, or of a run")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "--base", type=Path, help="the folder of the base, in place of the one that was trained on"
    )
    return parser


def main(arguments: Namespace, others: Sequence[str]) -> int:
    """Merge what is in `source`, a run or an adapter, into `out`; the child's exit code."""
    recipe_arguments.reject(arguments, others)
    compile_caches.settle()
    source, out = arguments.source, arguments.out
    adapter = _adapter(source)
    base = (arguments.base or base_of(adapter)).absolute()
    model_config.check_adapter(adapter)
    model_config.check_folder(base)
    if weight_files.packing(base):
        raise ConfigError(
            f"{base}: holds linear weights of 4 bits, and a merged model has 16 or 32; give the"
            " folder of the original model: --base FOLDER"
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out}: found something there, expected a new or empty folder; give another one"
        )
    files.refuse_strangers(out)
    weights_bytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    above = next(path for path in out.absolute().parents if path.exists())
    for what, there in (
        ("host RAM", machine.machine().host_available_bytes),
        (f"room in {above}", files.free_bytes(above)),
    ):
        if there < weights_bytes:
            raise ResourceError(
                f"{base}: its weights are {size(weights_bytes)}, but there is {size(there)} {what}"
            )
    argv = [
        sys.executable,
        "-P",
        "-m",
        "training.children.merge",
        "--base",
        str(base),
        "--adapter",
        str(adapter),
    ]
    variables = environment.passed(os.environ) | {"PYTHONPATH": str(CODE), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*argv, "--out", str(out.absolute())], env=variables, stderr=subprocess.PIPE, check=False
    )
    if done.returncode:  # else libraries' warnings and bars
        os.write(2, done.stderr)
    return done.returncode


def _adapter(source: Path) -> Path:
    """The adapter's folder: `source`, or where the run in `source` left its model."""
    source = layout.left_in(source)
    if (source / ADAPTER).is_file():
        return source.absolute()
    if (source / "adapter" / ADAPTER).is_file():
        raise ConfigError(
            f"{source}: the adapter is already merged into the model in this folder; use that"
        )
    raise ResourceError(
        f"{source}: found no {ADAPTER}, expected a LoRA adapter, or the run that trained one"
    )


def base_of(adapter: Path) -> Path:
    """The folder of the model that the adapter was trained on."""
    file = adapter / ADAPTER
    try:
        named = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ResourceError(
            f"{file}: is not an adapter's configuration ({error}); copy the adapter again"
        ) from error
    if not named:
        raise ResourceError(
            f"{file}: names no base model: it was trained on a shape's random weights, kept nowhere"
            " else"
        )
    if not (Path(named) / "config.json").is_file():
        raise ResourceError(
            f"{file}: its base model is {named}, and no model is there; put it there, or mend the"
            " path"
        )
    return Path(named)
