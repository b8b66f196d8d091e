"""Ways to make a model fit, which the plan chooses by their bytes and seconds."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.base.errors import ConfigError
from launch.plan import candidates, fit, planner, search
from launch.plan import facts as plan_facts
from launch.plan.planner import Choice
from launch.plan.search import AS_FAST
from launch.predict import estimate
from launch.predict.facts import Facts
from launch.predict.memory.allocator_config import EXPANDABLE
from launch.predict.models import model_config
from launch.predict.traces import Traces
from launch.probe import described
from launch.schema.levers import Levers
from launch.schema.machine import GIB, MIB
from launch.schema.plan import Change, DataFormat
from launch.schema.recipe import Recipe
from tests import builders, real_steps
from tests.builders import CODE, machine

LENGTH = 512
campaign = partial(pytest.param, marks=pytest.mark.campaign)
DATA = DataFormat(
    "prompt_response", {"prompt": "prompt", "response": "response"}, "parquet", "given"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For tests whose choices are the same whatever has been traced before."""
    return tmp_path_factory.mktemp("traces")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """For tests that say what is traced."""
    return tmp_path / "traces"


def planning(
    cache: Path,
    free_gib: float,
    no_every_n_layers: str | None = None,
    attention: str | None = "sdpa",
    data: dict[str, Any] | None = None,
    most_targets: Sequence[int] = (),
    exact_batch: bool = True,
    may_expand: bool = False,
    fused_adapters: bool | None = None,
    no_compiler: str | None = "",
    card_is: Mapping[str, str] | None = None,
    began_with: Levers | None = None,
    **training: Any,
) -> Facts:
    """Facts of a card with so much free memory. `most_targets` of tokenised rows;
    `may_expand`: the card can grow the allocator's segments."""
    recipe = Recipe.model_validate(
        {
            "name": "levers",
            "task": "sft",
            "model": {
                "shape": "qwen2-0.5b",
                "dtype": "bfloat16",
                "attn_implementation": attention,
            },
            "lora": {"r": 8, "fused_adapters": fused_adapters},
            "data": {"train_file": "/data/train.parquet", "max_length": LENGTH, **(data or {})},
            "training": {
                "bf16": True,
                "num_output_chunks": 8,
                "per_device_train_batch_size": 8,
                **training,
            },
            "launch": {"mode": "single_gpu", "exact_batch": exact_batch},
            "output_dir": "/out",
        }
    )
    config, parameters, family = model_config.read(
        recipe.model, None, root=CODE, cache=builders.CACHE
    )
    card = machine(gpus=1)
    free_bytes = int(free_gib * GIB)
    gpus = tuple(replace(gpu, free_bytes=free_bytes, **(card_is or {})) for gpu in card.gpus)
    facts = plan_facts.build(recipe, replace(card, gpus=gpus), config, parameters, family, DATA)
    if most_targets:
        counts = {"rows": 1000, "dropped": 0, "bad": 0, "target_tokens": 1000 * most_targets[-1]}
        lengths = {"tokens": 1000 * LENGTH, "lengths": [(LENGTH, LENGTH)]}
        counts |= {**lengths, "most_targets": list(most_targets)}
        facts = builders.changed(facts, counts=counts, lengths=(LENGTH, LENGTH))
    traces = Traces(recipe, facts.model.size, facts.model.lora_targets, cache)
    return builders.changed(
        facts,
        traces=traces,
        may_expand=may_expand,
        no_every_n_layers=no_every_n_layers,
        no_varlen_attn=None,
        no_compiler=no_compiler,
        began_with=began_with,
    )


def chosen(cache: Path, free_gib: float, *given: Any, **more: Any) -> Choice:
    """The plan of planning()."""
    return planner.choose(planning(cache, free_gib, *given, **more))


def what_nothing_fits_by(cache: Path, free_gib: float, **more: Any) -> str:
    """By what each candidate of planning(), with all weights on the card, exceeds a budget. Ways
    out, each of which would be traced, are those of test_advice."""
    facts = planning(cache, free_gib, **more, streamed_layers=0)
    possible, _ = candidates.possible(facts)
    chosen, judged = search.search(facts, possible)
    assert chosen is None
    return "; ".join(f"{estimate.describe(each.candidate)}: {each.misses}" for each, _ in judged)


def test_fewer_layers_are_checkpointed_the_more_memory_there_is(cache):
    choices = [chosen(cache, free_gib) for free_gib in (10, 8, 6.5, 5)]
    strategies = [choice.plan.strategy for choice in choices]
    assert [each.levers.checkpointed_share for each in strategies] == [0, 1 / 4, 1 / 2, 1]
    seconds = [choice.plan.seconds_per_step for choice in choices]
    assert seconds == sorted(seconds)
    asked = "training.activation_checkpointing_kwargs"
    values = {change.key: change.effective for change in choices[1].plan.changes}
    assert values[asked] == '{"every_n_layers": 4}'
    (recompute,) = (each for each in choices[1].plan.switches if each.name == "recompute")
    assert recompute.runs == "checkpointing 1 layer in 4"


@pytest.mark.campaign
def test_a_single_sample_checkpoints_fewer_layers_than_more_rows_that_fit(own):
    long: dict[str, Any] = {"data": {"max_length": 2048}, "per_device_train_batch_size": 4}
    of_rows = chosen(own, 4, **long).plan
    assert of_rows.strategy.levers.checkpointed_share == 1
    singles = [
        chosen(own, free_gib, exact_batch=False, **long).plan for free_gib in (3.9, 4.7, 5.7)
    ]
    assert [each.strategy.per_device_train_batch_size for each in singles] == [1, 1, 1]
    assert [each.strategy.levers.checkpointed_share for each in singles] == [1 / 2, 1 / 4, 0]
    seconds = [each.seconds_per_step for each in singles]
    assert of_rows.seconds_per_step > seconds[0]
    assert all(slow > quick * AS_FAST for slow, quick in itertools.pairwise(seconds))
    # two rows that fit without checkpointing are not slower than one: they alone are traced
    traced = set(own.glob("*.json"))
    plan = chosen(own, 10, exact_batch=False, **long).plan
    assert plan.strategy.per_device_train_batch_size == 2
    assert len(set(own.glob("*.json")) - traced) == 1


def test_a_transformers_that_cannot_leave_layers_out_checkpoints_all_and_the_plan_says_so(cache):
    why = "transformers 5.13 checkpoints all layers or none, as all before 5.23"
    plan = chosen(cache, 8, why).plan
    assert plan.strategy.levers.checkpointed_share == 1
    (recompute,) = (each for each in plan.switches if each.name == "recompute")
    assert recompute.why.endswith(why)


def test_activations_are_kept_on_the_host_where_nothing_else_fits(cache):
    parts = {"num_output_chunks": 64, "tiled_mlp_num_shards": 1}
    on_card = chosen(cache, 3, **parts).plan
    least = on_card.estimate.device_bytes
    assert not on_card.strategy.levers.activation_offloading
    free_gib = (least - 64 * MIB) / 0.95 / GIB  # launch.vram_fraction
    choice = chosen(cache, free_gib, **parts)
    on_host = choice.plan
    assert on_host.strategy.levers.activation_offloading
    layers, of_layer = 24, 8 * LENGTH * 896 * 2
    assert least - on_host.estimate.device_bytes == pytest.approx(layers * of_layer, rel=0.1)
    # pinned memory comes in powers of two: 8 MiB for the 7 of a layer
    of_step = estimate.judge(choice.facts, on_host.strategy).phases.host.step
    assert of_step.by_cause["offloaded activations"] == layers * 8 * MIB
    # 7 MiB are copied in less time than a layer of 8 x 512 tokens computes
    assert on_host.seconds_per_step == pytest.approx(on_card.seconds_per_step, rel=0.01)
    values = {change.key: change.effective for change in on_host.changes}
    assert values["training.activation_checkpointing_kwargs"] == '{"offload": true}'
    assert what_nothing_fits_by(
        cache, free_gib, **parts, activation_checkpointing_kwargs={"offload": False}
    )


def test_frozen_layers_are_streamed_where_nothing_else_fits_and_no_more_than_must(cache):
    parts: dict[str, Any] = {"num_output_chunks": 64, "tiled_mlp_num_shards": 1}
    parts["activation_checkpointing_kwargs"] = {"offload": False}
    parts["activation_checkpointing"] = True
    on_card = chosen(cache, 3, **parts).plan
    assert not on_card.strategy.levers.streamed_layers
    least_gib = on_card.estimate.device_bytes / GIB - 0.2
    free_gib = least_gib / 0.95  # launch.vram_fraction
    choice = chosen(cache, free_gib, **parts)
    plan, facts, runs = choice.plan, choice.facts, choice.plan.strategy
    count = runs.levers.streamed_layers
    assert 3 <= count <= 24
    fewer = replace(runs, levers=replace(runs.levers, streamed_layers=count - 1))
    facts.fetch([fewer])
    assert estimate.judge(facts, fewer).misses
    streamed = facts.streamed(runs)
    assert plan.estimate.host["streamed weights"] == streamed.host_bytes
    assert plan.estimate.pinned_bytes > streamed.host_bytes == count * streamed.layers[0].bytes
    assert [change.effective for change in plan.changes if "streamed" in change.key] == [str(count)]
    (row,) = (each for each in plan.switches if each.name == "weights")
    assert row.runs == f"frozen weights of {count} layers streamed from host RAM"
    # a copy of a layer takes less time than the layers up to the next one compute
    assert plan.seconds_per_step == pytest.approx(on_card.seconds_per_step, rel=0.05)


def test_copies_that_take_longer_than_computing_are_waited_for(cache):
    """A layer of 29.8 MB takes 2.5 ms at 12 GB/s, forward and backward."""
    parts: dict[str, Any] = {"activation_checkpointing": True, "per_device_train_batch_size": 1}
    seconds = [
        chosen(cache, 10, **parts, streamed_layers=count).plan.seconds_per_step
        for count in (0, 12, 24)
    ]
    assert seconds[0] is not None and seconds[1] is not None and seconds[2] is not None
    assert seconds[0] == seconds[1] < seconds[2]  # two layers compute meanwhile, or one
    most_s = 22 * 2 * 29.83e6 / 12e9
    assert 0.1 * most_s < seconds[2] - seconds[0] < most_s


def test_packed_rows_fit_without_the_mask_of_sdpa(cache):
    """A mask has a byte for each pair of tokens, and 2 bytes where it is added to scores."""
    length, rows = 8192, 2
    parts: dict[str, Any] = {
        "data": {"packing": True, "max_length": length},
        "per_device_train_batch_size": rows,
        "num_output_chunks": 64,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"offload": False},
        "tiled_mlp_num_shards": 1,
    }
    with_mask = chosen(cache, 19, **parts).plan
    least, mask = with_mask.estimate.device_bytes, rows * length**2 * 2
    free_gib = (least - mask // 2) / 0.95 / GIB
    assert what_nothing_fits_by(cache, free_gib, **parts)
    without = chosen(cache, free_gib, attention=None, **parts).plan
    assert without.strategy.levers.attn_implementation == "varlen_attn"
    assert least - without.estimate.device_bytes > mask
    (attention,) = (each for each in without.switches if each.name == "attention")
    assert attention.why.endswith("no mask, no padding between them")


def test_logits_at_targets_fit_where_those_of_all_positions_do_not(cache):
    fixed = {"num_output_chunks": 1, "activation_checkpointing": False}
    targets = [LENGTH // 4, *[LENGTH // 8] * 20]  # of 8 rows: less than an eighth of the positions
    most = sum(targets[:8])
    open_rows = chosen(cache, 70, **fixed)
    everywhere = chosen(cache, 70, **fixed, most_targets=targets, logits_at_targets=False)
    short = chosen(cache, 70, **fixed, most_targets=targets)
    vocabulary, positions = 151_936, 8 * LENGTH
    less = everywhere.plan.estimate.allocated_bytes - short.plan.estimate.allocated_bytes
    # float32 logits, their gradient and the logits under autocast, at least
    assert less > 8 * vocabulary * (positions - most)
    assert short.plan.seconds_per_step < everywhere.plan.seconds_per_step
    of_open = open_rows.plan.estimate.allocated_bytes
    assert of_open == pytest.approx(everywhere.plan.estimate.allocated_bytes, rel=0.01)
    (logits,) = (each for each in open_rows.plan.switches if each.name == "logits")
    assert logits.why.endswith(
        "memory for all 4,096 positions of a micro-batch until the rows are tokenised"
    )
    (logits,) = (each for each in short.plan.switches if each.name == "logits")
    assert f"memory for {most} of the 4,096 positions" in logits.why
    (line,) = (line for line in short.plan.savings if line.startswith("logits at targets"))
    assert "less" in line
    assert "faster" in line
    free_gib = (short.plan.estimate.device_bytes + 64 * MIB) / 0.95 / GIB  # launch.vram_fraction
    assert chosen(
        cache, free_gib, **fixed, most_targets=targets
    ).plan.strategy.levers.logits_at_targets
    for refused in ({}, {"most_targets": targets, "logits_at_targets": False}):
        assert what_nothing_fits_by(cache, free_gib, **fixed, **refused)


def test_segments_that_grow_fit_where_those_of_fixed_size_do_not(cache):
    """The number of targets varies, so that no later step fits into the segments of the first."""
    fixed: dict[str, Any] = {"num_output_chunks": 1, "activation_checkpointing": False}
    fixed["most_targets"] = [LENGTH // 4, *[LENGTH // 8] * 20]
    plain, grows = (chosen(cache, 70, **fixed, may_expand=grow).plan for grow in (False, True))
    assert (plain.allocator_settings, grows.allocator_settings) == ("", EXPANDABLE)
    assert grows.estimate.fragmentation_bytes < plain.estimate.fragmentation_bytes - 32 * MIB
    assert grows.estimate.allocated_bytes == pytest.approx(plain.estimate.allocated_bytes, rel=0.01)
    free_gib = (grows.estimate.device_bytes + 16 * MIB) / 0.95 / GIB  # launch.vram_fraction
    choice = chosen(cache, free_gib, **fixed, may_expand=True)
    assert choice.plan.allocator_settings == EXPANDABLE
    # though cached blocks would be given back
    assert what_nothing_fits_by(cache, free_gib, **fixed)


def test_a_compiled_step_takes_the_memory_of_one_that_is_not_and_fewer_seconds(cache):
    fixed: dict[str, Any] = {
        "num_output_chunks": 1,
        "logits_at_targets": False,
        "activation_checkpointing": False,
        # beside torch.compile they are those of transformers and PEFT
        "fused_norms": False,
        "fused_adapters": False,
    }
    plain, compiled = (chosen(cache, 70, **fixed, torch_compile=on).plan for on in (False, True))
    assert compiled.strategy == plain.strategy.with_levers(torch_compile=True)
    assert compiled.estimate == plain.estimate
    assert compiled.seconds_per_step and plain.seconds_per_step
    assert compiled.seconds_per_step < plain.seconds_per_step
    assert compiled.phases == plain.phases


def test_layers_are_compiled_where_that_is_clearly_faster_and_pays(cache):
    fixed: dict[str, Any] = {
        "attention": None,
        "num_output_chunks": 1,
        "logits_at_targets": False,
        "activation_checkpointing": False,
        "no_compiler": None,
        "most_targets": [LENGTH],
        "card_is": {"name": "NVIDIA H200", "architecture": "9.0"},  # whose host is slow
    }

    def levers_of(steps: int, **more: Any) -> Levers:
        choice = chosen(cache, 70, **{**fixed, **more}, max_steps=steps)
        (compiles,) = (each for each in choice.plan.switches if each.name == "compile")
        said.append(f"{compiles.runs}: {compiles.why}")
        changes.append([each for each in choice.plan.changes if "compile" in each.key])
        return choice.plan.strategy.levers

    said: list[str] = []
    changes: list[list[Change]] = []
    eager, compiled = levers_of(10), levers_of(100_000)
    assert (eager.torch_compile, compiled.torch_compile) == (False, True)
    assert (eager.fused_adapters, compiled.fused_adapters) == (True, False)
    assert (eager.attn_implementation, compiled.attn_implementation) == ("varlen_attn", "sdpa")
    assert not changes[0]
    (change,) = changes[1]
    assert (change.requested, change.effective) == ("null", "true")
    assert said[0] == "off: not faster"
    assert said[1].startswith("on: faster; compiling takes about 60 s at the start: training steps")
    # a typed value is obeyed, a run that goes on keeps what it began with
    assert not levers_of(100_000, torch_compile=False).torch_compile
    assert not levers_of(100_000, began_with=eager).torch_compile
    assert levers_of(10, began_with=compiled).torch_compile
    assert not levers_of(10, no_compiler="gone", began_with=compiled).torch_compile


def test_mlps_in_parts_fit_where_long_rows_do_not_at_once(cache):
    long: dict[str, Any] = {
        "data": {"max_length": 8192},
        "per_device_train_batch_size": 1,
        "num_output_chunks": 64,  # the logits are not the peak
        "activation_checkpointing_kwargs": {"offload": False},
    }
    at_once = chosen(cache, 5, **long).plan
    assert at_once.strategy.levers.tiled_mlp_num_shards == 1
    assert not any("MLPs in" in line for line in at_once.table)  # nor was it traced
    free_gib = (at_once.estimate.device_bytes - 256 * MIB) / 0.95 / GIB  # launch.vram_fraction
    parts = chosen(cache, free_gib, **long).plan
    assert parts.strategy.levers.tiled_mlp_num_shards == 8
    saved = at_once.estimate.allocated_bytes - parts.estimate.allocated_bytes
    inner = 8192 * 4864 * 2  # a tensor of the MLP's inner size
    assert 4 * inner < saved < 8 * inner
    # Predicted seconds, of no clock: a checkpointed layer computes its MLP twice, in parts or not;
    # smaller products take longer.
    assert 1 < parts.seconds_per_step / at_once.seconds_per_step < 1.05
    values = {change.key: change.effective for change in parts.changes}
    assert values["training.tiled_mlp_num_shards"] == "8"
    (line,) = (line for line in parts.savings if line.startswith("MLPs in 8 parts instead of"))
    assert "less" in line
    (switch,) = (each for each in parts.switches if each.name == "mlp")
    assert switch.runs == "MLPs in 8 parts"
    missed = what_nothing_fits_by(cache, free_gib, **long, tiled_mlp_num_shards=1)
    assert re.search(r"checkpointing, .* GiB in backward, budget", missed), missed
    asked = chosen(cache, free_gib, **long, tiled_mlp_num_shards=6).plan
    assert asked.strategy.levers.tiled_mlp_num_shards == 6
    assert not any(change.key == "training.tiled_mlp_num_shards" for change in asked.changes)


def test_mlps_in_parts_do_not_fit_where_logits_are_the_peak(cache):
    long: dict[str, Any] = {"data": {"max_length": 8192}, "per_device_train_batch_size": 1}
    plan = chosen(cache, 3.9, **long).plan
    assert plan.strategy.levers.activation_offloading
    (line,) = (line for line in plan.table if "checkpointing, MLPs in 8 parts" in line)
    assert "does not fit" in line


def with_lora(cache: Path, length: int, cards: int, shape: str = "qwen2.5-7b") -> Facts:
    """LoRA of a model on cards of 24 GB."""
    recipe = fit.recipe_of(shape, "lora", length, half=False, gpus=cards)
    on = described.from_words("RTX 4090", cards, 64)
    config, parameters, family = model_config.read(recipe.model, root=CODE, cache=builders.CACHE)
    facts = plan_facts.build(recipe, on, config, parameters, family, DATA)
    traces = Traces(recipe, facts.model.size, facts.model.lora_targets, cache)
    return builders.changed(facts, traces=traces)


def test_a_mode_whose_communication_alone_makes_it_slower_is_not_traced(own):
    """At 8,192 tokens one card fits by itself. ZeRO 3 fetches all weights from host RAM in each
    micro-step."""
    facts = with_lora(own, 8192, 1)
    plan = planner.choose(facts).plan
    assert plan.strategy.mode == "single_gpu"
    possible, _ = candidates.possible(facts)
    (asked,) = (each for each in possible if each.mode == "deepspeed_zero3_offload")
    all_layers = asked.with_levers(every_n_layers=1)
    assert facts.trace(all_layers) is None
    # what MLPs keep for backward is too much for the card: no trace has to say so
    (whole,) = (each for each in possible if each.mode == "single_gpu")
    for split in candidates.splits(facts, whole):
        assert facts.trace(split) is None
    facts.fetch([all_layers])
    judged = estimate.judge(facts, all_layers, exact=False)
    assert plan.seconds_per_step is not None
    assert judged.seconds > plan.seconds_per_step * AS_FAST


def test_sharded_copies_that_may_be_faster_are_priced_before_a_full_one_is_replayed(cache):
    facts = with_lora(cache, 2048, 2)
    possible, _ = candidates.possible(facts)
    two = [each for each in possible if each.num_processes == 2]
    chosen, judged = search.search(facts, two)
    assert chosen is not None
    assert chosen.candidate.launch_mode.is_whole
    faster = [each for each, _ in judged if each.time and each.seconds < chosen.seconds]
    assert any(not each.candidate.launch_mode.is_whole for each in faster)
    assert all(each.by == "price" and each.misses for each in faster)
    assert [each for each, _ in judged if each.by == "replay"] == [chosen]


def test_only_what_may_win_is_composed(tmp_path):
    """Of all modes, splits and levers on two cards, and on one of them."""
    words = ("--model.shape=qwen2.5-7b", "--model.dtype=bfloat16", "--data.max_length=2048")
    words += ("--lora.r=16", "--gpu=RTX 4090", "--gpus=2", "--ram=64", "--explain")
    done = builders.launch(tmp_path, "plan", "sft_fast", *words, LOWMEM_TRACES=str(tmp_path / "t"))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "deepspeed_" in said
    assert "1 layer in 2" in said
    assert len([*(tmp_path / "t").glob("*.json")]) <= 4
    assert len([*(tmp_path / "t").glob("*.step")]) <= 8


def test_some_layers_keep_activations_where_logits_at_once_are_traced_with_checkpointing(cache):
    """Without checkpointing, logits at once are too much for the card, and are not traced."""
    facts = with_lora(cache, 8192, 1, "qwen2.5-1.5b")
    plan = planner.choose(facts).plan
    assert plan.strategy.levers.every_n_layers > 1
    assert plan.strategy.levers.num_output_chunks == 8


SMALL = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
GATED = {**SMALL, "intermediate_size": 160, "num_key_value_heads": 2, "pad_token_id": 0}


@pytest.mark.parametrize(
    ("config", "lora", "least_share"),
    [
        campaign({"model_type": "qwen2", **GATED}, None, 0.4),
        ({"model_type": "qwen2", **GATED}, {"r": 4}, 0.3),
        campaign({"model_type": "gemma2", **GATED, "head_dim": 16}, {"r": 4}, 0),
        # the matrix into its MLP is twice as wide
        campaign({"model_type": "phi3", **GATED}, None, 0.4),
        campaign({"model_type": "phi", **SMALL, "intermediate_size": 256}, {"r": 4}, 0),
        campaign(
            {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 6, "n_head": 4},
            None,
            0,
        ),
    ],
    ids=["qwen2", "qwen2, LoRA", "gemma2, LoRA", "phi3", "phi, LoRA", "gpt2"],
)
def test_a_card_holds_at_least_what_candidates_are_left_out_by(
    config, lora, least_share, own, tmp_path
):
    """With and without checkpointing, autocast, accumulation, and logits and MLPs in parts."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    recipe = Recipe.model_validate(
        {
            "name": "bounds",
            "task": "sft",
            "model": {"path": str(tmp_path)},
            "lora": lora,
            "data": {"train_file": "/data/train.parquet", "max_length": 256},
            "training": {"bf16": True, "per_device_train_batch_size": 4},
            "launch": {"mode": "single_gpu"},
            "output_dir": "/out",
        }
    )
    shares = []
    for dtype, bf16 in (("float32", True), ("bfloat16", False), ("float32", False)):
        training = recipe.training.model_copy(update={"bf16": bf16})
        model = recipe.model.model_copy(update={"dtype": dtype})
        other = recipe.model_copy(update={"training": training, "model": model})
        config_read, parameters, family = model_config.read(
            other.model, None, root=CODE, cache=builders.CACHE
        )
        facts = plan_facts.build(other, machine(gpus=1), config_read, parameters, family, DATA)
        (candidate,), _ = candidates.possible(facts)
        ways = [
            candidate,
            replace(candidate, gradient_accumulation_steps=2),
            candidate.with_levers(every_n_layers=2),
            candidate.with_levers(every_n_layers=1, tiled_mlp_num_shards=2),
        ]
        traces = Traces(other, facts.model.size, facts.model.lora_targets, own)
        facts = builders.changed(facts, traces=traces)
        facts.fetch(ways)
        for way in ways:
            least = estimate.at_least(facts, way).memory
            held = estimate.judge(facts, way, exact=False).memory
            shares.append(least.allocated_bytes / held.allocated_bytes)
    assert max(shares) <= 1
    assert min(shares[::4]) > least_share  # without checkpointing


def test_offloading_is_refused_on_a_cpu():
    kwargs = {"activation_checkpointing_kwargs": {"offload": True}}
    with pytest.raises(ConfigError, match="on a CPU activations are in host RAM"):
        trained({"activation_checkpointing": True, **kwargs})


def test_keywords_of_checkpointing_that_is_off_are_refused():
    kwargs = {"activation_checkpointing_kwargs": {"every_n_layers": 2}}
    with pytest.raises(ConfigError, match="activation_checkpointing is false; leave one out"):
        trained({"activation_checkpointing": False, **kwargs})


def test_weights_are_the_same_whichever_layers_are_checkpointed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    weights = [
        trained({"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs})
        for kwargs in ({"every_n_layers": 1}, {"every_n_layers": 2}, {"use_reentrant": True})
    ]
    plain = trained({})
    for one in weights:
        for name, value in plain.items():
            torch.testing.assert_close(one[name], value, rtol=0, atol=0, msg=name)


def trained(training: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The weights after three steps in this process."""
    recipe = Recipe.model_validate(
        {
            "name": "levers",
            "task": "sft",
            "model": {"shape": "llama-tiny"},
            "data": {"train_file": "/data/train.parquet", "max_length": 48},
            "training": {
                "per_device_train_batch_size": 3,
                "gradient_accumulation_steps": 2,
                "learning_rate": 1e-2,
                **training,
            },
            "launch": {"mode": "cpu"},
            "output_dir": "/out",
        }
    )
    config, parameters, family = model_config.read(
        recipe.model, 512, root=CODE, cache=builders.CACHE
    )
    facts = plan_facts.build(recipe, machine(), config, parameters, family, DATA)
    trainer = real_steps.trainer(recipe, planner.choose(facts).plan, 48, True, 3)
    trainer.train()
    return {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
