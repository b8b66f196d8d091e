"""Runs on described cards: out of memory, a killed rank, a hung collective, a stop, a lost card."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests import builders, orphans
from tests.cuda_build.conftest import Workplace
from tests.fake_cuda.machine import Card

STEPS = 12  # of builders.recipe: 45 rows, 8 a step, 2 epochs


LOADED = """
import sys
from transformers import AutoModelForCausalLM
print(AutoModelForCausalLM.from_pretrained(sys.argv[1]).config._attn_implementation)
"""


def recipe(place: Workplace, shape: str = "llama-tiny", **sections: Any) -> str:
    sections.setdefault("training", {})["bf16"] = True
    return str(builders.recipe(place.folder, shape, **sections))


def records(place: Workplace) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The plan of the only run, and the outcome of each attempt."""
    (plan,) = place.folder.glob("workspace/runs/tiny/*/plan.json")
    ended = sorted(plan.parent.glob("attempts/*/outcome.json"))
    return json.loads(plan.read_text()), [json.loads(path.read_text()) for path in ended]


@pytest.mark.parametrize("shape", ["llama-tiny", "t5-tiny"])
@pytest.mark.parametrize("card", [Card(), Card("NVIDIA H200", 140, "9.0", 132)])
def test_a_run_on_one_card_ends_with_a_model_and_the_predicted_memory(tmp_path: Path, shape, card):
    """On the driver without a card, cuDNN does not start: its attention is not called."""
    one_card = Workplace(tmp_path, card)
    done = one_card.launch("run", recipe(one_card, shape), "--model.attn_implementation=sdpa")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (one_card.folder / "model/model.safetensors").exists()
    plan, (outcome,) = records(one_card)
    for name in ("weights_bytes", "gradients_bytes", "optimizer_bytes"):
        assert outcome[name] == pytest.approx(plan["estimate"][name], rel=0.001)
    for measured, tolerance in (("allocated", 0.01), ("reserved", 0.1)):
        planned = plan["estimate"][f"step_{measured}_bytes"]
        assert outcome[f"vram_{measured}_bytes"] == pytest.approx(planned, rel=tolerance)


@pytest.mark.parametrize("on_host", [False, True])
def test_varlen_attn_stops_goes_on_and_exports_a_model_for_sdpa(one_card: Workplace, on_host):
    """Also with activations on the host."""
    words = [recipe(one_card, **LONG), "--training.max_steps=100"]
    if on_host:
        words.append("--training.activation_checkpointing=true")
        words.append("--training.activation_checkpointing_kwargs={offload: true}")
    with started(one_card, *words) as process:
        after_step(one_card, 5)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 75, text
    done = one_card.launch("run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing" in done.stdout
    plan, (_, outcome) = records(one_card)
    assert plan["strategy"]["levers"]["attn_implementation"] == "varlen_attn"
    assert plan["strategy"]["levers"]["activation_offloading"] == on_host
    # micro-batches of the longest rows alone are predicted
    assert outcome["vram_allocated_bytes"] < 1.01 * plan["estimate"]["step_allocated_bytes"]
    loaded = one_card.python("-c", LOADED, str(one_card.folder / "model"))
    assert loaded.stdout.split() == ["sdpa"], loaded.stderr


def test_rows_of_many_lengths_reserve_what_is_planned(one_card: Workplace):
    """Segments that cannot grow stay behind after each new length, and no later step uses them."""
    rows = [
        {"prompt": "a b c", "response": " ".join("abcdefgh"[n % 8] for n in range(length))}
        for length in [*range(20, 240, 5), *range(238, 20, -7)]
    ]
    builders.write_parquet(one_card.folder / "rows.parquet", rows)
    data = {"train_file": str(one_card.folder / "rows.parquet"), "max_length": 256}
    shares = {}
    for settings in ("", "expandable_segments:False"):
        added = {"PYTORCH_ALLOC_CONF": settings} if settings else {}
        words = ("--model.shape=minigpt-medium", "--training.max_steps=16", "--resume=never")
        done = one_card.launch("run", recipe(one_card, data=data), *words, **added)
        assert done.returncode == 0, done.stdout + done.stderr
        *_, file = sorted(one_card.folder.glob("workspace/runs/tiny/*/plan.json"))
        plan = json.loads(file.read_text())
        outcome = json.loads((file.parent / "attempts/01/outcome.json").read_text())
        planned = plan["estimate"]["step_reserved_bytes"]
        shares[plan["allocator_settings"]] = outcome["vram_reserved_bytes"] / planned
    assert shares["expandable_segments:True"] == pytest.approx(1, abs=0.03)
    assert shares[""] > 1.1


def test_two_cards_train_over_nccl(two_cards: Workplace):
    words = ("--launch.num_processes=2", "--launch.mode=dual_gpu_nccl")
    with started(two_cards, recipe(two_cards), *words) as process:
        seen = orphans.listening(process)
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert "backend nccl" in text
    assert len(seen) >= 2
    assert {address for address, _ in seen} == {"127.0.0.1"}
    log = next(two_cards.folder.glob("workspace/runs/tiny/*/attempts/01/train.log")).parent
    logs = "".join(path.read_text() for path in log.rglob("*") if path.suffix in (".log", ".txt"))
    assert "barrier()" not in text + logs
    _, (outcome,) = records(two_cards)
    phases = outcome["phases"]
    assert list(phases) == ["load", "first_step", "step", "evaluation", "save"]
    for name in ("allocated_bytes", "reserved_bytes"):
        assert outcome[f"vram_{name}"] == max(peaks[name] for peaks in phases.values())
    assert phases["load"]["allocated_bytes"] < phases["first_step"]["allocated_bytes"]
    (file,) = two_cards.folder.glob("workspace/runs/tiny/*/attempts/01/second_step.json")
    # another step may have more targets
    assert json.loads(file.read_text())["allocated_bytes"] <= phases["step"]["allocated_bytes"]
    ranks = [process for process in two_cards.machine.processes() if process.launches > 1000]
    assert [process.collectives > STEPS for process in ranks] == [True, True]
    peaks = [process.peak_bytes for process in ranks]  # a card each
    assert sorted(index for peak in peaks for index, size in enumerate(peak) if size) == [0, 1]


def test_deepspeed_trains_on_cards_that_are_named_by_uuid(two_cards: Workplace):
    words = ("--launch.num_processes=2", "--launch.mode=deepspeed_zero2", "--training.max_steps=2")
    done = two_cards.launch("run", recipe(two_cards), *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (two_cards.folder / "model/model.safetensors").exists()


def test_an_out_of_memory_that_nothing_foresaw_is_planned_around(tmp_path: Path):
    place = Workplace(tmp_path, Card(hidden_limit_gib=1.6))
    more = {"training": {"max_steps": 3, "per_device_train_batch_size": 32}}
    done = place.launch("run", recipe(place, "gpt2-small", **more))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the GPU ran out of memory" in done.stdout
    assert "planned again" in done.stdout
    assert (place.folder / "model/model.safetensors").exists()


def test_memory_that_another_program_takes_is_left_to_it(one_card: Workplace):
    larger = {"max_steps": 4, "per_device_train_batch_size": 32}
    taker = [sys.executable, "-m", "training.children.card", "take_memory"]
    with (
        subprocess.Popen(taker, env=one_card.environment(), stdin=subprocess.PIPE) as other,
        started(one_card, recipe(one_card, "gpt2-small", training=larger)) as process,
    ):
        deadline = time.monotonic() + 120
        plans = one_card.folder.glob("workspace/runs/tiny/*/attempts/01/plan.json")
        while time.monotonic() < deadline and not (planned := next(plans, None)):
            plans = one_card.folder.glob("workspace/runs/tiny/*/attempts/01/plan.json")
            time.sleep(0.1)
        assert planned
        estimate = json.loads(planned.read_text())["phases"]["step"]
        other.stdin.write(f"{int(0.7 * estimate['device_bytes'])}\n".encode())
        other.stdin.flush()
        text, _ = process.communicate(timeout=240)
        other.stdin.close()
    assert process.returncode == 0, text
    assert "other programs took the memory: planning again for what is free" in text
    assert "planned again" in text


def started(place: Workplace, *words: str, fault: str = "") -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "launch", "run", *words],
        env=place.environment(fault),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def after_step(place: Workplace, step: int) -> Path:
    """The run's folder, once a step has been logged."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for path in place.folder.glob("workspace/runs/tiny/*/attempts/*/events.jsonl"):
            if any(json.loads(line)["step"] >= step for line in path.read_text().splitlines()):
                return path.parents[2]
        time.sleep(0.2)
    raise AssertionError(f"no step {step} within 120 s")


LONG = {"training": {"max_steps": 2000, "save_steps": 20, "logging_steps": 1}}


def test_a_killed_rank_is_named_and_the_run_goes_on_from_its_checkpoint(two_cards: Workplace):
    words = (recipe(two_cards, **LONG), "--launch.num_processes=2", "--training.max_steps=300")
    with started(two_cards, *words) as process:
        run = after_step(two_cards, 25)
        heartbeat = json.loads((run / "attempts/01/ranks/1/heartbeat.json").read_text())
        os.kill(heartbeat["pid"], signal.SIGKILL)
        text, _ = process.communicate(timeout=240)
    assert process.returncode == 0, text
    assert "restart 1 of 10" in text and "was killed with SIGKILL" in text, text
    assert "resuming from checkpoint-000020" in text, text


def test_a_stop_saves_and_the_same_line_goes_on(one_card: Workplace):
    words = (recipe(one_card, **LONG), "--training.max_steps=400")
    with started(one_card, *words) as process:
        after_step(one_card, 5)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 75, text
    done = one_card.launch("run", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "continuing" in done.stdout


@pytest.mark.parametrize("before", ["fsdp2", "dual_gpu_nccl"])
def test_fp16_goes_on_under_fsdp2(two_cards: Workplace, before):
    fp16 = {"bf16": False, "fp16": True, "max_steps": 100, "save_steps": 20, "logging_steps": 1}
    file = str(builders.recipe(two_cards.folder, training=fp16))
    words = (file, "--launch.num_processes=2")
    with started(two_cards, *words, f"--launch.mode={before}") as process:
        after_step(two_cards, 5)
        process.send_signal(signal.SIGTERM)
        text, _ = process.communicate(timeout=120)
    assert process.returncode == 75, text
    done = two_cards.launch("run", *words, "--launch.mode=fsdp2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("converting it from" in done.stdout) == (before != "fsdp2"), done.stdout


def test_a_hung_collective_ends_the_attempt_with_its_cause(two_cards: Workplace):
    words = (recipe(two_cards, **LONG), "--launch.mode=dual_gpu_nccl", "--launch.num_processes=2")
    more = ("--launch.hang_floor_s=5", "--launch.max_restarts=0")
    done = two_cards.launch("run", *words, *more, fault="hang_at=60")
    assert done.returncode == 7, done.stdout + done.stderr


def test_a_card_that_fails_during_a_run_is_named(tmp_path: Path):
    place = Workplace(tmp_path, Card(fails_at_launch=9000))
    done = place.launch("run", recipe(place, **LONG), "--launch.max_restarts=0")
    assert done.returncode != 0
    assert "unspecified launch failure" in done.stdout, done.stdout


def test_a_card_that_falls_off_the_bus_is_named_with_its_xid_and_then_missing(tmp_path: Path):
    place = Workplace(tmp_path, Card(fails_at_launch=9000, xid=79))
    done = place.launch("run", recipe(place, **LONG), "--launch.max_restarts=0")
    assert done.returncode == 3, done.stdout + done.stderr
    card = "GPU 0 (NVIDIA GeForce RTX 3080)"
    assert f"Xid 79 (the GPU has fallen off the bus) on {card}" in done.stdout, done.stdout
    doctor = place.launch("doctor")
    assert doctor.returncode == 3
    assert "GPU 0: GPU is lost" in doctor.stdout, doctor.stdout
