"""lora.modules_to_save: what is predicted is what PEFT copies, and what PEFT cannot train is
refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from launch.base.errors import ConfigError
from launch.plan import facts as plan_facts
from launch.plan import ways_to_fit
from launch.predict import optimizers, trained_parameters
from launch.predict import parameters as predict_parameters
from launch.schema.model_sections import LoraSection, ModelSection, QuantizationSection
from launch.schema.plan import ModelSize
from tests import builders
from training.compat.transformers_private import Network
from training.model import build, four_bit
from training.model.build import with_lora
from training.trace.model_parts import model_parts

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS = {
    "llama": {"model_type": "llama", **SIZES, **HEADS},
    "tied": {"model_type": "llama", **SIZES, **HEADS, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", **SIZES, **HEADS, "head_dim": 8},
    "gpt2": {"model_type": "gpt2", "vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4},
    "t5": {
        **{"model_type": "t5", "vocab_size": 300, "d_model": 32, "d_kv": 8, "d_ff": 48},
        **{"num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0},
    },
}
TIED = {"tied": ["embed_tokens", "lm_head"], "gpt2": ["wte", "lm_head"]}
CASES = [
    ("llama", ("lm_head",)),
    ("llama", ("embed_tokens", "lm_head")),
    ("llama", ("norm",)),
    ("llama", ("model.norm",)),
    ("llama", ("mlp",)),
    ("llama", ("layers.1", "layers.0.mlp.down_proj")),
    ("tied", ("lm_head",)),
    ("tied", ("embed_tokens",)),
    ("tied", ("embed_tokens", "lm_head")),
    ("qwen3", ("norm",)),
    ("gpt2", ("wte",)),
    ("gpt2", ("lm_head", "ln_f")),
    ("gpt2", ("c_fc", "wpe")),
    ("t5", ("lm_head",)),
    ("t5", ("layer_norm", "wo")),
    ("t5", ("relative_attention_bias",)),
]


def config_of(name: str) -> dict:
    return CONFIGS[name]


def real_model(name: str, dtype: str = "float32") -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(**config_of(name))
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    return family.from_config(config, dtype=getattr(torch, dtype))


def shapes_of(name: str) -> predict_parameters.Shapes:
    return predict_parameters.parameters_by_name(config_of(name))


def targets_of(name: str, lora: LoraSection) -> tuple[str, ...]:
    shapes, kind = shapes_of(name), config_of(name)["model_type"]
    return tuple(
        target
        for target in trained_parameters.lora_targets(
            shapes, lora, predict_parameters.FAMILIES[kind]
        )
        if any(full.endswith(f".{target}.weight") for full in shapes)
    )


def plain_peft(name: str, lora: LoraSection, dtype: str = "float32") -> PeftModel:
    """The model as a user of PEFT makes it."""
    ties = TIED.get(name, ())
    modules = [entry for entry in lora.modules_to_save if entry not in ties]
    named_tie = ties if len(modules) < len(lora.modules_to_save) else ()
    config = LoraConfig(
        r=lora.r,
        use_dora=lora.use_dora,
        target_modules=list(targets_of(name, lora)),
        modules_to_save=[*modules, *named_tie],
        ensure_weight_tying=bool(named_tie),
    )
    return get_peft_model(real_model(name, dtype), config)


def batch(name: str) -> dict[str, torch.Tensor]:
    ids = torch.arange(10, 34).reshape(3, 8)
    return {"input_ids": ids, "labels": ids}


def trained_of(network: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: part for name, part in network.named_parameters() if part.requires_grad}


@pytest.mark.parametrize("use_dora", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("name", "modules"), CASES)
def test_copies_and_states_are_those_of_peft(name, modules, dtype, use_dora):
    lora = LoraSection(r=4, modules_to_save=modules, use_dora=use_dora)
    shapes, kind = shapes_of(name), config_of(name)["model_type"]
    theirs = plain_peft(name, lora, dtype)
    ours = with_lora(real_model(name, dtype), lora, targets_of(name, lora))
    assert {n: (p.shape, p.dtype) for n, p in trained_of(ours).items()} == {
        n: (p.shape, p.dtype) for n, p in trained_of(theirs).items()
    }
    counted = trained_parameters.count(shapes, (), lora, predict_parameters.FAMILIES[kind])
    trainable, total = theirs.get_nb_trainable_parameters()
    assert counted == (total - trainable, trainable, trainable)
    predicted = trained_parameters.trainable_shapes(
        shapes, (), lora, predict_parameters.FAMILIES[kind]
    )
    real = {
        part.replace("base_model.model.", "").replace(".default", ""): tensor
        for part, tensor in trained_of(theirs).items()
    }
    assert predicted.keys() == real.keys()
    for part in filter(lambda part: "lora_" not in part, predicted):
        assert predicted[part] == real[part].shape  # of adapters on a Conv1D the sum is the same
    estimate = optimizers.model_state(
        shapes, (), lora, predict_parameters.FAMILIES[kind], "adamw_torch", dtype
    )
    trained = list(trained_of(ours).values())
    assert estimate.weights_bytes == sum(part.nbytes for part in ours.parameters())
    ours(**batch(name)).loss.backward()
    optimizer = torch.optim.AdamW(trained)
    optimizer.step()
    assert estimate.gradients_bytes == sum(part.grad.nbytes for part in trained)  # every one
    states = [value for state in optimizer.state.values() for value in state.values()]
    assert estimate.optimizer_bytes == sum(value.nbytes for value in states if value.ndim)


@pytest.mark.parametrize("optim", ["adamw_bnb_8bit", "adafactor", "lion_8bit"])
@pytest.mark.parametrize(
    ("name", "modules"), [("llama", ("lm_head",)), ("tied", ("lm_head",)), ("gpt2", ("wpe", "mlp"))]
)
def test_states_of_other_optimizers_are_those_that_the_trainer_makes(name, modules, optim):
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.optim import GlobalOptimManager
    from transformers import Trainer, TrainingArguments

    GlobalOptimManager.get_instance().initialize()
    lora = LoraSection(r=4, modules_to_save=modules)
    network = with_lora(real_model(name), lora, targets_of(name, lora))
    args = TrainingArguments(output_dir="unused", optim=optim, use_cpu=True, report_to=[])
    optimizer = Trainer(model=network, args=args).create_optimizer()
    for part in trained_of(network).values():
        part.grad = torch.full_like(part, 1e-3)
    optimizer.step()
    tensors = {
        value.data_ptr(): value.nbytes
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.ndim
    }
    kind = config_of(name)["model_type"]
    estimate = optimizers.model_state(
        shapes_of(name), (), lora, predict_parameters.FAMILIES[kind], optim, "float32"
    )
    assert estimate.optimizer_bytes == sum(tensors.values())


@pytest.mark.parametrize(
    ("name", "modules"),
    [("llama", ("lm_head", "norm")), ("tied", ("embed_tokens",)), ("t5", ("lm_head", "wo"))],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_qlora_holds_copies_of_what_is_not_in_4_bits(name, modules, dtype):
    section = QuantizationSection(load_in_4bit=True, bnb_4bit_compute_dtype=dtype)
    lora, config = LoraSection(r=4, modules_to_save=modules), config_of(name)
    model = ModelSection(shape="any", dtype=dtype)
    made = build.from_shape(model, ModelSize("any", config, 0, 0), section)
    network = build.prepare_to_train(made, model, lora, targets_of(name, lora))
    estimate = optimizers.model_state(
        shapes_of(name),
        (),
        lora,
        predict_parameters.FAMILIES[config["model_type"]],
        "adamw_torch",
        dtype,
        section,
    )
    tensors = [each for part in network.parameters() for each in (part, *four_bit.scales(part))]
    assert estimate.weights_bytes == sum(each.untyped_storage().nbytes() for each in tensors)
    trained = trained_of(network).values()
    assert estimate.gradients_bytes == sum(part.nbytes for part in trained)


@pytest.mark.parametrize("modules", [("down_proj",), ("mlp",), ("layers.1",)])
def test_a_copy_of_4_bit_weights_is_refused_and_no_way_to_fit(modules):
    lora = {"r": 4, "modules_to_save": list(modules)}
    four_bits = {"quantization": {"load_in_4bit": True}}
    recipe = builders.recipe_of(model={"shape": "llama-tiny"}, lora=lora, **four_bits)
    with pytest.raises(ConfigError, match="its linear weights have 4 bits, and no gradients"):
        builders.plan(recipe)
    recipe = builders.recipe_of(model={"shape": "llama-tiny"}, lora=lora, allow=["quantization"])
    assert (
        list(
            ways_to_fit.relaxations(
                recipe,
                shapes_of("llama"),
                predict_parameters.FAMILIES["llama"],
                True,
                "auto",
            )
        )
        == []
    )


@pytest.mark.parametrize(("name", "modules"), CASES)
def test_a_saved_adapter_loads_in_plain_peft_and_merges(name, modules, tmp_path):
    base = real_model(name)
    base.save_pretrained(tmp_path / "base")
    lora = LoraSection(r=4, modules_to_save=modules)
    network: Network = with_lora(base, lora, targets_of(name, lora))
    optimizer = torch.optim.SGD(trained_of(network).values(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        network(**batch(name)).loss.backward()
        optimizer.step()
    network.eval().save_pretrained(tmp_path / "adapter")
    recipe = builders.recipe_of().model_copy(update={"lora": lora})
    counted = plan_facts.model_size(
        recipe, config_of(name), shapes_of(name), predict_parameters.family(config_of(name))
    )
    written = load_file(tmp_path / "adapter/adapter_model.safetensors").values()
    assert sum(part.nbytes for part in written) == counted.lora_bytes + counted.tied_copy_bytes
    with torch.no_grad():
        expected = network(**batch(name)).logits
        family = type(real_model(name))
        plain = family.from_pretrained(tmp_path / "base")
        assert not torch.allclose(expected, plain(**batch(name)).logits, atol=1e-3)
        loaded = PeftModel.from_pretrained(plain, tmp_path / "adapter").eval()
        assert torch.equal(expected, loaded(**batch(name)).logits)
        loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
        merged = family.from_pretrained(tmp_path / "merged").eval()
        assert torch.allclose(expected, merged(**batch(name)).logits, atol=1e-4)


# ---- refused
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "section", "message"),
    [
        (
            "llama",
            {"modules_to_save": "lm_haed"},
            "'lm_haed' matches no module .* nearest: lm_head",
        ),
        ("gpt2", {"modules_to_save": "embed_tokens"}, "'embed_tokens' matches no module"),
        ("llama", {"modules_to_save": "layers"}, "model.layers, a list of layers"),
        ("llama", {"modules_to_save": "proj"}, "'proj' also matches .*q_proj, because peft"),
        ("llama", {"modules_to_save": "lp"}, "'lp' also matches model.layers.0.mlp, .*gate_proj"),
        ("llama", {"modules_to_save": "model"}, "model leaves no layer for an adapter"),
        ("llama", {"modules_to_save": ["mlp", "down_proj"]}, r"down_proj \(down_proj\) is part of"),
        (
            "llama",
            {"modules_to_save": "v_proj", "target_modules": ["q_proj", "v_proj"]},
            "lora.target_modules: 'v_proj' would get no adapter",
        ),
        (
            "llama",
            {"modules_to_save": "mlp", "target_modules": ["q_proj", "up_proj"]},
            "lora.target_modules: 'up_proj' would get no adapter",
        ),
        ("t5", {"modules_to_save": "shared"}, "the encoder and decoder of t5 share"),
        (
            "t5",
            {"modules_to_save": "embed_tokens"},
            "matches encoder.embed_tokens, but the encoder",
        ),
        ("t5", {"modules_to_save": "decoder"}, "matches decoder, but the encoder"),
        (
            "tied",
            {"modules_to_save": "lm_head", "trainable_token_indices": [3]},
            "trains every row of model.embed_tokens; leave one of the two out",
        ),
        (
            "t5",
            {"modules_to_save": "lm_head", "trainable_token_indices": [3]},
            "lm_head of an encoder-decoder cannot be trained beside added tokens",
        ),
    ],
)
def test_modules_that_cannot_be_copied_are_refused(name, section, message):
    lora = LoraSection(r=4, **section)
    with pytest.raises(ConfigError, match=message):
        trained_parameters.count(
            shapes_of(name), (), lora, predict_parameters.FAMILIES[config_of(name)["model_type"]]
        )


def test_a_module_is_not_frozen_and_trained():
    with pytest.raises(ConfigError, match=r"model.freeze freezes lm_head, which lora.modules_to"):
        lora = LoraSection(r=4, modules_to_save=("lm_head",))
        trained_parameters.count(
            shapes_of("llama"),
            ("lm_head",),
            lora,
            predict_parameters.FAMILIES["llama"],
        )


def test_half_precision_copies_are_not_trained_under_fp16_autocast():
    recipe = builders.recipe_of(
        model={"shape": "llama-tiny", "dtype": "float16"},
        lora={"r": 4, "modules_to_save": ["lm_head"]},
        training={"fp16": True},
        launch={"mode": "single_gpu"},
    )
    with pytest.raises(ConfigError, match=r"cannot train model.dtype float16 beside fp16 autocast"):
        builders.plan(recipe, builders.machine(1))


# ---- together with trained rows, and in the plan
# ---------------------------------------------------------------------------


def test_rows_are_trained_only_of_embeddings_that_are_not_copied():
    lora = LoraSection(r=4, modules_to_save=("embed_tokens",), trainable_token_indices=(3, 5))
    network = with_lora(real_model("llama"), lora, targets_of("llama", lora))
    names = [name for name in trained_of(network) if "lora_" not in name]
    assert [name.removeprefix("base_model.model.") for name in names] == [
        "model.embed_tokens.modules_to_save.default.weight",
        "lm_head.token_adapter.trainable_tokens_delta.default",
    ]
    counted = trained_parameters.count(
        shapes_of("llama"),
        (),
        lora,
        predict_parameters.FAMILIES["llama"],
    )
    assert counted[1] == sum(part.numel() for part in trained_of(network).values())


@pytest.mark.parametrize(
    ("name", "modules", "notes"),
    [
        ("llama", (), []),
        ("llama", ("norm",), ["input_layernorm (2 modules), post_attention_layernorm (2 modules)"]),
        ("tied", ("lm_head",), ["all weights of embed_tokens are", "one copy is trained as both"]),
        ("t5", ("lm_head",), ["weights of lm_head are", "lm_head is no longer tied"]),
    ],
)
def test_the_plan_names_the_modules(name, modules, notes):
    lora = LoraSection(r=4, modules_to_save=modules)
    recipe = builders.recipe_of().model_copy(update={"lora": lora})
    model_type = config_of(name)["model_type"]
    family = predict_parameters.FAMILIES[model_type]
    lines = [*plan_facts.copied_modules(recipe, shapes_of(name), family)]
    assert len(lines) == len(notes)
    assert all(note in line for note, line in zip(notes, lines, strict=True))


def test_the_plan_refuses_an_adapter_that_no_part_of_an_encoder_decoder_would_use():
    recipe = builders.recipe_of().model_copy(
        update={"lora": LoraSection(r=4, target_modules=("q", "shared"))}
    )
    family = predict_parameters.FAMILIES["t5"]
    with pytest.raises(ConfigError, match=r"^lora.target_modules: 'shared' .* of t5 share"):
        plan_facts.select_lora_targets(recipe, family, shapes_of("t5"))


def test_a_family_that_is_known_by_its_weights_keeps_its_tie():
    config = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    config |= {"vocab_size": 300, "num_hidden_layers": 2, "num_key_value_heads": 2}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gemma2", **config))
    shapes = {name: tuple(part.shape) for name, part in model.named_parameters()}
    lora = LoraSection(r=4, modules_to_save=("lm_head",))
    family = model_parts(model.config.to_dict()).family
    targets = trained_parameters.lora_targets(shapes, lora, family)
    trained = trained_of(with_lora(model, lora, targets))
    counted = trained_parameters.count(shapes, (), lora, family)
    assert counted[1] == sum(part.numel() for part in trained.values())
    assert [name for name in trained if "lora_" not in name] == [
        "base_model.model.model.embed_tokens.modules_to_save.default.weight"
    ]


def test_the_plan_refuses_a_wrong_name(tmp_path: Path):
    done = builders.launch(
        tmp_path, "plan", "lora_sft", "--lora.modules_to_save=[lm_haed]", "--model.shape=llama-tiny"
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "lora.modules_to_save: 'lm_haed' matches no module" in done.stderr
