"""`python -m launch evaluate`: loss, exact match, BLEU and ROUGE-L of a finished model on the rows
of a file, computed by a child; or tasks of lm-evaluation-harness, which is then called."""

import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launch.base import compile_caches, files
from launch.base.errors import ConfigError, ResourceError
from launch.base.text import shown, size
from launch.base.workspace import FILES, Workspace
from launch.commands import recipe_arguments
from launch.commands.model import export, finished
from launch.data import chat_templates, columns, token_cache
from launch.data.token_cache import TokenCache
from launch.predict.models import model_config
from launch.probe import machine as probe_machine
from launch.recipe import load, paths
from launch.run_folder.layout import RunDir
from launch.schema.machine import Machine
from launch.schema.plan import DataFormat, ModelSize
from launch.schema.recipe import Recipe
from launch.schema.result import Evaluation, FinishedModel

# keys of a run's data section that are of its other files, or of the order of its rows
_OF_TRAINING = {
    *("validation_file", "validation_size", "max_train_samples", "max_validation_samples"),
    *("streaming", "shuffle_buffer_mib", "group_by_length", "batch_by_tokens"),
}
_OF_TOKENS = {"split_special_tokens", "src_lang", "tgt_lang"}  # keys of its tokenizer section


EPILOG = (
    "Keys of a recipe replace those of the run, or their defaults:\n"
    "--data.prompt_column=question --data.max_length=1024 --evaluation.max_new_tokens=128"
)
FLAGS = {
    "source": {"type": Path, "help": "the folder of a model, an adapter or a run"},
    "--file": {"help": "rows, as data.train_file takes them"},
    "--json": {"action": "store_true", "help": "print one JSON object"},
    "--tasks": {"help": "instead: tasks of lm-evaluation-harness, as it takes them"},
}


def main(arguments: Namespace, unparsed: Sequence[str]) -> int | None:
    overrides = recipe_arguments.read_keys(arguments, unparsed)
    if (arguments.file is None) == (arguments.tasks is None):
        raise ConfigError("evaluate: expected either --file FILE or --tasks NAME,NAME")
    compile_caches.settle()
    model = finished.find(arguments.source)
    if arguments.tasks is not None:
        return subprocess.run(_harness(model, arguments.tasks), check=False).returncode
    run_recipe, flags = None, ["no"]
    if run := export.run_of(arguments.source, model.folder):
        run_recipe, strategy = RunDir(run).read_recipe(), RunDir(run).read_plan().strategy
        fuses = strategy.levers.fused_adapters and model.is_adapter
        flags = [strategy.mixed_precision, *["fuses"] * fuses]
    tokens = _tokens(
        model, _recipe(model, run_recipe, arguments.file, overrides), is_run=run_recipe is not None
    )
    model = replace(model, dtype=tokens.recipe.model.dtype)
    with TemporaryDirectory() as folder:
        _run_child(tokens, model, Path(folder), flags, is_quiet=arguments.json)
        evaluation = files.read(Path(folder) / "evaluation.json", Evaluation)
    assert evaluation is not None
    evaluation = replace(evaluation, notes=tuple(_notes(tokens, evaluation)))
    print(files.to_json(vars(evaluation), 1) if arguments.json else shown(_text(evaluation)))


def _harness(model: FinishedModel, tasks: str) -> list[str]:
    """The command line of lm-evaluation-harness. Raises ResourceError where it is not
    installed."""
    program = shutil.which("lm_eval")
    if program is None and find_spec("lm_eval") is None:
        raise ResourceError(
            "--tasks: lm-evaluation-harness is not installed here; type python -m pip install"
            ' "lm-eval[hf]"'
        )
    described = [
        f"pretrained={model.base},tokenizer={model.tokenizer},dtype={model.dtype}",
        *[f"peft={model.folder}"] * model.is_adapter,
        *["load_in_4bit=True"] * (model.quantization is not None),
    ]
    command = [
        *([program] if program else [sys.executable, "-m", "lm_eval"]),
        *("--model", "hf", "--model_args", ",".join(described), "--tasks", tasks),
    ]
    print(shown(shlex.join(command)), file=sys.stderr)
    return command


def _recipe(
    model: FinishedModel, run_recipe: Recipe | None, file: str, overrides: Sequence[str]
) -> Recipe:
    """A recipe that reads the file as a run did, or as a recipe does by default. Raises
    ConfigError."""
    content: dict[str, Any] = {
        "name": "evaluate",
        "task": run_recipe.task if run_recipe else "sft",
        "model": {
            "path": str(model.base),
            "dtype": run_recipe.model.dtype if run_recipe else model.dtype,
        },
        "tokenizer": {"path": str(model.tokenizer)},
        "data": {"train_file": file},
        "output_dir": str(model.folder),
    }
    if run_recipe:
        content["tokenizer"] |= run_recipe.tokenizer.model_dump(
            include=_OF_TOKENS, exclude_unset=True
        )
        content["data"] |= run_recipe.data.model_dump(
            exclude_unset=True, exclude={*_OF_TRAINING, "train_file"}
        )
        content["evaluation"] = run_recipe.evaluation
    recipe = Recipe.model_validate(content)
    with TemporaryDirectory() as folder:
        written = Path(folder) / "evaluate.yaml"
        written.write_text(load.dump(recipe), encoding="utf-8")
        recipe, _ = load.load(str(written), list(map(paths.absolute_override, overrides)), False)
    return paths.with_absolute_paths(recipe, Path.cwd())


def _tokens(model: FinishedModel, recipe: Recipe, is_run: bool) -> TokenCache:
    """The rows of the file as they will be tokenised, with notes on them. Raises DataError and
    ResourceError."""
    workspace = Workspace.here()
    config, _, family = model_config.read(recipe.model, root=FILES, cache=workspace.cache)
    model_config.check_tokenizer(Path(str(recipe.tokenizer.path)))
    data_format = columns.detect(
        recipe.data, workspace.root, token_cache.known_files(workspace.cache)
    )
    if data_format.kind == "text" and not is_run:
        recipe = recipe.model_copy(update={"task": "pretrain"})
    notes = _notes_on_format(recipe, data_format, family.is_encoder_decoder)
    data_format = replace(data_format, notes=(*data_format.notes, *notes))
    if model.is_adapter:  # it may have added tokens
        config = {**config, "vocab_size": None}
    model_size = ModelSize(str(model.folder), config, 0, 0, family=family)
    return token_cache.token_cache(workspace.cache, recipe, model_size, data_format)


def _notes_on_format(recipe: Recipe, data_format: DataFormat, is_pair: bool) -> Iterator[str]:
    is_text = data_format.kind == "text"
    template = chat_templates.describe(recipe, is_pair, is_text)
    if is_text:
        yield f"{recipe.data.train_file} holds texts, and no questions: the loss is all there is"
    elif " has none: " in template:
        yield f"chat template: {template}; --tokenizer.chat_template=chatml names another one"


def _run_child(
    tokens: TokenCache, model: FinishedModel, folder: Path, flags: Sequence[str], is_quiet: bool
) -> None:
    """Let a child write evaluation.json into a folder. Raises ResourceError for weights that do not
    fit. `flags`: the precision, and "fuses"."""
    machine = probe_machine.machine(run_dir=Workspace.here().root)
    argv = (folder, "cuda" if machine.gpus else "cpu", free_bytes(model, machine), *flags)
    files.write_json(folder / "tokens.json", tokens)
    files.write_json(folder / "model.json", model)
    finished.run_child(*finished.child("evaluate"), *argv, is_quiet=is_quiet)


def _notes(tokens: TokenCache, figures: Evaluation) -> Iterator[str]:
    yield from tokens.data_format.notes
    if figures.rows_truncated:
        yield (
            f"{figures.rows_truncated:,} of {figures.rows:,} rows: longer than data.max_length"
            f" {tokens.recipe.data.max_length}, truncated; --data.max_length=N raises it"
        )
    if figures.rows_left_out:
        yield (
            f"{figures.rows_left_out:,} of {figures.rows:,} rows: no target within data.max_length"
            f" {tokens.recipe.data.max_length}, and no part in the loss; asked like the others"
        )


def free_bytes(model: FinishedModel, machine: Machine) -> int:
    """The free memory of the first card, or of the host, beside the weights. Raises
    ResourceError."""
    where, free = (
        (f"on {machine.gpus[0].name}", machine.gpus[0].free_bytes)
        if machine.gpus
        else ("of host RAM", machine.host_available_bytes)
    )
    needed = finished.weights_bytes(model)
    if needed >= free:
        raise ResourceError(
            f"{model.folder}: its weights take {size(needed)}, and {size(free)} {where} are free;"
            " end other programs, or evaluate it on a larger machine"
        )
    return free - needed


def _text(figures: Evaluation) -> str:
    """The lines of a screen."""
    lines = [
        f"{figures.model} on {figures.file}, on {figures.device}, {figures.rows_at_once} rows at"
        " once",
        f"loss {figures.loss:.6f}, perplexity {figures.perplexity:,.2f}:"
        f" {figures.rows - figures.rows_left_out:,} rows, {figures.target_tokens:,} target tokens",
    ]
    if figures.exact_match is not None and figures.bleu is not None:
        lines.append(
            f"exact match {figures.exact_match:.1%} of {figures.questions:,} questions, BLEU"
            f" {figures.bleu:.1f}, ROUGE-L {figures.rouge_l or 0:.1f}"
        )
    return "\n".join([*lines, *figures.notes])
