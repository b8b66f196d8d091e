"""What predict counts is what transformers, PEFT and the optimizers really allocate."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)
from transformers.training_args import OptimizerNames

from launch.base.errors import ConfigError
from launch.predict import optimizers, trained_parameters
from launch.predict import parameters as predict_parameters
from launch.predict.models import model_families
from launch.schema.model_sections import LoraSection, ModelSection, QuantizationSection
from launch.schema.plan import ModelFamily, ModelSize
from launch.schema.training_section import Optimizer
from training.model import build, four_bit
from training.trace.model_parts import model_parts

pytestmark = pytest.mark.unit

MODELS = Path(__file__).parents[3] / "configs" / "models"
NAMES = sorted(file.stem for file in MODELS.glob("*.yaml"))
TINY = ["t5-tiny", "gpt2-tiny", "llama-tiny"]
HAS_BNB = importlib.util.find_spec("bitsandbytes") is not None


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors gain nothing from threads, which wait for each other where the machine is
    busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config_of(name: str) -> dict:
    return yaml.safe_load((MODELS / f"{name}.yaml").read_text(encoding="utf-8"))


def real_model(config: dict, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    real_config = AutoConfig.for_model(**config)
    family = AutoModelForSeq2SeqLM if real_config.is_encoder_decoder else AutoModelForCausalLM
    return family.from_config(real_config, dtype=dtype)


def meta_model(config: dict) -> PreTrainedModel:
    """The real model without the bytes of its weights."""
    with torch.device("meta"):
        return real_model(config)


def real_shapes(config: dict) -> list[tuple[str, tuple[int, ...]]]:
    return [
        (name, tuple(parameter.shape)) for name, parameter in meta_model(config).named_parameters()
    ]


# ---- names and shapes
# ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_named_shape_has_the_parameters_of_the_real_model(name):
    config = config_of(name)
    assert list(predict_parameters.parameters_by_name(config).items()) == real_shapes(config)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("t5-chatlm-0.2b", 187_692_288),
        ("t5-tiny", 361_472),
        ("gpt2-tiny", 30_142_848),
        ("gpt2-small", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("minigpt-medium", 58_491_392),
        ("llama-tiny", 254_272),
        ("llama-7b", 6_738_415_616),
        ("qwen2-0.5b", 494_032_768),
    ],
)
def test_named_shapes_have_the_published_sizes(name, parameters):
    config = config_of(name)
    assert (
        trained_parameters.count(
            predict_parameters.parameters_by_name(config),
            (),
            None,
            predict_parameters.FAMILIES[config["model_type"]],
        )[0]
        == parameters
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_comment_of_a_named_shape_states_its_exact_size(name):
    config = config_of(name)
    parameters = trained_parameters.count(
        predict_parameters.parameters_by_name(config),
        (),
        None,
        predict_parameters.FAMILIES[config["model_type"]],
    )[0]
    assert f"# {parameters:,} parameters at vocabulary {config['vocab_size']:,}." in (
        MODELS / f"{name}.yaml"
    ).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_every_key_of_a_named_shape_is_one_that_transformers_knows(name):
    config = config_of(name)
    known = AutoConfig.for_model(config["model_type"]).to_dict() | {
        "rope_theta": 0,
        "decoder_start_token_id": 0,
    }
    assert set(config) <= set(known) | {"tie_word_embeddings"}
    assert not {"pad_token_id", "eos_token_id", "bos_token_id"} & set(config)


@pytest.mark.parametrize("model_type", sorted(predict_parameters.FAMILIES))
def test_a_key_that_is_left_out_has_transformers_default(model_type):
    config = {"model_type": model_type}
    assert list(predict_parameters.parameters_by_name(config).items()) == real_shapes(config)


SMALL = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
}
SMALL_T5 = {
    "model_type": "t5",
    "vocab_size": 100,
    "d_model": 48,
    "d_ff": 80,
    "d_kv": 7,
    "num_heads": 3,
    "num_layers": 2,
}


@pytest.mark.parametrize(
    "config",
    [
        SMALL_T5,
        SMALL_T5 | {"feed_forward_proj": "gated-gelu", "num_decoder_layers": 3},
        SMALL_T5 | {"feed_forward_proj": "gated-silu", "tie_word_embeddings": False},
        SMALL_T5 | {"relative_attention_num_buckets": 16, "num_decoder_layers": 1},
        {
            "model_type": "t5",
            "vocab_size": 100,
            "hidden_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        {
            "model_type": "gpt2",
            "vocab_size": 100,
            "n_embd": 48,
            "n_layer": 2,
            "n_head": 4,
            "n_inner": 50,
        },
        {
            "model_type": "gpt2",
            "vocab_size": 100,
            "n_embd": 48,
            "n_layer": 1,
            "n_head": 4,
            "tie_word_embeddings": False,
        },
        {"model_type": "gpt2"} | SMALL | {"max_position_embeddings": 77},
        {"model_type": "llama"} | SMALL,
        {"model_type": "llama"}
        | SMALL
        | {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
        {"model_type": "llama"} | SMALL | {"head_dim": 10, "tie_word_embeddings": True},
        {"model_type": "mistral"} | SMALL | {"num_key_value_heads": 3},
        {"model_type": "mistral"} | SMALL | {"num_key_value_heads": 2, "head_dim": 12},
        {"model_type": "qwen2"} | SMALL | {"num_key_value_heads": 2},
        {"model_type": "qwen2"}
        | SMALL
        | {"num_key_value_heads": None, "tie_word_embeddings": True},
        {"model_type": "qwen3"} | SMALL | {"num_key_value_heads": 2},
        {"model_type": "qwen3"}
        | SMALL
        | {"num_key_value_heads": 6, "head_dim": 16, "attention_bias": True},
    ],
    ids=str,
)
def test_variants_of_an_architecture_have_the_parameters_of_the_real_model(config):
    assert list(predict_parameters.parameters_by_name(config).items()) == real_shapes(config)


def test_an_unknown_model_type_says_what_is_known():
    with pytest.raises(
        ConfigError, match=r"'mamba'.*known: gpt2, llama, mistral, qwen2, qwen3, t5"
    ):
        predict_parameters.parameters_by_name({"model_type": "mamba"})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"model_type": "llama", "hidden_size": "4096"},
            r"hidden_size is '4096'; it must be a whole number above 0",
        ),
        ({"model_type": "llama", "num_hidden_layers": 0}, r"num_hidden_layers is 0"),
        ({"model_type": "llama", "vocab_size": True}, r"vocab_size is True"),
        ({"model_type": "llama", "vocab_size": None}, r"vocab_size is None"),
        (
            {"model_type": "llama", "hidden_size": 100},
            r"hidden_size 100 is not a multiple of num_attention_heads 32",
        ),
        (
            {"model_type": "llama", "num_key_value_heads": 5},
            r"32 is not a multiple of num_key_value_heads 5",
        ),
        ({"model_type": "mistral", "num_key_value_heads": None}, r"num_key_value_heads is None"),
        ({"model_type": "gpt2", "n_embd": 100}, r"n_embd 100 is not a multiple of n_head 12"),
        (
            {"model_type": "gpt2", "tie_word_embeddings": "yes"},
            r"tie_word_embeddings is 'yes'; it must be true or false",
        ),
        (
            {"model_type": "gpt2", "add_cross_attention": True},
            r"add_cross_attention true is not supported",
        ),
        (
            {"model_type": "t5", "feed_forward_proj": "plain-relu"},
            r"feed_forward_proj is 'plain-relu'",
        ),
        (
            {"model_type": "t5", "feed_forward_proj": 3},
            r"feed_forward_proj is 3; it must be a text",
        ),
        ({"model_type": "t5", "hidden_size": -1}, r"d_model is -1"),
        ({}, r"model_type None"),
    ],
    ids=str,
)
def test_a_size_that_is_none_is_named(config, message):
    with pytest.raises(ConfigError, match=message):
        predict_parameters.parameters_by_name(config)


# ---- what trains
# ---------------------------------------------------------------------------


def test_sft_of_the_chinese_t5_trains_its_decoder():
    shapes = predict_parameters.parameters_by_name(config_of("t5-chatlm-0.2b"))
    assert trained_parameters.count(
        shapes, ("shared", "encoder"), None, predict_parameters.FAMILIES["t5"]
    ) == (
        187_692_288,
        94_396_032,
        0,
    )


@pytest.mark.parametrize(
    ("name", "freeze"),
    [
        ("t5-tiny", ("shared", "encoder")),
        ("t5-tiny", ("decoder.block.0", "encoder.final_layer_norm.weight")),
        ("gpt2-tiny", ("transformer.wte", "transformer.h.1")),
        ("llama-tiny", ("model.embed_tokens", "model.layers.0.mlp")),
    ],
)
def test_freezing_leaves_the_parameters_that_it_does_not_name(name, freeze):
    config = config_of(name)
    model = meta_model(config)
    for prefix in freeze:
        if prefix.endswith(".weight"):
            model.get_parameter(prefix).requires_grad_(False)
        else:
            model.get_submodule(prefix).requires_grad_(False)
    trainable = sum(
        parameter.numel() for parameter in model.parameters() if parameter.requires_grad
    )
    counted = trained_parameters.count(
        predict_parameters.parameters_by_name(config),
        freeze,
        None,
        predict_parameters.FAMILIES[config["model_type"]],
    )
    assert counted == (model.num_parameters(), trainable, 0)


def test_a_prefix_freezes_whole_modules_only():
    shapes = predict_parameters.parameters_by_name(
        config_of("gpt2-small")
    )  # h.1 is not h.10 or h.11
    _, trainable, _ = trained_parameters.count(
        shapes, ("transformer.h.1",), None, predict_parameters.FAMILIES["gpt2"]
    )
    assert 124_439_808 - trainable == 7_087_872


@pytest.mark.parametrize(
    ("freeze", "message"),
    [
        ("encoders", r"model.freeze: 'encoders' matches no parameter; nearest: encoder"),
        ("decoder.blok.0", r"nearest: decoder.block.0"),
        ("", r"model.freeze: '' matches no parameter"),
        ("wte", r"there are: shared, encoder, decoder"),
    ],
)
def test_a_frozen_module_that_does_not_exist_is_an_error_with_the_nearest(freeze, message):
    with pytest.raises(ConfigError, match=message):
        trained_parameters.count(
            predict_parameters.parameters_by_name(config_of("t5-tiny")),
            (freeze,),
            None,
            predict_parameters.FAMILIES["t5"],
        )


def test_freezing_everything_is_an_error():
    with pytest.raises(ConfigError, match="leave nothing to train"):
        trained_parameters.count(
            predict_parameters.parameters_by_name(config_of("t5-tiny")),
            ("shared", "encoder", "decoder"),
            None,
            predict_parameters.FAMILIES["t5"],
        )


@pytest.mark.parametrize("r", [1, 8, 16])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        *((name, None) for name in TINY),
        ("t5-tiny", ("q", "v")),
        ("t5-tiny", ("decoder.block.1.layer.1.EncDecAttention.q", "wo")),
        ("gpt2-tiny", ("c_attn",)),
        ("gpt2-tiny", ("attn.c_proj", "wpe")),
        ("llama-tiny", ("q_proj", "self_attn.o_proj")),
        ("llama-tiny", ("embed_tokens",)),
    ],
)
@pytest.mark.parametrize("use_dora", [False, True])
def test_lora_has_the_parameters_that_peft_adds(name, targets, r, use_dora):
    config = config_of(name)
    lora = LoraSection(r=r, target_modules=targets, use_dora=use_dora)
    peft_targets = list(targets or predict_parameters.FAMILIES[config["model_type"]].linear)
    real = get_peft_model(
        meta_model(config), LoraConfig(r=r, target_modules=peft_targets, use_dora=use_dora)
    )
    shapes = predict_parameters.parameters_by_name(config)
    parameters, trainable, lora_parameters = trained_parameters.count(
        shapes, (), lora, predict_parameters.FAMILIES[config["model_type"]]
    )
    real_trainable, real_total = real.get_nb_trainable_parameters()
    assert (parameters + lora_parameters, trainable, lora_parameters) == (
        real_total,
        real_trainable,
        real_trainable,
    )


def test_lora_on_a_gated_t5_and_on_qwen_has_the_parameters_that_peft_adds():
    for config in (
        SMALL_T5 | {"feed_forward_proj": "gated-gelu"},
        {"model_type": "qwen3"} | SMALL | {"num_key_value_heads": 2},
    ):
        targets = predict_parameters.FAMILIES[config["model_type"]].linear
        real = get_peft_model(meta_model(config), LoraConfig(r=4, target_modules=list(targets)))
        counted = trained_parameters.count(
            predict_parameters.parameters_by_name(config),
            (),
            LoraSection(r=4),
            predict_parameters.FAMILIES[config["model_type"]],
        )
        assert counted[2] == real.get_nb_trainable_parameters()[0]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("q_porj", r"'q_porj' matches no linear layer; nearest: .*q_proj"),
        ("norm", r"'norm' matches no linear layer"),
        ("proj", r"'proj' matches no linear layer"),
    ],
)
def test_a_lora_target_that_matches_nothing_is_an_error_with_the_nearest(target, message):
    shapes = predict_parameters.parameters_by_name(config_of("llama-tiny"))
    with pytest.raises(ConfigError, match=message):
        trained_parameters.count(
            shapes,
            (),
            LoraSection(target_modules=("q_proj", target)),
            predict_parameters.FAMILIES["llama"],
        )


SMALL_OTHERS = {
    "opt": {"hidden_size": 32, "ffn_dim": 64, "word_embed_proj_dim": 16, "num_attention_heads": 4},
    "gpt_neox": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
    "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
    "falcon": {"hidden_size": 32, "num_attention_heads": 4},
    "phi3": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "pad_token_id": 0,
    },
    "gemma2": {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4},
}


@pytest.mark.parametrize("model_type", SMALL_OTHERS)
def test_lora_on_a_type_without_a_list_has_the_parameters_of_all_linear_layers(model_type):
    config = {"num_hidden_layers": 2, "vocab_size": 64, **SMALL_OTHERS[model_type]}
    assert_all_linear({"model_type": model_type, **config}, LoraSection(r=4))


@pytest.mark.parametrize("name", TINY)
def test_a_family_that_is_counted_here_is_the_real_models(name):
    family = predict_parameters.family(config_of(name))
    # so many that fewer layers stand for them
    config = {**config_of(name), **dict.fromkeys(family.depth_keys, 6)}
    parts = model_parts(config)
    assert parts.parameters == predict_parameters.parameters_by_name(config)
    assert {*parts.family.linear} <= {*family.linear}  # a T5's are of both kinds of MLP
    assert {*parts.family.quantizable} == {*family.quantizable} & {*parts.family.linear}
    forward = model_families.read_forward(config, Path(), Path())
    assert replace(parts.family, linear=(), quantizable=()) == replace(
        family, linear=(), quantizable=(), forward=forward
    )


@pytest.mark.parametrize("name", TINY)
def test_all_linear_has_the_parameters_that_peft_adds(name):
    assert_all_linear(config_of(name), LoraSection(r=4, target_modules="all-linear"))


def assert_all_linear(config: dict, lora: LoraSection) -> None:
    model, parts = meta_model(config), model_parts(config)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert shapes == parts.parameters
    counted = trained_parameters.count(shapes, (), lora, parts.family)[2]
    targets = trained_parameters.lora_targets(shapes, lora, parts.family)
    real = get_peft_model(
        model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    assert counted == real.get_nb_trainable_parameters()[0]
    named = get_peft_model(meta_model(config), LoraConfig(r=4, target_modules=list(targets)))
    assert counted == named.get_nb_trainable_parameters()[0]


# ---- what the states cost
# ---------------------------------------------------------------------------


def one_step(model: torch.nn.Module, optim: str, folder: Path) -> torch.optim.Optimizer:
    """The optimizer the Trainer makes, after a step with made-up gradients."""
    if HAS_BNB:
        from bitsandbytes.optim import GlobalOptimManager

        # it remembers parameters by id(), also those of dead models
        GlobalOptimManager.get_instance().initialize()
    args = TrainingArguments(output_dir=str(folder), optim=optim, use_cpu=True, report_to=[])
    optimizer = Trainer(model=model, args=args).create_optimizer()
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    return optimizer


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of the state tensors, each storage once; scalars (step counters, Adafactor's RMS) are
    left out."""
    tensors = {
        value.data_ptr(): value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim > 0
    }
    return sum(tensors.values())


def parameter_bytes(model: torch.nn.Module, trainable_only: bool) -> int:
    return sum(p.nbytes for p in model.parameters() if p.requires_grad or not trainable_only)


OPTIMIZERS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            not HAS_BNB and any(word in name for word in ("8bit", "32bit", "bnb")),
            reason="bitsandbytes is not installed",
        ),
    )
    for name in optimizers.OPTIMIZERS
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["t5-tiny", "llama-tiny"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_full_training_states_are_those_of_the_real_optimizer(optim, name, dtype, tmp_path):
    config = config_of(name)
    model = real_model(config, getattr(torch, dtype))
    estimate = optimizers.model_state(
        predict_parameters.parameters_by_name(config),
        (),
        None,
        predict_parameters.FAMILIES[config["model_type"]],
        optim,
        dtype,
    )
    assert estimate.weights_bytes == parameter_bytes(model, trainable_only=False)
    optimizer = one_step(model, optim, tmp_path)
    assert estimate.gradients_bytes == sum(
        p.grad.nbytes for p in model.parameters() if p.grad is not None
    )
    assert estimate.optimizer_bytes == state_bytes(optimizer)
    assert estimate.peak is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_frozen_training_states_are_those_of_the_real_optimizer(optim, dtype, tmp_path):
    config = config_of("t5-tiny")
    model = real_model(config, getattr(torch, dtype))
    for prefix in ("shared", "encoder"):
        model.get_submodule(prefix).requires_grad_(False)
    shapes = predict_parameters.parameters_by_name(config)
    estimate = optimizers.model_state(
        shapes, ("shared", "encoder"), None, predict_parameters.FAMILIES["t5"], optim, dtype
    )
    assert estimate.weights_bytes == parameter_bytes(model, trainable_only=False)
    assert estimate.gradients_bytes == parameter_bytes(model, trainable_only=True)
    assert estimate.optimizer_bytes == state_bytes(one_step(model, optim, tmp_path))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("optim", OPTIMIZERS)
def test_lora_states_are_those_of_the_real_optimizer(optim, name, dtype, tmp_path):
    use_dora = dtype == "bfloat16"  # its vectors are float32 too
    config = config_of(name) | {"vocab_size": 2048}  # GPT-2's own vocabulary is most of its bytes
    targets = list(predict_parameters.FAMILIES[config["model_type"]].linear)
    model = get_peft_model(
        real_model(config, getattr(torch, dtype)),
        LoraConfig(r=16, target_modules=targets, use_dora=use_dora),
    )
    shapes = predict_parameters.parameters_by_name(config)
    estimate = optimizers.model_state(
        *(shapes, (), LoraSection(r=16, use_dora=use_dora)),
        *(predict_parameters.FAMILIES[config["model_type"]], optim, dtype),
    )
    assert estimate.weights_bytes == parameter_bytes(model, trainable_only=False)
    assert estimate.gradients_bytes == parameter_bytes(model, trainable_only=True)
    assert estimate.optimizer_bytes == state_bytes(one_step(model, optim, tmp_path))


def test_every_known_optimizer_is_one_of_the_trainers():
    assert set(optimizers.OPTIMIZERS) <= {name.value for name in OptimizerNames}
    assert tuple(optimizers.OPTIMIZERS) == get_args(Optimizer)


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ("galore_adamw", r"'galore_adamw' is not known; known: adamw_torch, "),
        ("adamw_hf", r"'adamw_hf' is not known"),
        ("adamw_torch_fusd", r"nearest: adamw_torch_fused"),
    ],
)
def test_an_optimizer_whose_states_are_not_known_is_refused(optim, message):
    with pytest.raises(ConfigError, match=message):
        optimizers.model_state(
            predict_parameters.parameters_by_name(config_of("t5-tiny")),
            (),
            None,
            predict_parameters.FAMILIES["t5"],
            optim,
            "float32",
        )


def test_a_7b_model_with_lora_holds_the_figures_worked_out_by_hand():
    shapes = predict_parameters.parameters_by_name(config_of("llama-7b"))
    estimate = optimizers.model_state(
        shapes,
        (),
        LoraSection(r=32),
        predict_parameters.FAMILIES["llama"],
        "adamw_torch_fused",
        "bfloat16",
    )
    lora_parameters = 32 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert estimate.weights_bytes == 2 * 6_738_415_616 + 4 * lora_parameters
    assert estimate.gradients_bytes == 4 * lora_parameters
    assert estimate.optimizer_bytes == 8 * lora_parameters
    assert estimate.model_state_bytes == 2 * 6_738_415_616 + 16 * lora_parameters


# ---- weights of 4 bits
# ---------------------------------------------------------------------------


@pytest.mark.skipif(not HAS_BNB, reason="bitsandbytes is not installed")
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [*TINY, "qwen2", "gated t5", "phi3", "gemma2", "qwen2_moe"])
def test_4_bit_weights_are_those_of_the_real_bitsandbytes(name, dtype, compute, double):
    small = {
        "qwen2": SMALL | {"model_type": "qwen2", "hidden_size": 42, "num_key_value_heads": 3}
    }  # biases; no size is a multiple of 64
    small["gated t5"] = SMALL_T5 | {"feed_forward_proj": "gated-gelu"}
    for kind in ("phi3", "gemma2", "qwen2_moe"):  # a fused matrix, a tied head, experts of 16 bits
        small[kind] = SMALL_OTHERS.get(kind, SMALL) | {
            "model_type": kind,
            "vocab_size": 300,
            "num_hidden_layers": 2,
        }
    config = small[name] if name in small else config_of(name) | {"vocab_size": 300}
    section = QuantizationSection(
        load_in_4bit=True, bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype=compute
    )
    parts = model_parts(config)
    shapes, family = parts.parameters, parts.family
    made = build.prepare_to_train(
        build.from_shape(
            *(ModelSection(shape="any", dtype=dtype), ModelSize("any", config, 0, 0), section),
            attention="eager",  # Gemma 2 has no other
        ),
        ModelSection(shape="any"),
        LoraSection(r=4),
        trained_parameters.lora_targets(shapes, LoraSection(r=4), family),
    )
    held = [tensor for one in made.parameters() for tensor in (one, *four_bit.scales(one))]
    assert len({tensor.untyped_storage().data_ptr() for tensor in held}) == len(held)
    estimate = optimizers.model_state(
        shapes,
        (),
        LoraSection(r=4),
        family,
        "adamw_torch",
        dtype,
        section,
    )
    assert estimate.weights_bytes == sum(tensor.untyped_storage().nbytes() for tensor in held)
    assert estimate.gradients_bytes == parameter_bytes(made, trainable_only=True)


def model_targets(shapes: predict_parameters.Shapes, kind: str) -> tuple[str, ...]:
    return tuple(
        target
        for target in predict_parameters.FAMILIES[kind].linear
        if any(name.endswith(f".{target}.weight") for name in shapes)
    )


def test_a_7b_model_in_4_bits_holds_the_figures_worked_out_by_hand():
    shapes = predict_parameters.parameters_by_name(config_of("llama-7b"))
    section = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype="bfloat16")
    estimate = optimizers.model_state(
        shapes,
        (),
        LoraSection(r=32),
        predict_parameters.FAMILIES["llama"],
        "adamw_torch_fused",
        "bfloat16",
        section,
    )
    linear = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    rest = 6_738_415_616 - linear
    matrices = 32 * 7
    nested = linear // 64 + 4 * (linear // (64 * 256)) + matrices * (1024 + 4 + 64)
    lora_parameters = 32 * 32 * (4 * (4096 + 4096) + 3 * (4096 + 11008))
    assert estimate.weights_bytes == linear // 2 + nested + 2 * rest + 4 * lora_parameters


def test_layers_that_are_not_known_cannot_be_quantised():
    section = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype="float32")
    shapes = {"encoder.query.weight": (8, 8)}
    with pytest.raises(
        ConfigError, match=r"transformers would give 4 bits to no layer of model_type 'bert'"
    ):
        lora = LoraSection(target_modules=("query",))
        bert = ModelFamily("bert", ("query",))
        optimizers.model_state(shapes, (), lora, bert, "adamw_torch", "float32", section)
