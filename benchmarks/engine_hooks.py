"""Host seconds that hooks of DeepSpeed and FSDP2 add to a micro-step and to an update, for each
tensor of a parameter, over those of an operator of eager PyTorch on the same core.

Models of many tensors of a few elements, one tensor a module, 12 modules a layer, in a process of
their own without a card, so that the host alone is measured, in seconds of its thread. Rounds of
the engine and of the operators alternate; a figure is the ratio of their medians. The plan takes
them as operators of its card's host (launch/predict/time/timing.py).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

import torch
from torch.distributed.fsdp import fully_shard

from benchmarks import recording

ENGINES = ("zero1", "zero2", "zero3", "fsdp2")
TENSORS, TENSORS_A_LAYER = (144, 288), 12
ACCUMULATION, STEPS, WARM_UP = 4, 12, 3
WIDTH, OPERATORS = 8, 200


class Scale(torch.nn.Module):
    """A module of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def operators() -> None:
    """Products of elements, forward and backward."""
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    y = x
    for _ in range(OPERATORS):
        y = y.mul(1.0)
    y.sum().backward()


def model_of(tensors: int) -> torch.nn.Sequential:
    layer = [TENSORS_A_LAYER] * (tensors // TENSORS_A_LAYER)
    return torch.nn.Sequential(
        *[torch.nn.Sequential(*[Scale() for _ in range(count)]) for count in layer]
    )


class Fsdp2:
    """A model that torch's fully_shard shares out, layer by layer, with DeepSpeed's three calls."""

    def __init__(self, model: torch.nn.Sequential) -> None:
        for part in (*model, model):
            fully_shard(part)
        self.model = model

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        """No update: its kernels are loops over tensors on a CPU."""
        self.model.zero_grad()


def deepspeed_of(model: torch.nn.Sequential, stage: int) -> Any:
    import deepspeed

    from training.compat import deepspeed_private

    deepspeed_private.leave_out_compiled_all_reduce()
    deepspeed.init_distributed("gloo")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": stage, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 60,
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def measured(engine: str, tensors: int) -> dict[str, float]:
    """Operators a tensor of a forward pass, a backward pass and an update."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    model = model_of(tensors)
    trained = Fsdp2(model) if engine == "fsdp2" else deepspeed_of(model, int(engine[-1]))
    x = torch.ones(4, WIDTH, dtype=torch.bfloat16)
    passes: dict[str, list[float]] = {"forward": [], "backward": [], "update": [], "operator": []}
    now = time.thread_time  # other work on this core does not count
    for number in range(STEPS * ACCUMULATION):
        begin = now()
        loss = trained(x).sum()
        forward = now()
        trained.backward(loss)
        backward = now()
        trained.step()
        passes["forward"].append(forward - begin)
        passes["backward"].append(backward - forward)
        if (number + 1) % ACCUMULATION == 0:
            passes["update"].append(now() - backward)
            begin = now()
            operators()
            passes["operator"].append((now() - begin) / (2 * OPERATORS))
    medians = {
        name: statistics.median(found[WARM_UP * len(found) // STEPS :])
        for name, found in passes.items()
    }
    operator_s = medians.pop("operator")
    return {name: seconds / tensors / operator_s for name, seconds in medians.items()} | {
        "operator_us": operator_s * 1e6
    }


def child(engine: str, tensors: int) -> dict[str, float]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    alone |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DS_ACCELERATOR": "cpu"}
    argv = [sys.executable, "-m", "benchmarks.engine_hooks", "--engine", engine]
    done = subprocess.run(
        [*argv, "--tensors", str(tensors)],
        env=os.environ | alone,
        cwd=recording.CODE,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, help="measure this one, in this process")
    parser.add_argument("--tensors", type=int, default=TENSORS[0])
    arguments = parser.parse_args()
    if arguments.engine:
        print(json.dumps(measured(arguments.engine, arguments.tensors)))
        return 0
    rows = [
        {"engine": engine, "tensors": tensors, **child(engine, tensors)}
        for engine in ENGINES
        for tensors in TENSORS
    ]
    head = ["engine", "tensors", "forward", "backward", "update", "us an operator"]
    lines = [
        [row["engine"], str(row["tensors"])]
        + [f"{row[name]:.0f}" for name in ("forward", "backward", "update")]
        + [f"{row['operator_us']:.1f}"]
        for row in rows
    ]
    text = (
        "Operators a tensor, with those of the model itself (1 in a forward pass, 2 in a backward"
        " pass):\n"
    )
    recording.write("engine_hooks", {"rows": rows}, text + "\n" + recording.table(head, lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
