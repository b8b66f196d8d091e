"""Steps of small models with Liger's kernels and without, in Triton's interpreter: prints their
losses and weights, and the kernels, saved tensors and peak of bytes beside the recorded ones, as
JSON. Arguments: optimizer steps, types of models."""

from __future__ import annotations

import json
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import geglu, rms_norm
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime import interpreter

from benchmarks.families import FAMILIES
from launch.predict.time.operators import TRITON
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.recorded_step import Log
from tests import real_steps
from tests.builders import machine, plan, recipe_of
from tests.modes.trace.test_trace import peak_bytes, real_peak_bytes
from training.compat.torch_private import FakeTensorMode
from training.levers import liger
from training.trace.recorder import Recorder
from training.trace.stand_ins import grouped_products, liger_kernels
from training.trace.step import step

LENGTH, BATCH = 4, 1
kernels: Counter[str] = Counter()


def complete_the_interpreter() -> None:
    """Add to Triton's interpreter numbers with a point as arguments, and functions of libdevice."""
    converted, executed = interpreter._implicit_cvt, interpreter.GridExecutor.__call__

    def convert(value: Any) -> Any:
        if not isinstance(value, float):
            return converted(value)
        return tl.tensor(
            interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32), tl.float32
        )

    def execute(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernels[self.fn.__name__] += 1
        return executed(self, *args, **kwargs)

    interpreter._implicit_cvt, interpreter.GridExecutor.__call__ = convert, execute
    rms_norm.rsqrt = lambda value: tl.rsqrt(value)
    geglu.tanh = lambda value: 2 * tl.sigmoid(2 * value) - 1


def config_of(name: str) -> dict[str, Any]:
    """A small config of a type, with two layers."""
    config = next(each for each in FAMILIES.values() if each["model_type"] == name)
    layer_types = config.get("layer_types", [])[:2] or None
    return {**config, "num_hidden_layers": 2, "layer_types": layer_types}


def planned(name: str, folder: Path) -> tuple[Recipe, Plan]:
    (folder / "config.json").write_text(json.dumps(config_of(name)))
    batch = {"per_device_train_batch_size": BATCH, "gradient_accumulation_steps": 1}
    training = {**batch, "optim": "sgd", "learning_rate": 1.0}  # weights show the gradients
    recipe = recipe_of(model={"shape": None, "path": str(folder)}, training=training)
    return recipe, plan(recipe, machine(gpus=0))


def trained(recipe: Recipe, chosen: Plan, steps: int) -> dict[str, Any]:
    trainer = real_steps.trainer(recipe, chosen, LENGTH, True, steps)
    loss = trainer.train().training_loss
    weights = torch.cat([each.detach().flatten() for each in trainer.model.parameters()])
    return {"loss": loss, "weights": weights}


def saved_bytes(name: str) -> list[int]:
    """Bytes of each tensor that a forward pass with Liger's kernels saves for backward."""
    sizes: list[int] = []
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(name)))
    liger.patch(model, {})

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(input_ids=torch.zeros(BATCH, LENGTH, dtype=torch.int64))
    return sizes


def launches(log: Log) -> Counter[str]:
    """The kernels that a recorded optimizer step launches."""
    names = (
        log.operators[call.operator].name
        for call in log.calls
        if not call.phase.startswith("evaluation")
    )
    return Counter(name.removeprefix(TRITON) for name in names if name.startswith(TRITON))


def compared(name: str, steps: int, folder: Path) -> dict[str, Any]:
    recipe, plain = planned(name, folder)
    with_liger = replace(plain, strategy=plain.strategy.with_levers(use_liger_kernel=True))
    kernels.clear()
    off = trained(recipe, plain, steps)
    assert not kernels
    on = trained(recipe, with_liger, steps)
    ran = dict(kernels)
    with FakeTensorMode(), grouped_products(on_nvidia=False), liger_kernels(Recorder(), None):
        recorded_bytes = saved_bytes(name)
    log = step(recipe, with_liger, (LENGTH, LENGTH), True, BATCH)
    return {
        "losses": [off["loss"], on["loss"]],
        "largest difference of weights": (on["weights"] - off["weights"]).abs().max().item(),
        "kernels": ran,
        "recorded kernels": launches(log),
        "saved": saved_bytes(name),
        "recorded saved": recorded_bytes,
        "peak": real_peak_bytes(recipe, with_liger, True, LENGTH) if name == "llama" else 0,
        "recorded peak": peak_bytes(log, BATCH),
    }


def main() -> None:
    complete_the_interpreter()
    steps, *names = sys.argv[1:]
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps({name: compared(name, int(steps), Path(folder))}), flush=True)


if __name__ == "__main__":
    main()
