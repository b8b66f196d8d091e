"""Layers whose weights are streamed: bytes on the card and pinned beside those that are predicted,
and the copies' place among the kernels."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch.schema.levers import SLOTS
from tests import builders
from tests.builders import CODE
from tests.cuda_build.conftest import TWO, Workplace
from tests.fake_cuda.machine import MAX_CARDS, PROCESS, Card

LAYERS, STREAMED = 12, 8
LORA = {"r": 4, "target_modules": "all-linear"}
# begin, end and inode of a mapping
MAPPED = re.compile(r"^([\da-f]+)-([\da-f]+) .* (\d+) +/memfd:streamed layers", re.MULTILINE)
# argv: folder of a small model with its tokenizer, folder of one with more layers
DEEPENED = """
import shutil, sys, torch
from transformers import AutoConfig, AutoModelForCausalLM
source, folder = sys.argv[1:]
shutil.copytree(source, folder)
config = AutoConfig.from_pretrained(source)
config.num_hidden_layers, config.hidden_size, config.intermediate_size = 12, 512, 1408
config.num_attention_heads = config.num_key_value_heads = 8
config.head_dim, config.layer_types = 64, None
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained(folder)
"""


def pinned_now(place: Workplace) -> int:
    """The most bytes that a process of the machine has locked at this moment. The driver's peak is
    not of memory that was registered."""
    file = place.machine.folder / "processes"
    if not file.exists():
        return 0
    content = file.read_bytes()
    rows = PROCESS.iter_unpack(content[: len(content) // PROCESS.size * PROCESS.size])
    return max((row[1 + 2 * MAX_CARDS] for row in rows if row[0]), default=0)


Buffers = dict[str, dict[int, int]]  # inode of shared memory -> process, its bytes of it


def look_at_buffers(place: Workplace, buffers: Buffers) -> None:
    """Add the shared memory of streamed weights that processes of the machine map now."""
    for process in place.machine.processes():
        with suppress(OSError):  # it has ended
            text = Path(f"/proc/{process.pid}/maps").read_text()
            for begin, end, inode in MAPPED.findall(text):
                buffers.setdefault(inode, {})[process.pid] = int(end, 16) - int(begin, 16)


def run(place: Workplace, *words: str) -> tuple[int, Buffers]:
    """The most that a process of a run had pinned, and the buffers that it shared."""
    argv = [sys.executable, "-m", "launch", "run", *words]
    out = place.folder / "out.txt"
    highest, buffers = 0, Buffers()
    with out.open("w") as file:
        process = subprocess.Popen(
            argv, env=place.environment(), stdout=file, stderr=subprocess.STDOUT, text=True
        )
        while True:
            try:
                process.wait(0.1)
                break
            except subprocess.TimeoutExpired:
                if pinned := pinned_now(place):
                    highest = max(highest, pinned)
                    look_at_buffers(place, buffers)
    assert process.returncode == 0, out.read_text()
    return highest, buffers


def records(place: Workplace, attempt: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    (plan,) = place.folder.glob("workspace/runs/tiny/*/plan.json")
    outcome = plan.parent / f"attempts/{attempt:02}/outcome.json"
    return json.loads(plan.read_text()), json.loads(outcome.read_text())


# argv: layers that are streamed, whether the card has room for the slots
PROGRAM = """
import json, sys, torch
from contextlib import nullcontext
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from launch.schema.levers import Levers
from training.levers.streaming import Streaming

count, has_room = map(int, sys.argv[1:])
device = torch.device("cuda", 0)
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=12)
network = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=2, target_modules=["q_proj"]))
network.base_model.model.gradient_checkpointing_enable({"use_reentrant": False})
network.enable_input_require_grads()
if not has_room:
    torch.cuda.set_per_process_memory_fraction(1e-5)
levers = Levers(every_n_layers=1, streamed_layers=count)
streaming = Streaming(network, levers, device) if count else None
network.to(device).train()
if streaming:
    streaming.attach()
streams = {}

class Streams(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = "others"
        if func is torch.ops.aten.copy_.default and args[1].device.type == "cpu":
            kind = "weights"
            assert args[1].is_pinned()
        stream = torch.cuda.current_stream().cuda_stream
        streams.setdefault(kind, {}).setdefault(stream, 0)
        streams[kind][stream] += 1
        return func(*args, **(kwargs or {}))

tokens = torch.ones(2, 64, dtype=torch.int64, device=device)
labels = torch.ones(2, 64, 512, device=device)
for step in range(4):
    torch.cuda.reset_peak_memory_stats()
    with Streams() if step == 2 else nullcontext():
        (network(input_ids=tokens).logits * labels).sum().backward()
print(json.dumps({
    "streams": streams,
    "side": streaming._copies.stream.cuda_stream if streaming else None,
    "segments": sorted({segment["stream"] for segment in torch.cuda.memory_snapshot()}),
    "peak": torch.cuda.max_memory_allocated(),
    "saved": streaming.bytes_not_held if streaming else 0,
}))
"""


def test_copies_have_a_stream_of_their_own_and_the_host_waits_for_none(tmp_path: Path):
    results: dict[int, dict[str, Any]] = {}
    for count in (0, STREAMED):
        place = Workplace(tmp_path / str(count), Card())
        done = place.python("-c", PROGRAM, str(count), "1", PYTHONPATH=str(CODE))
        assert done.returncode == 0, done.stderr
        (process,) = (each for each in place.machine.processes() if each.launches)
        waits = {"waits": process.synchronizations}
        results[count] = json.loads(done.stdout.splitlines()[-1]) | waits
    stays, streams = results[0], results[STREAMED]
    side = str(streams["side"])
    assert streams["streams"]["weights"] == {side: 2 * (STREAMED - SLOTS)}
    (main,) = streams["streams"]["others"]
    assert main != side
    assert streams["segments"] == stays["segments"]
    assert streams["waits"] <= stays["waits"]
    assert stays["peak"] - streams["peak"] == pytest.approx(streams["saved"], rel=0.01)


def test_a_card_without_room_for_the_slots_says_whose_they_are(one_card: Workplace):
    done = one_card.python("-c", PROGRAM, str(STREAMED), "0", PYTHONPATH=str(CODE))
    assert done.returncode != 0
    assert "CUDA out of memory. Tried to allocate" in done.stderr
    assert "training.streamed_layers: 2 slots of" in done.stderr


def test_memory_that_the_host_does_not_lock_is_named_and_planned_without(one_card: Workplace):
    training = {"bf16": True, "max_steps": 2, "streamed_layers": STREAMED}
    file = builders.recipe(one_card.folder, "gpt2-small", lora=LORA, training=training)
    words = ("run", str(file), "--launch.mode=single_gpu", "--model.dtype=bfloat16")
    done = one_card.launch(*words, NVIDIA_FAKE_MAX_PINNED=str(40 << 20))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the host does not lock" in done.stdout
    plan = max(one_card.folder.glob("workspace/runs/tiny/*/plan.json")).read_text()
    assert not json.loads(plan)["strategy"]["pin_memory"]


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        ("folder", "single_gpu"),
        ("4 bits", "single_gpu"),
        ("4 bits", "dual_gpu_nccl"),
        ("packed", "dual_gpu_nccl"),
        ("shape", "dual_gpu_nccl"),
    ],
)
def test_a_run_holds_and_pins_what_is_predicted(tmp_path: Path, kind, mode):
    cards = TWO if mode == "dual_gpu_nccl" else (Card(),)
    place = Workplace(tmp_path, *cards)
    training = {"bf16": True, "max_steps": 4, "save_steps": 2, "streamed_layers": STREAMED}
    sections: dict[str, Any] = {"lora": LORA, "training": training}
    words = [f"--launch.mode={mode}", f"--launch.num_processes={len(cards)}"]
    if kind == "shape":
        words.append("--model.shape=gpt2-small")
    else:
        small = builders.recipe(tmp_path / "small", training={"max_steps": 1})
        done = builders.launch(tmp_path / "small/workspace", "run", str(small), "--launch.mode=cpu")
        assert done.returncode == 0, done.stdout + done.stderr
        base = tmp_path / "base"
        made = place.python("-c", DEEPENED, str(tmp_path / "small/model"), str(base))
        assert made.returncode == 0, made.stderr
        if kind == "packed":
            base = builders.packed(base, tmp_path / "packed")
        sections["model"] = {"shape": None, "path": str(base)}
        if kind != "folder":
            sections["quantization"] = {"load_in_4bit": True}
    file = builders.recipe(place.folder, **sections)
    pinned, buffers = run(place, str(file), "--model.dtype=bfloat16", *words)
    plan, outcome = records(place)
    assert plan["strategy"]["levers"]["streamed_layers"] == STREAMED
    estimate = plan["estimate"]
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes", "offloaded_bytes"):
        assert outcome[name] == pytest.approx(estimate[name], rel=0.001)
    for phase, measured in outcome["phases"].items():
        planned = plan["phases"][phase]["allocated_bytes"]
        assert measured["allocated_bytes"] == pytest.approx(planned, rel=0.01), phase
    assert outcome["vram_reserved_bytes"] == pytest.approx(estimate["step_reserved_bytes"], rel=0.1)
    assert pinned == pytest.approx(estimate["pinned_bytes"], rel=0.03)
    if len(cards) > 1:  # two ranks pin the same pages
        (shared,) = buffers.values()
        shared_bytes = pytest.approx(len(cards) * estimate["offloaded_bytes"], rel=0.01)
        assert [*shared.values()] == [shared_bytes] * len(cards)
