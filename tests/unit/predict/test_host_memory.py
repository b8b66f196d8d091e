"""Host RAM of a job: who holds what in which phase, and what measured runs say about it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from launch.base import environment
from launch.base.errors import ResourceError
from launch.predict import parameters
from launch.predict.memory import malloc, onednn, pinned_memory
from launch.predict.memory.host_memory import (
    QUANTISING_BYTES,
    STAGING_BYTES,
    HostJob,
    estimate,
    fullest,
    pinned_bytes,
)
from launch.predict.memory.stored_weights import StoredWeights
from launch.probe import import_memory
from launch.probe.import_memory import ASSUMED, Imports
from launch.schema.machine import MIB
from launch.schema.plan import MemoryEstimate, ModelSize, Strategy
from launch.schema.recipe import Recipe
from launch.schema.result import CHECK_BYTES

TENSOR_BYTES = {"step": 2_000_000_000, "first_step": 1_200_000_000, "evaluation": 1_300_000_000}
IMPORTS = Imports(40 * MIB, 150 * MIB, 200 * MIB, 300 * MIB, 140 * MIB, "test")


def strategy(mode: str = "cpu", ranks: int = 1, workers: int = 0) -> Strategy:
    on_gpu = mode in ("single_gpu", "dual_gpu_nccl", "fsdp2")
    several = ranks > 1 or mode.startswith("deepspeed")
    backend = ("nccl" if on_gpu else "gloo") if several else None
    values: dict[str, Any] = {
        "mode": mode,
        "device": "cuda" if on_gpu else "cpu",
        "num_processes": ranks,
    }
    return Strategy(
        **values,
        backend=backend,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        per_device_eval_batch_size=8,
        mixed_precision="no",
        dataloader_num_workers=workers,
    )


def job(
    chosen: Strategy, path: str | None = None, lora_parameters: int = 0, **known: Any
) -> HostJob:
    """A model of a hundred million float32 parameters, tied, whose embedding is a tenth of it."""
    model = {"path": path} if path else {"shape": "gpt2-small"}
    recipe = Recipe.model_validate(
        {
            "name": "t",
            "task": "sft",
            "model": model,
            "data": {"train_file": "a.jsonl"},
            "output_dir": "out",
        }
    )
    trainable = lora_parameters or 100_000_000
    config, lora_bytes = {"model_type": "gpt2"}, 4 * lora_parameters
    counts = 100_000_000, trainable, lora_parameters, lora_bytes
    shape = ModelSize("m", config, *counts, family=parameters.FAMILIES["gpt2"])
    states = MemoryEstimate(400_000_000, 4 * trainable, 8 * trainable)
    values = {
        "tensor_bytes": TENSOR_BYTES,
        "embedding_bytes": 40_000_000,
        **known,
    }
    if path:
        values = {"stored": stored_as("float32"), **values}
    return HostJob(recipe, chosen, shape, values.pop("states", states), **values)


def stored_as(dtype: str, **known: Any) -> StoredWeights:
    """The files of that model, in one type."""
    return StoredWeights({dtype: 100_000_000}, {dtype: 10_000_000}, 400_000_000, **known)


def test_each_rank_keeps_kernels_of_bf16_from_the_first_step_on() -> None:
    chosen = replace(strategy("multi_cpu", ranks=2), mixed_precision="bf16")
    phases = estimate(job(chosen), IMPORTS)
    kept = 2 * onednn.KERNELS * onednn.KERNEL_BYTES
    assert {name: parts.get("bf16 kernels", 0) for name, parts in phases.items()} == {
        "prepare": 0,
        "load": 0,
        **dict.fromkeys(("step", "first_step", "save"), kept),
    }
    for other in (replace(chosen, device="cuda"), strategy("multi_cpu", ranks=2)):
        parts = estimate(job(other), IMPORTS)["step"]
        assert "bf16 kernels" not in parts


@pytest.mark.parametrize(
    ("users", "added"),
    [
        ({}, {onednn.ONEDNN: "64", onednn.IDEEP: "64"}),
        ({onednn.ONEDNN: "1024"}, {onednn.IDEEP: "64"}),
        ({onednn.ITS_OLD_NAME: "8", onednn.IDEEP: "8"}, {}),
    ],
)
def test_the_users_own_number_of_kernels_is_left_alone(users, added) -> None:
    assert onednn.settings(users) == added
    passed = environment.passed(users, [])
    assert users.items() <= passed.items()


def test_libraries_are_in_ram_once_however_many_ranks_map_them() -> None:
    one, three = (estimate(job(strategy("multi_cpu", ranks)), IMPORTS)["step"] for ranks in (1, 3))
    assert one["libraries"] == three["libraries"]
    assert three["model"] == 3 * one["model"] == 3 * 2_000_000_000


def test_a_step_is_the_peak_of_a_cpu_run_and_an_evaluation_where_it_holds_more() -> None:
    assert fullest(estimate(job(strategy()), IMPORTS)) == "step"
    large = job(strategy(), tensor_bytes={**TENSOR_BYTES, "evaluation": 3_000_000_000})
    assert fullest(estimate(large, IMPORTS)) == "step"  # there are no held-out rows
    data = large.recipe.data.model_copy(update={"validation_file": "v.jsonl"})
    evaluates = replace(large, recipe=large.recipe.model_copy(update={"data": data}))
    assert fullest(estimate(evaluates, IMPORTS)) == "evaluation"


def test_frozen_weights_of_a_folder_are_mapped_once_for_all_ranks() -> None:
    ranks = job(
        strategy("multi_cpu", 2),
        path="/model",
        lora_parameters=1_000_000,
        tensor_bytes={"step": 500_000_000},
    )
    parts = estimate(ranks, IMPORTS)["step"]
    assert parts["weights' files"] == 400_000_000
    assert parts["model"] == 2 * 100_000_000


def loading(
    mode: str,
    stored: StoredWeights,
    sections: Mapping[str, Any] = {},
    mixed_precision: Literal["no", "bf16"] = "no",
    **known: Any,
) -> Mapping[str, int]:
    """Host RAM of a load of LoRA with a million parameters, float32, by cause."""
    ranks = 1 if mode in ("cpu", "single_gpu") else 2
    chosen = replace(strategy(mode, ranks), mixed_precision=mixed_precision)
    asked = job(chosen, path="/m", lora_parameters=1_000_000, stored=stored, **known)
    recipe = Recipe.model_validate({**asked.recipe.model_dump(mode="json"), **sections})
    asked = replace(asked, recipe=recipe)
    return estimate(asked, IMPORTS)["load"]


IN_4_BITS = {"lora": {"r": 8}, "quantization": {"load_in_4bit": True}}


def test_weights_of_another_type_are_converted_in_each_rank() -> None:
    converted = loading("multi_cpu", stored_as("bfloat16"))
    assert converted["weights"] == 2 * (400_000_000 + 4_000_000)
    assert loading("multi_cpu", stored_as("float32"))["weights"] == 2 * 4_000_000  # the adapters
    mixed = StoredWeights(
        {"float32": 99_000_000, "bfloat16": 1_000_000}, {"float32": 9_000_000, "bfloat16": 5}, 1
    )
    assert loading("single_gpu", mixed)["weights"] == 4 * 1_000_000 + 4_000_000


def test_deepspeed_casts_mapped_weights_on_the_host() -> None:
    cast = loading("deepspeed_zero2", stored_as("float32"), mixed_precision="bf16")
    assert cast["weights"] == 2 * (200_000_000 + 4_000_000)
    for mode, precision in (("deepspeed_zero2", "no"), ("deepspeed_zero3", "bf16")):
        parts = loading(mode, stored_as("float32"), mixed_precision=precision)
        assert parts["weights"] == 2 * 4_000_000


def test_of_mapped_files_one_tensor_is_in_ram_unless_a_limit_counts_them_whole() -> None:
    for mode in ("cpu", "single_gpu"):
        assert loading(mode, stored_as("bfloat16"))["weights' files"] == 20_000_000
        limited = loading(mode, stored_as("bfloat16"), counts_mappings=True)
        assert limited["weights' files"] == 200_000_000


def test_weights_for_4_bits_go_to_a_card_tensor_by_tensor() -> None:
    same = loading("single_gpu", stored_as("float32"), IN_4_BITS)
    assert "weights" not in same
    assert same["while building"] == STAGING_BYTES
    other = loading("dual_gpu_nccl", stored_as("bfloat16"), IN_4_BITS)
    assert "weights" not in other
    assert other["while building"] == 2 * (40_000_000 + STAGING_BYTES)


def test_streamed_weights_are_in_ram_once_for_all_ranks() -> None:
    """One rank packs the weights of a folder and keeps them; the other ranks drop theirs."""
    streamed = [30_000_000, 20_000_000]
    for ranks in (1, 2):
        asked = job(strategy("dual_gpu_nccl", ranks), streamed=streamed)
        assert estimate(asked, IMPORTS)["step"]["streamed weights"] == 50_000_000
    loaded = loading("dual_gpu_nccl", stored_as("float32"), IN_4_BITS, streamed=streamed)
    assert loaded["weights"] == 50_000_000


def test_a_cpu_packs_weights_into_4_bits_beside_copies_of_one_matrix() -> None:
    states = MemoryEstimate(60_000_000, 0, 0)
    parts = loading(
        *("cpu", stored_as("bfloat16"), IN_4_BITS), states=states, quantised_elements=4_000_000
    )
    assert parts["weights"] == 60_000_000
    assert parts["while building"] == QUANTISING_BYTES * 4_000_000


def test_a_vocabulary_that_grows_is_copied_on_the_host() -> None:
    stored = stored_as("float32", grown=(10_000_000, 8_000_000))
    grown = loading("single_gpu", stored)
    assert grown["weights"] == 4_000_000 + 4 * 18_000_000
    assert grown["while building"] == 4 * 10_000_000 + STAGING_BYTES
    half = {"model": {"path": "/m", "dtype": "bfloat16"}}
    stored = stored_as("bfloat16", grown=(10_000_000,))
    assert loading("single_gpu", stored, half)["while building"] == 8 * 10_000_000 + STAGING_BYTES
    assert loading("single_gpu", stored, {**half, **IN_4_BITS})["while building"] == STAGING_BYTES


def test_ddp_on_cpus_loads_with_one_more_copy_of_the_weights() -> None:
    parts = estimate(job(strategy("multi_cpu", 2)), IMPORTS)["load"]
    assert parts["weights"] == parts["while building"] == 2 * 400_000_000


def test_an_output_embedding_is_there_before_it_is_tied() -> None:
    assert estimate(job(strategy()), IMPORTS)["load"]["while building"] == 40_000_000
    assert "while building" not in estimate(job(strategy(), path="/model"), IMPORTS)["load"]


def test_the_copy_of_a_tied_embedding_is_tied_behind_one_in_float32() -> None:
    """peft makes a linear layer of its own before it gives it the embedding's copy."""
    asked = job(strategy(), path="/model", lora_parameters=11_000_000)
    half = asked.recipe.model.model_copy(update={"dtype": "bfloat16"})
    recipe = asked.recipe.model_copy(update={"model": half})
    asked = replace(asked, recipe=recipe, model=replace(asked.model, tied_copy_bytes=20_000_000))
    assert estimate(asked, IMPORTS)["load"]["while building"] == 40_000_000


def test_a_run_on_a_gpu_has_its_model_on_the_host_while_it_loads_and_saves() -> None:
    phases = estimate(job(strategy("single_gpu")), IMPORTS)
    assert phases["load"]["weights"] == phases["save"]["weights to write"] == 400_000_000
    assert "model" not in phases["step"]


def test_a_cpu_holds_a_copy_that_is_compared_with_an_export_unless_it_is_large() -> None:
    def copied(weights_bytes: int, dtype: str = "float32", **sections: Any) -> int:
        states, stored = MemoryEstimate(weights_bytes, 0, 20_000_000), stored_as(dtype)
        asked = job(strategy(), path="/m", lora_parameters=1_000_000, states=states, stored=stored)
        recipe = Recipe.model_validate({**asked.recipe.model_dump(mode="json"), **sections})
        saving = estimate(replace(asked, recipe=recipe), IMPORTS)["save"]
        return saving.get("copy to check the export", 0)

    assert copied(120_000_000, **IN_4_BITS) == 100_000_000
    assert copied(2 * CHECK_BYTES, **IN_4_BITS) == 0  # only within the plan
    assert copied(400_000_000) == 0  # a mapped folder
    # the largest tensor, which finds no room in the heap
    assert copied(25_000_000, "bfloat16", **IN_4_BITS) == 40_000_000


def test_the_weights_of_all_ranks_are_gathered_into_one_more_model() -> None:
    parts = estimate(job(strategy("fsdp2", 2)), IMPORTS)["save"]
    assert parts["model to export"] == 440_000_000


@pytest.mark.parametrize(
    ("mode", "precision", "dtype", "written"),
    [
        ("deepspeed_zero2_offload", "bf16", "bfloat16", 1_000_000_000),  # a file of 1 GB
        ("deepspeed_zero2_offload", "no", "float32", 1_200_000_000),  # its embedding
        ("deepspeed_zero2_offload", "bf16", "float32", 12_000_000_000),  # converted, whole
        ("deepspeed_zero2", "bf16", "bfloat16", 12_000_000_000),  # a state of Adam, on two ranks
        ("dual_gpu_nccl", "bf16", "bfloat16", 6_000_000_000),  # a checkpoint's weights
    ],
)
def test_the_host_has_of_a_save_what_a_card_copies_at_once(mode, precision, dtype, written):
    """Of three billion weights, whose embedding has 300 million."""
    chosen = replace(strategy(mode, 2), device="cuda", backend="nccl", mixed_precision=precision)
    asked = job(chosen, trained_elements=[300_000_000])
    counts = replace(asked.model, parameters=3 * 10**9, trainable_parameters=3 * 10**9)
    recipe = asked.recipe.model_copy(
        update={"model": asked.recipe.model.model_copy(update={"dtype": dtype})}
    )
    asked = replace(asked, recipe=recipe, model=counts)
    assert estimate(asked, IMPORTS)["save"]["weights to write"] == written


def test_offloaded_states_are_rounded_up_where_they_are_pinned(monkeypatch) -> None:
    """By a torch that rounds every block."""
    monkeypatch.setattr(pinned_memory, "WITH_EXACT_SIZES", (0, 0))  # a torch from 2.13 on
    states = MemoryEstimate(400_000_000, 0, 0, offloaded_bytes=1_600_000_000)
    on_gpu = replace(strategy("deepspeed_zero2_offload"), device="cuda", backend="nccl")
    of_job = job(on_gpu, states=states)
    assert "rounding of pinned memory" not in estimate(of_job, IMPORTS)["step"]
    # an older torch, which cannot be installed beside this one
    monkeypatch.setattr(pinned_memory, "WITH_EXACT_SIZES", (99, 0))
    rounding = 2 * ((1 << 29) - 400_000_000)  # of the float32 weights and of their gradients
    assert estimate(of_job, IMPORTS)["step"]["rounding of pinned memory"] == rounding
    on_cpu = estimate(job(strategy("deepspeed_zero2_offload"), states=states), IMPORTS)["step"]
    assert on_cpu["offloaded states"] == 1_600_000_000
    assert "rounding of pinned memory" not in on_cpu


def test_what_is_not_pinned_takes_its_own_bytes(monkeypatch) -> None:
    monkeypatch.setattr(pinned_memory, "WITH_EXACT_SIZES", (0, 0))  # a torch from 2.13 on
    states = MemoryEstimate(400_000_000, 0, 0, offloaded_bytes=1_600_000_000)
    pinned = replace(strategy("deepspeed_zero2_offload"), device="cuda", backend="nccl")
    activations = [3 * MIB, 5 * MIB]
    plain = replace(pinned, pin_memory=False)
    for chosen, rounded, locked in ((pinned, 12 * MIB, True), (plain, 8 * MIB, False)):
        of_job = job(chosen, states=states, offloaded_activations=activations)
        step = estimate(of_job, IMPORTS)["step"]
        assert step["offloaded activations"] == of_job.ranks * rounded
        assert (pinned_bytes(of_job) > 400_000_000) == locked
        assert bool(pinned_memory.setting(chosen)) == locked
    assert step["offloaded states"] == 1_600_000_000


@pytest.mark.parametrize("is_exact", [True, False])
def test_pinned_states_and_buffers_are_those_that_the_driver_was_asked_for(
    monkeypatch, is_exact
) -> None:
    """On the CUDA build without a card: gpt2 of 6 layers under ZeRO-2, qwen2 of 6 under ZeRO-3,
    both offloaded, one rank; its batches were 0.8 and 0.4 MB."""
    # as above
    monkeypatch.setattr(pinned_memory, "WITH_EXACT_SIZES", (0, 0) if is_exact else (99, 0))
    width, words = 768, 50257
    layer = [width, width, 3 * width**2, 3 * width, width**2, width, width, width]
    layer += [4 * width**2, 4 * width, 4 * width**2, width]
    gpt2 = [words * width, 512 * width, *(6 * layer), width, width]
    width, words, inner = 896, 32768, 4864
    layer = [width**2, width, *(2 * [128 * width, 128]), width**2, *(3 * [inner * width])]
    qwen2 = [words * width, *(6 * [*layer, width, width]), width]
    for mode, elements, asked in (
        ("deepspeed_zero2_offload", gpt2, 892_625_935 if is_exact else 1_477_222_415),
        ("deepspeed_zero3_offload", qwen2, 1_281_283_343 if is_exact else 1_538_671_631),
    ):
        chosen = replace(strategy(mode), device="cuda", backend="nccl", mixed_precision="bf16")
        states = MemoryEstimate(0, 0, 0, offloaded_bytes=16 * sum(elements))
        of_job = job(chosen, path="/models/m", states=states, trained_elements=elements)
        counts = replace(of_job.model, trainable_parameters=sum(elements))
        assert pinned_bytes(replace(of_job, model=counts)) == pytest.approx(asked, rel=0.002)
    assert pinned_bytes(job(strategy("deepspeed_zero2_offload"))) == 0


def test_gloo_has_pinned_copies_of_a_cards_weights_and_gradients() -> None:
    """A T5 of about 105 million float32 parameters; at most 1,417,876,256 bytes were pinned, with
    0.7 MB of batches: not all buckets of gradients are on their way at once."""
    width, inner = 768, 2048
    block = 4 * [width**2] + 2 * [inner * width]
    elements = [32128 * width, *(6 * block), *(6 * [*(4 * [width**2]), *block])]
    total = sum(elements)
    assert total == pytest.approx(105_000_000, rel=0.01)
    chosen = replace(strategy("multi_cpu", 2), device="cuda", backend="gloo")
    states = MemoryEstimate(4 * total, 4 * total, 8 * total)
    of_job = job(chosen, states=states, trained_elements=elements)
    counts = replace(of_job.model, trainable_parameters=total)
    predicted = pinned_bytes(replace(of_job, model=counts))
    assert 1_417_000_000 < predicted < 1.2 * 1_417_000_000
    over_nccl = replace(chosen, backend="nccl")
    assert pinned_bytes(job(over_nccl, states=states, trained_elements=elements)) < 10_000_000


def test_what_malloc_keeps_is_a_line_of_its_own_in_every_rank() -> None:
    one = estimate(job(strategy(), holes_bytes={"step": 100 * MIB}), IMPORTS)["step"]
    assert one["freed and kept by malloc"] == 100 * MIB
    two = estimate(job(strategy("multi_cpu", 2), holes_bytes={"step": 100 * MIB}), IMPORTS)["step"]
    assert two["freed and kept by malloc"] == 2 * one["freed and kept by malloc"]
    assert "freed and kept by malloc" not in estimate(job(strategy()), IMPORTS)["step"]


SMALL = 64 << 10
TAKEN = SMALL + malloc.ALIGNED_BYTES


def resident_bytes(events: Sequence[tuple[int, int]], **known: Any) -> int:
    """At most, of a heap without objects, when they happen twice."""
    known = {"written": {}, "objects_bytes": 0, **known}
    freed = {block for block, size in events if size < 0}
    again = [event for event in events if event[0] in freed]
    return max(malloc.replay([("step", events), ("save", again)], **known).values())


def test_the_end_of_the_heap_is_reached_again() -> None:
    assert resident_bytes([(0, SMALL), (0, -1), (1, SMALL), (1, -1)]) == TAKEN
    larger = 4 * SMALL
    assert (
        resident_bytes([(0, SMALL), (0, -1), (1, larger), (1, -1)]) == larger + malloc.ALIGNED_BYTES
    )


def test_a_hole_between_others_serves_what_leaves_room_for_alignment() -> None:
    before = [(0, SMALL), (1, SMALL), (0, -1)]
    ends = [(1, -1), (2, -1)]
    room = malloc.SLACK_BYTES - malloc.ALIGNED_BYTES
    assert resident_bytes([*before, (2, SMALL - room), *ends]) == 2 * TAKEN
    assert resident_bytes([*before, (2, SMALL), *ends]) == 3 * TAKEN


def test_neighbours_that_are_freed_become_one_hole() -> None:
    blocks = [(0, SMALL), (1, SMALL), (2, SMALL)]
    both = [(0, -1), (1, -1), (3, 2 * SMALL), (2, -1), (3, -1)]
    apart = [(0, -1), (2, -1), (3, 2 * SMALL), (1, -1), (3, -1)]
    assert resident_bytes([*blocks, *both]) == 3 * TAKEN
    # the first and the last are no neighbours; the last reaches the heap's end, which grows by what
    # is missing
    assert resident_bytes([*blocks, *apart]) == 2 * TAKEN + 2 * SMALL + malloc.ALIGNED_BYTES


def test_a_block_of_32_mib_and_more_is_mapped_and_given_back() -> None:
    two, three, huge = 2 * MIB, 3 * MIB, 40 * MIB
    kept = resident_bytes([(0, two), (1, SMALL), (0, -1), (2, three), (1, -1), (2, -1)])
    assert kept == two + three + SMALL + 3 * malloc.ALIGNED_BYTES
    assert (
        resident_bytes([(0, huge), (0, -1), (1, huge + 16), (1, -1)])
        == huge + 16 + malloc.ALIGNED_BYTES
    )


def test_a_large_block_that_the_heap_has_room_for_takes_no_more() -> None:
    small, huge = 30 * MIB, 40 * MIB
    grown = [(0, small), (1, small), (2, small), (0, -1), (1, -1), (2, -1)]
    assert resident_bytes([*grown, (3, huge), (3, -1)]) == 3 * (small + malloc.ALIGNED_BYTES)
    # a hole of three
    kept = [(0, small), (1, small), (2, small), (3, MIB), (0, -1), (1, -1), (2, -1)]
    ends = [(4, huge), (4, -1), (3, -1)]
    assert resident_bytes([*kept, *ends]) == 3 * small + MIB + 4 * malloc.ALIGNED_BYTES


def test_objects_between_tensors_keep_their_holes_apart() -> None:
    tensors = [
        (0, SMALL),
        (1, SMALL),
        (0, -1),
        (1, -1),
        (2, 2 * SMALL + malloc.ALIGNED_BYTES),
        (2, -1),
    ]
    assert resident_bytes(tensors) == 2 * TAKEN
    assert resident_bytes(tensors, objects_bytes=2 * malloc.OBJECT_BYTES) > 3 * SMALL


def test_large_blocks_of_other_threads_find_no_room_in_this_heap() -> None:
    small, huge = 30 * MIB, 40 * MIB
    grown = [(0, small), (1, small), (2, small), (0, -1), (1, -1), (2, -1)]
    events = [*grown, (3, huge), (3, -1)]
    taken = 3 * (small + malloc.ALIGNED_BYTES)
    assert resident_bytes(events, by_threads=True) == taken + huge + malloc.ALIGNED_BYTES


def test_a_part_has_the_heap_that_earlier_parts_have_left() -> None:
    many = [(number, SMALL) for number in range(100)]
    parts = [("load", [*many, *((number, -1) for number in range(100))]), ("step", [(100, SMALL)])]
    at_most = malloc.replay(parts, {}, 0)
    assert at_most == {"load": 100 * TAKEN, "step": 100 * TAKEN}
    ends = malloc.TRIM_THRESHOLD_BYTES // SMALL + 2  # what is free above it is given back
    many = [(number, SMALL) for number in range(ends)]
    parts = [("load", [*many, *((number, -1) for number in reversed(range(ends)))])]
    assert malloc.replay([*parts, ("step", [(ends, SMALL)])], {}, 0)["step"] < ends * TAKEN


def test_of_a_mapped_block_only_what_is_written_is_in_ram() -> None:
    assert resident_bytes([(0, 40 * MIB), (0, -1)], written={40 * MIB: 3 * MIB}) == 3 * MIB


def test_what_is_never_freed_is_there_once() -> None:
    assert resident_bytes([(0, 5 * MIB), (1, MIB), (1, -1)]) == 6 * MIB + 2 * malloc.ALIGNED_BYTES


def test_each_rank_has_the_order_of_all_rows() -> None:
    parts = estimate(job(strategy("multi_cpu", 2), rows=10_000_000), IMPORTS)["step"]
    assert parts["order of samples"] == 2 * 8 * 10_000_000


def test_imports_are_assumed_until_they_were_measured_on_this_device(tmp_path: Path) -> None:
    assert import_memory.measured_or_assumed(tmp_path, "cpu") == ASSUMED
    assert import_memory.measured_or_assumed(tmp_path, "cuda").rank_bytes > ASSUMED.rank_bytes
    file = import_memory.figures_file(tmp_path, "cpu")
    file.parent.mkdir()
    file.write_text(json.dumps(asdict(IMPORTS)))
    assert import_memory.measured_or_assumed(tmp_path, "cpu") == IMPORTS
    assert import_memory.measured_or_assumed(tmp_path, "cuda").rank_bytes > ASSUMED.rank_bytes


def test_imports_that_fail_are_a_problem_with_the_childs_last_line(
    tmp_path: Path, monkeypatch
) -> None:
    # the real child ends with its own refusal
    monkeypatch.setattr(import_memory, "ROLES", ("no such role",))
    with pytest.raises(ResourceError, match=r"imports fails: .*invalid choice: 'no such role'"):
        import_memory.measure(tmp_path, "cpu")
    assert import_memory.measured_or_assumed(tmp_path, "cpu") == ASSUMED


def test_kernels_are_as_many_as_products_and_lengths_of_micro_batches() -> None:
    shapes = {"a": (64, 64), "b": (64, 64), "c": (128, 64), "norm": (64,)}
    assert onednn.kernels(shapes, shapes, 1, evaluates=False) == 3 * 2
    assert onednn.kernels(shapes, {"lora": (8, 64)}, 2, evaluates=True) == 2 * (2 * 3 + 1) + 3
    assert onednn.padded_lengths([64] * 9, 4, 100) == 1
    # a quarter of the rows is shorter, which a batch of 4 hides 255 times of 256
    assert onednn.padded_lengths([256] * 3 + [248], 4, 4) == pytest.approx(1 + 4 / 256, abs=1e-4)
    assert onednn.padded_lengths([256] * 3 + [248], 1, 1000) == pytest.approx(2)
    chosen = replace(strategy("multi_cpu", ranks=2), mixed_precision="bf16")
    parts = estimate(job(chosen, kernels=10), IMPORTS)["step"]
    assert parts["bf16 kernels"] == 2 * 10 * onednn.KERNEL_BYTES
