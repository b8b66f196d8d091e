"""The driver without a card itself: what its cards say, hold and refuse, and what its collectives
compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card

GIB = 1 << 30


def run(place: Workplace, code: str, **variables: str) -> str:
    done = place.python("-c", f"import torch\n{code}", **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_a_card_is_what_was_described(tmp_path: Path):
    place = Workplace(
        tmp_path, Card(name="NVIDIA H200", memory_gib=139, capability="9.0", other_gib=1)
    )
    text = run(
        place,
        "p = torch.cuda.get_device_properties(0)\n"
        "print(p.name, p.major, p.minor, p.total_memory, torch.cuda.is_bf16_supported(),"
        " torch.cuda.mem_get_info()[0])",
    )
    free = 138 * GIB - (300 << 20)
    assert text == f"NVIDIA H200 9 0 {139 * GIB} True {free}"


@pytest.mark.parametrize(
    ("visible", "order", "names"),
    [
        (None, None, "fast slow"),  # CUDA's own order: the fastest first
        (None, "PCI_BUS_ID", "slow fast"),
        ("1", None, "slow"),
        ("GPU-00000002", None, "fast"),
        ("1,7,0", "PCI_BUS_ID", "fast"),  # the first number that is not there ends the list
    ],
)
def test_visible_devices_and_their_order(tmp_path: Path, visible, order, names):
    place = Workplace(tmp_path, Card(name="slow", capability="7.5"), Card(name="fast"))
    variables = {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": order}
    code = (
        "devices = range(torch.cuda.device_count())\n"
        "print(*(torch.cuda.get_device_properties(i).name for i in devices))"
    )
    assert run(place, code, **{name: text for name, text in variables.items() if text}) == names


@pytest.mark.parametrize("settings", ["", "expandable_segments:True"])
def test_memory_is_handed_out_up_to_what_the_card_has(tmp_path: Path, settings):
    place = Workplace(tmp_path, Card(memory_gib=2, context_mib=256))
    text = run(
        place,
        """
kept = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
print(torch.cuda.memory_reserved(), bool((kept.cpu() == 1).all()))
try:
    torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
except torch.cuda.OutOfMemoryError as error:
    print("total capacity of 2.00 GiB" in str(error))
del kept
torch.cuda.empty_cache()
print(torch.empty(3 << 29, dtype=torch.uint8, device="cuda").numel())
""",
        PYTORCH_ALLOC_CONF=settings,
    )
    reserved, *rest = text.split()
    assert rest == ["True", "True", str(3 << 29)]
    assert GIB <= int(reserved) <= GIB + (32 << 20)  # a segment grows by up to 20 MiB


def test_a_process_sees_what_others_hold_and_what_dies_gives_back(one_card: Workplace):
    text = run(
        one_card,
        """
import subprocess, sys
other = '''
import torch
kept = torch.empty(4 << 30, dtype=torch.uint8, device="cuda")
print(1, flush=True)
input()
'''
pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
child = subprocess.Popen([sys.executable, "-c", other], **pipes)
child.stdout.readline()
held = torch.cuda.mem_get_info()
child.kill(); child.wait()
freed = torch.cuda.mem_get_info()
print(freed[0] - held[0])
""",
    )
    assert int(text) == 4 * GIB + (300 << 20)
    taken = [max(process.peak_bytes) for process in one_card.machine.processes()]
    assert sorted(taken) == [0, 4 * GIB]


def test_a_card_that_fails_says_so_at_every_later_call(tmp_path: Path):
    place = Workplace(tmp_path, Card(fails_at_launch=3))
    done = place.python(
        "-c",
        "import torch\nx = torch.randn(9, device='cuda')\nfor _ in range(9): x = x * 2\nx.cpu()",
    )
    assert done.returncode != 0
    assert "CUDA error: unspecified launch failure" in done.stderr


def test_a_table_of_integers_comes_back_as_it_was_and_stale_numbers_become_ordinary(
    one_card: Workplace,
):
    code = """
sizes = [2047 << 20, 0, 5 << 30, 1, 2, 3, 4, 5]  # the first has the bits of a NaN, as a float32
print(torch.tensor(sizes, device="cuda").tolist() == sizes)
print(torch.tensor([float("nan")] * 16, device="cuda").cpu().isnan().any().item())
"""
    assert run(one_card, code).split() == ["True", "False"]


RANK = """
import os, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
from datetime import timedelta
limit = timedelta(seconds=TIMEOUT_S)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank), timeout=limit)
"""
COLLECTIVES = (
    RANK
    + """
results = []
floats = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
for dtype in (*floats, torch.int64, torch.uint8):
    count = (1 << 20) + 5 if dtype == torch.float32 else 7  # two pieces
    mine = torch.full((count,), rank + 1, dtype=dtype, device="cuda")
    dist.all_reduce(mine)
    results.append(set(mine.tolist()) == {3})
    dist.broadcast(mine.fill_(rank + 1), 1)
    results.append(set(mine.tolist()) == {2})
    both = torch.empty(2 * count, dtype=dtype, device="cuda")
    dist.all_gather_into_tensor(both, mine.fill_(rank + 1))
    results.append(both.tolist() == [1] * count + [2] * count)
    dist.reduce_scatter_tensor(mine, both)
    results.append(set(mine.tolist()) == {2 + 2 * rank})
objects = [None, None]
dist.all_gather_object(objects, {"rank": rank})
results.append(objects == [{"rank": 0}, {"rank": 1}])
mean = torch.full((3,), rank + 1.0, device="cuda")
dist.all_reduce(mean, dist.ReduceOp.AVG)
results.append(mean.tolist() == [1.5] * 3)
parts = dist.new_group([0, 1])
dist.all_reduce(mean, dist.ReduceOp.MAX, group=parts)
print(f"{all(results)} {results}\\n", end="")  # at once, as two ranks share the output
dist.destroy_process_group()
"""
)


def ranks(place: Workplace, folder: Path, code: str, fault: str = "", timeout_s: int = 120):
    script = folder / "rank.py"
    script.write_text(f"TIMEOUT_S = {timeout_s}\n{code}")
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script))
    return place.python(*words, fault=fault)


def test_collectives_compute_what_nccl_computes(two_cards: Workplace, tmp_path: Path):
    done = ranks(two_cards, tmp_path, COLLECTIVES)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("True [True") == 2, done.stdout  # two ranks may share a line


def test_a_hung_collective_is_ended_by_the_watchdog(two_cards: Workplace, tmp_path: Path):
    code = RANK + "x = torch.ones(9, device='cuda')\ndist.all_reduce(x)\nprint(x.tolist())\n"
    done = ranks(two_cards, tmp_path, code, fault="hang", timeout_s=5)
    assert done.returncode != 0
    assert "Watchdog caught collective operation timeout" in done.stderr


@pytest.mark.parametrize("dtype", ["bool", "float32", "bfloat16", "int64"])
@pytest.mark.parametrize("count", [100, 1_000_000])  # one kernel, and a kernel for each part
def test_counts_of_elements_are_zero_whatever_lay_in_memory(tmp_path: Path, dtype: str, count: int):
    place = Workplace(tmp_path, Card())
    code = (
        # stale bytes of blocks that are handed out again
        "[torch.full((n,), 1.0, device='cuda') for n in (1, 64, 4096, 1_000_000)]\n"
        f"x = torch.ones({count}, device='cuda', dtype=torch.{dtype})\n"
        "print(len(x.nonzero()), len(x.masked_select(x != 0)), repr(x)[:6])"
    )
    assert run(place, code) == "0 0 tensor"
