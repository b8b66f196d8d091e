"""The copies of layers' inputs: their stream, their memory on both sides, and that the host never
waits for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.builders import CODE
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card

LAYERS, ROWS, WIDTH = 12, 3000, 512
# argv: layers, rows, width, whether the inputs are offloaded
PROGRAM = """
import json, sys, torch
from contextlib import nullcontext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from training.levers.offloading import Offloading

layers, rows, width, offloads = map(int, sys.argv[1:])
device = torch.device("cuda", 0)
network = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(layers)).to(device)
offloading = Offloading(device) if offloads else None
streams = {}

class Streams(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = "others"
        if func is torch.ops.aten.copy_.default:
            kind = "to the host" if args[0].device.type == "cpu" else "to the device"
        stream = torch.cuda.current_stream().cuda_stream
        streams.setdefault(kind, {}).setdefault(stream, 0)
        streams[kind][stream] += 1
        return func(*args, **(kwargs or {}))

inputs = torch.ones(rows, width, device=device, requires_grad=True)
peaks = []
for step in range(4):
    torch.cuda.reset_peak_memory_stats()
    with Streams() if step == 1 else nullcontext():
        x = inputs * 1
        for layer in network:
            with offloading.hooks() if offloading else nullcontext():
                x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
    del x
    peaks.append(torch.cuda.max_memory_allocated())
print(json.dumps({
    "streams": streams,
    "side": offloading.copies.stream.cuda_stream if offloading else None,
    "segments": sorted({segment["stream"] for segment in torch.cuda.memory_snapshot()}),
    "peaks": peaks[1:],
}))
"""


def test_copies_have_a_stream_of_their_own_and_no_memory_of_it(tmp_path: Path):
    results: dict[bool, dict[str, Any]] = {}
    for offloads in (False, True):
        place = Workplace(tmp_path / str(offloads), Card())
        done = place.python(
            "-c", PROGRAM, *map(str, (LAYERS, ROWS, WIDTH, int(offloads))), PYTHONPATH=str(CODE)
        )
        assert done.returncode == 0, done.stderr
        (process,) = (each for each in place.machine.processes() if each.launches)
        results[offloads] = json.loads(done.stdout.splitlines()[-1]) | {
            "waits": process.synchronizations,
            "pinned": process.peak_pinned_bytes,
        }
    plain, offloaded = results[False], results[True]
    side = str(offloaded["side"])
    assert offloaded["streams"]["to the host"] == {side: LAYERS}
    assert offloaded["streams"]["to the device"] == {side: LAYERS - 1}
    (main,) = offloaded["streams"]["others"]
    assert main != side
    # all memory is the main stream's; a copy is waited for by kernels, not by the host
    assert offloaded["segments"] == plain["segments"]
    assert offloaded["waits"] == plain["waits"]
    of_input = ROWS * WIDTH * 4
    assert len(set(offloaded["peaks"])) == 1
    assert plain["peaks"][0] - offloaded["peaks"][0] >= (LAYERS - 3) * of_input
    # 6.1 MB are pinned as 8 MiB, once for all steps
    assert plain["pinned"] == 0
    assert offloaded["pinned"] == LAYERS * (8 << 20)
