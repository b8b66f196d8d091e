"""`python -m launch export`: a trained model for other programs, merged into one ordinary folder,
beside its base in 4 bits, or as a GGUF file whose answers are compared, with a Modelfile for
Ollama."""

import glob
import json
import os
import re
import shlex
import shutil
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.base import compile_caches, files
from launch.base.errors import ConfigError, ExportError, ResourceError
from launch.base.text import columns, from_here, shown
from launch.base.workspace import CODE, FILES, Workspace
from launch.commands.model import converted, finished, hub
from launch.commands.recipe_arguments import refuse
from launch.hub import upload
from launch.predict.models import model_config, weight_files
from launch.run_folder import layout
from launch.run_folder.layout import RunDir
from launch.schema.result import (
    EXPORTED,
    ConvertedAnswers,
    ExpectedAnswers,
    ExportedFrom,
    ExportedModel,
)

# a virtual environment that make export-tools makes
TOOLS = Path(os.environ.get("LOWMEM_EXPORT_TOOLS") or CODE / ".cache" / "export_tools")
SCRIPTS = FILES / "scripts" / "export_tools"
_ASK = ".cache/export_tools/bin/python scripts/export_tools/ask_gguf.py"
Q4 = "q4_k_m"  # made of f16 by llama.cpp's llama-quantize
BYTES = {"f16": 2, "bf16": 2, "q8_0": 34 / 32, Q4: 2 + 0.62}  # bytes of a weight
REST = 1.02  # with the weights that stay in float32
_FOLDERS = ("merged", "packed", hub.FOLDER)  # values of --to that transformers loads
_SPARE_BYTES = 32 << 20  # vocabulary, ids and answers


@dataclass(frozen=True)
class Conversion:
    """A model that becomes a GGUF file."""

    model: Path
    run: Path | None  # the run that trained it
    out: Path
    file_type: str
    prompts: Path | None
    quantizer: str | None  # llama-quantize
    to: str

    @property
    def is_adapter(self) -> bool:
        return (self.model / finished.ADAPTER).is_file()

    @property
    def weights(self) -> Path:
        """The folder of the weights, without an adapter."""
        return finished.base_of(self.model) if self.is_adapter else self.model

    @property
    def config(self) -> Mapping[str, Any]:
        return json.loads((self.weights / "config.json").read_bytes())

    def base(self) -> str:
        """The folder of the model that was trained; "" for a shape's random weights."""
        if self.is_adapter:
            return str(self.weights)
        if self.run:
            return RunDir(self.run).read_recipe().model.path or ""
        exported = files.read_or_none(self.weights / "lowmem.json", ExportedModel)
        return exported.base if exported else str(self.weights)


FLAGS = {
    "source": {"type": Path, "help": "the folder of a model, an adapter or a run"},
    "--to": {"choices": (*_FOLDERS, "gguf", "ollama"), "required": True},
    "--type": {"choices": BYTES, "help": "of a GGUF file's weights (default f16)"},
    "--out": {"type": Path, "help": "a new folder (default: beside the model)"},
    "--prompts": {
        "type": Path,
        "help": "a text file with a question a line, instead of held-out rows",
    },
    "--llama-quantize": {"metavar": "PROGRAM", "help": f"of llama.cpp, for {Q4}"},
    "--push": {
        "metavar": "OWNER/NAME",
        "help": "upload the folder to this repository, a private one",
    },
    "--public": {"action": "store_true", "help": "a public one"},
    "--dry-run": {"action": "store_true", "help": "show what --push would upload"},
}


def main(arguments: Namespace) -> None:
    compile_caches.settle()
    conversion, repository = _conversion(arguments), hub.repository(arguments)
    if repository and not arguments.dry_run:
        upload.check(repository, arguments.public)  # before a conversion takes its minutes
    origin = ExportedFrom(
        str(conversion.model),
        weight_files.weights_fingerprint(conversion.model),
        conversion.to,
        conversion.file_type,
    )
    if arguments.to != hub.FOLDER and _is_exported(conversion.out, origin):
        print(f"written already: {shown(str(conversion.out))}")
    elif arguments.to != hub.FOLDER:
        _export(conversion, origin)
    if repository:
        named = {str(path): path.name for path in (conversion.model, conversion.out)}
        hub.push(conversion.out, conversion.base(), named, repository, arguments)


def _conversion(arguments: Namespace) -> Conversion:
    model = finished.source_folder(arguments.source).absolute()
    file_type = arguments.type or "f16"
    of_gguf = {
        "--type": arguments.type,
        "--prompts": arguments.prompts,
        "--llama-quantize": arguments.llama_quantize,
    }
    refuse(
        *(
            (
                value and arguments.to in _FOLDERS,
                f"{flag} {value}: is of a GGUF file; leave it out beside --to {arguments.to}",
            )
            for flag, value in of_gguf.items()
        ),
        (
            arguments.out and arguments.to == hub.FOLDER,
            f"--out {arguments.out}: --to {hub.FOLDER} uploads the model's own folder and writes"
            " none; leave it out",
        ),
        (
            arguments.push and arguments.to == "packed",
            f"--push {arguments.push}: a hub has the base already; push the adapter: --to folder",
        ),
    )
    ending = f"-{arguments.to}" + (f"-{file_type}" if file_type != "f16" else "")
    out = arguments.out or model.with_name(f"{model.name}{ending}")
    return Conversion(
        model=model,
        run=run_of(arguments.source, model),
        out=model if arguments.to == hub.FOLDER else out.absolute(),
        file_type=file_type,
        prompts=arguments.prompts,
        quantizer=_quantizer(arguments) if arguments.type == Q4 else None,
        to=arguments.to,
    )


def _is_exported(out: Path, origin: ExportedFrom) -> bool:
    """True for a folder with this export, finished and whole. Raises ResourceError for one that is
    of other weights, or was damaged."""
    there = files.read_or_none(out / EXPORTED, ExportedFrom)
    if there is None:
        return False
    if replace(there, sizes={}) != origin:
        raise ConfigError(
            f"{out}: holds an export of other weights than {origin.model} has now, or of another"
            " type; remove it, or name another folder with --out"
        )
    if other := files.other_size(out, there.sizes):
        path, sizes = other
        raise ResourceError(
            f"{path}: is not as it was exported: {sizes}; remove {out} and export again"
        )
    return True


def _export(conversion: Conversion, origin: ExportedFrom) -> None:
    """Write the export under another name and put it in its place."""
    finished.check_new(conversion.out)
    if conversion.to not in _FOLDERS:
        check(conversion)
    out = conversion.out
    for killed in out.parent.glob(f".{glob.escape(out.name)}.*.tmp"):
        print(f"{shown(str(killed))}: another export writes there, or was killed; then remove it")
    aside = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise ResourceError(
            f"{out}: cannot be written there ({error.strerror}); name another folder with --out"
        ) from error
    try:
        files.write_json(aside / EXPORTED, origin)
        (_write_folder if conversion.to in _FOLDERS else _convert)(conversion, aside)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def run_of(source: Path, model: Path) -> Path | None:
    """The folder of the run that trained a model, if it is still there."""
    if RunDir(source).plan_file.exists():
        return source.absolute()
    exported = files.read_or_none(model / "lowmem.json", ExportedModel)
    named = re.fullmatch(f"(.+)-({layout.STAMP.pattern})", exported.run) if exported else None
    run = Workspace.here().runs / named[1] / named[2] if named else None
    return run if run and RunDir(run).plan_file.exists() else None


def _quantizer(arguments: Namespace) -> str:
    """llama.cpp's program for 4 bits. Raises ConfigError."""
    named = arguments.llama_quantize or "llama-quantize"
    program = shutil.which(named)
    if program is None and not arguments.llama_quantize and has_llama_cpp():
        return "llama_cpp"
    if program is None:
        raise ConfigError(
            f"--type {Q4}: found no {named}, expected a program of llama.cpp; name it: python -m"
            f" launch export {arguments.source} --to {arguments.to} --type {Q4}"
            " --llama-quantize PROGRAM; llama-cpp-python in its place:"
            f" {from_here(TOOLS / 'bin' / 'python')} -m pip install llama-cpp-python"
        )
    return program


def has_llama_cpp() -> bool:
    """True if llama-cpp-python is installed for the tools, which see the packages here too."""
    return find_spec("llama_cpp") is not None or any(
        TOOLS.glob("lib/python*/site-packages/llama_cpp")
    )


def check(conversion: Conversion) -> None:
    """Refuse what cannot be converted here. Raises ConfigError and ResourceError."""
    if not (TOOLS / ".requirements").is_file():
        raise ResourceError(
            f"{TOOLS}: the converter is not installed; type this once, in the folder of lowmem:"
            " make export-tools"
        )
    if conversion.prompts:
        files.lines_of_text(conversion.prompts)  # before a model is loaded
    folder = conversion.weights
    model_config.check_folder(folder)
    model_config.check_tokenizer(conversion.model)
    config = conversion.config
    if config.get("is_encoder_decoder"):
        raise ConfigError(
            f"{folder}: is an encoder-decoder ({config['model_type']}), which neither llama.cpp's"
            " server nor Ollama runs; expected a decoder"
        )
    finished.check_new(conversion.out)
    finished.refuse_packed(folder, conversion.model if conversion.is_adapter else None)
    stored = weight_files.stored_weights(folder)
    assert stored is not None  # as check_folder() has seen
    count = sum(stored.elements.values())
    disk_bytes = int(count * BYTES[conversion.file_type] * REST) + _SPARE_BYTES
    disk_bytes += stored.total_bytes if conversion.is_adapter else 0
    finished.check_sizes(folder, conversion.out, 4 * count, disk_bytes)  # answers are in float32


def _write_folder(conversion: Conversion, aside: Path) -> None:
    """Merge an adapter, or pack its base in 4 bits, in the folder `aside`."""
    written, out, is_packed = aside / "model", conversion.out, conversion.to == "packed"
    (finished.pack if is_packed else finished.merge)(conversion.model, written)
    if is_packed:
        config = json.loads((written / finished.ADAPTER).read_bytes())
        config["base_model_name_or_path"] = str(out / "base")
        files.write_json(written / finished.ADAPTER, config)
    finished.write_readme(conversion.model, conversion.weights, written, out)
    (aside / EXPORTED).rename(written / EXPORTED)
    _place(written, out)
    base = f", whose base is {shown(str(out / 'base'))}" if is_packed else ""
    print(f"{conversion.to} into {shown(str(out))}{base}")


def _convert(conversion: Conversion, aside: Path) -> None:
    """Convert and compare in the folder `aside`, which becomes `out`."""
    folder = conversion.model
    if conversion.is_adapter:
        folder = aside / "model"
        finished.merge(conversion.model, folder)
    file = aside / f"{conversion.model.name}-{conversion.file_type}.gguf"
    expected_file, answers_file = aside / "expected.json", aside / "converted.json"
    print("asking the model", flush=True)
    prompts = (conversion.run or "", conversion.prompts or "")
    finished.run_child(*finished.child("expected_answers"), folder, expected_file, *prompts)
    _run_tools(conversion, folder, file, expected_file, answers_file)
    expected = files.read(expected_file, ExpectedAnswers)
    answers = files.read(answers_file, ConvertedAnswers)
    assert expected is not None and answers is not None
    if answers.refused:
        raise ConfigError(shown(f"{conversion.model}: {answers.refused}"))
    if answers.other_ids:
        print(converted.split_otherwise(answers, columns()))
    for path in (expected_file, answers_file):
        path.unlink()
    shutil.rmtree(aside / "model", ignore_errors=True)
    _finish(conversion, file, expected, answers)


def _run_tools(
    conversion: Conversion, folder: Path, file: Path, expected_file: Path, out: Path
) -> None:
    """Write the file and let llama.cpp answer from it, with the Python of the tools."""
    finished.run_child(
        *(TOOLS / "bin" / "python", SCRIPTS / "to_gguf.py"),
        *("--folder", folder, "--file", file, "--type", conversion.file_type),
        *("--expected", expected_file, "--out", out),
        *(("--llama-quantize", conversion.quantizer) if conversion.quantizer else ()),
    )


def _finish(
    conversion: Conversion, file: Path, expected: ExpectedAnswers, answers: ConvertedAnswers
) -> None:
    """Name the file by what was compared, write the texts beside it, and put the folder in its
    place. Raises ExportError for a file that is not the model."""
    figures = converted.summary(expected, answers)
    is_judged = conversion.file_type != Q4
    faults = [*converted.problems(expected, answers, conversion.file_type)] if is_judged else []
    if faults:
        file = file.rename(file.with_name(f"{file.name}.unchecked"))
        file.with_name(EXPORTED).unlink()
    else:
        _write_texts(conversion, file, expected, figures)
    _place(file.parent, conversion.out)
    written = shown(str(conversion.out / file.name))
    if faults:
        raise ExportError(f"{written}: {shown(faults[0])}; {figures}; do not use this file")
    print(f"{figures}\nwritten: {written}")
    tools = (TOOLS / "bin" / "python", SCRIPTS / "ask_gguf.py", conversion.out / file.name)
    print(f"ask it: {shlex.join(map(from_here, tools))} QUESTION")


def _place(folder: Path, out: Path) -> None:
    """Give a finished folder its name, with the sizes of its files beside its origin."""
    if origin := files.read_or_none(folder / EXPORTED, ExportedFrom):
        written = (path for path in folder.rglob("*") if path.is_file() and path.name != EXPORTED)
        sizes = {str(path.relative_to(folder)): path.stat().st_size for path in written}
        files.write_json(folder / EXPORTED, replace(origin, sizes=sizes))
    files.sync_all(folder)
    finished.check_new(out)  # another export may have written there meanwhile
    if out.exists():
        out.rmdir()
    folder.rename(out)


def _write_texts(
    conversion: Conversion, file: Path, expected: ExpectedAnswers, figures: str
) -> None:
    """Write what stands beside a GGUF file."""
    name = conversion.model.name
    ask = f"llama-cli -m {file.name}\n{_ASK} {file.name} QUESTION  # in the folder of lowmem"
    if conversion.to == "ollama":
        ask = f"ollama create {name} -f Modelfile\nollama run {name}"
        text = converted.modelfile(file.name, expected, conversion.config)
        files.write_atomic(file.with_name("Modelfile"), text)
    text = converted.readme(file.stem, conversion.model, conversion.base(), figures, ask)
    files.write_atomic(file.with_name("README.md"), text)
