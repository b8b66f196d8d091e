"""Record training steps for a launcher: `python -m training.trace.server FOLDER`.

Reads a request from each line and prints "done" when its records are in the folder."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.base import modules
from launch.base.files import write_atomic
from launch.schema.machine import cudnn_is_last
from launch.schema.plan import DataFormat, MemoryEstimate, ModelSize, Plan, Strategy
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import STEP, RecordedStep, dumped


def main(folder: Path) -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # lines of libraries are no answers
        for line in sys.stdin:
            _reply(json.loads(line), folder)
            print("done", file=answers, flush=True)


def _reply(request: dict[str, Any], folder: Path) -> None:
    """Write the files of all questions of a request to the folder."""
    recipe = Recipe.model_validate(request["recipe"])
    model_size = TypeAdapter(ModelSize).validate_python(request["shape"])
    modules.leave_out(request["unused_packages"])  # the ranks do without them too
    import_trace()
    for name, question in request["questions"].items():
        plan = _plan(recipe, model_size, tuple(request["lora_targets"]), question["strategy"])
        recorded = _recorded(recipe, plan, question)
        write_atomic(folder / f"{name}{STEP}", dumped(recorded))


@cache
def import_trace() -> None:
    """Import the modules of a trace, now that the packages that the run leaves out are known.
    Without collections, which would visit them in each trace: a quarter of its time."""
    gc.disable()  # each step collects once, before it begins
    modules.as_plain_package("transformers.models")  # its own start reads the files of all models
    with modules.uncollected(), _without_compiler():
        step = importlib.import_module("training.trace.step")
    step.SHAPES.is_kept = True


@contextmanager
def _without_compiler() -> Iterator[None]:
    """Import modules without torch's compiler, a second of its own: bitsandbytes asks for compiled
    functions at once, of which no step on a card calls one. No module of a trace may be imported
    before, as one of them imports bitsandbytes."""
    import torch

    compiled = torch.compile
    torch.compile = _as_it_is
    try:
        yield
    finally:
        torch.compile = compiled


def _as_it_is(function: Any = None, **options: Any) -> Any:
    """torch.compile, as a function and as a decorator with options."""
    return _as_it_is if function is None else function


def _plan(
    recipe: Recipe, model_size: ModelSize, lora_targets: tuple[str, ...], strategy: dict[str, Any]
) -> Plan:
    return Plan(
        recipe_name=recipe.name,
        strategy=TypeAdapter(Strategy).validate_python(strategy),
        shape=model_size,
        data_format=DataFormat("text", {}, "text", ""),
        estimate=MemoryEstimate(0, 0, 0),
        budget_bytes=0,
        lora_targets=lora_targets,
    )


def _recorded(recipe: Recipe, plan: Plan, question: dict[str, Any]) -> RecordedStep:
    """The record of a launch.predict.traces.Question, of one document in each row if rows are
    flattened."""
    import torch

    from training.trace import cuda_semantics, step

    strategy = plan.strategy
    batch = 1 if question["is_single"] else step.BATCH
    target = None
    if strategy.device == "cuda":
        is_last = cudnn_is_last(recipe.data.packing, os.environ)
        cudnn = 0 if is_last else torch.backends.cudnn.version() or cuda_semantics.CUDNN
        target = cuda_semantics.Target(
            question["architecture"],
            question["fused_attention"],
            cudnn,
            documents=int(question["documents"] > 0),
        )
    lengths, is_padded = question["lengths"], question["is_padded"]
    kinds = question["parts_apart"], question["all_layers"]
    return step.record(recipe, plan, lengths, is_padded, batch, target, *kinds)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
