"""RAM and seconds of a training step on a CPU, by glibc's malloc as it comes and by
launch/predict/memory/malloc.py.

Each size is trained for some steps in fresh processes, the two alternating. RAM is the process'
high-water mark. Seconds are of the processor, user and system: beside others the clock on the wall
says little. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys

from benchmarks import recording
from launch.predict.memory import malloc

SIZES = {
    "2 M parameters, batch 16": {
        "n_embd": 128,
        "n_layer": 6,
        "n_head": 4,
        "vocab_size": 4096,
        "batch": 16,
    },
    "6 M parameters, batch 4": {
        "n_embd": 256,
        "n_layer": 6,
        "n_head": 4,
        "vocab_size": 4096,
        "batch": 4,
    },
    "49 M parameters, batch 2": {
        "n_embd": 768,
        "n_layer": 6,
        "n_head": 12,
        "vocab_size": 8192,
        "batch": 2,
    },
}
CHILD = """
import json, resource, sys, torch
from transformers import GPT2Config, GPT2LMHeadModel
size, steps = json.loads(sys.argv[1]), int(sys.argv[2])
batch = size.pop("batch")
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(n_positions=256, bos_token_id=0, eos_token_id=0, **size))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for step in range(steps + 2):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF)
    rows = torch.randint(0, size["vocab_size"], (batch, 256 - step % 3 * 32))
    model(input_ids=rows, labels=rows).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
after = resource.getrusage(resource.RUSAGE_SELF)
seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
print(json.dumps({"cpu_s": seconds / steps, "highest_bytes": after.ru_maxrss << 10}))
"""


def trained(size: dict[str, int], steps: int, settings: dict[str, str]) -> dict[str, float]:
    argv = [sys.executable, "-c", CHILD, json.dumps(size), str(steps)]
    child = subprocess.run(
        argv, check=True, capture_output=True, text=True, env={**os.environ, **settings}
    )
    return json.loads(child.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    found = []
    for name, size in SIZES.items():
        rounds = [
            {
                "as it comes": trained(size, arguments.steps, {}),
                "set": trained(size, arguments.steps, malloc.SETTINGS),
            }
            for _ in range(arguments.rounds)
        ]
        row: dict[str, float | str] = {"size": name}
        for what in ("highest_bytes", "cpu_s"):
            plain, ours = (
                statistics.median(one[way][what] for one in rounds)
                for way in ("as it comes", "set")
            )
            row |= {f"{what}_plain": plain, f"{what}_set": ours, f"{what}_ratio": ours / plain}
        found.append(row)
        print(row, flush=True)
    rows = [
        [
            row["size"],
            *(f"{row[f'highest_bytes_{way}'] / (1 << 20):.0f}" for way in ("plain", "set")),
            f"{row['highest_bytes_ratio']:.3f}",
            *(f"{1000 * row[f'cpu_s_{way}']:.0f}" for way in ("plain", "set")),
            f"{row['cpu_s_ratio']:.3f}",
        ]
        for row in found
    ]
    head = [
        "model",
        "as it comes, MiB",
        "set",
        "ratio",
        "as it comes, ms of processor a step",
        "set",
        "ratio",
    ]
    recording.write("malloc_settings", {"rows": found}, recording.table(head, rows))


if __name__ == "__main__":
    main()
