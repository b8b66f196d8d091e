"""Count the waits of a step for the device: one, for the gradient norm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import builders
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card

# argv: run folder
PROGRAM = """
import json, os, sys
from pathlib import Path
from train_low_mem import leave
from training.children import step_costs

masks = set()

def watch(trainer):
    collate = trainer.data_collator._tensors
    def collated(rows):
        batch = collate(rows)
        masks.add(batch["is_padded"])
        return batch
    object.__setattr__(trainer.data_collator, "_tensors", collated)

costs = step_costs.measure(Path(sys.argv[1]), watch)
if os.environ.get("RANK", "0") == "0":
    print("\\nwaits: " + json.dumps([costs["waits"], list(masks)]))
leave(0)
"""


@pytest.mark.parametrize(
    ("shape", "ranks"), [("llama-tiny", 1), ("gpt2-tiny", 1), ("t5-tiny", 1), ("llama-tiny", 2)]
)
def test_a_step_that_neither_logs_nor_saves_waits_once(tmp_path: Path, shape, ranks):
    place = Workplace(tmp_path, *[Card()] * ranks)
    training = {
        "bf16": True,
        "max_steps": 12,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        **dict.fromkeys(("logging_steps", "save_steps", "eval_steps"), 100),
        "dataloader_num_workers": 0,
    }
    words = (f"--launch.num_processes={ranks}", "--dry-run")
    dry = place.launch("run", str(builders.recipe(tmp_path, shape, training=training)), *words)
    assert dry.returncode == 0, dry.stdout + dry.stderr
    argv = [str(tmp_path / "rank.py"), str(builders.only_run(tmp_path / "workspace"))]
    Path(argv[0]).write_text(PROGRAM)
    if ranks > 1:
        torchrun = "-m torch.distributed.run --standalone --nproc-per-node"
        argv = [*torchrun.split(), str(ranks), *argv]
    done = place.python(*argv)
    assert done.returncode == 0, done.stdout + done.stderr
    text = next(line for line in done.stdout.splitlines() if line.startswith("waits: "))
    steps, masks = json.loads(text.removeprefix("waits: "))
    assert sorted(masks) == [False, True]  # some micro-batches are padded
    norm = [[wait for wait in waits if "training/loop/trainer.py" in wait[-2]] for waits in steps]
    assert [len(waits) for waits in norm] == [1] * len(steps)
    others = [
        wait for waits in steps for wait in waits if "training/loop/trainer.py" not in wait[-2]
    ]
    assert not others
