"""LoRA on weights of 4 bits: the real launch on the CPU, with bitsandbytes' own kernels."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import bitsandbytes
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from launch.predict import parameters
from launch.predict.models import model_config
from launch.run_folder.layout import RunDir
from launch.schema.model_sections import LoraSection, ModelSection, QuantizationSection
from launch.schema.plan import ModelSize
from tests import builders
from tests.train_cpu.test_resume import kill_after
from training.engines import setup
from training.model import build, four_bit

SECTIONS = {"lora": {"r": 4}, "quantization": {"load_in_4bit": True}}
NF4 = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
TARGETS = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def adapter(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[Path, str, str]:
    """(folder, recipe, what was printed) of a run that evaluates and saves on its way."""
    folder = tmp_path_factory.mktemp("finished")
    training = {"num_train_epochs": 8, "save_steps": 5, "eval_steps": 1}
    recipe = str(builders.recipe(folder, training=training, **SECTIONS))
    done = builders.launch(folder / "workspace", "run", recipe, "--explain")
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, recipe, done.stdout


def test_training_learns_and_holds_the_bytes_that_were_predicted(finished):
    folder, _, said = finished
    run = builders.only_run(folder / "workspace")
    losses = [event["loss"] for event in builders.events(run)]
    assert losses[-1] < losses[0] - 0.3
    assert "llama-tiny: 265,536 parameters, 11,264 trainable" in said
    assert "linear weights in 4 bits (nf4), their scales in 8, computed in float32" in said
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    estimate = json.loads((run / "plan.json").read_text())["estimate"]
    assert outcome["weights_bytes"] == estimate["weights_bytes"]
    assert outcome["gradients_bytes"] == estimate["gradients_bytes"]


def test_evaluation_changes_no_weight(finished, tmp_path):
    """Where the CPU has AVX512-BF16, bitsandbytes would repack the weights at the first one, and
    train no further."""
    recipe = builders.recipe(
        tmp_path, training={"num_train_epochs": 8, "save_steps": 5, "eval_steps": 40}, **SECTIONS
    )
    done = builders.launch(tmp_path / "workspace", "run", str(recipe))
    assert done.returncode == 0, done.stderr
    expected, found = adapter(finished[0] / "model/adapter"), adapter(tmp_path / "model/adapter")
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_the_exported_model_is_the_trained_one_of_ordinary_layers(finished):
    """A 4-bit base of the same seed, with the adapter, answers as the merged folder does."""
    folder, _, _ = finished
    exported = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    assert "quantization_config" not in json.loads((folder / "model/config.json").read_text())
    recipe = RunDir(builders.only_run(folder / "workspace")).read_recipe()
    shape = RunDir(builders.only_run(folder / "workspace")).read_plan().shape
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    base = build.build(recipe.model, shape, None, (), tokenizer, recipe.training.seed, NF4)
    whole = build.build(recipe.model, shape, None, (), tokenizer, recipe.training.seed)
    tokens = torch.randint(5, 100, (2, 30))
    with torch.no_grad():
        trained = PeftModel.from_pretrained(base, folder / "model/adapter").eval()(tokens).logits
        unquantised = (
            PeftModel.from_pretrained(whole, folder / "model/adapter").eval()(tokens).logits
        )
        merged = exported(tokens).logits
    torch.testing.assert_close(merged, trained, rtol=1e-4, atol=1e-4)
    assert (unquantised - trained).abs().max() > 1e-2  # the comparison can tell


def test_kill_minus_nine_and_the_same_line_again_give_the_uninterrupted_adapter(finished, tmp_path):
    folder, recipe, _ = finished
    words = ["run", recipe, f"--output_dir={tmp_path / 'model'}"]
    kill_after(tmp_path / "workspace", words, step=13)
    changed = builders.launch(
        tmp_path / "workspace", *words, "--quantization.bnb_4bit_quant_type=fp4"
    )
    assert changed.returncode == 5
    assert "quantization.bnb_4bit_quant_type nf4 -> fp4" in changed.stderr
    off = builders.launch(tmp_path / "workspace", *words, "--quantization.load_in_4bit=false")
    assert off.returncode == 5
    assert "quantization removed" in off.stderr
    again = builders.launch(tmp_path / "workspace", *words)
    assert again.returncode == 0, again.stderr + again.stdout
    assert "resuming from checkpoint-0000" in again.stdout
    expected, found = adapter(folder / "model/adapter"), adapter(tmp_path / "model/adapter")
    assert expected.keys() == found.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def packed_export(finished, tmp_path_factory) -> Path:
    """The export of an adapter that was trained on a folder, with its base in 4 bits."""
    folder = tmp_path_factory.mktemp("packed_export")
    train_on(finished[0] / "model", folder / "whole")
    export = ["export", str(folder / "whole/model"), "--to", "packed"]
    done = builders.launch(folder / "workspace", *export)
    assert done.returncode == 0, done.stderr
    return folder / "whole/model-packed"


def train_on(base: Path, folder: Path) -> dict[str, torch.Tensor]:
    """The adapter that QLoRA trains on a folder."""
    training = {"max_steps": 4, "eval_steps": 2}
    recipe = builders.recipe(folder, training=training, **SECTIONS)
    # of which the stored weights are not: they are rounded before they are packed
    words = ["run", "--explain", str(recipe), f"--model.path={base}", "--model.dtype=bfloat16"]
    done = builders.launch(folder / "workspace", *words)
    assert done.returncode == 0, done.stderr + done.stdout
    return adapter(folder / "model")


def test_a_packed_export_is_its_adapter_on_the_base_of_its_training(packed_export, finished):
    original = packed_export.parent / "model"
    assert (
        packed_export.joinpath("adapter_model.safetensors").read_bytes()
        == (original / "adapter_model.safetensors").read_bytes()
    )
    base = packed_export / "base"
    assert json.loads((packed_export / "adapter_config.json").read_bytes())[
        "base_model_name_or_path"
    ] == str(base)
    stored = builders.weights(base)
    packed = [stored[f"model.layers.0.self_attn.{name}.weight"] for name in ATTENTION]
    assert {weight.dtype for weight in packed} == {torch.uint8}
    in_bf16 = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16")
    packing = AutoModelForCausalLM.from_pretrained(
        finished[0] / "model",
        dtype=torch.bfloat16,
        quantization_config=four_bit.config(in_bf16),
        device_map={"": "cpu"},
    )
    row = torch.arange(12).view(1, 12)
    logits = [
        PeftModel.from_pretrained(model, folder)(input_ids=row).logits
        for model, folder in (
            (packing, original),
            (AutoModelForCausalLM.from_pretrained(base), packed_export),
        )
    ]
    assert torch.equal(*logits)
    again = builders.launch(
        original.parent / "workspace", "export", str(original), "--to", "packed"
    )
    assert again.returncode == 0 and "written already" in again.stdout
    for source, words in (
        (finished[0] / "model/adapter", "was not trained on weights of 4 bits"),
        (packed_export, "has 4 bits already; use both as they are"),
    ):
        out = str(original.parent / "refused")
        refused = builders.launch(
            original.parent / "workspace", "export", str(source), "--to", "packed", "--out", out
        )
        assert refused.returncode == 2 and words in refused.stderr


def test_a_folder_that_is_packed_trains_the_adapter_of_its_original(
    packed_export, finished, tmp_path
):
    original, packed = finished[0] / "model", packed_export / "base"
    before = {path: path.read_bytes() for path in packed.iterdir() if path.is_file()}
    found, expected = train_on(packed, tmp_path / "packed"), adapter(packed_export)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    in_float32 = builders.packed(original, tmp_path / "in_float32")
    assert adapter(packed_export).keys() == train_on(in_float32, tmp_path / "float32").keys()
    assert {path: path.read_bytes() for path in packed.iterdir() if path.is_file()} == before
    exported = tmp_path / "packed/model"
    assert "launch merge FOLDER --base ORIGINAL" in (exported / "README.md").read_text()
    merge = ["merge", str(exported), "--out", str(tmp_path / "merged")]
    refused = builders.launch(tmp_path / "workspace", *merge)
    assert refused.returncode == 2
    assert f"{packed}: holds linear weights of 4 bits" in refused.stderr
    other = shutil.copytree(original, tmp_path / "other")
    weights = {name: -tensor for name, tensor in builders.weights(original).items()}
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    of_float32 = ["merge", str(tmp_path / "float32/model"), *merge[2:], "--base", str(other)]
    wrong = builders.launch(tmp_path / "workspace", *of_float32)
    assert wrong.returncode == 2
    assert f"is not that of {in_float32}, on which the adapter was trained" in wrong.stderr
    done = builders.launch(tmp_path / "workspace", *merge, "--base", str(original))
    assert done.returncode == 0, done.stderr
    assert builders.weights(tmp_path / "merged").keys() == builders.weights(original).keys()
    sys.path.insert(0, str(builders.CODE / "scripts"))
    import chat as script

    loaded, _ = script.load(exported)
    assert len(list(four_bit.layers(loaded))) == 14


@pytest.mark.campaign
def test_two_ranks_train_an_adapter_for_a_local_folder_and_chat_loads_both_in_4_bits(
    finished, tmp_path
):
    base = shutil.copytree(finished[0] / "model", tmp_path / "base")
    before = {name: tensor.clone() for name, tensor in builders.weights(base).items()}
    recipe = builders.recipe(tmp_path, training={"max_steps": 4, "eval_steps": 2}, **SECTIONS)
    words = [
        f"--model.path={base}",
        "--launch.num_processes=2",
        "--model.dtype=bfloat16",
        "--training.bf16=true",
    ]
    done = builders.launch(tmp_path / "workspace", "run", "--explain", str(recipe), *words)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "computed in bfloat16; the rest keeps model.dtype bfloat16" in done.stdout
    run = builders.only_run(tmp_path / "workspace")
    outcome = json.loads((run / "attempts/01/outcome.json").read_text())
    assert (
        outcome["weights_bytes"]
        == json.loads((run / "plan.json").read_text())["estimate"]["weights_bytes"]
    )
    assert not (tmp_path / "model/model.safetensors").exists()
    assert all(torch.equal(tensor, builders.weights(base)[name]) for name, tensor in before.items())
    assert (
        f"to merge it into the full weights of {base}" in (tmp_path / "model/README.md").read_text()
    )
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base), tmp_path / "model"
    )
    assert merged.merge_and_unload().model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    chat = subprocess.run(
        [sys.executable, str(builders.CODE / "scripts/chat.py"), str(tmp_path / "model"), "1: red"],
        env=builders.environment(tmp_path / "workspace"),
        capture_output=True,
        text=True,
    )
    assert chat.returncode == 0, chat.stderr
    sys.path.insert(0, str(builders.CODE / "scripts"))
    import chat as script

    loaded, _ = script.load(tmp_path / "model")
    assert len(list(four_bit.layers(loaded))) == 14
    save_file(
        {name: -tensor for name, tensor in before.items()},
        base / "model.safetensors",
        {"format": "pt"},
    )
    other = builders.launch(tmp_path / "workspace", "run", str(recipe), *words, f"--resume={run}")
    assert other.returncode == 5
    assert "the weights that the adapter is trained for are not the same" in other.stderr
    assert "--resume.allow=[model]" in other.stderr


def test_the_7b_model_of_the_guide_fits_a_16_gib_card_in_4_bits_and_in_16_bits_it_does_not(
    tmp_path,
):
    """LoRA of rank 32, 4 x 256 tokens, checkpointing, logits whole: the guide puts 4 bits near the
    end."""
    training = {
        "per_device_train_batch_size": 4,
        "bf16": True,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"offload": False},  # by 2 MiB it would fit
        "num_output_chunks": 1,
        "streamed_layers": 0,  # so it would fit too
    }
    sections = {"model": {"dtype": "bfloat16"}, "data": {"max_length": 256}, "lora": {"r": 32}}
    recipe = builders.recipe(tmp_path, shape="llama-7b", training=training, **sections)
    on = ["--machine", str(builders.CODE / "configs/machines/a5000-16g.yaml")]
    words = [
        "plan",
        "--explain",
        str(recipe),
        *on,
        "--launch.mode=single_gpu",
        "--launch.exact_batch=true",
    ]
    # segments that grow would save the half GiB that is missing
    fixed = {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    refused = builders.launch(tmp_path / "workspace", *words, **fixed)
    assert refused.returncode == 3
    keys = "activation_checkpointing_kwargs", "num_output_chunks", "streamed_layers"
    without = " ".join(rf"training\.{key}" for key in keys)
    assert re.search(
        rf"  without {without} \(single_gpu, \d+\.\d+ GiB, at most .* a step\)",
        refused.stderr,
    )
    assert re.search(r"checkpointing: short by .* on the card: 15\.", refused.stderr)
    assert "--quantization.load_in_4bit=true (single_gpu, 6." in refused.stderr
    in_4_bits = "--quantization.load_in_4bit=true"
    taken = builders.launch(tmp_path / "workspace", *words, in_4_bits, **fixed)
    assert taken.returncode == 0, taken.stderr
    assert re.search(
        r"memory +6\.\d\d GiB predicted of 14\.72 GiB per .*\n +peak 5\.\d\d GiB in backward",
        taken.stdout,
    )
    as_prepared_by_peft = [in_4_bits, "--model.dtype=float32"]
    wide = builders.launch(tmp_path / "workspace", *words, *as_prepared_by_peft, **fixed)
    beside_float32 = r"memory +[78]\.\d\d GiB predicted of 14\.72 GiB per .*\n +peak 6\."
    assert re.search(beside_float32, wide.stdout), wide.stderr


@pytest.mark.parametrize("double", [True, False])
def test_what_the_product_is_made_of_gives_what_the_product_gives(double):
    """The decomposition that a trace for CUDA counts, on real numbers."""
    layer = bitsandbytes.nn.Linear4bit(96, 40, True, torch.float32, double, "nf4").to("cpu")
    state, inputs = layer.weight.quant_state, torch.randn(3, 5, 96)
    outer = state.state2.absmax if double else state.absmax
    nested = {}
    if double:
        nested = {
            "absmax_8bit": state.absmax,
            "absmax_code": state.state2.code,
            "absmax_offset": state.offset,
        }
    operands = (inputs, layer.weight.data, list(state.shape), outer, 64, "nf4")
    expected = torch.ops.bitsandbytes.gemm_4bit.default(*operands, layer.bias.data, **nested)
    (decomposed,) = four_bit.decompositions(on_cuda=True).values()
    assert torch.equal(decomposed(*operands, layer.bias.data, **nested), expected)


@pytest.mark.parametrize("shape", ["llama-tiny", "gpt2-tiny", "t5-tiny", "qwen2"])
def test_a_shape_is_quantised_where_a_folder_is_and_merges_back_to_its_own_layers(shape, tmp_path):
    section = ModelSection(shape="llama-tiny" if shape == "qwen2" else shape)
    config, _, family = model_config.read(section, 512, root=builders.CODE, cache=builders.CACHE)
    if shape == "qwen2":
        config = {**config, "model_type": "qwen2"}
    counted = ModelSize(shape, config, 0, 0, family=family)
    torch.manual_seed(0)
    whole = build.from_shape(section, counted)
    whole.save_pretrained(tmp_path / "folder")
    torch.manual_seed(0)
    made = build.from_shape(section, counted, NF4)
    folder = ModelSection(path=str(tmp_path / "folder"))
    loaded = build.from_folder(folder, NF4, torch.device("cpu"))
    expected = dict(made.named_parameters())
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, expected[name]), name
        assert parameter.dtype == expected[name].dtype
        for one, other in zip(
            four_bit.scales(parameter), four_bit.scales(expected[name]), strict=True
        ):
            assert torch.equal(one, other), name
    assert [name for name, _ in four_bit.layers(made)] == [
        name for name, _ in four_bit.layers(loaded)
    ]
    with torch.device("meta"):
        empty = dict(build.from_shape(section, counted, NF4).named_parameters())
    for name, parameter in expected.items():
        found = [(one.shape, one.dtype) for one in (empty[name], *four_bit.scales(empty[name]))]
        assert found == [
            (one.shape, one.dtype) for one in (parameter, *four_bit.scales(parameter))
        ], name
    assert sum(map(setup.numel, made.parameters())) == sum(map(setup.numel, whole.parameters()))
    kind = parameters.FAMILIES[config["model_type"]].linear
    targets = tuple(
        one for one in kind if any(name.endswith(f".{one}") for name, _ in made.named_modules())
    )
    adapted = build.with_lora(made, LoraSection(r=2), targets).eval()  # of T5, wo is not quantised
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(5, 100, (2, 9))
    inputs = {"input_ids": tokens, **({"decoder_input_ids": tokens} if shape == "t5-tiny" else {})}
    with torch.no_grad():
        trained = adapted(**inputs).logits
        merged = four_bit.merged(adapted, torch.float32)
        torch.testing.assert_close(merged(**inputs).logits, trained, rtol=1e-4, atol=1e-4)
    assert {n: type(m) for n, m in merged.named_modules()} == {
        n: type(m) for n, m in whole.named_modules()
    }
    expected_shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    assert {
        name: parameter.shape for name, parameter in merged.named_parameters()
    } == expected_shapes
