"""The checks of a self-check by part, the most valuable first."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from launch.commands.selfcheck.bench import BATCH, SHAPE, Bench, Changes, CheckFailed, measured

PRECISIONS: dict[str, Changes] = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {}}
TAKEN_SHARE = 0.6  # of what a run needs: another program leaves it so much
POLL_S = 0.1
WARM_BASE = "base"  # a trained folder, which adapters start from


@dataclass(frozen=True)
class Check:
    """A measurement. `least_s`: with less time left it is not begun."""

    name: str
    part: int
    least_s: float
    run: Callable[[Bench], dict[str, Any]]
    cards: int = 1
    package: str = ""  # that it needs


def all_checks() -> list[Check]:
    return [*_first(), *_second(), *_third()]


def _first() -> Iterator[Check]:
    yield Check("card", 1, 30, _card)
    for tuned, precision in itertools.product(("full", "lora", "qlora"), PRECISIONS):
        yield _training(f"{tuned}, {precision}", 1, _changes(tuned, precision))
    yield Check("out of memory", 1, 90, _out_of_memory)


def _second() -> Iterator[Check]:
    longer = {"max_steps": 40, "bf16": True}
    yield _training("40 steps", 2, {"training": longer})
    yield Check("plain Trainer", 2, 60, _plain_trainer)
    for mode in ("dual_gpu_nccl", "dual_gpu_gloo", "deepspeed_zero2", "deepspeed_zero3", "fsdp2"):
        changes = {"training": longer, "launch": {"mode": mode, "num_processes": 2}}
        yield _training(f"40 steps, {mode}", 2, changes, cards=2)


def _third() -> Iterator[Check]:
    bf16 = {"bf16": True}
    saving = {**bf16, "activation_checkpointing": True}
    for name, changes in {
        "torch.compile": {"training": {**bf16, "torch_compile": True, "max_steps": 10}},
        "8-bit states": {"training": {**bf16, "optim": "adamw_8bit"}},
        "paged 8-bit states": {"training": {**bf16, "optim": "paged_adamw_8bit"}},
        "ZeRO-2, offload": {"training": bf16, "launch": {"mode": "deepspeed_zero2_offload"}},
        "ZeRO-3, offload": {"training": bf16, "launch": {"mode": "deepspeed_zero3_offload"}},
        "checkpointing": {"training": saving},
    }.items():
        yield _training(name, 3, changes)
    flash = {"shape": SHAPE, "attn_implementation": "flash_attention_2"}
    check = _training("flash_attn", 3, {"training": bf16, "model": flash})
    yield replace(check, package="flash_attn")


def _training(name: str, part: int, changes: Changes, cards: int = 1) -> Check:
    return Check(name, part, 60, partial(_train, name=name, changes=changes), cards)


def _train(bench: Bench, name: str, changes: Changes) -> dict[str, Any]:
    if "lora" in changes:
        base = bench.models / WARM_BASE
        if not base.exists():
            bench.train(WARM_BASE, {"training": {"max_steps": 1}})
        changes = {**changes, "model": {"path": str(base)}, "tokenizer": {"path": str(base)}}
    return bench.run(_slug(name), changes)


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name)


def _changes(tuned: str, precision: str) -> Changes:
    changes: dict[str, Any] = {"training": PRECISIONS[precision]}
    if tuned != "full":
        changes |= {"lora": {"r": 8}}
    if tuned == "qlora":
        changes["quantization"] = {"load_in_4bit": True}
    return changes


def _card(bench: Bench) -> dict[str, Any]:
    """Facts that a process sees: bytes of a context, allocator, kernels of attention, rates of
    copies."""
    with bench.child("card", ["training.children.card_facts"]) as child:
        child.wait()
    return json.loads(child.log.read_text(encoding="utf-8").splitlines()[-1])


def _plain_trainer(bench: Bench) -> dict[str, Any]:
    """Tokens a second of transformers.Trainer alone, with the same model and batches."""
    with bench.child("plain", ["training.children.plain_trainer", str(BATCH)]) as child:
        child.wait()
    return json.loads(child.log.read_text(encoding="utf-8").splitlines()[-1])


def _out_of_memory(bench: Bench) -> dict[str, Any]:
    """Let another program take the card's memory while a run starts: the run is planned again, and
    ends."""
    name = "out_of_memory"
    larger = {"per_device_train_batch_size": 4 * BATCH, "bf16": True}
    changes = {"training": larger, "launch": {"max_restarts": 5}}
    with (
        bench.child("other_program", ["training.children.take_memory"]) as other,
        bench.begin(name, changes) as run,
    ):
        attempt = _begun(bench, run)
        planned = attempt.read_plan().estimate
        assert other.process.stdin is not None
        other.process.stdin.write(f"{int(planned.device_bytes * TAKEN_SHARE)}\n".encode())
        other.process.stdin.flush()
        run.wait()
    attempts = run.newest().attempts()
    if len(attempts) < 2:
        raise CheckFailed("the run did not run out of memory")
    batches = [each.read_plan().strategy.per_device_train_batch_size for each in attempts]
    return {"micro_batches": batches, **measured(run.newest())}


def _begun(bench: Bench, run: Any) -> Any:
    """The run's first attempt, once it is there."""
    while time.monotonic() < bench.deadline:
        if run.process.poll() is not None:
            raise CheckFailed(run.said())
        attempts = run.attempts()
        if attempts:
            return attempts[0]
        time.sleep(POLL_S)
    raise TimeoutError
