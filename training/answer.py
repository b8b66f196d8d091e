"""Answer a launcher's questions about training steps: `python -m training.answer REQUEST FOLDER`, a child of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from launch.rundir import write_atomic
from launch.schema import DataFormat, MemoryEstimate, ModelShape, Plan, Recipe, Strategy


def main(request: Path, folder: Path) -> None:
    content = json.loads(request.read_bytes())
    recipe = Recipe.model_validate(content["recipe"])
    shape = TypeAdapter(ModelShape).validate_python(content["shape"])
    questions = {
        name: (_plan(recipe, shape, tuple(content["lora_targets"]), question["strategy"]), question)
        for name, question in content["questions"].items()
    }
    for package in content["unused_packages"]:  # as in the ranks: to Python they are not installed
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]
    for name, (plan, question) in questions.items():
        _write(_traced(recipe, plan, question), folder, name)


def _plan(recipe: Recipe, shape: ModelShape, lora_targets: tuple[str, ...], strategy: dict[str, Any]) -> Plan:
    return Plan(
        recipe_name=recipe.name,
        strategy=TypeAdapter(Strategy).validate_python(strategy),
        shape=shape,
        data_format=DataFormat("text", {}, "text", ""),
        estimate=MemoryEstimate(0, 0, 0),
        budget_bytes=0,
        lora_targets=lora_targets,
    )


def _traced(recipe: Recipe, plan: Plan, question: dict[str, Any]) -> Any:
    """The log that a launch.traces.Question asks for."""
    import torch  # not before the packages that the run leaves out are left out

    from training import cuda_semantics, trace

    strategy = plan.strategy
    single = strategy.per_device_train_batch_size == 1
    padded = not single or strategy.device == "cuda"  # one row is as long as its batch, but for rounding up
    batch = 1 if single else trace.BATCH
    target = None
    if strategy.device == "cuda":
        cudnn = torch.backends.cudnn.version() or cuda_semantics.CUDNN
        target = cuda_semantics.Target(question["architecture"], question["fused_attention"], cudnn)
    return trace.whole_step(recipe, plan, question["lengths"], padded, batch, target)


def _write(log: Any, folder: Path, name: str) -> None:
    """NAME.json with peaks and work, NAME.log with the whole log."""
    from training import peaks

    blocks = [[one.fixed_bytes, one.sample_bytes, one.born.startswith("evaluation")] for one in log.blocks]
    events = [event.block if event.birth else ~event.block for event in log.events]
    write_atomic(folder / f"{name}.log", json.dumps({"blocks": blocks, "events": events}))
    write_atomic(folder / f"{name}.json", json.dumps({"peaks": peaks.peaks(log), "work": peaks.work(log)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
