"""Ways to save memory in real runs: the losses are those of runs without, a killed run goes on,
also with another number of parts, and the model is exported as ever."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import builders
from tests.train_cpu.test_resume import kill_after

SHORT = {"num_train_epochs": 3, "save_steps": 3, "optim": "sgd", "learning_rate": 0.1}
KEYS = ("tiled_mlp_num_shards", "num_output_chunks", "logits_at_targets")
WITHOUT = tuple(
    f"--training.{key}={value}" for key, value in zip(KEYS, (1, 1, "false"), strict=True)
)
# name -> the words of the attempt that is killed, and of the next
WAYS = {
    "MLPs in parts": (
        ("--training.activation_checkpointing=true", "--training.tiled_mlp_num_shards=4"),
        ("--training.tiled_mlp_num_shards=3",),
    ),
    "logits in parts": (
        ("--training.num_output_chunks=4",),
        ("--training.num_output_chunks=3",),
    ),
    "logits at targets": (
        ("--training.logits_at_targets=true",),
        ("--training.logits_at_targets=true",),
    ),
}
WAYS["all"] = tuple(
    tuple(word for way in WAYS.values() for word in way[attempt]) for attempt in (0, 1)
)
rarely = partial(pytest.param, marks=pytest.mark.campaign)
LORA = {"lora": {"r": 4}}
ALL = [(4, 4, True), (3, 3, True)]


def losses(workspace: Path) -> dict[int, float]:
    """The loss of each step of a run, by the attempt that has trained it last."""
    events = builders.events(builders.only_run(workspace))
    return {event["step"]: event["loss"] for event in events}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    (file,) = folder.glob("*model.safetensors")
    return load_file(file)


def dtypes(states: Mapping[Any, Any]) -> Iterator[torch.dtype]:
    """Those of an optimizer's states; bitsandbytes has a mapping of its own inside."""
    for value in states.values():
        if isinstance(value, Mapping):
            yield from dtypes(value)
        elif isinstance(value, torch.Tensor):
            yield value.dtype


def settings(run: Path) -> list[tuple[Any, ...]]:
    """The ways of each attempt of a run, as its plan says."""
    plans = [json.loads(file.read_text()) for file in sorted(run.glob("attempts/*/plan.json"))]
    return [tuple(plan["strategy"]["levers"][key] for key in KEYS) for plan in plans]


@pytest.mark.modes
@pytest.mark.parametrize(
    ("way", "shape", "ranks", "sections", "used"),
    [
        ("all", "llama-tiny", 1, LORA, ALL),
        ("all", "t5-tiny", 2, {}, ALL[:1]),  # nothing stops it
        rarely("all", "t5-tiny", 2, {}, ALL),
        rarely("all", "gpt2-tiny", 1, {}, ALL),
        rarely("logits at targets", "gpt2-tiny", 1, {}, [(1, 1, True)] * 2),
        rarely("MLPs in parts", "llama-tiny", 1, LORA, [(4, 1, True), (3, 1, True)]),
        rarely("logits in parts", "llama-tiny", 1, LORA, [(1, 4, True), (1, 3, True)]),
        rarely("MLPs in parts", "gpt2-tiny", 1, {}, [(4, 1, True), (3, 1, True)]),
        rarely("MLPs in parts", "t5-tiny", 2, {}, [(4, 1, True), (3, 1, True)]),
        rarely("logits in parts", "t5-tiny", 2, {}, [(1, 4, True), (1, 3, True)]),
        rarely("logits at targets", "t5-tiny", 2, {}, [(1, 1, True)] * 2),
    ],
)
def test_losses_and_model_are_those_of_a_run_without_across_a_resume(
    tmp_path,
    way: str,
    shape: str,
    ranks: int,
    sections: dict[str, Any],
    used: list[tuple[Any, ...]],
):
    training = {**SHORT, "per_device_train_batch_size": 8 // ranks}
    recipe = str(builders.recipe(tmp_path, shape, training=training, **sections))
    words = ["run", recipe, f"--launch.num_processes={ranks}"]
    killed, resumed = WAYS[way]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    done = builders.launch(whole, *words, *WITHOUT, f"--output_dir={whole / 'model'}")
    assert done.returncode == 0, done.stdout + done.stderr
    expected, before, is_resumed = losses(whole), {}, len(used) > 1
    if is_resumed:
        kill_after(parts, [*words, *killed], step=7)
        before = losses(parts)
    again = builders.launch(parts, *words, *(resumed if is_resumed else killed))
    assert again.returncode == 0, again.stdout + again.stderr
    assert ("resuming from checkpoint-00000" in again.stdout) == is_resumed
    after = losses(parts)
    assert len(expected) == len(after) == 18
    for step, loss in expected.items():
        assert after[step] == pytest.approx(loss, rel=1e-5)
        assert before.get(step, loss) == pytest.approx(loss, rel=1e-5)
    assert settings(builders.only_run(parts)) == used
    assert settings(builders.only_run(whole)) == [(1, 1, False)]
    one, other = weights(whole / "model"), weights(tmp_path / "model")
    assert one.keys() == other.keys()
    for name, weight in one.items():
        torch.testing.assert_close(other[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.modes
@pytest.mark.parametrize(
    "optim", [pytest.param("adamw_8bit", marks=pytest.mark.campaign), "paged_adamw_8bit"]
)
def test_optimizer_states_in_8_bits_go_on_after_a_kill_to_the_bytes_of_a_whole_run(tmp_path, optim):
    """Pages are host memory like any other on a CPU: both end with the same model."""
    training = {"num_train_epochs": 3, "save_steps": 3}
    words = ["run", str(builders.recipe(tmp_path, "llama-tiny", training=training))]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    plain = ("--training.optim=adamw_8bit", f"--output_dir={whole / 'model'}")
    done = builders.launch(whole, *words, *plain)
    assert done.returncode == 0, done.stdout + done.stderr
    words.append(f"--training.optim={optim}")
    kill_after(killed, words, step=7)
    again = builders.launch(killed, *words)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from checkpoint-00000" in again.stdout
    assert losses(killed) == losses(whole)
    *_, last = sorted(builders.only_run(killed).glob("checkpoints/checkpoint-*/optimizer.pt"))
    assert torch.uint8 in set(dtypes(torch.load(last, weights_only=True)["state"]))
    expected, found = weights(whole / "model"), weights(tmp_path / "model")
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name


LAYERS, RANKS, STEPS = 2, 2, 18
CHECKPOINTED = {
    "per_device_train_batch_size": 4,
    "num_train_epochs": 3,
    "save_steps": 3,
    "activation_checkpointing": True,
}


@pytest.mark.modes
@pytest.mark.parametrize("sections", [{}, rarely(LORA)], ids=["all weights", "LoRA"])
def test_two_ranks_train_as_with_activations_on_the_device_across_a_resume(tmp_path, sections):
    """DDP whose checkpointed layers keep their inputs on the host."""
    recipe = str(builders.recipe(tmp_path, training=CHECKPOINTED, **sections))
    words = [recipe, f"--launch.num_processes={RANKS}"]
    plain, on_host = tmp_path / "plain", tmp_path / "on_host"
    mode = ("--launch.mode=multi_cpu", f"--output_dir={plain / 'model'}")
    done = builders.launch(plain, "run", *words, *mode)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = tmp_path / "counts"
    counts.mkdir()
    extra = {"OFFLOADING_COUNTS": str(counts)}
    one = ("-m", "tests.modes.launch_one", "ddp_on_host")
    kill_after(on_host, words, step=7, program=one, **extra)
    again = subprocess.run(
        [sys.executable, *one, *words],
        env=builders.environment(on_host, **extra),
        cwd=builders.CODE,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resuming from checkpoint-00000" in again.stdout
    assert losses(on_host) == losses(plain)
    assert len(losses(plain)) == STEPS
    for rank in range(RANKS):
        sent, received = (
            (counts / f"{name}-{rank}").read_text().split() for name in ("sent", "received")
        )
        assert set(sent) == {str(RANKS)}
        assert len(sent) > STEPS * LAYERS  # those after the last checkpoint twice
        assert len(received) >= STEPS * LAYERS
    expected, found = weights(plain / "model"), weights(tmp_path / "model")
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.equal(found[name], weight), name
