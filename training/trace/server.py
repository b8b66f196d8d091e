"""Answer a launcher's questions about training steps: `python -m training.trace.server FOLDER`.

Reads one request a line, and says when its answers are in the folder."""

from __future__ import annotations

import gc
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.base.files import write_atomic
from launch.schema.plan import Born, DataFormat, MemoryEstimate, ModelSize, Plan, Strategy
from launch.schema.recipe import Recipe


def main(folder: Path) -> None:
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
        for request in sys.stdin:
            _answer(json.loads(request), folder)
            print("done", file=answers, flush=True)


def _answer(request: dict[str, Any], folder: Path) -> None:
    """Trace what the request asks for; its files are in the folder then."""
    recipe = Recipe.model_validate(request["recipe"])
    shape = TypeAdapter(ModelSize).validate_python(request["shape"])
    for package in request["unused_packages"]:  # as in the ranks: to Python they are not installed
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]  None is how Python says so
    plain: dict[Any, Any] = {}  # the log of one process, from which several engines' are made
    for name, question in request["questions"].items():
        plan = _plan(recipe, shape, tuple(request["lora_targets"]), question["strategy"])
        _write(_shared(recipe, plan, question, plain), folder, name)


def _plan(
    recipe: Recipe, shape: ModelSize, lora_targets: tuple[str, ...], strategy: dict[str, Any]
) -> Plan:
    return Plan(
        recipe_name=recipe.name,
        strategy=TypeAdapter(Strategy).validate_python(strategy),
        shape=shape,
        data_format=DataFormat("text", {}, "text", ""),
        estimate=MemoryEstimate(0, 0, 0),
        budget_bytes=0,
        lora_targets=lora_targets,
    )


def _shared(recipe: Recipe, plan: Plan, question: dict[str, Any], plain: dict[Any, Any]) -> Any:
    """The log of one rank of the question's engine."""
    from training.trace import sharded

    strategy = plan.strategy
    is_cast = strategy.engine in ("deepspeed", "fsdp2") and strategy.mixed_precision != "no"
    same = (
        strategy.engine if is_cast else "",
        strategy.mixed_precision,
        strategy.activation_checkpointing,
        strategy.num_output_chunks,
        strategy.attn_implementation,
        question["documents"],
        strategy.per_device_train_batch_size == 1,
        strategy.gradient_accumulation_steps > 1,
        question["is_padded"],
        *question["lengths"],
    )
    if same not in plain:
        plain[same] = _traced(recipe, plan, question)
    config = plan.shape.config
    kind = config["model_type"]
    # transformers 5 ties every T5
    tied = kind == "t5" or config.get("tie_word_embeddings", kind == "gpt2")
    return sharded.shared_out(plain[same], recipe, strategy, tied, question["bucket_elements"])


def _traced(recipe: Recipe, plan: Plan, question: dict[str, Any]) -> Any:
    """The log that a launch.traces.Question asks for."""
    import torch  # not before the packages that the run leaves out are left out

    from training.trace import cuda_semantics, step

    _forget_imports()
    strategy = plan.strategy
    single = strategy.per_device_train_batch_size == 1
    batch = 1 if single else step.BATCH
    target = None
    if strategy.device == "cuda":
        cudnn = torch.backends.cudnn.version() or cuda_semantics.CUDNN
        target = cuda_semantics.Target(
            question["architecture"], question["fused_attention"], cudnn, question["documents"]
        )
    return step.whole_step(recipe, plan, question["lengths"], question["is_padded"], batch, target)


@cache
def _forget_imports() -> None:
    """What is imported stays: each collection would look through it all, a quarter of a trace's
    time."""
    gc.freeze()


def _write(log: Any, folder: Path, name: str) -> None:
    """NAME.json with peaks and work, NAME.log with the whole log."""
    from training.trace import peaks

    blocks = [[one.fixed_bytes, one.sample_bytes, _born(one.born)] for one in log.blocks]
    events = [event.block if event.birth else ~event.block for event in log.events]
    after_update = (
        at for at, event in enumerate(log.events) if event.phase.startswith(("zero", "evaluation"))
    )
    update = next(after_update, len(events))
    write_atomic(
        folder / f"{name}.log", json.dumps({"blocks": blocks, "events": events, "update": update})
    )
    write_atomic(
        folder / f"{name}.json", json.dumps({"peaks": peaks.peaks(log), "work": peaks.work(log)})
    )


def _born(phase: str) -> Born:
    """As much of a phase as a replay needs."""
    if phase == "start:optimizer":
        return "state"
    if phase.startswith("start"):
        return "start"
    return "evaluation" if phase.startswith("evaluation") else "step"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
