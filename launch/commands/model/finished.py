"""Finished models: found in the folders that evaluate, export and scripts/chat.py are given, and
`python -m launch merge`, by which a LoRA adapter and its base become one ordinary model folder,
written by a child."""

import json
import os
import re
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.base import compile_caches, environment, files, modules, processes
from launch.base.errors import ConfigError, ResourceError
from launch.base.text import from_here, shown, size
from launch.base.workspace import CODE, FILES, Workspace
from launch.commands.model import converted
from launch.commands.recipe_arguments import refuse
from launch.hub import names
from launch.predict import optimizers
from launch.predict.models import model_config, weight_files
from launch.probe import machine
from launch.run_folder import layout
from launch.schema.model_sections import (
    DTYPE_BYTES,
    LoraSection,
    ModelSection,
    QuantizationSection,
)
from launch.schema.result import ExportedModel, FinishedModel

ADAPTER = "adapter_config.json"


FLAGS = {
    "source": {"type": Path, "help": "the folder of an adapter, or of a run"},
    "--out": {"type": Path, "required": True, "help": "a new folder"},
    "--base": {
        "type": Path,
        "help": "the folder of the base, in place of the one that was trained on",
    },
}


def main(arguments: Namespace) -> None:
    compile_caches.settle()
    source, out, base = source_folder(arguments.source), arguments.out, arguments.base
    merge(source, out, base)
    write_readme(source, base or base_of(source), out, out)
    print(f"merged into {shown(str(out))}")


def source_folder(source: Path) -> Path:
    """The folder of a model, or that a run has left. Raises ResourceError, with what to type for a
    name on a hub and for a GGUF file."""
    refuse(
        (
            source.suffix == ".gguf",
            f"{source}: a GGUF file is for llama.cpp, which scripts/export_tools/ask_gguf.py asks;"
            " give the folder of the model that it was made from",
        ),
        (
            not source.exists() and names.is_model(str(source)),
            f"{source}: there is no such folder; for the model of that name on a hub type python -m"
            f" launch download {source}, and give the folder that it prints",
        ),
        error=ResourceError,
    )
    return layout.left_in(source)


def write_readme(adapter: Path, base: Path, folder: Path, out: Path) -> None:
    """Write the README.md of a merged model into `folder`, whose name is `out` in the end."""
    text = converted.readme(
        out.name,
        adapter,
        str(base),
        figures="the logits of a row, with those of the adapter on its base",
        ask=f"python scripts/chat.py {from_here(out)}",
    )
    files.write_atomic(folder / "README.md", text)


def merge(source: Path, out: Path, base: Path | None = None) -> None:
    """Merge the adapter in a model's folder into `out`. `base`: in place of the one that it was
    trained on."""
    adapter = _adapter(source)
    named, base = base, (base or base_of(adapter)).absolute()
    model_config.check_adapter(adapter)
    model_config.check_folder(base)
    if named is not None:
        try:
            unlike = _check_alike(base, base_of(adapter))
        except ResourceError as error:  # the one that was trained on may be gone
            unlike = str(error)
        if unlike:
            print(shown(f"--base {base}: not all weights were compared with the trained: {unlike}"))
    refuse_packed(base, adapter)
    _write("merge", base, adapter, out)


def pack(adapter: Path, out: Path) -> None:
    """Write the adapter into `out`, with its base in the 4 bits that it was trained on. Raises
    ConfigError."""
    exported = files.read_or_none(_adapter(adapter) / "lowmem.json", ExportedModel)
    if exported is None or not exported.quantization:
        raise ConfigError(
            f"{adapter}: was not trained on weights of 4 bits (quantization.load_in_4bit); its base"
            " is to be used as it is: --to merged, or the adapter beside its base"
        )
    base = base_of(adapter)
    model_config.check_adapter(adapter)
    model_config.check_folder(base)
    if weight_files.packing(base):
        raise ConfigError(f"{adapter}: its base, {base}, has 4 bits already; use both as they are")
    _write("pack", base, adapter, out)


def _write(how: str, base: Path, adapter: Path, out: Path) -> None:
    """Let a child write the model into a new folder that has room for it."""
    check_new(out)
    weights_bytes = sum(path.stat().st_size for path in base.glob("*.safetensors"))
    # embeddings and scales are part of what is packed
    needed_bytes = weights_bytes // 2 if how == "pack" else weights_bytes
    check_sizes(base, out, needed_bytes, needed_bytes)
    run_child(*child("merge"), how, base, adapter, out.absolute())


def _check_alike(base: Path, trained: Path) -> str:
    """Refuse a base with other weights than the one that the adapter was trained on; the reason for
    which weights were not compared. Raises ConfigError."""
    of_base, other = (weight_files.tensors(folder) or {} for folder in (base, trained))
    unlike = "" if of_base.keys() & other.keys() else "no weight has the same name in both"
    for name in of_base.keys() & other.keys():
        pair = of_base[name], other[name]
        types = " and ".join("4 bits" if each.packing else each.dtype for each in pair)
        is_same = None if "4 bits" in types else weight_files.same_values(*pair)
        if is_same is None:
            unlike = f"{types} do not round to each other"
        elif not is_same:
            raise ConfigError(
                f"--base {base}: its {name} is not that of {trained}, on which the adapter was"
                " trained; give the original of that model"
            )
    return unlike


def refuse_packed(base: Path, adapter: Path | None) -> None:
    """Refuse weights that are packed in 4 bits. Raises ConfigError."""
    if weight_files.packing(base):
        merging = f"python -m launch merge {shlex.quote(str(adapter))} --base FOLDER --out NEW"
        raise ConfigError(
            f"{base}: holds linear weights of 4 bits, expected 16 or 32; name the folder of the"
            f" original{f': {merging}' if adapter else ''}"
        )


def check_new(out: Path) -> None:
    """Refuse a folder that holds something. Raises ConfigError."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            f"--out {out}: found something there, expected a new or empty folder; give another one"
        )
    files.refuse_strangers(out)


def check_sizes(model: Path, out: Path, ram_bytes: int, disk_bytes: int) -> None:
    """Refuse weights for which RAM or the disk is too small. Raises ResourceError."""
    above = files.existing(out.absolute().parent)
    for name, needed, free in (
        ("host RAM", ram_bytes, machine.machine().host_available_bytes),
        (f"room in {above}", disk_bytes, files.free_bytes(above)),
    ):
        if free < needed:
            raise ResourceError(
                f"{model}: its weights are {size(needed)}, but there is {size(free)} {name}"
            )


def child(name: str) -> tuple[str, ...]:
    """The beginning of the command line of a program in training/children/."""
    return sys.executable, "-P", "-m", f"training.children.{name}"


def run_child(*argv: object, is_quiet: bool = False) -> None:
    """Run a child that finds our code and downloads nothing. Its errors are shown where it fails,
    else libraries' warnings and bars would be; `is_quiet`: and nothing else. Raises SystemExit with
    the exit code of a child that fails."""
    variables = {
        **environment.passed(os.environ),
        **{"PYTHONPATH": str(CODE), "HF_HUB_OFFLINE": "1"},
        **{"TQDM_DISABLE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    }
    done = subprocess.run(
        [*map(str, argv)],
        env=variables,
        stdout=subprocess.DEVNULL if is_quiet else None,
        stderr=subprocess.PIPE,
        check=False,
        preexec_fn=processes.die_with_launcher,
    )
    if done.returncode:
        error = re.search(rb"^error: .*\n", done.stderr, re.MULTILINE)
        os.write(2, error[0] if error else done.stderr)
        raise SystemExit(done.returncode)


def _adapter(source: Path) -> Path:
    """The folder of an adapter, if `source` is one."""
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


def find(source: Path) -> FinishedModel:
    """The model of a run, or in a folder, whose files are as they should be. Raises
    ResourceError."""
    folder = source_folder(source).absolute()
    if not any((folder / name).is_file() for name in ("config.json", ADAPTER)):
        raise ResourceError(
            f"{folder}: no model here; give the folder that the run printed, or a run folder"
        )
    base = folder
    if (folder / ADAPTER).is_file():
        base = base_of(folder)
        model_config.check_adapter(folder)
    model_config.check_folder(base)
    tokenizer = folder if (folder / "tokenizer_config.json").is_file() else base
    is_adapter = folder != base
    adapter = files.read_or_none(folder / "lowmem.json", ExportedModel) if is_adapter else None
    dtype = (adapter.dtype if adapter else None) or _dtype(base)
    return FinishedModel(folder, base, tokenizer, dtype, _quantization(base, dtype, adapter))


def _dtype(base: Path) -> Any:
    """The type of a folder's weights, as transformers decides it."""
    config = weight_files.read_json(base / "config.json")
    named = config.get("dtype") or config.get("torch_dtype")
    stored = weight_files.stored_weights(base)
    elements = stored.elements if stored else {}
    types = (named, *sorted(elements, key=elements.__getitem__, reverse=True), "float32")
    return next(each for each in types if each in DTYPE_BYTES)


def _quantization(
    base: Path, dtype: str, adapter: ExportedModel | None
) -> Mapping[str, Any] | None:
    """The section of the recipe if the base of an adapter was quantised in training; that of the
    base if its weights are packed."""
    if adapter and adapter.quantization:
        return adapter.quantization
    packing = weight_files.packing(base)
    if packing is None:
        return None
    config = weight_files.read_json(base / "config.json")["quantization_config"]
    compute = config.get("bnb_4bit_compute_dtype")
    return {
        "load_in_4bit": True,
        "bnb_4bit_compute_dtype": compute if compute in DTYPE_BYTES else dtype,
        **asdict(packing),
    }


def weights_bytes(finished: FinishedModel) -> int:
    """The bytes that the weights take in memory, with adapters as a recipe has them by default."""
    section = ModelSection(path=str(finished.base), dtype=finished.dtype)
    _, parameters, family = model_config.read(section, root=FILES, cache=Workspace.here().cache)
    quantization = finished.quantization
    return optimizers.model_state(
        parameters,
        (),
        LoraSection() if finished.is_adapter or quantization else None,
        family,
        "sgd",
        finished.dtype,
        QuantizationSection.model_validate(quantization) if quantization else None,
    ).weights_bytes


def leave_out_unused(*models: FinishedModel) -> None:
    """Make optional packages look as if they were not installed: transformers would import them,
    which takes half of the time to the first answer."""
    used = {
        "peft": any(each.is_adapter for each in models),
        "bitsandbytes": any(each.quantization for each in models),
    }
    modules.leave_out(package for package in modules.OPTIONAL if not used.get(package))
