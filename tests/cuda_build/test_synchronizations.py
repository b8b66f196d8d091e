"""Count the waits of a step for the device: one, for the gradient norm."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import builders
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card

ON_HOST = {
    "activation_checkpointing": True,
    "activation_checkpointing_kwargs": {"offload": True},
}
# argv: run folder
PROGRAM = """
import json, os, sys
from pathlib import Path
from train_low_mem import leave
from training.children import step_costs

masks = set()

def watch(trainer):
    collate = trainer.data_collator._batch
    def collated(rows):
        batch = collate(rows)
        masks.add(batch.get("is_padded"))
        assert len(batch["target_positions"]) <= batch["labels"].numel()
        return batch
    object.__setattr__(trainer.data_collator, "_batch", collated)

costs = step_costs.measure(Path(sys.argv[1]), watch)
if os.environ.get("RANK", "0") == "0":
    print("\\nwaits: " + json.dumps([costs["waits"], list(masks)]))
leave(0)
"""


@pytest.mark.parametrize(
    ("shape", "ranks", "attention", "added"),
    [
        ("llama-tiny", 1, "sdpa", {}),
        ("llama-tiny", 1, "varlen_attn", {}),
        ("llama-tiny", 1, "sdpa", ON_HOST),
        ("gpt2-tiny", 1, "sdpa", {}),
        ("t5-tiny", 1, "sdpa", {}),
        ("llama-tiny", 2, "sdpa", {}),
    ],
)
def test_a_step_that_neither_logs_nor_saves_waits_once(
    tmp_path: Path, shape, ranks, attention, added
):
    place = Workplace(tmp_path, *[Card()] * ranks)
    training = {
        "bf16": True,
        "max_steps": 12,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 4,
        **dict.fromkeys(("logging_steps", "save_steps", "eval_steps"), 100),
        "dataloader_num_workers": 0,
        **added,
    }
    model = {"attn_implementation": attention}
    words = (f"--launch.num_processes={ranks}", "--dry-run")
    dry = place.launch(
        "run", str(builders.recipe(tmp_path, shape, model=model, training=training)), *words
    )
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
    # some micro-batches are padded, unless they are flattened
    assert sorted(masks) == ([False, True] if attention == "sdpa" else [None])
    norm = [[wait for wait in waits if "training/loop/trainer.py" in wait[-2]] for waits in steps]
    assert [len(waits) for waits in norm] == [1] * len(steps)
    others = [
        wait for waits in steps for wait in waits if "training/loop/trainer.py" not in wait[-2]
    ]
    assert not others
