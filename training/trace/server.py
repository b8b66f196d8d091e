"""Answer a launcher's questions about training steps: `python -m training.trace.server FOLDER`.

Reads a request from each line and prints "done" when its answers are in the folder."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.base import modules
from launch.base.files import write_atomic
from launch.schema.machine import cudnn_is_last
from launch.schema.plan import PAGED, Born, DataFormat, MemoryEstimate, ModelSize, Plan, Strategy
from launch.schema.recipe import Recipe


def main(folder: Path) -> None:
    # logs of one process, from which those of several engines are made, and the model they are of
    plain: dict[Any, Any] = {}
    model: Any = None
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # lines of libraries are no answers
        for line in sys.stdin:
            request = json.loads(line)
            questions = request.pop("questions")
            if request != model:
                plain.clear()
            model = request
            _reply(request, questions, plain, folder)
            print("done", file=answers, flush=True)


def _reply(
    request: dict[str, Any],
    questions: dict[str, dict[str, Any]],
    plain: dict[Any, Any],
    folder: Path,
) -> None:
    """Write the files of all questions of a request to the folder."""
    recipe = Recipe.model_validate(request["recipe"])
    model_size = TypeAdapter(ModelSize).validate_python(request["shape"])
    modules.leave_out(request["unused_packages"])  # the ranks do without them too
    import_trace()
    for name, question in questions.items():
        plan = _plan(recipe, model_size, tuple(request["lora_targets"]), question["strategy"])
        _write(*_shared(recipe, plan, question, plain), folder, name)


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


def _shared(
    recipe: Recipe, plan: Plan, question: dict[str, Any], plain: dict[Any, Any]
) -> tuple[Any, dict[str, Any]]:
    """The log of one rank of the question's engine, and the logs of special turns of its step."""
    from training.trace import sharded

    strategy = plan.strategy
    is_cast = not strategy.launch_mode.is_whole and strategy.mixed_precision != "no"
    same = (
        strategy.launch_mode.engine if is_cast else "",
        strategy.mixed_precision,
        *strategy.levers.recorded.values(),
        bool(question["documents"]),
        question["is_single"],
        strategy.gradient_accumulation_steps > 1,
        question["is_padded"],
        *question["lengths"],
    )
    if same not in plain:
        plain[same] = _traced(recipe, plan, question)
    log = plain[same]
    if question["documents"] > 1:
        log = log.of_documents(question["documents"])
    tied = plan.shape.family.ties_head
    step = log, recipe, strategy, tied, question["bucket_elements"]
    turns = {turn: sharded.shard_step(*step, turn) for turn in sharded.special_turns(strategy)}
    return sharded.shard_step(*step), turns


def _traced(recipe: Recipe, plan: Plan, question: dict[str, Any]) -> Any:
    """The log of one process for a launch.predict.traces.Question, of one document in each row if
    rows are flattened."""
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
    return step.whole_step(recipe, plan, question["lengths"], question["is_padded"], batch, target)


def _write(log: Any, turns: dict[str, Any], folder: Path, name: str) -> None:
    """Write NAME.log with the full log, then NAME.json with peaks and work."""
    from training.trace import peaks

    turns_content = {turn: _content(turns[turn]) for turn in turns}
    full = json.dumps(_content(log) | {"turns": turns_content})
    reduced = {"peaks": peaks.peaks(log), "work": peaks.work(log), "log_bytes": len(full)}
    write_atomic(folder / f"{name}.log", full)
    write_atomic(folder / f"{name}.json", json.dumps(reduced))


def _content(log: Any) -> dict[str, Any]:
    """Reduce a log to the parts that a replay needs."""
    from training.trace.recorder import UPDATE

    ends = {event.block for event in log.events if not event.birth}
    blocks = [_size_of(block, number in ends) for number, block in enumerate(log.blocks)]
    events = [event.block if event.birth else ~event.block for event in log.events]
    streams = {number: block.stream for number, block in enumerate(log.blocks) if block.stream}
    # where the first step makes the optimizer's states
    updates = (
        index for index, event in enumerate(log.events) if log.blocks[event.block].op == UPDATE
    )
    update = next(updates, len(events))
    layers: dict[Any, list[int]] = {}  # the weights of each
    for number, block in enumerate(log.blocks):
        if block.kind == "weights" and block.layer is not None and block.born == "start:weights":
            layers.setdefault(block.layer, []).append(number)
    return {
        "blocks": blocks,
        "events": events,
        "update": update,
        "streams": streams,
        "layers": [*layers.values()],
    }


def _size_of(block: Any, ends: bool) -> list[Any]:
    """A row of launch.predict.traces.LoggedBlock."""
    born = _born(block.born, block.kind, block.op, ends)
    if block.sum is None:
        of_targets = [None, block.target_bytes] if block.target_bytes else []
        return [block.fixed_bytes, block.sample_bytes, born, *of_targets]
    fixed_rows, sample_rows, target_rows, *of_kernel = astuple(block.sum)
    return [fixed_rows, sample_rows, born, of_kernel, target_rows]


@cache
def _born(phase: str, kind: str, op: str, ends: bool) -> Born:
    """The part of a phase that a replay needs, of a block. `ends`: it ends in the log."""
    from training.trace.rewrite_log import FLAT, GRADIENTS, SLICE, TRAINED

    section, _, part = phase.partition(":")
    if section == "start":
        if kind == "communication" or op == GRADIENTS:
            return "engine"
        if op == SLICE:
            return "slice"
        if op in (TRAINED, FLAT):
            return "trained"
        if part == "optimizer":
            return "paged" if kind == PAGED else "state"
        return "workspace" if part == "workspace" else "start"
    if section != "evaluation":
        return "step"
    return "evaluation" if ends or kind != "communication" else "kept"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
