"""Steps with Liger's kernels and without, in Triton's interpreter: prints the losses and which
kernels ran, as JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import torch
import triton.language as tl
from liger_kernel.ops import rms_norm
from triton.runtime import interpreter

from tests import real_steps
from tests.builders import machine, plan, recipe_of

kernels: Counter[str] = Counter()


def complete_the_interpreter() -> None:
    """What Triton 3.9's lacks: numbers with a point as arguments, libdevice's rsqrt."""
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


def main() -> None:
    complete_the_interpreter()
    found: dict[str, Any] = {}
    for is_on in (False, True):
        training = {"per_device_train_batch_size": 2, "use_liger_kernel": is_on}
        recipe = recipe_of(model={"shape": "llama-tiny"}, training=training)
        chosen = plan(recipe, machine(1))
        (said,) = (one.runs for one in chosen.switches if one.name == "liger")
        trainer = real_steps.trainer(recipe, chosen, 16, True, 2)
        found[said] = trainer.train().training_loss
        weights = torch.cat([one.detach().flatten() for one in trainer.model.parameters()])
        found[f"weights {said}"] = weights.double().norm().item()
        found[f"kernels {said}"] = dict(kernels)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
