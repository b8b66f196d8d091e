"""The plan obeys the user, or says in numbers why it cannot."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.base.errors import ConfigError, DoesNotFit, ResourceError
from launch.base.workspace import Workspace
from launch.plan import candidates, planner, resolve
from launch.predict import budgets, estimate
from launch.predict.history.calibration import NO_MARGIN, Margin
from launch.predict.memory import traced_steps
from launch.predict.memory.allocator_config import EXPANDABLE, AllocatorConfig
from launch.predict.oom_history import OomHistory
from launch.probe import architectures, described
from launch.probe.import_memory import ASSUMED
from launch.render import run_files
from launch.report import plan_lines
from launch.run_folder.layout import RunDir
from launch.schema.machine import GIB, CardFigures, Link, Machine
from tests import builders
from tests.builders import changed, facts_of, gpu, machine, plan, recipe_of
from training.loop import arguments


def test_without_a_gpu_one_process_trains_on_the_cpu():
    strategy = plan().strategy
    assert (strategy.mode, strategy.num_processes, strategy.backend, strategy.device) == (
        "cpu",
        1,
        None,
        "cpu",
    )


def test_every_gpu_is_used_unless_a_number_is_given():
    two = plan(on=machine(2)).strategy
    assert (two.mode, two.num_processes, two.backend) == ("dual_gpu_nccl", 2, "nccl")
    one = plan(recipe_of(launch={"num_processes": 1}), machine(2)).strategy
    assert (one.mode, one.num_processes, one.backend) == ("single_gpu", 1, None)


def test_the_least_that_a_training_takes_is_that_of_single_samples():
    def least(samples: int) -> list[estimate.Judged]:
        batch = {
            "per_device_train_batch_size": samples,
            "gradient_accumulation_steps": 8 // samples,
            "per_device_eval_batch_size": 8,
        }
        return planner.at_least(facts_of(recipe_of(training=batch), machine(1)))

    alone = least(1)
    assert {each.candidate.per_device_train_batch_size for each in alone} == {1}
    assert least(8) == alone


@pytest.mark.parametrize(
    ("cards", "steps", "launch", "ranks"),
    [
        (2, 3, {}, [2, 1]),
        (3, 1, {}, [3, 1]),  # 3 micro-batches are no number for 2 ranks
        (3, 2, {}, [3, 2, 1]),
        (8, 3, {}, [8, 4, 2, 1]),
        (8, 3, {"num_processes": 8}, [8]),
        (2, 3, {"mode": "deepspeed_zero3"}, [2]),
    ],
)
def test_fewer_ranks_are_candidates_at_the_same_effective_batch(cards, steps, launch, ranks):
    recipe = recipe_of(launch=launch, training={"gradient_accumulation_steps": steps})
    facts = facts_of(recipe, machine(cards))
    possible, _ = candidates.possible(facts)
    assert list(dict.fromkeys(each.num_processes for each in possible)) == ranks
    batch = recipe.training.per_device_train_batch_size * steps * cards
    assert {each.effective_batch_size for each in possible} == {batch}
    alone = {each.mode for each in possible if each.num_processes == 1}
    offloaded = {"deepspeed_zero2_offload", "deepspeed_zero3_offload"}
    assert alone == ({"single_gpu", *offloaded} if 1 in ranks else set())


def test_gloo_that_was_asked_for_is_gloo():
    assert plan(on=machine(2), force_gloo=True).strategy.backend == "gloo"
    assert (
        plan(recipe_of(launch={"mode": "dual_gpu_gloo"}), machine(2)).strategy.mode
        == "dual_gpu_gloo"
    )


def test_the_batch_of_the_user_is_never_changed():
    for batch in (1, 7, 20, 4096):
        recipe = recipe_of(
            training={"per_device_train_batch_size": batch, "gradient_accumulation_steps": 3}
        )
        strategy = plan(recipe, machine(2)).strategy
        assert strategy.per_device_train_batch_size == batch
        assert strategy.effective_batch_size == batch * 3 * 2


def test_ranks_that_are_running_already_are_taken_as_they_are():
    strategy = plan(num_processes=3).strategy
    assert (strategy.mode, strategy.num_processes, strategy.backend) == ("multi_cpu", 3, "gloo")


@pytest.mark.parametrize(
    ("recipe", "on", "words"),
    [
        (
            recipe_of(training={"fp16": True}, model={"dtype": "bfloat16"}),
            machine(1),
            "takes no bfloat16 gradients",
        ),
        (recipe_of(launch={"num_processes": 3}), machine(2), "there are 2 GPU"),
        (recipe_of(launch={"mode": "cpu", "num_processes": 2}), machine(), "is one process"),
        (
            recipe_of(launch={"mode": "cpu", "nodes": 2, "main_process_ip": "10.0.0.1"}),
            machine(),
            "launch.nodes says 2",
        ),
        (recipe_of(training={"fp16": True}), machine(), "no effect on a CPU"),
        (recipe_of(data={"max_length": 4096}), machine(), "data.max_length 4096"),
        (recipe_of(model={"freeze": ["encodr"]}), machine(), "encodr"),
    ],
)
def test_what_cannot_be_is_refused_with_the_reason(recipe, on, words):
    with pytest.raises(ConfigError, match=words):
        plan(recipe, on)


@pytest.mark.parametrize(
    ("launch", "on", "ranks", "flags"),
    [
        ({"num_processes": 3}, machine(2), {}, "--launch.num_processes=2 "),
        ({"num_processes": 3}, machine(1), {}, "--launch.num_processes=1 "),
        ({"num_processes": 3, "mode": "fsdp2"}, machine(1), {}, "--launch.mode=auto "),
        ({"num_processes": 5, "mode": "single_gpu"}, machine(1), {}, "--launch.num_processes=1 "),
        ({"num_processes": 2, "mode": "cpu"}, machine(), {}, "--launch.num_processes=1 "),
        (
            {"num_processes": 1, "mode": "dual_gpu_nccl"},
            machine(2),
            {},
            "--launch.num_processes=2 ",
        ),
        ({"num_processes": 3}, machine(), {"num_processes": 2}, "--launch.num_processes=2 "),
    ],
)
def test_a_number_of_processes_is_refused_with_flags_that_keep_the_effective_batch(
    launch, on, ranks, flags
):
    batch = 16 * 2 * launch["num_processes"]
    with pytest.raises(ConfigError, match=flags) as refused:
        plan(recipe_of(launch=launch), on, **ranks)
    sections: dict[str, dict[str, Any]] = {"launch": launch, "training": {}}
    for section, key, value in re.findall(r"--(\w+)\.(\w+)=(\w+)", str(refused.value)):
        number = int(value) if value.isdigit() else value
        sections[section] = {**sections[section], key: number}
    strategy = plan(recipe_of(**sections), on, **ranks).strategy
    assert strategy.effective_batch_size == batch
    said = str(refused.value).partition(f"keeps the effective batch of {batch}: ")[2]
    assert said.startswith(f"{sections['training'].get('per_device_train_batch_size', 16)} per")


@pytest.mark.parametrize(
    ("mode", "gpus", "words"), [("single_gpu", 0, "a GPU, found none"), ("dual_gpu_nccl", 1, "two")]
)
def test_a_mode_whose_cards_are_not_there_is_refused_as_a_missing_device(mode, gpus, words):
    with pytest.raises(ResourceError, match=f"launch.mode {mode} needs {words}"):
        plan(recipe_of(launch={"mode": mode}), machine(gpus))


def test_a_model_whose_states_do_not_fit_is_refused_with_numbers_and_ways_out():
    recipe = recipe_of(model={"shape": "llama-7b"}, data={"max_length": 512})
    numbers = r"25\.10 GiB weights \+ 25\.10 GiB gradients \+ 50\.21 GiB optimizer"
    ways = r"would fit:\n(.*\n)*  --lora\.r=16 --model\.dtype=bfloat16 \(dual_gpu_nccl, 13\.\d"
    with pytest.raises(DoesNotFit, match=rf"{numbers}(.*\n)*.*{ways}"):
        plan(recipe, machine(2))


def test_lora_in_bfloat16_of_the_same_model_fits_and_its_states_are_counted_apart():
    recipe = recipe_of(model={"shape": "llama-7b", "dtype": "bfloat16"}, lora={"r": 16})
    chosen = plan(recipe, machine(1))
    assert chosen.estimate.weights_bytes == pytest.approx(12.7 * GIB, rel=0.01)
    assert chosen.shape.trainable_parameters == chosen.shape.lora_parameters == 39_976_960
    assert chosen.estimate.optimizer_bytes == 8 * 39_976_960


def test_bf16_on_a_card_without_it_becomes_fp16_and_is_said():
    turing = machine(cards=(gpu(architecture="7.5"),))
    chosen = plan(recipe_of(training={"bf16": True}), turing)
    assert chosen.strategy.mixed_precision == "fp16"
    assert [change.key for change in chosen.changes] == ["training.bf16"]


def test_without_a_trace_the_plan_says_that_activations_are_not_predicted():
    recipe = recipe_of()
    lines = "\n".join(plan_lines.full_text(recipe, machine(), plan(recipe)))
    assert "activations are not predicted" in lines
    assert "16 per device x 2 accumulation x 1 process = 32 effective" in lines


def link(backend: str | None, **env: str) -> Link:
    rates = (20e9, 60e12) if backend else (None, None)
    return Link(backend, env, *rates, (), f"{backend or 'nothing'} works")


def test_the_link_that_works_is_the_backend_and_its_variables_reach_the_ranks():
    on = machine(2)
    chosen = plan(on=on, link=link("nccl", NCCL_P2P_DISABLE="1"))
    assert (chosen.strategy.mode, chosen.link.env) == ("dual_gpu_nccl", {"NCCL_P2P_DISABLE": "1"})
    run = RunDir(Path("/workspace/runs/wish/1"))
    assert (
        run_files.command(chosen, on, run, run.attempt(1), Workspace(Path("/workspace")), {}).env[
            "NCCL_P2P_DISABLE"
        ]
        == "1"
    )


def test_where_nccl_fails_gloo_or_one_card_trains_and_the_plan_says_why():
    over_gloo = plan(on=machine(2), link=link("gloo"))
    assert (over_gloo.strategy.mode, over_gloo.strategy.backend) == ("dual_gpu_gloo", "gloo")
    assert "NCCL does not work between these GPUs (gloo works)" in over_gloo.rejected[0]
    alone = plan(on=machine(2), link=link(None))
    assert (alone.strategy.mode, alone.strategy.num_processes, alone.link) == (
        "single_gpu",
        1,
        None,
    )
    assert "nothing works" in alone.rejected[0]
    assert (
        alone.strategy.effective_batch_size == over_gloo.strategy.effective_batch_size == 16 * 2 * 2
    )
    (change,) = alone.changes
    assert (change.key, change.requested, change.effective) == (
        "training.gradient_accumulation_steps",
        "2",
        "4",
    )


@pytest.mark.parametrize(
    ("section", "found", "words"),
    [
        ({"mode": "dual_gpu_nccl"}, link("gloo"), "use dual_gpu_gloo"),
        ({"mode": "deepspeed_zero2"}, link("gloo"), "NCCL does not work"),
        ({"mode": "dual_gpu_nccl"}, link(None), "nothing works"),
        ({"num_processes": 2}, link(None), "nothing works"),
    ],
)
def test_what_the_user_named_is_not_replaced_by_what_works(section, found, words):
    with pytest.raises(ConfigError, match=words):
        plan(recipe_of(launch=section), machine(2), link=found)


def test_the_plan_says_when_one_card_is_faster_than_two():
    slow = Link("gloo", {}, 0.05e9, 60e12, (), "Gloo works")
    lines = "\n".join(plan(recipe_of(launch={"mode": "dual_gpu_gloo"}), machine(2), link=slow).why)
    assert "one is faster (--launch.num_processes=1)" in lines
    assert "link: not tested" in "\n".join(plan(on=machine(2)).why)


@pytest.mark.parametrize(
    ("cpus", "rows", "typed", "expected"),
    [
        (16, 3000, [], 8),  # the recipe's own number
        (2, 3000, [], 1),
        (1, 3000, [], 0),
        (16, 30, [], 4),
        (16, 7, [], 2),  # batches of 6 rows
        (2, 7, ["--training.dataloader_num_workers=8"], 8),
    ],
)
def test_there_are_no_more_data_workers_than_cores_and_batches_unless_that_is_typed(
    tmp_path, monkeypatch, cpus, rows, typed, expected
):
    monkeypatch.setenv("LOWMEM_ROOT", str(tmp_path))
    data = builders.write_parquet(tmp_path / "rows.parquet", builders.rows(rows))
    typed = [*typed, f"--data.train_file={data}", "--data.validation_file=null"]
    on = replace(described.from_words("RTX 4090", 1, 64.0), cpu_count=cpus)
    chosen = resolve.resolve("lora_sft", typed, on, trace=False).plan
    assert chosen.strategy.dataloader_num_workers == expected
    assert ("a batch of the rows for each" in "\n".join(chosen.why)) == (rows == 7 and cpus == 16)


RTX_3080 = CardFigures(gpu().name, 300 << 20, "selfcheck", 5.5e13, 12e9)


@pytest.mark.parametrize(
    ("card", "margin", "line"),
    [
        (
            RTX_3080,
            Margin(0.021, "95% bound of 20 runs on this machine"),
            "measured here: context 0.29 GiB (selfcheck), products 55 TFLOP/s (selfcheck), copies"
            " between host and card 12.0 GB/s (selfcheck), error of reserved memory +2.1% (95%"
            " bound of 20 runs on this machine)",
        ),
        (CardFigures(gpu().name, 300 << 20), NO_MARGIN, "measured here: context 0.29 GiB (doctor)"),
        (replace(RTX_3080, name="NVIDIA T4"), NO_MARGIN, None),
    ],
)
def test_the_plan_says_which_of_its_figures_were_measured_on_this_machine(card, margin, line):
    recipe = recipe_of()
    facts = facts_of(
        recipe,
        machine(1),
        import_memory=replace(ASSUMED, card=card),
        error_margin=margin,
    )
    chosen = planner.choose(facts).plan
    found = next((each for each in chosen.why if each.startswith("measured here")), None)
    assert found == line


def test_without_the_package_deepspeed_is_not_planned_and_a_named_mode_says_so():
    with pytest.raises(ConfigError, match="the package deepspeed is not installed"):
        plan(recipe_of(launch={"mode": "deepspeed_zero2"}), machine(2), has_deepspeed=False)
    large = recipe_of(model={"shape": "llama-7b"})
    with pytest.raises(DoesNotFit, match="the package deepspeed is not installed"):
        plan(large, machine(2), has_deepspeed=False)


def test_over_gloo_what_does_not_fit_every_card_is_offloaded_on_one_at_the_same_effective_batch():
    recipe = recipe_of(
        model={"shape": "qwen2-0.5b"}, data={"max_length": 64}, launch={"vram_fraction": 0.2}
    )
    chosen = plan(recipe, machine(2, host_available_bytes=64 * GIB), link=link("gloo"))
    assert (chosen.strategy.mode, chosen.strategy.num_processes) == ("deepspeed_zero2_offload", 1)
    assert chosen.strategy.effective_batch_size == 16 * 2 * 2


def test_ranks_that_are_running_and_a_number_that_was_asked_for_have_to_agree():
    with pytest.raises(ConfigError, match="num_processes 3, but 2 rank"):
        plan(recipe_of(launch={"num_processes": 3}), num_processes=2)


@pytest.mark.parametrize(("share", "budget"), [(1.0, 18.05), (0.5, 10.5), (0.95, 18.05)])
def test_the_users_share_of_a_card_limits_the_budget_too(share, budget):
    recipe, on = recipe_of(launch={"vram_fraction": 0.95}), machine(1)
    facts = facts_of(recipe, on)
    facts = changed(facts, allocator=AllocatorConfig(per_process_memory_fraction=share))
    strategy = plan(recipe, on).strategy
    assert budgets.budget_bytes(facts, strategy) / GIB == pytest.approx(budget, abs=0.2)


@pytest.mark.parametrize(
    ("values", "packing", "attention", "settings"),
    [
        ({"may_expand": True}, False, "sdpa", EXPANDABLE),
        ({"may_expand": True, "is_ragged": False}, False, "sdpa", ""),
        ({"may_expand": True}, True, "sdpa", ""),  # padded to one length
        ({"may_expand": True}, True, "varlen_attn", EXPANDABLE),
        # the user names settings, or the driver cannot
        ({"may_expand": False}, False, "sdpa", ""),
    ],
)
def test_segments_grow_where_rows_differ_in_length(values, packing, attention, settings):
    sections = {"data": {"packing": packing}}
    planned = segments(values, sections, attention, logits_at_targets=False)
    assert planned == ([settings] if settings else [])


@pytest.mark.parametrize(
    ("sections", "most_targets", "settings"),
    [
        ({}, None, [EXPANDABLE]),  # not tokenised
        ({"data": {"packing": True}}, None, [EXPANDABLE]),
        ({}, [90, 80], [EXPANDABLE]),
        ({}, [80, 80], []),
        ({"task": "pretrain", "data": {"packing": True}}, None, []),
    ],
)
def test_segments_grow_where_micro_batches_differ_in_targets(sections, most_targets, settings):
    values: dict[str, Any] = {"may_expand": True, "is_ragged": False}
    if most_targets is not None:
        counts = {"rows": 2, "dropped": 0, "bad": 0, "tokens": 200, "lengths": [(100, 100)] * 2}
        counts |= {"target_tokens": sum(most_targets), "most_targets": most_targets}
        values["counts"] = counts
    assert segments(values, sections) == settings


@pytest.mark.parametrize(("shape", "share"), [("llama-tiny", 90 / 200), ("t5-tiny", 90 / 290)])
def test_answers_of_a_t5_are_tokens_beside_its_inputs(shape, share):
    recipe = recipe_of(model={"shape": shape})
    facts = facts_of(recipe, machine(1))
    counts = {"rows": 2, "dropped": 0, "bad": 0, "tokens": 200, "lengths": [(100, 45)] * 2}
    counts |= {"target_tokens": 90, "most_targets": [45, 45]}
    chosen = planner.choose(changed(facts, counts=counts))
    assert chosen.plan.target_share == pytest.approx(share)


def segments(
    values: dict[str, Any], sections: dict[str, Any], attention: str = "sdpa", **training: Any
) -> list[str]:
    """The allocator's settings in the plan and on its screen."""
    recipe = recipe_of(
        model={"shape": "llama-tiny", "attn_implementation": attention},
        launch={"mode": "single_gpu"},
        training={"bf16": True, **training},
        **sections,
    )
    facts = facts_of(recipe, machine(1))
    chosen = planner.choose(changed(facts, **values)).plan
    named = [switch.runs for switch in chosen.switches if switch.name == "allocator"]
    assert "".join(named) == chosen.allocator_settings
    return named


@pytest.mark.parametrize(
    ("vendor", "kernel", "expands"),
    [
        ("nvidia", "6.8.0-45-generic", True),
        ("nvidia", "5.15.153.1-microsoft-standard-WSL2", False),
        ("amd", "6.8.0-45-generic", False),
    ],
)
def test_segments_grow_where_the_driver_maps_memory_into_addresses(vendor, kernel, expands):
    cards = [replace(gpu(), vendor=vendor)]
    assert architectures.expands_segments(cards, kernel) == expands


def with_a_full_card() -> Machine:
    free, full = machine(2).gpus
    return replace(machine(2), gpus=(free, replace(full, free_bytes=1 << 20)))


def test_where_one_card_is_nearly_full_the_other_trains_alone_at_the_same_effective_batch():
    recipe = recipe_of(model={"shape": "t5-chatlm-0.2b"})
    chosen = plan(recipe, with_a_full_card(), has_deepspeed=False)
    even = plan(recipe, machine(2)).strategy
    assert (chosen.strategy.mode, chosen.strategy.num_processes) == ("single_gpu", 1)
    assert chosen.strategy.effective_batch_size == even.effective_batch_size
    assert "GPU 0: the most free memory of 2 GPUs" in "\n".join(chosen.why)


def test_a_mode_of_all_cards_is_refused_with_the_full_card_and_how_to_leave_it_out():
    recipe = recipe_of(model={"shape": "t5-chatlm-0.2b"}, launch={"mode": "dual_gpu_nccl"})
    with pytest.raises(
        DoesNotFit,
        match=r"GPU 1 \(RTX 3080\) has the least free memory, 1\.0 MiB .* CUDA_VISIBLE_DEVICES=0",
    ) as refusal:
        plan(recipe, with_a_full_card(), has_deepspeed=False)
    assert "would fit:\n  --launch.mode=auto (single_gpu" in str(refusal.value)


def test_of_four_cards_one_of_which_is_busy_two_train_where_four_do_not_fit():
    busy = machine(cards=(*(gpu(i) for i in range(3)), gpu(3, free_bytes=GIB // 2)))
    chosen = plan(recipe_of(model={"shape": "t5-chatlm-0.2b"}), busy, has_deepspeed=False)
    assert (chosen.strategy.mode, chosen.strategy.num_processes) == ("dual_gpu_nccl", 2)
    assert chosen.strategy.effective_batch_size == 16 * 2 * 4


def test_ways_out_are_of_a_mode_that_fits_and_never_the_line_that_was_typed():
    recipe = recipe_of(
        model={"shape": "llama-7b", "dtype": "bfloat16"},
        lora={"r": 16},
        training={"bf16": True},
        launch={"mode": "deepspeed_zero3_offload"},
    )
    four_bit = r"--quantization\.load_in_4bit=true --launch\.mode=auto \(dual_gpu_nccl, 4\.20 GiB\)"
    with pytest.raises(
        DoesNotFit,
        match=rf"would fit:\n  --launch\.mode=auto \(dual_gpu_nccl, 13\.15 GiB\)\n  {four_bit}$",
    ):
        plan(recipe, machine(2, host_available_bytes=7 * GIB))


def test_the_variable_of_the_guides_does_not_forbid_offloading_on_one_card():
    recipe = recipe_of(
        model={"shape": "qwen2-0.5b"}, data={"max_length": 64}, launch={"vram_fraction": 0.2}
    )
    strategy = plan(recipe, machine(2, host_available_bytes=64 * GIB), force_gloo=True).strategy
    assert (strategy.mode, strategy.num_processes, strategy.backend) == (
        "deepspeed_zero2_offload",
        1,
        "nccl",
    )


def test_4_bit_weights_are_a_way_out_where_they_fit():
    launch = {"mode": "single_gpu"}
    recipe = recipe_of(
        model={"shape": "llama-7b", "dtype": "bfloat16"},
        lora={"r": 16},
        training={"streamed_layers": 0},
        launch=launch,
    )
    small = machine(1, cards=(gpu(total_bytes=8 * GIB, free_bytes=8 * GIB),))
    with pytest.raises(
        DoesNotFit, match=r"--quantization\.load_in_4bit=true \(single_gpu, 4\.20 GiB\)"
    ):
        plan(recipe, small)
    with pytest.raises(
        DoesNotFit,
        match=r"--lora\.r=16 --quantization\.load_in_4bit=true \(single_gpu, 4\.20 GiB\)",
    ):
        plan(recipe.model_copy(update={"lora": None}), small)
    taken = recipe_of(
        model={"shape": "llama-7b", "dtype": "bfloat16"},
        lora={"r": 16},
        launch=launch,
        quantization={"load_in_4bit": True},
    )
    assert plan(taken, small).estimate.model_state_bytes / GIB == pytest.approx(4.20, abs=0.005)


def test_layers_of_a_model_that_is_larger_than_the_card_are_streamed():
    """As few as make the states fit; each of the 80 layers has 855 million frozen weights."""
    sections = {"model": {"shape": "llama3.1-70b", "dtype": "bfloat16"}, "lora": {"r": 16}}
    card = machine(1, cards=(gpu(total_bytes=24 * GIB, free_bytes=24 * GIB),))
    card = replace(card, host_available_bytes=64 * GIB)
    chosen = plan(recipe_of(**sections, quantization={"load_in_4bit": True}), card)
    count = chosen.strategy.levers.streamed_layers
    assert chosen.strategy.levers.every_n_layers == 1
    layer_bytes, states = 855_638_016 / 2, chosen.estimate.model_state_bytes
    assert 30 < count < 60
    assert chosen.budget_bytes - 1.1 * layer_bytes < states <= chosen.budget_bytes
    with pytest.raises(
        DoesNotFit, match=r"73 layers streamed from host RAM.*short by 54\.35 GiB of host RAM"
    ):
        plan(recipe_of(**sections), card)


def test_the_ranks_of_two_cards_share_the_host_ram_of_streamed_layers():
    """Each holds adapters of its own."""
    sections = {"model": {"shape": "llama3.1-70b", "dtype": "bfloat16"}, "lora": {"r": 16}}
    cards = tuple(gpu(place, total_bytes=24 * GIB, free_bytes=24 * GIB) for place in range(2))
    two = replace(machine(2, cards=cards), host_available_bytes=32 * GIB)
    four_bit = {"quantization": {"load_in_4bit": True}, "launch": {"mode": "dual_gpu_nccl"}}
    chosen = plan(recipe_of(**sections, **four_bit), two)
    streamed_bytes = chosen.strategy.levers.streamed_layers * 855_638_016 / 2
    assert 2 * streamed_bytes > 32 * GIB
    assert 2 * chosen.estimate.offloaded_bytes == pytest.approx(streamed_bytes, rel=0.001)


@pytest.mark.parametrize(("host_gib", "num_streamed"), [(6, 7), (3, 0)])
def test_the_least_that_a_training_takes_streams_layers_where_the_host_has_room(
    host_gib, num_streamed
):
    recipe = recipe_of(
        model={"shape": "llama-7b", "dtype": "bfloat16"},
        lora={"r": 16},
        launch={"mode": "single_gpu"},
    )
    card = gpu(total_bytes=12 * GIB, free_bytes=12 * GIB)
    on = machine(cards=(card,), host_available_bytes=host_gib * GIB)
    (least,) = planner.at_least(facts_of(recipe, on), with_step=False)
    assert least.candidate.levers.streamed_layers == num_streamed
    assert bool(least.misses) == (num_streamed == 0)


def test_4_bit_products_are_computed_in_the_precision_of_training():
    four_bit = {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}}
    words = {
        "float32": recipe_of(**four_bit),
        "bfloat16": recipe_of(**four_bit, training={"bf16": True}),
        "float16": recipe_of(**four_bit, training={"fp16": True}),
    }
    for dtype, recipe in words.items():
        assert f"computed in {dtype}" in "\n".join(plan(recipe, machine(1)).why)
    old = machine(1, cards=(gpu(architecture="7.5"),))
    assert "computed in float16" in "\n".join(plan(words["bfloat16"], old).why)
    half = recipe_of(**four_bit, model={"shape": "llama-tiny", "dtype": "bfloat16"})
    assert "computed in bfloat16" in "\n".join(plan(half, machine(1)).why)
    named = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}
    asked = recipe_of(lora={"r": 4}, quantization=named, training={"bf16": True})
    assert "computed in float32" in "\n".join(plan(asked, machine(1)).why)


def test_an_adapter_on_bfloat16_weights_trains_under_an_fp16_scaler():
    """Its own weights are float32, and the others get no gradients."""
    adapter = recipe_of(training={"fp16": True}, model={"dtype": "bfloat16"}, lora={"r": 4})
    assert plan(adapter, machine(1)).strategy.mixed_precision == "fp16"


@pytest.mark.parametrize("gpus", [1, 2])
def test_float16_weights_under_an_fp16_scaler_need_an_engine_that_trains_float32_ones(gpus):
    half = {"model": {"dtype": "float16"}, "training": {"fp16": True}}
    chosen = plan(recipe_of(**half), machine(gpus))
    assert chosen.strategy.launch_mode.engine == "deepspeed"
    assert "takes no float16 gradients" in chosen.rejected[0]
    for mode in ("single_gpu", "dual_gpu_nccl") if gpus > 1 else ("single_gpu",):
        named = recipe_of(**half, launch={"mode": mode})
        with pytest.raises(
            ConfigError, match=f"launch.mode {mode} cannot train model.dtype float16 "
        ):
            plan(named, machine(gpus))
    if gpus > 1:
        assert plan(recipe_of(**half), machine(gpus), has_deepspeed=False).strategy.mode == "fsdp2"
        return
    with pytest.raises(ConfigError, match="or use a deepspeed mode"):
        plan(recipe_of(**half), machine(gpus), has_deepspeed=False)


@pytest.mark.parametrize(
    ("other", "on"),
    [({"lora": {"r": 4}}, machine(1)), ({"training": {"fp16": False, "bf16": True}}, machine(1))],
)
def test_float16_weights_without_such_gradients_or_without_a_scaler_are_planned_as_asked(other, on):
    half = {"model": {"dtype": "float16"}, "training": {"fp16": True}}
    assert plan(recipe_of(**{**half, **other}), on).strategy.mode == "single_gpu"


@pytest.mark.parametrize(
    ("section", "share"),
    [({}, 1.0), ({"vram_fraction": 0.95}, 0.95), ({"vram_fraction": 0.7}, 0.7)],
)
def test_ranks_keep_the_memory_that_planning_left_free_unless_a_share_was_asked_for(
    tmp_path, section, share
):
    recipe = recipe_of(launch=section)
    run = RunDir(tmp_path)
    run.write_plan(recipe, plan(recipe, machine(1)))
    # recipe.json has every default, the plan knows better
    assert run.read_plan().allocator_fraction == share


@pytest.mark.parametrize(("rule", "rate"), [("linear", 2e-4), ("sqrt", 1e-4 * 2**0.5)])
def test_a_rate_that_shall_follow_the_effective_batch_does_and_the_plan_says_so(rule, rate):
    training = {
        "learning_rate": 1e-4,
        "learning_rate_scaling": rule,
        "learning_rate_batch_size": 32,
        "warmup_steps": 0.1,
    }
    recipe = recipe_of(training=training)
    here, two = plan(recipe), plan(recipe, machine(2))
    assert not [change for change in here.changes if change.key == "training.learning_rate"]
    (change,) = [change for change in two.changes if change.key == "training.learning_rate"]
    assert (change.requested, change.effective) == ("0.0001", f"{rate:g}")
    assert "64 instead of 32, as asked for" in change.reason
    assert arguments.make_arguments(recipe, here, 640, False, {}).learning_rate == pytest.approx(
        1e-4
    )
    assert recipe.training.learning_rate_at(two.strategy.effective_batch_size) == pytest.approx(
        rate
    )
    lines = "\n".join(plan_lines.full_text(recipe, machine(2), replace(two, rows=640)))
    assert f"learning rate {rate:g} linear, warm-up 0.1 of all steps: 3, max_length 128" in lines


@pytest.mark.parametrize(
    "training", [{"learning_rate_scaling": "sqrt"}, {"learning_rate_batch_size": 32}]
)
def test_a_rate_scales_from_a_batch_by_a_rule_and_not_with_one_of_them(training):
    with pytest.raises(ValueError, match="set both"):
        recipe_of(training=training)


def test_by_tokens_the_longest_rows_are_judged_and_a_whole_step_of_short_ones():
    recipe = recipe_of(data={"train_file": "x", "max_length": 128, "batch_by_tokens": True})
    facts = facts_of(recipe, machine())
    cut = plan(recipe, machine()).strategy
    asked, short = traced_steps.list_steps(
        facts, replace(cut, per_device_train_batch_size=4, gradient_accumulation_steps=8)
    )
    assert (asked[0].lengths, asked[1]) == ((128, 128), 4)
    assert (short[0].lengths, short[1]) == ((16, 16), 32)
    assert short[0].is_padded
    assert not short[0].is_single
    known = changed(facts, lengths=(100, 60), is_ragged=True)  # of a T5
    for micro_batch, parts in ((1, 2), (1, 64), (3, 7), (16, 2)):
        candidate = replace(
            cut, per_device_train_batch_size=micro_batch, gradient_accumulation_steps=parts
        )
        for question, rows, *_ in traced_steps.list_steps(known, candidate):
            assert 1 <= rows <= micro_batch * parts
            assert all(
                rows * length <= micro_batch * most
                for length, most in zip(question.lengths, (100, 60), strict=True)
            )
    assert len(traced_steps.list_steps(facts, replace(cut, gradient_accumulation_steps=1))) == 1


def test_by_tokens_flattened_rows_are_judged_as_one_row_of_the_most_documents_and_targets():
    recipe = recipe_of(data={"train_file": "x", "max_length": 128, "batch_by_tokens": True})
    facts = facts_of(recipe, machine(1))
    counts = {"rows": 90, "most_targets": [30] * 90}
    candidate = replace(
        plan(recipe, machine(1)).strategy.with_levers(attn_implementation="varlen_attn"),
        per_device_train_batch_size=4,
        gradient_accumulation_steps=8,
    )
    (step,) = traced_steps.list_steps(changed(facts, counts=counts), candidate)
    # 32 rows of 16 tokens are one of 512 in 32 documents, and have more targets than 4 rows of 128
    assert (step.question.documents, step.rows) == (8, 4)
    (size,) = step.sizes
    assert (size.tokens, size.targets) == (4 * 128, 4 * 128)
    assert size.targets == min(32 * 30, 32 * 16) > 4 * 30


def test_splits_by_tokens_share_the_trace_of_the_longest_rows_and_short_rows_are_traced():
    class Asked:
        failure = None

        def __init__(self):
            self.lengths = set()

        def fetch(self, questions):
            self.lengths |= {question.lengths for question in questions}

        def get(self, question):
            return None

    recipe = recipe_of(data={"train_file": "x", "max_length": 128, "batch_by_tokens": True})
    asked = Asked()
    facts = facts_of(recipe, machine(), traces=asked)
    cut = plan(recipe, machine()).strategy
    ways = [
        replace(cut, per_device_train_batch_size=rows, gradient_accumulation_steps=32 // rows)
        for rows in (16, 8, 4)
    ]
    facts.fetch(ways)
    for way in ways:
        estimate.judge(facts, way, exact=False)
    assert asked.lengths == {(128, 128)}
    estimate.judge(facts, ways[-1])
    assert asked.lengths == {(128, 128), (16, 16)}


def test_a_recipe_whose_plans_are_used_up_is_not_planned_again_in_this_start():
    recipe = recipe_of()
    used_up = r"all plans of this start took more memory than there is, each less than the one"
    with pytest.raises(DoesNotFit, match=f"{used_up} before; the same line again tries a smaller"):
        plan(recipe, oom=OomHistory(spent=(recipe,)))
    recipe = recipe_of(data={"max_length": 128}, allow=["data.max_length"])
    spent = [recipe]
    for length in (96, 64):  # the next one that may be given up
        facts = facts_of(recipe, machine(), oom=OomHistory(spent=tuple(spent)))
        chosen = planner.choose(facts).recipe
        assert chosen.data.max_length == length
        spent.append(chosen)
    with pytest.raises(DoesNotFit, match=rf"{used_up}(.*\n)*Nor does it fit with all that allow"):
        plan(recipe, oom=OomHistory(spent=tuple(spent)))


@pytest.mark.parametrize(
    ("is_on", "kwargs", "cards", "refusal"),
    [
        (False, {"every_n_layers": 2}, 1, "but activation_checkpointing is false; leave one out"),
        (True, {"offload": True}, 0, "but on a CPU activations are in host RAM; leave offload out"),
        (True, {"every_n_layers": 2}, 1, "but it is old; leave every_n_layers and offload out"),
        (True, {"offload": True}, 1, "but it is old; leave every_n_layers and offload out"),
        (True, {"every_n_layers": 1}, 1, None),
        (True, {}, 0, None),
    ],
)
def test_keywords_of_checkpointing_that_would_do_nothing_are_refused(is_on, kwargs, cards, refusal):
    checkpointing = {"activation_checkpointing": is_on, "activation_checkpointing_kwargs": kwargs}
    recipe = recipe_of(training=checkpointing)
    if refusal is None:
        assert plan(recipe, machine(cards), no_every_n_layers="it is old").strategy
        return
    with pytest.raises(ConfigError, match=rf"activation_checkpointing_kwargs: .*{refusal}"):
        plan(recipe, machine(cards), no_every_n_layers="it is old")


def test_a_lever_that_the_model_cannot_have_ends_the_plan():
    tiled = {"tiled_mlp_num_shards": 4, "torch_compile": True}
    with pytest.raises(ConfigError, match="tiled_mlp_num_shards: 4, but torch"):
        plan(recipe_of(training=tiled))
