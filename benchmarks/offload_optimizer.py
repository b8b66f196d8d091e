"""One optimizer step over offloaded states: DeepSpeed's compiled cpu_adam over the fused AdamW that
our modes keep.

Both update the same number of float32 parameters on the CPU, as ZeRO's offload has them: one flat
tensor a rank. The two alternate; the figure is the ratio of medians. cpu_adam is compiled at
its first use, into a temporary folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from benchmarks import recording

PARAMETERS = 33_500_000


def steps_s(torch: Any, make: Callable[[list[Any]], Any], repetitions: int) -> list[float]:
    """Seconds of each step, the first (which makes the states) left out."""
    parameter = torch.nn.Parameter(torch.randn(PARAMETERS))
    parameter.grad = torch.randn(PARAMETERS)
    optimizer = make([parameter])
    optimizer.step()
    found = []
    for _ in range(repetitions):
        began = time.perf_counter()
        optimizer.step()
        found.append(time.perf_counter() - began)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"TORCH_EXTENSIONS_DIR": folder, "DS_ACCELERATOR": "cpu"}
        import torch
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        torch.set_num_threads(len(os.sched_getaffinity(0)))
        ways: dict[str, Callable[[list[Any]], Any]] = {
            "cpu_adam": lambda parameters: DeepSpeedCPUAdam(parameters, lr=1e-3),
            "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True),
        }
        rounds = []
        for _ in range(arguments.rounds):
            load = recording.quiet()
            medians = {
                name: statistics.median(steps_s(torch, make, arguments.repetitions))
                for name, make in ways.items()
            }
            rounds.append({"load_before": load, **medians})
            print(rounds[-1], flush=True)
    medians = {name: statistics.median(one[name] for one in rounds) for name in ways}
    ratio = medians["cpu_adam"] / medians["fused"]
    rows = [
        [
            at,
            *(f"{1000 * one[name]:.1f}" for name in ways),
            f"{one['cpu_adam'] / one['fused']:.3f}",
            one["load_before"],
        ]
        for at, one in enumerate(rounds, start=1)
    ]
    text = (
        f"cpu_adam / fused AdamW = **{ratio:.3f}** (medians of {len(rounds)} rounds, {PARAMETERS:,}"
        f" parameters: {1000 * medians['cpu_adam']:.1f} ms over {1000 * medians['fused']:.1f} ms a"
        " step).\n\n"
        + recording.table(["round", "cpu_adam, ms", "fused, ms", "ratio", "load before"], rows)
    )
    deepspeed = {"deepspeed": recording.version("deepspeed")}
    recording.write(
        "offload_optimizer",
        {**deepspeed, "parameters": PARAMETERS, "ratio": ratio, "rounds": rounds},
        text,
    )


if __name__ == "__main__":
    main()
