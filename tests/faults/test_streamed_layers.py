"""Faults while weights of layers come from the host: the run goes on with the same bits, or ends
with its cause and its checkpoints."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import builders, stopping
from tests.faults.test_out_of_memory import CUDA, until_others_take
from tests.faults.test_restart import KILL


def streaming(number: int, **more: Any) -> dict[str, Any]:
    """Sections of a run with so many of six layers streamed."""
    training = {"streamed_layers": number, "activation_checkpointing": True, **more}
    lora = {"r": 4, "target_modules": ["c_attn", "c_fc"]}
    return {"model": {"shape": "gpt2-tiny"}, "lora": lora, "training": training}


def in_a_copy(when: str, do: str, rank: int) -> dict[str, Any]:
    """A fault of a rank that has begun to copy a layer."""
    of_copies = {"module": "training.levers.streaming", "attribute": "Streaming.copy"}
    return {**of_copies, "when": when, "do": do, "rank": rank, "times": 1}


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter/adapter_model.safetensors")


@pytest.mark.shows("F4", "kill -9 of the rank that holds what both stream, in a copy; it marked it")
def test_killed_in_a_copy_it_goes_on_to_the_adapter_of_layers_that_stay(tmp_path):
    steps = {"num_train_epochs": 1, "max_steps": 10, "save_steps": 4}
    with stopping.launched(
        tmp_path,
        workspace="whole",
        words=(f"--output_dir={tmp_path / 'whole_model'}",),
        **streaming(0, **steps),
    ) as child:
        assert child.wait(within_s=300) == 0, child.said()
    fault = in_a_copy("call >= 40", KILL, rank=0)  # six of them or more a step
    sections = streaming(4, **steps)
    with stopping.launched(
        tmp_path, workspace="killed", faults={"kill": fault}, **sections
    ) as child:
        assert child.wait(within_s=300) == 0, child.said()
        assert stopping.fired(tmp_path, "kill") == 1
        assert "restart 1 of 10 in 1 s, from step" in child.said()
        assert child.left() == []
    expected, found = adapter(tmp_path / "whole_model"), adapter(tmp_path / "model")
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.mark.shows("F27", "a layer that never comes from the host, on one of two ranks; a mark")
def test_a_layer_that_does_not_come_is_a_hang_whose_stacks_are_saved(tmp_path):
    wait = "import threading; threading.Event().wait()"
    fault = in_a_copy("call >= 40", wait, rank=1)
    launch = {"hang_floor_s": 6, "max_restarts": 10}
    with stopping.launched(
        tmp_path, faults={"late": fault}, launch=launch, **streaming(4)
    ) as child:
        child.until("the verdict", lambda: "hangs: no sign of life for" in child.said(), 300)
        assert stopping.fired(tmp_path, "late")
        child.until("a second attempt", lambda: len(child.run.attempts()) == 2, 300)
        child.until("its steps", lambda: child.section() == "step", 300)
        child.process.send_signal(signal.SIGTERM)
        assert child.wait(within_s=300) == 75, child.said()
        assert "streaming.py" in child.run.attempt(1).stacks_file(1).read_text()
        assert child.left() == []


def test_without_memory_for_the_slots_a_start_ends_and_the_next_one_goes_on(tmp_path):
    """In the second life of a run, whose checkpoints stay. No smaller plan is tried."""
    out_of_memory = f"import torch\nraise torch.OutOfMemoryError({CUDA!r})"
    slots = {"module": "training.levers.streaming", "attribute": "Streaming._empty_slots"}
    sections = streaming(4, num_train_epochs=1, max_steps=400, save_steps=4)
    sections["launch"] = {"on_oom": "fail"}
    with stopping.launched(tmp_path, ranks=1, **sections) as child:
        child.until("a checkpoint", child.committed, 300)
        child.process.send_signal(signal.SIGTERM)
        assert child.wait(within_s=300) == 75, child.said()
        (saved,) = child.committed()[-1:]
    fault = {**slots, "do": out_of_memory}
    with stopping.launched(tmp_path, ranks=1, faults={"slots": fault}, **sections) as child:
        assert child.wait(within_s=300) == 12, child.said()
        assert stopping.fired(tmp_path, "slots")
        assert "error: the GPU ran out of memory\n  where  in load" in child.said()
        assert "more training.streamed_layers" in child.said()
        assert child.committed()[-1] == saved
        assert child.left() == []
    with stopping.launched(tmp_path, ranks=1, **sections) as child:
        child.until("its steps", lambda: child.committed()[-1] > saved, 300)
        assert f"resuming from checkpoint-{saved:06}" in child.said()


@pytest.mark.shows("F11", "eight processes in the run's cgroup take its memory; the kernel kills")
def test_where_others_take_the_host_the_ranks_end_and_their_buffer_goes(tmp_path, cgroup):
    (cgroup / "memory.limit_in_bytes").write_text(str(5 << 29))
    launch = {"num_processes": 2, "host_reserve_gib": 0.0, "host_stop_fraction": 0.0}
    sections = streaming(4, **stopping.ENDLESS) | {"launch": launch}
    recipe = builders.recipe(tmp_path, **sections)
    inside = f'echo $$ > "{cgroup}/cgroup.procs"; exec "{sys.executable}"'
    argv = ("bash", "-c", f'{inside} -m launch run "{recipe}"')
    with stopping.ended(
        stopping.Child(tmp_path, argv, tmp_path / "workspace", tmp_path / "out")
    ) as child:
        child.until("a checkpoint", child.committed, within_s=300)
        until_others_take(child, inside)
        assert "other programs took the memory" in child.said()
        assert child.left() == []
        (saved,) = child.committed()[-1:]
    with stopping.ended(
        stopping.Child(tmp_path, argv, tmp_path / "workspace", tmp_path / "out")
    ) as child:
        child.until("its steps", lambda: child.committed()[-1] > saved, 300)
        assert f"resuming from checkpoint-{saved:06}" in child.said()
