"""The checks of a self-check by part, the most valuable first."""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from launch.base import environment
from launch.base.errors import ResourceError
from launch.commands.selfcheck.bench import (
    BATCH,
    SHAPE,
    Bench,
    Changes,
    CheckFailed,
    Child,
    NotAvailable,
    measured,
)
from launch.predict.memory import context as memory_context
from launch.probe import gpus, import_memory, link_test
from launch.probe import machine as probe_machine
from launch.schema.machine import NOT_MEASURED

PRECISIONS: dict[str, Changes] = {"bf16": {"bf16": True}, "fp16": {"fp16": True}, "fp32": {}}
TRAINED: dict[str, Changes] = {
    "full": {},
    "lora": {"lora": {"r": 8}},
    "qlora": {"lora": {"r": 8}, "quantization": {"load_in_4bit": True}},
}
_TAKEN_SHARE = 0.6  # share of a run's need that another program leaves free
POLL_S = 0.1
COMPILED = "torch.compile"
_WARM_BASE = "base"  # a trained folder, which adapters start from


@dataclass(frozen=True)
class Check:
    """A measurement. `least_s`: with less time left it is not begun."""

    name: str
    part: int
    least_s: float
    run: Callable[[Bench], dict[str, Any]]
    cards: int = 1
    package: str = ""  # a package without which the check is skipped


def all_checks() -> list[Check]:
    return [*_first(), *_second(), *_third()]


def _first() -> list[Check]:
    return [
        Check("card", 1, 45, _card),
        *(
            _training(f"{tuned}, {precision}", 1, {**weights, "training": training})
            for tuned, weights in TRAINED.items()
            for precision, training in PRECISIONS.items()
        ),
        Check("out of memory", 1, 90, _out_of_memory),
    ]


def _second() -> list[Check]:
    longer = {"training": {"max_steps": 40, "bf16": True}}
    modes = ("dual_gpu_nccl", "dual_gpu_gloo", "deepspeed_zero2", "deepspeed_zero3", "fsdp2")
    return [
        _training("40 steps", 2, longer),
        Check("plain Trainer", 2, 60, _plain_trainer),
        Check("costs of a step", 2, 60, measure_step_costs),
        Check("link", 2, 60, measure_link, cards=2),
        *(
            _training(
                f"40 steps, {mode}",
                2,
                {**longer, "launch": {"mode": mode, "num_processes": 2}},
                cards=2,
            )
            for mode in modes
        ),
    ]


def _third() -> list[Check]:
    bf16 = {"bf16": True}
    compiled = {"training": {**bf16, "torch_compile": True, "max_steps": 10}}
    flash = {"shape": SHAPE, "attn_implementation": "flash_attention_2"}
    return [
        Check(COMPILED, 3, 90, partial(_compiled, changes=compiled)),
        _training("8-bit states", 3, {"training": {**bf16, "optim": "adamw_8bit"}}),
        _training("paged 8-bit states", 3, {"training": {**bf16, "optim": "paged_adamw_8bit"}}),
        *(
            _training(
                f"ZeRO-{stage}, offload",
                3,
                {"training": bf16, "launch": {"mode": f"deepspeed_zero{stage}_offload"}},
            )
            for stage in (2, 3)
        ),
        _training("checkpointing", 3, {"training": {**bf16, "activation_checkpointing": True}}),
        _training("flash_attn", 3, {"training": bf16, "model": flash}, package="flash_attn"),
    ]


def _training(name: str, part: int, changes: Changes, cards: int = 1, package: str = "") -> Check:
    return Check(name, part, 60, partial(_train, name=name, changes=changes), cards, package)


def _train(bench: Bench, name: str, changes: Changes) -> dict[str, Any]:
    if "lora" in changes:
        base = bench.models / _WARM_BASE
        if not base.exists():
            bench.train(_WARM_BASE, {"training": {"max_steps": 1}})
        changes = {**changes, "model": {"path": str(base)}, "tokenizer": {"path": str(base)}}
    plain_name = "".join(letter if letter.isalnum() else "_" for letter in name)
    figures = bench.run(plain_name, changes)
    if outside := figures["outside"]:
        keep_context(bench, **outside)
    return figures


def keep_context(bench: Bench, card: str, context_bytes: int) -> None:
    """Let later plans count the bytes that a run took outside the allocator, if no measurement so
    far has as many."""
    figures = import_memory.measured_or_assumed(bench.cache, "cuda").card
    if figures.name in ("", card) and context_bytes > figures.context_bytes:
        import_memory.keep_card(
            bench.cache,
            replace(figures, name=card, context_bytes=context_bytes, context_source="selfcheck"),
        )


def _card(bench: Bench) -> dict[str, Any]:
    """Facts that a process sees: bytes of a context, allocator, kernels of attention, rates of
    copies and products. Later plans use the context and the rates."""
    try:
        memory = import_memory.measure(bench.cache, "cuda", forget=True)
    except ResourceError as error:
        raise CheckFailed(str(error)) from error
    facts = bench.figures("card", ["training.children.card", "facts"], _one_card())
    copied, flops = facts["bytes_per_second"], facts["flops_per_second"]
    card = replace(
        memory.card,
        name=memory.card.name or facts["name"],
        flops_per_s=flops,
        host_device_bytes_per_s=min(copied.values()),
    )
    import_memory.keep_card(bench.cache, card)
    gpu = next((gpu for gpu in probe_machine.machine().gpus if gpu.name == card.name), None)
    context = [memory_context.context_bytes(gpu, NOT_MEASURED)[0] if gpu else 0, card.context_bytes]
    rates = {f"copies {where}, GB/s": rate / 1e9 for where, rate in copied.items()}
    facts |= {"context_bytes": context} if card.context_bytes else {}
    return {**facts, "rates": {**rates, "products in half precision, TFLOP/s": flops / 1e12}}


def _compiled(bench: Bench, changes: Changes) -> dict[str, Any]:
    """A training that is compiled, if a small function can be."""
    tried = bench.figures("compile_once", ["training.children.card", "compile"], _one_card())
    if tried["reason"]:
        raise NotAvailable(f"torch.compile cannot run here ({tried['reason']})")
    return _train(bench, COMPILED, changes)


def _plain_trainer(bench: Bench) -> dict[str, Any]:
    """Tokens a second of transformers.Trainer alone, with the same model and batches."""
    return bench.figures("plain", ["training.children.plain_trainer", str(BATCH)], _one_card())


def _one_card() -> dict[str, str]:
    """The variables of a child that uses the card that a run on one card gets."""
    machine = probe_machine.machine()
    card = max(machine.gpus, key=lambda gpu: (gpu.free_bytes, gpu.architecture))
    return gpus.visible_devices(replace(machine, gpus=(card,)), 1)


def measure_step_costs(bench: Bench) -> dict[str, Any]:
    """Waits of a step for the card, and seconds of a checkpoint beside those of saving it."""
    name = "step_costs"
    training = {
        **{"bf16": True, "max_steps": 20, "save_steps": 8, "dataloader_num_workers": 0},
        "logging_steps": 1000,  # a log waits too
    }
    with bench.begin(name, {"training": training}, "--dry-run") as child:
        child.wait()
    run = bench.folder / "runs" / name / "dry-run"
    costs = bench.figures(name, ["training.children.step_costs", str(run)], _one_card())
    seconds = {
        "a checkpoint between steps, s": costs["checkpoint_seconds"],
        "saving in it, s": costs["saving_seconds"],
    }
    return {**costs, "rates": {"waits of a step": max(map(len, costs["waits"])), **seconds}}


def measure_link(bench: Bench) -> dict[str, Any]:
    """Bus bandwidth of the fastest transport between the cards and of Gloo, for later plans."""
    machine, variables = probe_machine.machine(), environment.passed(os.environ)
    links = {
        backends[0]: link_test.link(
            machine, len(machine.gpus), bench.cache, variables, fresh=True, backends=backends
        )
        for backends in (link_test.BACKENDS, link_test.BACKENDS[1:])
    }
    if failed := [link.reason for link in links.values() if link.backend is None]:
        raise CheckFailed("; ".join(failed))
    rates = {
        f"link, {link.reason}, GB/s": link.bytes_per_s / 1e9
        for link in links.values()
        if link.bytes_per_s
    }
    return {"links": {name: asdict(link) for name, link in links.items()}, "rates": rates}


def _out_of_memory(bench: Bench) -> dict[str, Any]:
    """Let another program take the card's memory while a run starts: the run is planned again, and
    ends."""
    name = "out_of_memory"
    larger = {"per_device_train_batch_size": 4 * BATCH, "bf16": True}
    changes = {"training": larger, "launch": {"max_restarts": 5}}
    with (
        Child(
            bench, "other_program", ["training.children.card", "take_memory"], _one_card()
        ) as other,
        bench.begin(name, changes) as run,
    ):
        planned = begun(bench, run).read_plan().estimate
        assert other.process.stdin is not None
        other.process.stdin.write(f"{int(planned.device_bytes * _TAKEN_SHARE)}\n".encode())
        other.process.stdin.flush()
        run.wait()
    attempts = run.newest().attempts()
    if len(attempts) < 2:
        raise CheckFailed("the run did not run out of memory")
    batches = [each.read_plan().strategy.per_device_train_batch_size for each in attempts]
    return {"micro_batches": batches, **measured(run.newest())}


def begun(bench: Bench, run: Any) -> Any:
    """The run's first attempt, once its plan is there."""
    while time.monotonic() < bench.deadline:
        if run.process.poll() is not None:
            raise CheckFailed(run.said())
        attempts = run.attempts()
        if attempts and attempts[0].plan_file.exists():
            return attempts[0]
        time.sleep(POLL_S)
    raise TimeoutError
