"""What a rank holds under each engine, and what an engine is not asked to do."""

from __future__ import annotations

import pytest

from launch.base.errors import ConfigError, DoesNotFit
from launch.report import plan_lines
from launch.schema.machine import GIB
from tests.builders import machine, plan, recipe_of

P = 254_272  # parameters of llama-tiny


def states(mode: str, gpus: int = 2, **sections) -> dict[str, int]:
    estimate = plan(recipe_of(launch={"mode": mode}, **sections), machine(gpus)).estimate
    names = ("weights", "gradients", "optimizer", "offloaded")
    return {name: getattr(estimate, f"{name}_bytes") for name in names}


@pytest.mark.parametrize(
    ("mode", "weights", "gradients", "optimizer", "offloaded"),
    [  # bytes a parameter on each of two ranks, in float32; DeepSpeed adds a copy of what it trains
        ("dual_gpu_nccl", 4, 4, 8, 0),
        ("deepspeed_zero1", 4, 4, 6, 0),
        ("deepspeed_zero2", 4, 2, 6, 0),
        ("deepspeed_zero2_offload", 4, 0, 0, 8),
        ("deepspeed_zero3", 2, 2, 6, 0),
        ("deepspeed_zero3_offload", 0, 0, 0, 12),
        ("fsdp2", 2, 2, 4, 0),
    ],
)
def test_two_ranks_share_what_their_engine_shares(mode, weights, gradients, optimizer, offloaded):
    expected = {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "offloaded": offloaded,
    }
    assert states(mode) == {name: count * P for name, count in expected.items()}


def test_deepspeed_in_bf16_holds_the_weights_in_bf16_and_a_float32_copy():
    found = states("deepspeed_zero2", training={"bf16": True})
    assert found == {"weights": 2 * P, "gradients": P, "optimizer": 6 * P, "offloaded": 0}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fsdp2_under_autocast_trains_float32_weights_whatever_they_were_loaded_as(dtype):
    found = states("fsdp2", training={"bf16": True}, model={"dtype": dtype})
    assert found == {"weights": 2 * P, "gradients": 2 * P, "optimizer": 4 * P, "offloaded": 0}


def test_lora_shares_out_the_adapters_states_only():
    whole = plan(recipe_of(launch={"mode": "deepspeed_zero2"}, lora={"r": 4}), machine(2))
    adapters = whole.shape.lora_parameters
    assert whole.estimate.weights_bytes == 4 * (P + adapters)
    assert whole.estimate.optimizer_bytes == 6 * adapters


@pytest.mark.parametrize(
    ("sections", "on", "words"),
    [
        ({"launch": {"mode": "fsdp2"}}, machine(), "on CPUs Accelerate leaves FSDP out"),
        ({"launch": {"mode": "fsdp2"}}, machine(1), "there is one"),
        (
            {"launch": {"mode": "deepspeed_zero2"}, "training": {"optim": "adafactor"}},
            machine(2),
            "adafactor",
        ),
        (
            {"launch": {"mode": "deepspeed_zero2"}, "model": {"dtype": "bfloat16"}},
            machine(2),
            "training.bf16",
        ),
        ({"launch": {"mode": "deepspeed_zero9"}}, machine(2), "deepspeed_zero9"),
    ],
)
def test_what_an_engine_cannot_do_is_refused_with_the_reason(sections, on, words):
    with pytest.raises((ConfigError, ValueError), match=words):
        plan(recipe_of(**sections), on)


def test_gloo_on_gpus_is_for_ddp_alone():
    with pytest.raises(ConfigError, match="needs NCCL"):
        plan(recipe_of(launch={"mode": "deepspeed_zero2"}), machine(2), force_gloo=True)
    assert plan(on=machine(2), force_gloo=True).strategy.mode == "dual_gpu_gloo"


def test_a_model_too_large_for_one_card_is_shared_out_before_it_is_offloaded():
    """0.5 billion parameters: 7.4, 6.4, 5.5, 4.6 and 1.8 GiB of states a card, and none."""
    recipe = recipe_of(model={"shape": "qwen2-0.5b"}, data={"max_length": 64})
    small = machine(2, host_available_bytes=64 * GIB)
    modes = {}
    for fraction in (0.95, 0.36, 0.3, 0.26, 0.12, 0.05):
        section = recipe.launch.model_copy(update={"vram_fraction": fraction})
        modes[fraction] = plan(recipe.model_copy(update={"launch": section}), small).strategy.mode
    assert list(modes.values()) == [
        "dual_gpu_nccl",
        "deepspeed_zero1",
        "deepspeed_zero2",
        "deepspeed_zero3",
        "deepspeed_zero2_offload",
        "deepspeed_zero3_offload",
    ]


def test_offloaded_states_have_to_fit_the_host_with_all_its_ranks():
    recipe = recipe_of(
        model={"shape": "qwen2-0.5b"},
        data={"max_length": 64},
        launch={"mode": "deepspeed_zero2_offload"},
    )
    assert plan(
        recipe, machine(2, host_available_bytes=10 * GIB)
    ).estimate.offloaded_bytes == pytest.approx(8 * 494_032_768, rel=1e-6)
    with pytest.raises(DoesNotFit, match=r"7\.36 GiB in host RAM, budget 6\.00 GiB"):
        plan(recipe, machine(2, host_available_bytes=8 * GIB))


def test_the_plan_shows_where_offloaded_states_are():
    recipe = recipe_of(launch={"mode": "deepspeed_zero2_offload"}, training={"bf16": True})
    lines = "\n".join(plan_lines.full_text(recipe, machine(2), plan(recipe, machine(2))))
    assert "bf16 weights, float32 copies" in lines
    assert "1.9 MiB of states in host RAM" in lines


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"nodes": 2}, "main_process_ip"),
        ({"nodes": 2, "main_process_ip": "10.0.0.1", "machine_rank": 2}, "count from 0 to 1"),
        (
            {"nodes": 2, "main_process_ip": "10.0.0.1", "num_processes": 3},
            "launch.num_processes 3 cannot be shared evenly by launch.nodes 2; write a multiple of"
            " 2; --launch.num_processes=2 --training.gradient_accumulation_steps=3 keeps the"
            " effective batch of 96: 16 per device x 3 accumulation x 2 processes",
        ),
        ({"machine_rank": 1}, "set launch.nodes"),
    ],
)
def test_nodes_that_cannot_meet_are_refused(section, words):
    with pytest.raises(ValueError, match=words):
        recipe_of(launch=section)


def test_two_nodes_hold_the_effective_batch_of_all_their_cards():
    chosen = plan(
        recipe_of(launch={"nodes": 2, "main_process_ip": "10.0.0.1", "machine_rank": 1}), machine(2)
    )
    strategy = chosen.strategy
    assert (strategy.num_processes, strategy.num_machines, strategy.processes_per_machine) == (
        4,
        2,
        2,
    )
    assert strategy.effective_batch_size == 16 * 2 * 4
    assert chosen.rendezvous is not None and chosen.rendezvous.machine_rank == 1


FOUR_BIT = {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}}


@pytest.mark.parametrize("mode", ["deepspeed_zero2", "deepspeed_zero3_offload"])
def test_deepspeed_does_not_share_out_4_bit_weights(mode):
    with pytest.raises(ConfigError, match=f"{mode} cannot share out 4-bit weights.*use fsdp2"):
        plan(recipe_of(launch={"mode": mode}, **FOUR_BIT), machine(2))
    chosen = plan(recipe_of(**FOUR_BIT), machine(2))
    assert chosen.strategy.mode == "dual_gpu_nccl"
    assert "deepspeed_zero3 cannot share out 4-bit weights" in "\n".join(chosen.rejected)


def test_fsdp2_shares_out_4_bit_weights_but_not_their_scales():
    whole, shared = (
        plan(recipe_of(launch={"mode": mode}, **FOUR_BIT), machine(2)).estimate.weights_bytes
        for mode in ("dual_gpu_nccl", "fsdp2")
    )
    layer = [64 * 64] * 2 + [64 * 32] * 2 + [64 * 256] * 3  # elements of llama-tiny's matrices
    # a byte for each 64 elements, 4 for each 256 of these, and tables of 16, 256 and 1 float32
    scales = sum(count // 64 + 4 * -(-count // 64 // 256) + 4 * (16 + 256 + 1) for count in layer)
    assert shared == 2 * scales + -(-(whole - 2 * scales) // 2)
