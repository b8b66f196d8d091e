"""Which kernels a plan chooses for a recipe, a card and its packages, and what it says of each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.base.errors import ConfigError, ResourceError
from launch.plan import candidates, kernels
from launch.probe import packages
from launch.report import plan_lines
from launch.schema.levers import Levers
from launch.schema.modes import LAUNCH_MODES
from launch.schema.plan import ForwardFacts, ModelFamily, ModelSize, Plan
from tests.builders import facts_of, gpu, machine, plan, recipe_of

pytestmark = pytest.mark.unit

HALF = {"bf16": True}
THERE, GONE = {"no_flash_attn": None}, {"no_flash_attn": "the package flash_attn is not installed"}


def row(chosen: Plan, name: str) -> tuple[str, str]:
    return next((one.runs, one.why) for one in chosen.switches if one.name == name)


def model_of(config: dict[str, Any], **forward: Any) -> ModelSize:
    name = config["model_type"]
    dropout = 0.1 if name == "gpt2" else 0.0
    known = {"flattens": name != "t5", "attention_dropout": dropout, **forward}
    family = ModelFamily(name, forward=ForwardFacts(**known))
    return ModelSize("m", config, 0, 0, family=family)


def attention(
    card: dict[str, Any] | None = None, given: dict[str, Any] = THERE, **sections: Any
) -> tuple[str, str]:
    """What a plan for one card says of its attention, which is what runs."""
    recipe = recipe_of(**{"training": HALF, **sections})
    chosen = plan(recipe, machine(cards=(gpu(**card),) if card is not None else ()), **given)
    runs, why = row(chosen, "attention")
    assert chosen.strategy.levers.attn_implementation == runs
    return runs, why


def test_flash_attn_is_taken_where_it_is_installed_and_can_run():
    runs, why = attention({})
    assert runs == "flash_attention_2"
    assert why == "flash_attn is there; rows follow one another: no mask, no padding between them"


@pytest.mark.parametrize(
    ("card", "given", "sections", "words"),
    [
        ({}, GONE, {}, "the package flash_attn is not installed"),
        ({}, {}, {}, "whether flash_attn is installed there is not known"),
        (None, THERE, {}, "flash_attn has kernels for GPUs only"),
        (
            {"architecture": "7.5"},
            THERE,
            {"training": {"fp16": True}},
            "no kernels for RTX 3080 (7.5)",
        ),
        (
            {"vendor": "amd", "architecture": "gfx1201"},
            THERE,
            {},
            "no kernels for RTX 3080 (gfx1201)",
        ),
        ({}, THERE, {"training": {}}, "computes in 16 bits only (training.bf16)"),
        ({}, THERE, {"model": {"shape": "t5-tiny"}}, "rows of t5 are not flattened for flash_attn"),
        (
            {},
            THERE,
            {"training": {**HALF, "torch_compile": True}},
            "torch.compile would compile anew",
        ),
    ],
)
def test_elsewhere_attention_is_pytorchs_and_the_plan_says_why(card, given, sections, words):
    runs, why = attention(card, given, **sections)
    assert runs == "sdpa"
    assert why.startswith("PyTorch's own kernels; ")
    assert words in why


@pytest.mark.parametrize("card", [{}, {"vendor": "amd", "architecture": "gfx942:sramecc+:xnack-"}])
@pytest.mark.parametrize(
    "sections", [{}, {"training": {}, "model": {"dtype": "bfloat16"}}, {"training": {"fp16": True}}]
)
def test_16_bits_by_any_way_will_do(card, sections):
    assert attention(card, **sections)[0] == "flash_attention_2"


def test_named_it_is_obeyed_on_a_described_machine_and_refused_where_it_cannot_run():
    named = {"model": {"attn_implementation": "flash_attention_2"}}
    assert attention({}, {}, **named) == ("flash_attention_2", attention({}, THERE, **named)[1])
    with pytest.raises(
        ResourceError,
        match=r"flash_attention_2, but the package flash_attn is not installed; leave",
    ):
        attention({}, GONE, **named)
    with pytest.raises(
        ConfigError, match=r"flash_attention_2, but flash_attn computes in 16 bits only"
    ):
        attention({}, THERE, **named, training={})
    with pytest.raises(
        ConfigError, match=r"flash_attention_2, but flash_attn has kernels for GPUs only"
    ):
        attention(None, THERE, **named)


# ---- torch's varlen_attn

TORCH = {**GONE, "no_varlen_attn": None}


def test_pytorchs_flash_kernels_are_taken_where_flash_attn_is_not_installed():
    runs, why = attention({}, TORCH)
    assert (runs, why) == (
        "varlen_attn",
        "PyTorch's own flash kernels (the package flash_attn is not installed); rows follow one"
        " another: no mask, no padding between them",
    )
    assert attention({}, {**TORCH, **THERE})[0] == "flash_attention_2"


ADA = {"architecture": "8.9"}


@pytest.mark.parametrize(
    ("card", "given", "sections", "config", "words"),
    [
        ({}, GONE, {}, {}, "whether torch has varlen_attn there is not known"),
        ({}, {**GONE, "no_varlen_attn": "torch 2.10.0 is old"}, {}, {}, "torch 2.10.0 is old"),
        (None, TORCH, {}, {}, "has kernels for GPUs only"),
        ({"architecture": "7.5"}, TORCH, {"training": {"fp16": True}}, {}, "no kernels for RTX"),
        ({"vendor": "amd", "architecture": "gfx942"}, TORCH, {}, {}, "varlen_attn has no kernels"),
        ({}, TORCH, {"training": {}}, {}, "computes in 16 bits only"),
        ({}, TORCH, {}, {"model_type": "t5"}, "of t5"),
        ({}, TORCH, {}, {"attention_dropout": 0.1}, "the model's attention_dropout is 0.1"),
        (
            {},
            TORCH,
            {},
            {"model_type": "gpt2", "n_embd": 64},
            "the model's attention dropout is 0.1",
        ),
        ({}, TORCH, {}, {"head_dim": 20}, "heads of a multiple of 8, these have 20"),
        ({}, TORCH, {}, {"hidden_size": 80}, "heads of a multiple of 8, these have 20"),
        ({}, TORCH, {}, {"head_dim": 264}, "heads of at most 256, these have 264"),
        (ADA, TORCH, {}, {"head_dim": 208}, "no backward for heads of 208 on RTX 3080"),
        ({}, TORCH, {"training": {**HALF, "torch_compile": True}}, {}, "compile anew"),
    ],
)
def test_where_varlen_attn_cannot_run_it_is_sdpa_and_named_it_is_refused(
    card, given, sections, config, words
):
    cards = (gpu(**card),) if card is not None else ()
    config = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_attention_heads": 4,
        **config,
    }
    for name in (None, "varlen_attn"):
        recipe = recipe_of(
            **{"training": HALF, **sections},
            model={"shape": "llama-tiny", "attn_implementation": name},
        )
        no_flash, no_torch = given["no_flash_attn"], given.get("no_varlen_attn", "")
        facts = recipe, model_of(config), cards, "bf16" if recipe.training.bf16 else "no"
        reason = kernels.no_varlen(*facts, no_torch)
        if name is None:
            assert kernels.attention(*facts, no_flash, no_torch) == "sdpa"
            assert words in (reason or "")
        elif reason is not None:
            with pytest.raises((ConfigError, ResourceError), match=r"varlen_attn, but .*; leave"):
                kernels.attention(*facts, no_flash, no_torch)
        else:  # named, it is obeyed where the plan would leave it out
            assert words in ("whether torch has varlen_attn there is not known", "compile anew")
            assert kernels.attention(*facts, no_flash, no_torch) == "varlen_attn"


def test_heads_that_a_smaller_card_cannot_train_are_trained_on_a_larger_one():
    config = {"model_type": "llama", "head_dim": 208, "num_attention_heads": 2}
    facts = recipe_of(training=HALF), model_of(config)
    for architecture, runs in (("8.0", "varlen_attn"), ("9.0", "varlen_attn"), ("12.0", "sdpa")):
        card = (gpu(architecture=architecture),)
        assert kernels.attention(*facts, card, "bf16", "gone", None) == runs


@pytest.mark.parametrize("name", ["sdpa", "eager"])
def test_another_that_is_named_is_obeyed(name):
    runs, why = attention({}, model={"attn_implementation": name})
    assert (runs, why.partition(";")[0]) == (name, "asked for")


def test_a_family_without_sdpa_is_planned_with_eager_attention_and_refused_with_sdpa():
    gemma = model_of({"model_type": "gemma2"}, has_sdpa=False)
    assert kernels.attention(recipe_of(), gemma, (), "no", None) == "eager"
    named = recipe_of(model={"shape": "llama-tiny", "attn_implementation": "sdpa"})
    with pytest.raises(ConfigError, match=r"transformers has no sdpa for gemma2; leave it out"):
        kernels.attention(named, gemma, (), "no", None)


@pytest.mark.parametrize(
    ("mode", "precision", "sections", "words"),
    [
        ("single_gpu", "bf16", {}, None),
        ("dual_gpu_nccl", "fp16", {}, None),
        ("cpu", "bf16", {}, None),
        ("single_gpu", "no", {}, "under autocast"),
        ("single_gpu", "bf16", {"lora": None}, "no lora"),
        ("single_gpu", "bf16", {"lora": {"lora_dropout": 0.1}}, "dropout"),
        ("single_gpu", "bf16", {"lora": {"use_dora": True}}, "DoRA"),
        ("single_gpu", "bf16", {"training": {"torch_compile": True}}, "torch.compile"),
        ("fsdp2", "bf16", {}, "fsdp2 casts"),
        ("deepspeed_zero2", "bf16", {}, "deepspeed casts"),
    ],
)
def test_adapters_are_fused_where_they_compute_in_16_bits(mode, precision, sections, words):
    recipe = recipe_of(**{"lora": {"r": 4}, **sections})
    reason = kernels.no_fused_adapters(recipe, LAUNCH_MODES[mode], precision)
    assert (words in reason) if words else reason is None
    assert kernels.fused_adapters(recipe, LAUNCH_MODES[mode], precision) is (reason is None)


def test_fused_adapters_that_cannot_be_are_refused():
    asked = {"r": 4, "fused_adapters": True}
    with pytest.raises(ConfigError, match=r"fused_adapters: true, but .*autocast.*; leave it out"):
        plan(recipe_of(lora=asked))
    with pytest.raises(ConfigError, match=r"fused_adapters: true, but .*DoRA"):
        plan(recipe_of(lora={**asked, "use_dora": True}, training=HALF))
    fused, plain = (
        plan(recipe_of(lora={"r": 4, "fused_adapters": value}, training=HALF))
        for value in (None, False)
    )
    assert fused.strategy.levers.fused_adapters
    assert not plain.strategy.levers.fused_adapters
    assert row(plain, "adapters") == ("beside their layers", "asked for")


@pytest.mark.parametrize(
    ("mode", "cards", "sections", "words"),
    [
        ("single_gpu", (gpu(),), {}, None),
        ("dual_gpu_nccl", (gpu(), gpu()), {}, None),
        ("cpu", (), {}, "no kernel"),
        ("single_gpu", (gpu(),), {"training": {"torch_compile": True}}, "torch.compile"),
        ("single_gpu", (gpu(),), {"training": {"kernels": "eager"}}, "kernels: eager"),
        ("fsdp2", (gpu(), gpu()), {}, "not been tested with fsdp2"),
    ],
)
def test_rms_norms_are_fused_on_gpus(mode, cards, sections, words):
    llama = model_of({"model_type": "llama"}, has_rms_norms=True)
    facts = recipe_of(**sections), llama, LAUNCH_MODES[mode], cards
    reason = kernels.no_fused_norms(*facts)
    assert (words in reason) if words else reason is None
    assert kernels.fused_norms(*facts) is (reason is None)
    if words is None:
        assert kernels.no_fused_norms(*facts, has_liger=True) == "Liger has its own"


def test_norms_that_cannot_be_fused_are_those_of_transformers_and_asked_for_refused():
    gpt2, mode, card = model_of({"model_type": "gpt2"}), LAUNCH_MODES["single_gpu"], (gpu(),)
    assert kernels.no_fused_norms(recipe_of(), gpt2, mode, card) == "gpt2 has other norms"
    asked = recipe_of(training={"fused_norms": True})
    with pytest.raises(ConfigError, match=r"fused_norms: true, but gpt2 has other norms; leave"):
        kernels.fused_norms(asked, gpt2, mode, card)


def test_rows_that_follow_one_another_are_hardly_padded():
    from launch.predict.time import padding

    counts = {
        "lengths": [[10, 10], [400, 400]] * 8,
        "rows": 16,
        "tokens": 16 * 205,
        "longest_input": 400,
    }
    recipe = recipe_of(training=HALF)
    share = {
        attention: padding.compute(counts, chosen.strategy, 8, recipe.data, (400, 400)).share
        for attention, given in (
            ("sdpa", GONE),
            ("flash_attention_2", THERE),
            ("varlen_attn", TORCH),
        )
        if (chosen := plan(recipe, machine(1), **given)).strategy.levers.attn_implementation
        == attention
    }
    assert share["varlen_attn"] == share["flash_attention_2"] < 0.01 < 0.4 < share["sdpa"]


# ---- TF32


def test_tf32_is_off_unless_asked_for_and_a_float32_plan_says_what_it_would_give():
    a100 = replace(
        gpu(architecture="8.0", total_bytes=40 << 30, free_bytes=39 << 30),
        name="NVIDIA A100-SXM4-40GB",
    )
    runs, why = row(plan(recipe_of(), machine(cards=(a100,))), "tf32")
    assert runs == "off"
    assert (
        why
        == "not asked for; --training.tf32=true: products with 10 bits of mantissa, up to 8 x as"
        " fast"
    )
    assert "no faster than float32" in row(plan(recipe_of(), machine(1)), "tf32")[1]
    assert "tf32" not in [one.name for one in plan(recipe_of(training=HALF), machine(1)).switches]
    assert row(plan(recipe_of(), machine(cards=(gpu(architecture="7.5"),))), "tf32") == (
        "off",
        "RTX 3080 (7.5) has no TF32",
    )
    assert row(plan(recipe_of(training={"tf32": False}), machine(1)), "tf32") == (
        "off",
        "asked for",
    )
    on = plan(recipe_of(training={"tf32": True}), machine(1))
    assert on.strategy.tf32
    assert row(on, "tf32") == ("on", "asked for: float32 products have 10 bits of mantissa")
    both = plan(recipe_of(training={"tf32": True, **HALF}), machine(1))
    assert row(both, "tf32")[1].endswith("under bf16 few are left")


def test_tf32_on_a_cpu_is_refused():
    with pytest.raises(ConfigError, match="a CPU has no TF32; drop it"):
        plan(recipe_of(training={"tf32": True}))


FLAGS = """
import json
from launch.base import modules
modules.leave_out(modules.OPTIONAL)
import torch
from tests.builders import machine, plan, recipe_of
from training.loop import arguments

flags = [torch.backends.cuda.matmul.allow_tf32]
for asked in (True, False):
    recipe = recipe_of(training={"tf32": asked})
    arguments.make_arguments(recipe, plan(recipe, machine(1)), 9, False, {})
    flags.append(torch.backends.cuda.matmul.allow_tf32)
print(json.dumps(flags))
"""


def test_the_flag_is_as_the_plan_says_whatever_a_containers_variable_says():
    """As in NVIDIA's images; with TrainingArguments' own switch alone the variable wins."""
    code = str(Path(__file__).resolve().parents[3])
    variables = {**os.environ, "PYTHONPATH": code, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", FLAGS], env=variables, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [True, True, False]


# ---- Liger


def liger(recipe_sections: dict[str, Any], cards: int = 1, no_liger: str | None = None) -> Plan:
    training = {"use_liger_kernel": True, **recipe_sections.pop("training", {})}
    return plan(recipe_of(training=training, **recipe_sections), machine(cards), no_liger=no_liger)


def test_liger_is_on_where_it_can_run():
    chosen = liger({})
    assert chosen.strategy.levers.use_liger_kernel
    assert row(chosen, "liger") == ("on", "asked for; the loss stays ours")
    off = plan(recipe_of(training={"use_liger_kernel": False}), machine(1), no_liger=None)
    assert row(off, "liger") == ("off", "asked for")
    assert row(plan(recipe_of(), machine(1)), "liger") == (
        "off",
        "whether liger-kernel is installed there is not known",
    )


QLORA = {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}}


def levers_of(sections: dict[str, Any], **given: Any) -> list[Levers]:
    """Those of the candidates of one card, or of two."""
    cards = given.pop("cards", (gpu(),))
    facts = facts_of(recipe_of(**sections), machine(cards=cards), **{"no_liger": None, **given})
    possible, _ = candidates.possible(facts)
    return [each.levers for each in possible if each.launch_mode.is_whole]


@pytest.mark.parametrize(
    ("sections", "given"),
    [
        ({"model": {"shape": "gpt2-tiny"}}, {}),
        ({"training": {"kernels": "eager"}}, {}),
        ({"training": {"torch_compile": True}}, {}),
        ({"training": {"fused_norms": True}}, {}),
        ({"training": {"use_liger_kernel": False}}, {}),
        ({}, {"no_liger": ""}),
        ({}, {"no_liger": "there is no compiler"}),
        ({}, {"cards": (gpu(architecture="7.5"),)}),
        ({}, {"cards": ()}),
    ],
)
def test_a_plan_tries_ligers_kernels_where_nothing_is_against_it(sections, given):
    assert [each.use_liger_kernel for each in levers_of({})] == [False, True]
    assert [each.fused_norms for each in levers_of({})] == [True, False]
    assert {each.use_liger_kernel for each in levers_of(sections, **given)} == {False}


@pytest.mark.parametrize(
    ("mode", "cards", "sections", "no_compiler", "words"),
    [
        ("single_gpu", (gpu(),), {}, None, None),
        ("dual_gpu_nccl", (gpu(), gpu()), {"lora": {"r": 4}}, None, None),
        ("cpu", (), {}, None, "GPUs only"),
        ("single_gpu", (gpu(),), {"training": {"torch_compile": False}}, None, "not asked for"),
        ("single_gpu", (gpu(),), {"training": {"torch_compile": True}}, "no gcc", "no gcc"),
        ("single_gpu", (gpu(),), {"training": {"kernels": "eager"}}, None, "kernels: eager"),
        ("single_gpu", (gpu(),), {"training": {"use_liger_kernel": True}}, None, "other kernels"),
        ("single_gpu", (gpu(),), {"training": {"full_determinism": True}}, None, "determinism"),
        ("single_gpu", (gpu(),), QLORA, None, "4-bit layers"),
        ("single_gpu", (gpu(architecture="7.5"),), {}, None, "from 8.0 on"),
        ("fsdp2", (gpu(), gpu()), {}, None, "not tested with fsdp2"),
        ("single_gpu", (gpu(),), {}, "", "not known"),
        ("single_gpu", (gpu(),), {}, "there is no compiler", "there is no compiler"),
    ],
)
def test_a_plan_may_compile_where_nothing_is_against_it(mode, cards, sections, no_compiler, words):
    family = model_of({"model_type": "llama"}).family
    recipe = recipe_of(**sections)
    machine_facts = LAUNCH_MODES[mode], cards, no_compiler
    reason = kernels.no_compile(recipe, family, *machine_facts)
    assert (words in reason) if words else reason is None
    two_stacks = replace(family, is_encoder_decoder=True)
    assert kernels.no_compile(recipe, two_stacks, *machine_facts) is not None


def test_a_plan_says_that_4_bit_layers_compile_for_long_where_that_is_asked_for():
    compiled = {"training": {**HALF, "torch_compile": True}}
    for sections, is_said in (({**QLORA, **compiled}, True), (compiled, False)):
        why = row(plan(recipe_of(**sections), machine(1), **THERE), "compile")[1]
        assert why.startswith("asked for: training steps")
        assert why.endswith("4-bit layers of an H200 were not compiled after 130 s") == is_said


def test_a_run_that_goes_on_keeps_its_kernels_unless_a_key_names_others():
    flash = {"training": HALF, "lora": {"r": 4}}, {**THERE, "no_varlen_attn": None}
    new, with_liger = levers_of(flash[0], **flash[1])
    assert (new.attn_implementation, with_liger.use_liger_kernel) == ("flash_attention_2", True)
    for began in (
        with_liger,
        new,
        replace(new, attn_implementation="varlen_attn"),
        replace(new, attn_implementation="sdpa", fused_norms=False, fused_adapters=False),
    ):
        (kept,) = levers_of(flash[0], **flash[1], began_with=began)
        assert replace(kept, logits_at_targets=began.logits_at_targets) == began
        chosen = plan(recipe_of(**flash[0]), machine(1), **flash[1], began_with=began)
        assert row(chosen, "attention") == (began.attn_implementation, "as the run began")
        for name in ("norms", "adapters"):
            assert row(chosen, name)[1] != "asked for"
    typed = {**flash[0], "training": {**HALF, "use_liger_kernel": False}}
    (kept,) = levers_of(typed, **flash[1], began_with=with_liger)
    assert not kept.use_liger_kernel
    without = {**flash[1], "no_flash_attn": "gone"}
    (without_package,) = levers_of(flash[0], **without, began_with=with_liger)
    assert without_package.attn_implementation == "varlen_attn"


def test_eager_kernels_are_those_of_transformers_and_a_key_names_others():
    there = {**THERE, "no_varlen_attn": None}
    eager = {"training": {**HALF, "kernels": "eager"}, "lora": {"r": 4}}
    (levers,) = levers_of(eager, **there)
    assert (levers.attn_implementation, levers.use_liger_kernel) == ("sdpa", False)
    assert not (levers.fused_norms or levers.fused_adapters)
    named = {
        "training": {**eager["training"], "fused_norms": True},
        "lora": {"r": 4, "fused_adapters": True},
        "model": {"attn_implementation": "flash_attention_2"},
    }
    (levers,) = levers_of(named, **there)
    assert levers.attn_implementation == "flash_attention_2"
    assert levers.fused_norms
    assert levers.fused_adapters


@pytest.mark.parametrize(
    ("sections", "cards", "no_liger", "error", "words"),
    [
        ({}, 0, None, ConfigError, "its kernels are for GPUs; leave it out"),
        (
            {"model": {"shape": "gpt2-tiny"}},
            1,
            None,
            ConfigError,
            "liger-kernel has no kernels for a gpt2",
        ),
        (
            {},
            1,
            "liger_kernel is gone",
            ResourceError,
            "true, but liger_kernel is gone; or leave it out",
        ),
        (
            {"training": {"liger_kernel_config": {"fused_linear_cross_entropy": True}}},
            1,
            None,
            ConfigError,
            "fused_linear_cross_entropy: true, but the loss is not the model's here",
        ),
        (
            {"training": {"liger_kernel_config": {"rope": False, "geglu": True}}},
            1,
            None,
            ConfigError,
            "geglu, but liger-kernel's kernels for a llama are rope, rms_norm, swiglu; leave it",
        ),
    ],
)
def test_liger_that_cannot_run_is_refused_with_the_reason(sections, cards, no_liger, error, words):
    with pytest.raises(error, match=words):
        liger(dict(sections), cards, no_liger)


# ---- the rows


def test_every_row_is_on_the_screen_of_the_plan():
    recipe = recipe_of(
        training={
            **HALF,
            "activation_checkpointing": True,
            "num_output_chunks": 4,
            "optim": "adamw_bnb_8bit",
        }
    )
    chosen = plan(recipe, machine(1))
    said = "\n".join(plan_lines.full_text(recipe, machine(1), chosen))
    for words in (
        "  kernels    precision  bf16 autocast: training.bf16",
        (
            "             attention  sdpa: PyTorch's own kernels; whether flash_attn is installed"
            " there is not known"
        ),
        "             liger      off: whether liger-kernel is installed there is not known",
        "             loss       logits in 4 parts: asked for",
        (
            "             optimizer  adamw_bnb_8bit: bitsandbytes: states of 8 bits where a tensor"
            " has 4,096 elements"
        ),
        "             recompute  checkpointing: asked for",
        "             compile    off: whether code can be compiled there is not known",
    ):
        assert words in said
    assert row(
        plan(recipe_of(training={"torch_compile": True}), no_compiler="no g++"), "compile"
    ) == (
        "off",
        "no g++",
    )
    old = plan(recipe_of(training=HALF), machine(cards=(gpu(architecture="7.5"),)))
    assert row(old, "precision") == ("fp16 autocast", "training.bf16, which the card lacks")


def test_the_rows_are_kept_with_the_plan(tmp_path):
    from launch.run_folder.layout import RunDir

    chosen = plan(recipe_of(), machine(1))
    run = RunDir(tmp_path)
    run.write_plan(recipe_of(), chosen)
    assert run.read_plan().switches == chosen.switches


@pytest.mark.parametrize("optim", ["lion_32bit", "paged_adamw_8bit", "rmsprop_bnb"])
def test_bitsandbytes_is_not_left_out_where_its_optimizer_runs(optim):
    assert "bitsandbytes" not in packages.unused(recipe_of(training={"optim": optim}), None)
    assert "bitsandbytes" in packages.unused(recipe_of(), None)


@pytest.mark.parametrize(
    ("package", "sections", "words"),
    [
        (
            "bitsandbytes",
            {"training": {"optim": "adamw_8bit"}},
            "training.optim: adamw_8bit needs the package bitsand",
        ),
        (
            "bitsandbytes",
            {"lora": {}, "quantization": {"load_in_4bit": True}},
            "quantization needs the package bitsand",
        ),
        (
            "peft",
            {"lora": {}},
            "lora needs the package peft, which is not installed; .* -m pip install peft",
        ),
    ],
)
def test_a_package_that_the_recipe_needs_and_that_is_not_there_is_named(
    package, sections, words, monkeypatch
):
    recipe = recipe_of(**sections)
    packages.refuse_missing(recipe)
    monkeypatch.setitem(sys.modules, package, None)  # how Python says that it is not installed
    with pytest.raises(ResourceError, match=words):
        packages.refuse_missing(recipe)
    packages.refuse_missing(recipe_of())
