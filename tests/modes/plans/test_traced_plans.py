"""Plans of described machines, made with traces and held in tests/data/rehearsal; judged
by sums made by hand and by the allocator of the CUDA build. After a change that is meant:
LOWMEM_WRITE_REHEARSAL=1 python -m pytest tests/modes/plans/test_traced_plans.py, and read the
difference."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from benchmarks import cpu_memory, cuda_build_memory
from launch.base.workspace import CODE
from launch.plan import resolve
from launch.probe import described
from launch.schema.machine import GIB
from launch.schema.plan import Plan, Strategy
from scripts import render_configs
from tests import builders

HELD = CODE / "tests/data/rehearsal/with_traces.json"
EFFECTIVE_BATCH, LENGTH = 32, 512
# machine -> (GiB that a rank may take: launch.vram_fraction of what is free; published TFLOP/s of
# bfloat16 products: NVIDIA's sheets, configs/cards.yaml)
MACHINES = {
    "a5000-16g": (0.95 * 15.5, 77.4),
    "a6000-48g": (0.95 * 47.5, 154.8),
    "h200": (0.95 * 139.3, 989.4),
}


@dataclass(frozen=True)
class Model:
    """A recipe's flags, and its figures made by hand from the model's config."""

    flags: tuple[str, ...]
    states: tuple[int, int, int]  # bytes of weights, gradients and optimizer
    flop_per_token: int  # of products, forward and backward, nothing computed twice
    recomputed: int  # of them, those of a forward pass that checkpointing computes again
    slowest: int = 6  # times that a step may take longer than its products at the published rate


LLAMA_7B, ADAPTERS = 6_738_415_616, 32 * 32 * (4 * (2 * 4096) + 3 * (4096 + 11008))
LLAMA_PRODUCTS = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
QWEN_05B = 494_032_768  # as its card says; the head is the embedding
QWEN_PRODUCTS = 24 * (2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864)
T5, T5_DECODER = 187_692_288, 94_396_032  # all, and what is trained
T5_ENCODER_PRODUCTS, T5_DECODER_PRODUCTS = (
    10 * (attentions * 4 * 768**2 + 2 * 768 * 3072) for attentions in (1, 2)
)
MODELS = {
    # encoder frozen, head tied to the frozen embedding
    "sft_fast": Model(
        (),
        (4 * T5, 4 * T5_DECODER, 8 * T5_DECODER),
        2 * T5_ENCODER_PRODUCTS + 6 * T5_DECODER_PRODUCTS + 4 * 29_298 * 768,
        2 * (T5_ENCODER_PRODUCTS + T5_DECODER_PRODUCTS),
        slowest=20,  # few products of many small kernels
    ),
    "0.5b": Model(
        ("--model.shape=qwen2-0.5b",),
        (4 * QWEN_05B, 4 * QWEN_05B, 8 * QWEN_05B),
        6 * (QWEN_PRODUCTS + 151_936 * 896),
        2 * QWEN_PRODUCTS,
    ),
    # products with frozen weights have no gradients of weights
    "7b-lora": Model(
        ("--model.shape=llama-7b", "--model.dtype=bfloat16", "--lora.r=32"),
        (2 * LLAMA_7B + 4 * ADAPTERS, 4 * ADAPTERS, 8 * ADAPTERS),
        4 * (LLAMA_PRODUCTS + 32_000 * 4096),
        2 * LLAMA_PRODUCTS,
    ),
}
EACH = [(machine, name) for machine in MACHINES for name in MODELS]


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, str], Plan]:
    traces = Path(builders.TRACES["LOWMEM_TRACES"])

    def planned(machine: str, flags: tuple[str, ...]) -> Plan:
        return render_configs.planned(machine, flags, traces)[2]

    return {(machine, name): planned(machine, MODELS[name].flags) for machine, name in EACH}


def shown(plan: Plan) -> dict[str, Any]:
    strategy, levers = plan.strategy, plan.strategy.levers
    assert plan.seconds_per_step is not None and plan.host.step is not None
    return {
        "mode": strategy.mode,
        "batch": f"{strategy.per_device_train_batch_size} x {strategy.gradient_accumulation_steps}",
        "every_n_layers": levers.every_n_layers,
        "activation_offloading": levers.activation_offloading,
        "num_output_chunks": levers.num_output_chunks,
        "tiled_mlp_num_shards": levers.tiled_mlp_num_shards,
        "attention": levers.attn_implementation,
        "peak": f"{plan.estimate.device_bytes / GIB:.3f} GiB in {plan.estimate.peak.section}",
        "step": f"{plan.phases.step.allocated_bytes / GIB:.3f} GiB",
        "host": f"{plan.host.step.bytes / GIB:.3f} GiB",
        "seconds": f"{plan.seconds_per_step:.3g}",
    }


def test_a_described_machine_runs_what_is_held(plans):
    found: dict[str, dict[str, Any]] = {machine: {} for machine in MACHINES}
    for (machine, name), plan in plans.items():
        found[machine][name] = shown(plan)
    if "LOWMEM_WRITE_REHEARSAL" in os.environ:
        HELD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    assert found == json.loads(HELD.read_text(encoding="utf-8"))


@pytest.mark.parametrize(("machine", "name"), EACH)
def test_states_are_those_of_the_models_card(plans, machine, name):
    estimate = plans[machine, name].estimate
    found = (estimate.weights_bytes, estimate.gradients_bytes, estimate.optimizer_bytes)
    assert found == pytest.approx(MODELS[name].states, rel=1e-3)


@pytest.mark.parametrize(("machine", "name"), EACH)
def test_a_step_takes_its_products_at_less_than_the_cards_published_rate(plans, machine, name):
    plan = plans[machine, name]
    strategy, model, tera_flop_per_s = plan.strategy, MODELS[name], MACHINES[machine][1]
    assert strategy.effective_batch_size == EFFECTIVE_BATCH
    again = strategy.levers.checkpointed_share * model.recomputed
    least_s = EFFECTIVE_BATCH * LENGTH * (model.flop_per_token + again) / (tera_flop_per_s * 1e12)
    assert plan.seconds_per_step is not None
    assert least_s < plan.seconds_per_step < model.slowest * least_s


def kept_bytes(rows: int, checkpointed_share: float) -> float:
    """Bytes that backward needs of the layers of a 7B Llama: the input of a checkpointed layer; of
    another the inputs of its norms and products, q, k and v, and of the MLP what its product
    multiplies. In bfloat16."""
    hidden, inner = 4096, 11008
    of_layer = (1 - checkpointed_share) * (8 * hidden + 3 * inner) + checkpointed_share * hidden
    return 32 * rows * LENGTH * of_layer * 2


@pytest.mark.parametrize("machine", MACHINES)
def test_the_batch_of_7b_lora_is_one_that_the_card_can_hold(plans, machine):
    plan, room_bytes = plans[machine, "7b-lora"], MACHINES[machine][0] * GIB
    strategy, states_bytes = plan.strategy, sum(MODELS["7b-lora"].states)
    rows, share = strategy.per_device_train_batch_size, strategy.levers.checkpointed_share
    assert strategy.mode == "single_gpu"
    assert not strategy.levers.activation_offloading
    kept = kept_bytes(rows, share)
    # beside it the largest layer and the logits of a part: float32, and their gradient
    beside = kept_bytes(rows, 0) / 32 + 3 * 4 * 32_000 * rows * LENGTH
    allocated = plan.phases.step.allocated_bytes
    assert states_bytes + 0.8 * kept < allocated < states_bytes + 1.3 * kept + beside
    assert allocated < plan.estimate.device_bytes < room_bytes
    all_rows_bytes = states_bytes + kept_bytes(16, 1)  # as asked, all layers checkpointed
    assert rows == 16 or states_bytes + kept_bytes(16, 0) > room_bytes
    assert rows < 16 or all_rows_bytes < room_bytes


@pytest.mark.parametrize(
    "name", ["gpt2, checkpointing, autocast", "llama, LoRA, checkpointing", "t5, autocast"]
)
def test_peaks_are_those_that_the_allocator_of_the_cuda_build_has_counted(
    name, tmp_path, monkeypatch
):
    # one folder of all cases, and so one worker
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path.parent / "workspace"))
    (case,) = (each for each in cuda_build_memory.CASES if each.name == name)
    results = json.loads((CODE / "benchmarks/results/cuda_build_memory.json").read_text())
    (row,) = (each for each in results["rows"] if each["case"] == name)
    flags = [*cuda_build_memory.EVERY_TWO, f"--launch.mode={case.mode}", "--tokenizer.loading=file"]
    flags.append(f"--training.dataloader_num_workers={row['strategy']['dataloader_num_workers']}")
    machine = described.from_words("A100 SXM4 80GB", 1, 64)
    plan = resolve.resolve(str(cpu_memory.write_data(tmp_path, case)), flags, machine).plan
    assert plan.strategy == TypeAdapter(Strategy).validate_python(row["strategy"])
    for phase, figures in row["phases"].items():
        predicted = getattr(plan.phases, phase)
        for figure, (_, measured) in figures.items():
            found = getattr(predicted, f"{figure}_bytes")
            # at most a segment of the allocator, 2 MiB
            assert found == pytest.approx(measured, rel=1e-4, abs=2 << 20), (phase, figure)
