"""A rank and its card: its share of memory, peaks, paged states, precision."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import builders
from tests.cuda_build.conftest import Workplace
from tests.cuda_build.test_driver import run
from tests.fake_cuda.machine import Card


@pytest.mark.parametrize(
    ("settings", "share"), [("", 0.75), ("per_process_memory_fraction:0.25", 0.25)]
)
def test_the_smaller_of_the_free_memory_and_of_the_users_share_limits_a_rank(
    tmp_path: Path, settings, share
):
    code = """
from tests import builders
from training import run
device = torch.device("cuda", 0)
run._hold_to_free_memory(builders.plan(), device)
print(torch.cuda.get_per_process_memory_fraction(device))
"""
    place = Workplace(tmp_path, Card(memory_gib=20, other_gib=5, context_mib=0))
    assert float(run(place, code, PYTORCH_ALLOC_CONF=settings)) == pytest.approx(share, abs=0.01)


def test_memory_of_loading_is_no_peak_of_a_step(one_card: Workplace):
    code = f"""
from pathlib import Path
from transformers import TrainerControl, TrainerState, TrainingArguments
from launch.run_folder.layout import AttemptDir
from training.loop import callbacks
from training.loop.rank_memory import MemoryPeaks
device = torch.device("cuda", 0)
attempt, peaks = AttemptDir(Path({str(one_card.folder)!r})), MemoryPeaks(device)
reporter = callbacks.Reporter(
    attempt, 0, callbacks.StepMeter(), None, peaks, False, lambda step, loss: None
)
kept = torch.empty(64 << 20, dtype=torch.uint8, device=device)
del (loaded := [torch.empty(1 << 30, dtype=torch.uint8, device=device)])[:]
arguments = TrainingArguments(output_dir={str(one_card.folder)!r}, report_to=[])
reporter.on_step_begin(arguments, TrainerState(), TrainerControl())
of = peaks.of_all_ranks()
print(of["load"].reserved_bytes > 1 << 30, of["first_step"].reserved_bytes >> 20)
"""
    # the table of all ranks takes a small block
    assert run(one_card, code) in ("True 64", "True 66")


PAGED = """
import copy
from bitsandbytes.optim import PagedAdamW32bit
from training.compat import bitsandbytes_private

def made():
    weight = torch.nn.Parameter(torch.ones(1024, 1024, device="cuda"))
    small = torch.nn.Parameter(torch.ones(8, device="cuda"))
    weight.grad, small.grad = torch.ones_like(weight), torch.ones_like(small)
    return PagedAdamW32bit([weight, small]), weight, small

first, weight, small = made()
first.step()
torch.cuda.synchronize()
first.state[weight]["state1"].fill_(7.0)
checkpoint = copy.deepcopy(first.state_dict())
again, weight, small = made()
torch.cuda.reset_peak_memory_stats()
before = torch.cuda.memory_allocated()
bitsandbytes_private.load_paged(again)
again.load_state_dict(checkpoint)
bitsandbytes_private.page_states(again)
taken = torch.cuda.max_memory_allocated() - before
state = again.state[weight]
pages = [getattr(state[key], "is_paged", False) for key in ("state1", "state2")]
again.step()
print([pages, bool((state["state1"] == 7).all()), taken < 1 << 20,
       again.state[small]["state1"].device.type, len(again.page_mng.paged_tensors)])
"""


def test_states_that_a_paged_optimizer_loads_are_paged_again(one_card: Workplace):
    assert run(one_card, PAGED).splitlines()[-1] == "[[True, True], True, True, 'cuda', 2]"


def test_numbers_on_the_host_are_read_before_a_kernel_of_the_check_runs(one_card: Workplace):
    code = """
from torch.utils._python_dispatch import TorchDispatchMode
from training.loop import nan_guard

class Order(TorchDispatchMode):
    devices = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if "norm" in str(function):
            self.devices.append(args[0][0].device.type)
        return function(*args, **(kwargs or {}))

with Order() as order:
    nan_guard.all_finite([torch.ones(9, device="cuda"), torch.ones(9)])
print(*order.devices)
"""
    assert run(one_card, code) == "cpu cuda"


def test_a_checkpoints_check_runs_no_kernel_before_the_hosts_states_were_read(one_card: Workplace):
    code = f"""
from pathlib import Path
from types import SimpleNamespace
from torch.utils._python_dispatch import TorchDispatchMode
from training.loop import nan_guard

class Order(TorchDispatchMode):
    calls = []
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {{}}))
        tensor = result[0] if isinstance(result, (list, tuple)) else result
        if torch.is_tensor(tensor) and "detach" not in str(function):
            self.calls.append(tensor.device.type)
        return result

network = torch.nn.Linear(3, 3, device="cuda")
paged = torch.ones(9)  # bitsandbytes' pages are tensors of the host
guard = nan_guard.NanGuard(None, Path({str(one_card.folder)!r}), None, False, 1e-4)
guard.trainer = SimpleNamespace(
    model=network,
    state=SimpleNamespace(global_step=1),
    is_deepspeed_enabled=False,
    optimizer=SimpleNamespace(state={{0: {{"state1": paged}}}}),
    args=SimpleNamespace(device=torch.device("cuda", 0)),
)
with Order() as order:
    guard.check_checkpoint()
print(*sorted(set(order.calls)), order.calls == sorted(order.calls))
"""
    assert run(one_card, code) == "cpu cuda True"


SAVED = """
import json, os, sys
from pathlib import Path
from transformers import TrainerCallback
from training.children import step_costs
from tests.fake_cuda.machine import processes

def waits():
    here = processes(Path(os.environ["NVIDIA_FAKE_CUDA"]))
    return next(each.synchronizations for each in here if each.pid == os.getpid())

class Ends(TrainerCallback):
    counts, first = [], None
    def on_step_end(self, *others, **more):
        self.counts = [waits()]

ends = Ends()

def watch(trainer):
    trainer.add_callback(ends)
    check = trainer.guard.check_checkpoint
    def checked():
        ends.first = ends.first or [*ends.counts, waits()]
        check()
    trainer.guard.check_checkpoint = checked

step_costs.measure(Path(sys.argv[1]), watch)
print("\\nwaits: " + json.dumps(ends.first), flush=True)
os._exit(0)
"""


def test_a_checkpoint_waits_for_the_card_before_states_are_read(one_card: Workplace):
    training = {"bf16": True, "optim": "paged_adamw_8bit", "max_steps": 5, "save_steps": 4}
    training |= {"logging_steps": 100, "dataloader_num_workers": 0}
    recipe = str(builders.recipe(one_card.folder, "llama-tiny", training=training))
    dry = one_card.launch("run", recipe, "--dry-run")
    assert dry.returncode == 0, dry.stdout + dry.stderr
    done = one_card.python("-c", SAVED, str(builders.only_run(one_card.folder / "workspace")))
    assert done.returncode == 0, done.stderr[-3000:]
    (text,) = [line for line in done.stdout.splitlines() if line.startswith("waits: ")]
    after_step, before_check = json.loads(text.removeprefix("waits: "))
    assert before_check == after_step + 1


@pytest.mark.parametrize(("capability", "fix"), [("7.5", "False"), ("8.0", "True")])
def test_torch_knows_which_card_has_bf16(tmp_path: Path, capability, fix):
    code = "print(torch.cuda.is_bf16_supported(including_emulation=False))"
    assert run(Workplace(tmp_path, Card(capability=capability)), code) == fix


GROUPED = """
from types import SimpleNamespace
import torch
from transformers.integrations import sdpa_attention
from launch.schema.levers import PLAIN
from training.levers import attention
model = SimpleNamespace(config=SimpleNamespace(_attn_implementation=PLAIN.attn_implementation))
args = SimpleNamespace(device=torch.device("cuda", 0))
attention.apply(SimpleNamespace(model=model, args=args), PLAIN)
library = torch.nn.functional.scaled_dot_product_attention
def watched(*args, **kwargs):
    out = library(*args, **kwargs)
    print(out.grad_fn.name())
    return out
torch.nn.functional.scaled_dot_product_attention = watched
layer = SimpleNamespace(num_key_value_groups=4, is_causal=True)
for dtype in (torch.float16, torch.float32):
    heads = [
        torch.zeros(1, heads, 64, 64, dtype=dtype, device="cuda", requires_grad=True)
        for heads in (8, 2, 2)
    ]
    sdpa_attention.sdpa_attention_forward(layer, *heads, None)
"""


@pytest.mark.parametrize(
    ("capability", "kernels"),
    [("7.5", ("Efficient", "Efficient")), ("8.0", ("Flash", "Efficient"))],
)
def test_grouped_heads_get_a_fused_kernel(tmp_path: Path, capability, kernels):
    named = [f"ScaledDotProduct{kernel}AttentionBackward0" for kernel in kernels]
    assert run(Workplace(tmp_path, Card(capability=capability)), GROUPED).split() == named
