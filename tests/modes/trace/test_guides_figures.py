"""Figures that guides print for their systems, and what a traced step says: described cards, no
GPU.

The right-hand side of each case is a range around what the model, batch and length of the guide
take here; a card's room is the described machine's. On a GPU none of it has been measured by us."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.base.errors import DoesNotFit
from launch.plan import resolve
from launch.probe import described
from launch.schema.machine import GIB
from launch.schema.plan import Plan
from tests.builders import CODE, recipe

ROOM_GIB = 400.0  # of a card that holds everything, for figures of what cannot run
CHECKPOINTED = "--training.activation_checkpointing=true"
SHORT = "--data.max_length=512"
PLAIN = "--training.activation_checkpointing=false"
SDPA = "--model.attn_implementation=sdpa"  # as the guide; varlen_attn takes less
LORA_7B = (
    "--model.shape=qwen1.5-7b",
    "--model.dtype=bfloat16",
    "--training.bf16=true",
    "--lora.r=32",
    "--lora.fused_adapters=false",
)
MEDIUM = ("--model.shape=minigpt-medium", "--training.bf16=true", "--data.max_length=2048")


def planned(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    machine_name: str,
    batch: int,
    *words: str,
    room_gib: float | None = None,
) -> Plan:
    machine = described.from_file(CODE / "configs" / "machines" / f"{machine_name}.yaml")
    machine = replace(machine, gpus=machine.gpus[:1])
    if room_gib is not None:
        room = int(room_gib * GIB)
        cards = tuple(replace(card, total_bytes=room, free_bytes=room) for card in machine.gpus)
        machine = replace(
            machine, gpus=cards, host_available_bytes=4 * room, host_limit_bytes=4 * room
        )
    # one folder of all cases, and so one worker
    monkeypatch.setenv("LOWMEM_ROOT", str(folder.parent / "workspace"))
    file = recipe(folder, "gpt2-tiny")
    flags = [
        f"--training.per_device_train_batch_size={batch}",
        "--training.per_device_eval_batch_size=1",
        "--training.fused_norms=false",  # as the guides
    ]
    return resolve.resolve(
        str(file),
        [*flags, "--launch.mode=single_gpu", *words],
        machine,
    ).plan


@pytest.mark.parametrize(
    ("machine", "batch", "words", "low", "high"),
    [
        # the A5000 guide: 12-14 GB
        ("a5000-16g", 6, (*LORA_7B, "--data.max_length=2048", PLAIN), 95, 115),
        ("a5000-16g", 1, (*LORA_7B, "--data.max_length=256", CHECKPOINTED), 15.5, 17),
        # the A6000 guide: 20-25 GB at 32
        ("a6000-48g", 32, (*MEDIUM, PLAIN), 43, 53),
        ("a6000-48g", 16, (*MEDIUM, PLAIN), 22, 28),
        # the ROCm guide: 3-4 GB at 32
        ("r9700-32g", 32, ("--model.shape=gpt2-small", SHORT, PLAIN), 25, 31),
        # the optimizer's states split a block of logits, which every later step then lacks
        ("r9700-32g", 64, ("--model.shape=gpt2-tiny", SHORT, PLAIN), 20, 35),
        (
            "r9700-32g",
            16,
            ("--model.shape=gpt2-medium", SHORT, "--training.fp16=true", PLAIN),
            20,
            28,
        ),
        (
            "r9700-32g",
            16,
            ("--model.shape=gpt2-medium", SHORT, "--training.fp16=true", CHECKPOINTED),
            9,
            13,
        ),
    ],
)
def test_what_a_guides_figure_should_have_been(
    machine, batch, words, low, high, tmp_path, monkeypatch
):
    plan = planned(tmp_path, monkeypatch, machine, batch, *words, room_gib=ROOM_GIB)
    assert plan.strategy.per_device_train_batch_size == batch
    assert low < plan.estimate.device_bytes / GIB < high


def test_the_7b_model_of_the_guide_does_not_fit_16_gib_by_a_smaller_batch_or_checkpointing(
    tmp_path, monkeypatch
):
    with pytest.raises(DoesNotFit) as refused:
        words = (*LORA_7B, "--data.max_length=256", "--training.streamed_layers=0")
        planned(tmp_path, monkeypatch, "a5000-16g", 6, *words)
    # more than there is room for before any activation, at any batch
    assert "model states 15." in str(refused.value)
    assert "--quantization.load_in_4bit=true" in str(refused.value)


def test_in_4_bits_it_fits(tmp_path, monkeypatch):
    words = (*LORA_7B, "--data.max_length=256", "--quantization.load_in_4bit=true", CHECKPOINTED)
    plan = planned(tmp_path, monkeypatch, "a5000-16g", 4, *words)
    assert plan.strategy.per_device_train_batch_size == 4
    assert 7 < plan.estimate.device_bytes / GIB < 11


def test_the_a6000_batch_of_32_is_split_at_128_effective_and_16_runs(tmp_path, monkeypatch):
    words = (
        *(*MEDIUM, PLAIN, SDPA),
        "--training.num_output_chunks=1",
        "--training.gradient_accumulation_steps=4",
    )
    plan = planned(tmp_path, monkeypatch, "a6000-48g", 32, *words)
    assert plan.strategy.per_device_train_batch_size < 32
    assert plan.strategy.effective_batch_size == 128
    assert any("32 samples at once need" in change.reason for change in plan.changes)
    with pytest.raises(DoesNotFit, match=r"with launch\.exact_batch"):
        planned(tmp_path, monkeypatch, "a6000-48g", 32, *words, "--launch.exact_batch=true")
    half = planned(tmp_path, monkeypatch, "a6000-48g", 16, *words)
    assert half.strategy.per_device_train_batch_size == 16


def test_the_a6000_batch_of_32_runs_with_its_logits_in_parts(tmp_path, monkeypatch):
    words = (
        *(*MEDIUM, PLAIN, SDPA),
        "--training.gradient_accumulation_steps=4",
        "--launch.exact_batch=true",
    )
    plan = planned(tmp_path, monkeypatch, "a6000-48g", 32, *words)
    assert plan.strategy.levers.num_output_chunks > 1
    assert any(change.key == "training.num_output_chunks" for change in plan.changes)


def test_accumulating_less_saves_no_memory(tmp_path, monkeypatch):
    words = ("--model.shape=gpt2-tiny", "--data.max_length=512", PLAIN)
    two, eight = (
        planned(
            tmp_path,
            monkeypatch,
            "r9700-32g",
            8,
            *words,
            f"--training.gradient_accumulation_steps={steps}",
        )
        for steps in (2, 8)
    )
    assert two.estimate.peak == eight.estimate.peak


@pytest.mark.parametrize("asked", [12, 24, 48])
def test_a_batch_that_does_not_fit_is_cut_into_divisors_so_that_the_effective_batch_is_held(
    asked, tmp_path, monkeypatch
):
    words = (
        "--model.shape=gpt2-small",
        "--data.max_length=512",
        PLAIN,
        "--training.gradient_accumulation_steps=5",
    )
    plan = planned(tmp_path, monkeypatch, "r9700-32g", asked, *words, room_gib=8)
    strategy = plan.strategy
    assert strategy.per_device_train_batch_size < asked
    assert strategy.per_device_train_batch_size * strategy.gradient_accumulation_steps == 5 * asked


def test_a_typical_batch_of_the_3080_guide_takes_4_gib_and_the_longest_more_than_twice_that(
    tmp_path, monkeypatch
):
    words = (
        "--model.shape=t5-chatlm-0.2b",
        "--model.freeze=[shared,encoder]",
        "--training.bf16=true",
        PLAIN,
    )
    typical, longest = (
        planned(
            tmp_path,
            monkeypatch,
            "2x3080-20g-16g",
            16,
            *words,
            f"--data.max_length={length}",
            room_gib=ROOM_GIB,
        )
        for length in (128, 512)
    )
    assert 3 < typical.estimate.device_bytes / GIB < 5
    assert longest.estimate.device_bytes > 2.3 * typical.estimate.device_bytes
