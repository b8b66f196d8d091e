"""Host memory that a card's weights take while they are saved, and blocks that the driver pins."""

from __future__ import annotations

import json

import pytest

from tests import builders
from tests.cuda_build.conftest import Workplace

WRITTEN = """
import sys
from types import SimpleNamespace
import torch
from training.checkpoints import commit

flat = torch.arange(1 << 20, device="cuda").to(torch.float32)
weights = {"a": flat[:1000].view(10, 100), "b": flat[1000:], "tied": flat[1000:], "c": 7}
copied = []
to_host = torch.UntypedStorage.cpu
torch.UntypedStorage.cpu = lambda storage: copied.append(storage.nbytes()) or to_host(storage)
writes = commit.DelayedWrites(SimpleNamespace(save=torch.save))
writes.save({"module": weights, "step": 3}, sys.argv[1])
writes.check()
assert sorted(copied) == [4000, 4 * (1 << 20) - 4000], copied
read = torch.load(sys.argv[1], weights_only=True, map_location="cpu")
assert read["step"] == 3 and read["module"]["c"] == 7
for name in ("a", "b", "tied"):
    assert torch.equal(read["module"][name], weights[name].cpu()), name
assert read["module"]["b"].data_ptr() == read["module"]["tied"].data_ptr()
"""


def test_slices_of_a_cards_buffer_are_copied_to_the_host_one_at_a_time(one_card: Workplace):
    done = one_card.python("-c", WRITTEN, str(one_card.folder / "states.pt"))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("mode", ["deepspeed_zero2_offload", "deepspeed_zero3_offload"])
def test_offloaded_states_are_pinned_in_exact_sizes_saved_and_read_back(one_card: Workplace, mode):
    """Joined to the user's settings of the allocator."""
    training = {"bf16": True, "max_steps": 2, "save_steps": 2, "dataloader_num_workers": 0}
    file = str(builders.recipe(one_card.folder, "gpt2-small", training=training))
    words = (file, f"--launch.mode={mode}", "--model.dtype=bfloat16")
    settings = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    for steps, ranks in ((2, 1), (4, 2)):
        more = f"--training.max_steps={steps}"
        done = one_card.launch("run", *words, more, **settings)
        assert done.returncode == 0, done.stdout + done.stderr
        asked = [each for each in one_card.machine.processes() if each.launches > 100]
        assert len(asked) == ranks
        plan = json.loads(max(one_card.folder.glob("workspace/runs/*/*/plan.json")).read_text())
        planned = plan["estimate"]["pinned_bytes"]
        assert asked[-1].peak_pinned_bytes == pytest.approx(planned, rel=0.002)


LOCKED = """
import sys
from types import SimpleNamespace
import torch
from launch.schema.levers import Levers
from training import run

def check(size, kernel, streamed=0, rank=0):
    strategy = SimpleNamespace(
        mode="deepspeed_zero2_offload",
        levers=Levers(streamed_layers=streamed),
        processes_per_machine=2,
    )
    estimate = SimpleNamespace(pinned_bytes=size, offloaded_bytes=1 << 49)
    plan = SimpleNamespace(estimate=estimate, strategy=strategy)
    run._check_pinned_memory(plan, torch.device("cuda"), kernel, rank)

check(1 << 50, "6.8.0-generic")
check(1 << 50, "6.8.0-generic", streamed=3, rank=1)  # rank 0 tries what they share
check(1 << 20, "6.6.87-microsoft-standard-WSL2")
try:
    check(1 << 50, "6.6.87-microsoft-standard-WSL2")
except RuntimeError as error:
    print(error)
"""


def test_host_memory_that_wsl_does_not_lock_is_named_before_a_rank_loads(one_card: Workplace):
    done = one_card.python("-c", LOCKED)
    assert done.returncode == 0, done.stderr
    assert "WSL 2: the host does not lock 1,048,576.00 GiB for a rank" in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("--launch.mode=deepspeed_zero2_offload",),
        ("--launch.mode=deepspeed_zero3_offload", "--model.dtype=bfloat16"),
        ("--training.activation_checkpointing_kwargs={offload: true}",),
    ],
)
def test_where_the_host_locks_too_little_a_run_goes_on_without_pinned_memory(
    one_card: Workplace, words
):
    """Batches are still pinned."""
    training = {"bf16": True, "max_steps": 2, "dataloader_num_workers": 0}
    file = str(builders.recipe(one_card.folder, "gpt2-small", training=training))
    locked_bytes = 2 << 20
    done = one_card.launch("run", file, *words, NVIDIA_FAKE_MAX_PINNED=str(locked_bytes))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "out of memory at step 0: the host cannot pin more memory" in done.stdout
    assert "pin_memory: asked true, runs false" in done.stdout
    asked = one_card.machine.processes()[-1]
    plan = json.loads(max(one_card.folder.glob("workspace/runs/*/*/plan.json")).read_text())
    planned = plan["estimate"]["pinned_bytes"]
    assert 0 < asked.peak_pinned_bytes <= planned < locked_bytes
