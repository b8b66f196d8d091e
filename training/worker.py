"""Answer what a plan asks of torch and transformers: `python -m training.worker [--without-torch]`.

Each line of its input is a request of launch.data.worker. A line of its output is 0 and the JSON of
an answer, or the exit code of a LaunchError and its text. Modules are imported by the request that
needs them first."""

import gc
import importlib
import json
import os
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from launch.base import files, modules, processes
from launch.base.errors import LaunchError, ResourceError
from launch.data import token_cache, worker
from launch.schema.machine import CoreFigures, cudnn_is_last
from launch.schema.plan import DataFormat, MemoryEstimate, Plan
from launch.schema.recorded_step import STEP, dumped
from launch.schema.result import ModelParts, NewTokens
from launch.schema.rows import LargestMicroBatches, ShownRows
from training.compat import without_torch

# packages that transformers and accelerate import if they are installed, and no request needs
UNUSED = ("deepspeed", "datasets")


def main(hides_torch: bool) -> None:
    processes.settle_process()
    processes.settle_threads()
    prepare()
    if hides_torch:
        without_torch.hide()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # lines of libraries are no answers
        for line in sys.stdin.buffer:
            try:
                kind, _, fields = line.partition(b" ")
                request = getattr(worker, kind.decode())
                result = WORK[request](files.adapter(request).validate_json(fields))
                reply = b"0 " + files.adapter(type(result)).dump_json(result)
            except LaunchError as error:
                reply = f"{error.exit_code} {json.dumps(str(error))}".encode()
            answers.write(reply + b"\n")
            answers.flush()


def prepare() -> None:
    """Make imports of transformers take less. To be called before any."""
    modules.leave_out(UNUSED)
    modules.as_plain_package("transformers.models")  # its own start reads the files of all models


@cache
def imported(name: str) -> ModuleType:
    """A module without torch's compiler, a second of its own: bitsandbytes asks for compiled
    functions at once, of which no step on a card calls one. No module that imports bitsandbytes may
    be imported before. Later collections leave its objects out."""
    with modules.uncollected():
        import torch

        compiled = torch.compile
        torch.compile = _as_it_is
        try:
            return importlib.import_module(name)
        finally:
            torch.compile = compiled


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """torch.compile, as a function and as a decorator with options."""
    return _as_it_is if function is None else function


def _parts(request: worker.ReadParts) -> ModelParts:
    return imported("training.trace.model_parts").model_parts(request.config)


def _tokens(request: worker.AddTokens) -> NewTokens:
    """The ids of tokens that a folder's tokenizer has, and would get. Raises DataError and
    ResourceError."""
    from training.data import tokenizer

    loaded = tokenizer.load(request.folder, request.template)
    before = loaded.get_vocab()
    there = {token: before[token] for token in request.tokens if token in before}
    ids = tokenizer.add_tokens(loaded, request.tokens)
    return NewTokens(
        size_before=max(before.values()) + 1,
        size=max(loaded.get_vocab().values()) + 1,
        ids=ids,
        there=there,
    )


def _cores(request: worker.MeasureCores) -> list[CoreFigures]:
    from training import core_rates

    return core_rates.figures(request.threads)


def _largest(request: worker.FindLargest) -> list[LargestMicroBatches]:
    from training.data import largest_batches

    rows = {
        part: largest_batches.row_sizes(token_cache.token_files(request.folder, part))
        for part in {division.part for division in request.divisions}
    }
    return [largest_batches.largest(rows[each.part], each) for each in request.divisions]


def _rows(request: worker.EncodeRows) -> ShownRows:
    """Raises DataError and ResourceError."""
    processes.check_threads()
    from training.data.row_summary import RowSummary

    summary = RowSummary(request.tokens, _tokenizer(request.tokens))
    for file in request.files:
        if request.line:
            summary.add_line(file, request.line)
        else:
            summary.add_first(file, request.num_read, request.num_rows)
    return summary.summary()


def _tokenizer(tokens: token_cache.TokenCache) -> Any:
    """The tokenizer of the tokenised rows, if they are there, or the one that they would get."""
    from training.data import prepare, tokenise, tokenizer

    if tokens.folder.exists() and not token_cache.fault(tokens.folder):
        return tokenizer.load(tokens.folder / tokenise.TOKENIZER)
    return prepare.tokenizer_of(tokens, partial(print, file=sys.stderr))


def _record(request: worker.RecordSteps) -> None:
    """Write the record of each step to the folder, of one document in each row if rows are
    flattened."""
    import_trace()
    import torch

    from training.trace import cuda_semantics, step

    recipe = request.recipe
    for name, each in request.steps.items():
        is_last = cudnn_is_last(each.few_shapes, os.environ)
        cudnn = 0 if is_last else torch.backends.cudnn.version() or cuda_semantics.CUDNN
        plan = Plan(
            recipe_name=recipe.name,
            strategy=each.strategy,
            shape=request.model_size,
            data_format=DataFormat("text", {}, "text", ""),
            estimate=MemoryEstimate(0, 0, 0),
            budget_bytes=0,
            lora_targets=request.lora_targets,
        )
        on_card = cuda_semantics.Target(
            *(each.architecture, each.fused_attention, cudnn, int(each.documents > 0))
        )
        recorded = step.record(
            recipe,
            plan,
            each.lengths,
            each.is_padded,
            1 if each.is_single else step.BATCH,
            on_card if each.strategy.device == "cuda" else None,
            each.parts_apart,
            each.all_layers,
        )
        try:
            files.write_atomic(request.folder / f"{name}{STEP}", dumped(recorded))
        except OSError as error:
            raise ResourceError(
                f"{request.folder}: a trace cannot be kept there ({error.strerror}); make room, or"
                " name another folder with LOWMEM_TRACES"
            ) from error


@cache
def import_trace() -> None:
    """Import the modules of a trace. Without collections, which would visit them in each trace: a
    quarter of its time."""
    gc.disable()  # each step collects once, before it begins
    if find_spec("bitsandbytes") is not None:  # tables that it makes then are on no card
        imported("bitsandbytes")
    imported("training.trace.step").SHAPES.is_kept = True


WORK: dict[type[Any], Callable[[Any], Any]] = {
    worker.ReadParts: _parts,
    worker.AddTokens: _tokens,
    worker.FindLargest: _largest,
    worker.EncodeRows: _rows,
    worker.RecordSteps: _record,
    worker.MeasureCores: _cores,
}

if __name__ == "__main__":
    main(hides_torch=len(sys.argv) > 1)
