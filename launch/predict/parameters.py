"""The parameters of a model, counted from its Hugging Face config alone.

Pure: no file, clock or environment. `Shapes` maps each parameter's name, as named_parameters()
gives it, to its shape; a tied parameter is there once. Holds for transformers 5.23:
tests/unit/predict/test_parameters.py compares with the real models.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from launch.base.errors import ConfigError
from launch.schema.plan import HEAD, ModelFamily

Shape = tuple[int, ...]
Shapes = dict[str, Shape]

_LLAMA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_LLAMA_TIES = {"lm_head.weight": "model.embed_tokens.weight"}
ALL_LINEAR = "all-linear"
# the matrix with a row for each token
EMBEDDING = re.compile(r"(^|\.)(embed_tokens|wte|shared|word_embeddings|embed_in)\.weight$")
# the families that are counted here; a model of another type is built on the meta device
# (launch.predict.models.model_families)
FAMILIES: dict[str, ModelFamily] = {
    "t5": ModelFamily(
        "t5",
        linear=("q", "k", "v", "o", "wi", "wi_0", "wi_1", "wo"),  # wi: relu; wi_0, wi_1: gated
        # T5ForConditionalGeneration._keep_in_fp32_modules names wo
        quantizable=("q", "k", "v", "o", "wi", "wi_0", "wi_1"),
        tied={
            "encoder.embed_tokens.weight": "shared.weight",
            "decoder.embed_tokens.weight": "shared.weight",
            "lm_head.weight": "shared.weight",
        },
        is_encoder_decoder=True,
        depth_keys=("num_layers", "num_decoder_layers"),
    ),
    "gpt2": ModelFamily(
        "gpt2",
        *2 * (("c_attn", "c_proj", "c_fc"),),
        tied={"lm_head.weight": "transformer.wte.weight"},
        has_conv1d=True,
        depth_keys=("n_layer",),
    ),
    **{
        kind: ModelFamily(
            *(kind, _LLAMA_TARGETS, _LLAMA_TARGETS, _LLAMA_TIES), depth_keys=("num_hidden_layers",)
        )
        for kind in ("llama", "mistral", "qwen2", "qwen3")
    },
}
# families whose output head is tied or untied by their config alone; not T5: its config scales the
# head's input too
UNTIED_HEADS = tuple(kind for kind in FAMILIES if kind != "t5")

# The values transformers takes for a key that a config leaves out; only keys that decide names and
# shapes.
_LLAMA_DEFAULTS = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "tie_word_embeddings": False,
}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "t5": {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_decoder_layers": None,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "feed_forward_proj": "relu",
    },
    "gpt2": {
        "vocab_size": 50257,
        "n_positions": 1024,
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_inner": None,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    },
    "llama": _LLAMA_DEFAULTS | {"attention_bias": False, "mlp_bias": False},
    "mistral": _LLAMA_DEFAULTS | {"intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen2": _QWEN_DEFAULTS,
    "qwen3": _QWEN_DEFAULTS | {"head_dim": 128, "attention_bias": False},
}
# transformers' attribute_map: common name -> the type's own
_ALIASES: dict[str, dict[str, str]] = {
    "t5": {
        "hidden_size": "d_model",
        "num_attention_heads": "num_heads",
        "num_hidden_layers": "num_layers",
        "head_dim": "d_kv",
    },
    "gpt2": {
        "hidden_size": "n_embd",
        "max_position_embeddings": "n_positions",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    },
}


# ---- names and shapes
# ---------------------------------------------------------------------------


def parameters_by_name(config: Mapping[str, Any]) -> Shapes:
    """Every parameter of the model that AutoModel builds from `config`, in its order.

    Raises ConfigError for an unknown model_type and for a size that is none.
    """
    model_type = config.get("model_type")
    if model_type not in _DEFAULTS:
        raise ConfigError(
            f"model_type {model_type!r} cannot be counted from its config; known:"
            f" {', '.join(sorted(_DEFAULTS))}"
        )
    builders = {"t5": _t5, "gpt2": _gpt2}
    return builders.get(model_type, _llama)(_values(config, model_type))


def _values(config: Mapping[str, Any], model_type: str) -> dict[str, Any]:
    """The config's values over the defaults, each checked: sizes are whole numbers above 0,
    switches are booleans."""
    aliases = _ALIASES.get(model_type, {})
    values_by_key = dict(config) | {
        aliases[key]: value for key, value in config.items() if key in aliases
    }
    values: dict[str, Any] = {"model_type": model_type}
    for key, default in _DEFAULTS[model_type].items():
        value = values_by_key.get(key, default)
        if isinstance(default, bool):
            right, expected = isinstance(value, bool), "true or false"
        elif isinstance(default, str):
            right, expected = isinstance(value, str), "a text"
        else:
            may_be_none = default is None or (
                key == "num_key_value_heads" and model_type != "mistral"
            )
            right = (value is None and may_be_none) or (type(value) is int and value > 0)
            expected = "a whole number above 0"
        if not right:
            raise ConfigError(f"{model_type} config: {key} is {value!r}; it must be {expected}")
        values[key] = value
    if model_type == "t5" and values["num_decoder_layers"] is None:
        # no alias
        values["num_decoder_layers"] = config.get("num_layers", _DEFAULTS["t5"]["num_layers"])
    return values


def _heads_divide(width_key: str, width: int, heads_key: str, heads: int) -> int:
    if width % heads:
        raise ConfigError(
            f"model config: {width_key} {width} is not a multiple of {heads_key} {heads}; change"
            " one of them"
        )
    return width // heads


def _t5(values: dict[str, Any]) -> Shapes:
    width, inner, feed_forward = (
        values["d_model"],
        values["num_heads"] * values["d_kv"],
        values["d_ff"],
    )
    activation = values["feed_forward_proj"].split("-")
    if len(activation) > 2 or (len(activation) == 2 and activation[0] != "gated"):
        raise ConfigError(
            f"t5 config: feed_forward_proj is {values['feed_forward_proj']!r}; "
            "it must be an activation (relu) or gated-<activation> (gated-gelu)"
        )
    up_names = ("wi_0", "wi_1") if activation[0] == "gated" else ("wi",)
    tensor_shapes: Shapes = {"shared.weight": (values["vocab_size"], width)}

    def attention(layer: str, name: str, has_bias_table: bool) -> Shapes:
        prefix = f"{layer}.{name}"
        table = (values["relative_attention_num_buckets"], values["num_heads"])
        return {
            **{f"{prefix}.{projection}.weight": (inner, width) for projection in ("q", "k", "v")},
            f"{prefix}.o.weight": (width, inner),
            **({f"{prefix}.relative_attention_bias.weight": table} if has_bias_table else {}),
            f"{layer}.layer_norm.weight": (width,),
        }

    for stack, num_layers in (
        ("encoder", values["num_layers"]),
        ("decoder", values["num_decoder_layers"]),
    ):
        for i in range(num_layers):
            layer = f"{stack}.block.{i}.layer"
            tensor_shapes |= attention(f"{layer}.0", "SelfAttention", has_bias_table=i == 0)
            if stack == "decoder":
                tensor_shapes |= attention(f"{layer}.1", "EncDecAttention", has_bias_table=False)
            mlp = f"{layer}.{2 if stack == 'decoder' else 1}"
            ups = {
                f"{mlp}.DenseReluDense.{name}.weight": (feed_forward, width) for name in up_names
            }
            tensor_shapes |= ups | {
                f"{mlp}.DenseReluDense.wo.weight": (width, feed_forward),
                f"{mlp}.layer_norm.weight": (width,),
            }
        tensor_shapes[f"{stack}.final_layer_norm.weight"] = (width,)
    return tensor_shapes  # transformers 5 ties lm_head to shared whatever the config says


def _gpt2(values: dict[str, Any]) -> Shapes:
    width = values["n_embd"]
    inner = 4 * width if values["n_inner"] is None else values["n_inner"]
    _heads_divide("n_embd", width, "n_head", values["n_head"])
    if values["add_cross_attention"]:
        raise ConfigError("gpt2 config: add_cross_attention true is not supported; remove it")
    tensor_shapes: Shapes = {
        "transformer.wte.weight": (values["vocab_size"], width),
        "transformer.wpe.weight": (values["n_positions"], width),
    }

    def with_bias(shapes_by_module: Shapes) -> Shapes:
        return {
            name: dimensions
            for module, shape in shapes_by_module.items()
            for name, dimensions in ((f"{module}.weight", shape), (f"{module}.bias", shape[-1:]))
        }

    for i in range(values["n_layer"]):
        block = f"transformer.h.{i}"
        tensor_shapes |= with_bias(
            {
                f"{block}.ln_1": (width,),
                f"{block}.attn.c_attn": (width, 3 * width),  # Conv1D: (in, out)
                f"{block}.attn.c_proj": (width, width),
                f"{block}.ln_2": (width,),
                f"{block}.mlp.c_fc": (width, inner),
                f"{block}.mlp.c_proj": (inner, width),
            }
        )
    tensor_shapes |= with_bias({"transformer.ln_f": (width,)})
    if not values["tie_word_embeddings"]:
        tensor_shapes["lm_head.weight"] = (values["vocab_size"], width)
    return tensor_shapes


def _llama(values: dict[str, Any]) -> Shapes:
    model_type, width, heads = (
        values[key] for key in ("model_type", "hidden_size", "num_attention_heads")
    )
    head_dim = values["head_dim"]
    # llama refuses such a config even where head_dim is given
    if head_dim is None or model_type == "llama":
        quotient = _heads_divide("hidden_size", width, "num_attention_heads", heads)
        head_dim = head_dim or quotient
    kv_heads = heads if values["num_key_value_heads"] is None else values["num_key_value_heads"]
    _heads_divide("num_attention_heads", heads, "num_key_value_heads", kv_heads)
    attention_bias, mlp_bias = values.get("attention_bias", False), values.get("mlp_bias", False)
    inner, kv_inner, feed_forward = (
        heads * head_dim,
        kv_heads * head_dim,
        values["intermediate_size"],
    )
    tensor_shapes: Shapes = {"model.embed_tokens.weight": (values["vocab_size"], width)}

    def linear(name: str, num_out: int, num_in: int, bias: bool) -> Shapes:
        weight: Shapes = {f"{name}.weight": (num_out, num_in)}
        return weight | {f"{name}.bias": (num_out,)} if bias else weight

    qkv_bias = attention_bias or model_type == "qwen2"
    for i in range(values["num_hidden_layers"]):
        attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        head_norms = ("q_norm", "k_norm") if model_type == "qwen3" else ()
        tensor_shapes |= {
            **linear(f"{attention}.q_proj", inner, width, qkv_bias),
            **linear(f"{attention}.k_proj", kv_inner, width, qkv_bias),
            **linear(f"{attention}.v_proj", kv_inner, width, qkv_bias),
            **linear(f"{attention}.o_proj", width, inner, attention_bias),
            **{f"{attention}.{norm}.weight": (head_dim,) for norm in head_norms},
            **linear(f"{mlp}.gate_proj", feed_forward, width, mlp_bias),
            **linear(f"{mlp}.up_proj", feed_forward, width, mlp_bias),
            **linear(f"{mlp}.down_proj", width, feed_forward, mlp_bias),
            f"model.layers.{i}.input_layernorm.weight": (width,),
            f"model.layers.{i}.post_attention_layernorm.weight": (width,),
        }
    tensor_shapes["model.norm.weight"] = (width,)
    if not values["tie_word_embeddings"]:
        tensor_shapes["lm_head.weight"] = (values["vocab_size"], width)
    return tensor_shapes


# ---- names in them
# ---------------------------------------------------------------------------


def embedding(tensor_shapes: Shapes) -> str:
    """The name of the matrix with a row for each token. Raises ConfigError without one."""
    for name, shape in tensor_shapes.items():
        if len(shape) == 2 and EMBEDDING.search(name):
            return name
    raise ConfigError(
        "the model's weights name no embedding of tokens (embed_tokens, wte, shared, ...), so"
        " tokenizer.add_tokens and lora.trainable_token_indices cannot be used with it"
    )


def of_tokens(tensor_shapes: Shapes) -> frozenset[str]:
    """The parameters with a row for each token: embeddings, and an output head with its bias."""
    rows = tensor_shapes[embedding(tensor_shapes)][:1]
    weights = {name: f"{name.rpartition('.')[0]}.weight" for name in tensor_shapes}
    return frozenset(
        name
        for name, weight in weights.items()
        if tensor_shapes[name][:1] == rows and (EMBEDDING.search(weight) or HEAD.search(weight))
    )


def family(config: Mapping[str, Any]) -> ModelFamily:
    """The family of a config, one of FAMILIES. Transformers 5 ties every T5."""
    of_type = FAMILIES[config["model_type"]]
    is_tied = config.get("tie_word_embeddings", of_type.model_type == "gpt2")
    return of_type if is_tied or of_type.is_encoder_decoder else replace(of_type, tied={})


def ties(tensor_shapes: Shapes, family: ModelFamily) -> dict[str, str]:
    """The parameters that are another parameter under a second name, and that parameter. A head
    that the weights untie is a parameter of its own."""
    return {name: source for name, source in family.tied.items() if name not in tensor_shapes}


def matrix_modules(tensor_shapes: Shapes) -> list[str]:
    """Last names of the modules that hold a matrix: q_proj, down_proj, ..."""
    matrices = (
        name.removesuffix(".weight") for name, shape in tensor_shapes.items() if len(shape) == 2
    )
    return list(dict.fromkeys(name.rpartition(".")[2] for name in matrices))


def modules_of(tensor_shapes: Shapes) -> list[str]:
    """Full names of the modules that hold parameters, also inside others; outermost first."""
    prefixes = dict.fromkeys(
        ".".join(parts[:num_parts])
        for parts in (name.split(".") for name in tensor_shapes)
        for num_parts in range(1, len(parts))
    )
    return sorted(prefixes, key=lambda prefix: prefix.count("."))


def total_elements(tensor_shapes: Shapes) -> int:
    return sum(map(math.prod, tensor_shapes.values()))
