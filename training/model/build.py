"""Make the model that trains: built from a named shape or loaded from a local folder, then frozen
in part or extended with LoRA."""

import json
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.errors import StrictDataclassFieldValidationError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from launch.base.errors import ConfigError, ResourceError
from launch.base.text import cause
from launch.schema.levers import PLAIN, Levers
from launch.schema.model_sections import (
    AttnImplementation,
    LoraSection,
    ModelSection,
    QuantizationSection,
)
from launch.schema.plan import ModelFamily, ModelSize
from training.compat import (
    deepspeed_private,
    levers_private,
    peft_private,
    transformers_private,
)
from training.compat.transformers_private import Network
from training.data import tokenizer as data_tokenizer
from training.data.chat.loss_spans import ConversationRenderer
from training.log import logger
from training.model import four_bit, varlen_attention

# Types whose decoders begin with the padding token where their config says nothing. Source: the
# errors of their own _shift_right.
_PAD_STARTS = ("t5", "longt5", "switch_transformers")
# Types whose own shift of the labels puts their last token first: _set_target_language().
_LABEL_STARTS = ("mbart", "plbart")


def build(
    section: ModelSection,
    model_size: ModelSize,
    lora: LoraSection | None,
    lora_targets: tuple[str, ...],
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    quantization: QuantizationSection | None = None,
    device: torch.device | None = None,
    attention: AttnImplementation = "sdpa",
    keeps_ids: bool = False,
    rows_of: tuple[int, int] | None = None,
    levers: Levers = PLAIN,
    keeps_streamed: bool = True,
) -> Network:
    """The model on the CPU, before training. All ranks get the same weights for the same seed.

    A folder to be quantised (Recipe.quantized()) is loaded to `device`, a tensor at a time; 4-bit
    weights of layers that are streamed go from there to the host, where one rank of a machine
    keeps them (`keeps_streamed`) for all. `keeps_ids` is
    Recipe.keeps_ids. `rows_of`: this rank and the number of ranks, where each keeps its rows of
    weights of 4 bits (four_bit.keep_rows)."""
    torch.manual_seed(seed)
    varlen_attention.register(attention)
    model: Network
    if section.path is None:
        model = from_shape(section, model_size, quantization, attention)
        if rows_of is not None:
            for _, layer in four_bit.layers(model):
                four_bit.keep_rows(layer.weight, *rows_of)
    else:
        with _keeping(rows_of, model_size.family):
            model = from_folder(
                *(section, quantization, device or torch.device("cpu")),
                *(attention, levers, keeps_streamed),
            )
        grow_vocabulary(model, model_size.config.get("vocab_size", 0), seed)
    rows = model.get_input_embeddings().num_embeddings
    data_tokenizer.check_ids(tokenizer, rows, tokenizer.name_or_path)
    set_special_tokens(model, tokenizer, keeps_ids)
    return prepare_to_train(model, section, lora, lora_targets)


def folder_config(folder: str | Path) -> PreTrainedConfig:
    """The configuration of a model folder. Raises ResourceError for a type that transformers does
    not have."""
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResourceError(
            f"{folder}/config.json: transformers {transformers.__version__} cannot read it"
            f" ({cause(error)}); code that comes with a model is never run: use a model_type and"
            " values that transformers has itself"
        ) from error


def pretrained(folder: str | Path, is_encoder_decoder: bool, **options: Any) -> Any:
    """from_pretrained() of a local folder: of its safetensors, and without code of its own."""
    family = AutoModelForSeq2SeqLM if is_encoder_decoder else AutoModelForCausalLM
    return family.from_pretrained(
        folder,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        **options,
    )


def without_weights(
    section: ModelSection,
    model_size: ModelSize,
    lora: LoraSection | None,
    lora_targets: tuple[str, ...],
    quantization: QuantizationSection | None = None,
    attention: AttnImplementation = "sdpa",
) -> Network:
    """The same model on the meta device: its parameters have a shape and a type, but no values."""
    varlen_attention.register(attention)
    with torch.device("meta"):
        # flash_attn need not be here; not each type has sdpa
        built = "eager" if attention == "eager" else "sdpa"
        model = from_shape(section, model_size, quantization, built)
        transformers_private.set_attention(model, attention)
        return prepare_to_train(model, section, lora, lora_targets)


def prepare_to_train(
    model: PreTrainedModel,
    section: ModelSection,
    lora: LoraSection | None,
    lora_targets: tuple[str, ...],
) -> torch.nn.Module:
    """Freeze the modules of model.freeze, or add LoRA."""
    # Generation turns the cache on for itself. T5's decoder has a copy of the config.
    for module in model.modules():
        if (config := getattr(module, "config", None)) is not None:
            config.use_cache = False
    frozen = tuple(f"{module}." for module in section.freeze)
    for name, parameter in model.named_parameters():
        if f"{name}.".startswith(frozen):
            parameter.requires_grad_(False)
    return with_lora(model, lora, lora_targets) if lora else model


def from_shape(
    section: ModelSection,
    model_size: ModelSize,
    quantization: QuantizationSection | None = None,
    attention: AttnImplementation = "sdpa",
) -> PreTrainedModel:
    config = AutoConfig.for_model(**model_size.config)
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    model = family.from_config(
        config,
        dtype=getattr(torch, section.dtype),
        attn_implementation=attention,
        trust_remote_code=False,
    )
    if quantization is not None:
        four_bit.quantize(model, quantization)
    return model


def from_folder(
    section: ModelSection,
    quantization: QuantizationSection | None,
    device: torch.device,
    attention: AttnImplementation | None = "sdpa",
    levers: Levers = PLAIN,
    keeps_streamed: bool = True,
) -> PreTrainedModel:
    """Load the model of a folder. `attention` None: that which its type prefers."""
    assert section.path is not None
    config = folder_config(section.path)
    asked_tie = section.tie_word_embeddings
    if asked_tie is not None:
        config.tie_word_embeddings = asked_tie
    packs_here = quantization is not None and device.type == "cpu"
    streams = quantization is not None and device.type == "cuda" and levers.streamed_layers > 0
    try:
        with (
            four_bit.giving_blocks_back() if packs_here or streams else nullcontext(),
            _leaving_card(levers, keeps_streamed) if streams else nullcontext(),
        ):
            model, facts = loaded(
                *(section.path, config, quantization, getattr(torch, section.dtype)),
                device if quantization is not None else None,
                attn_implementation=attention,
            )
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"{section.path}: the model cannot be loaded ({cause(error)})"
        ) from error
    except (TypeError, KeyError, AttributeError) as error:  # a value of another kind
        raise ResourceError(
            f"{section.path}: the model cannot be loaded ({type(error).__name__}: {error}); a value"
            " in config.json or generation_config.json is none that transformers takes there"
        ) from error
    if unread := sorted(map(str, facts["unexpected_keys"])):
        logger.info(
            "%s: %d tensors are not in the model of config.json, and neither trained nor exported,"
            " such as %s",
            *(section.path, len(unread), unread[0]),
        )
    if asked_tie is False and "lm_head.weight" in facts["missing_keys"]:
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        with deepspeed_private.gathered([head.weight, embedding.weight]):
            head.weight.data.copy_(embedding.weight.data)
    if packs_here:
        _leave_files(model)
    return model


def loaded(
    folder: str | Path,
    config: PreTrainedConfig,
    quantization: QuantizationSection | None,
    dtype: torch.dtype,
    device: torch.device | None,
    **options: Any,
) -> tuple[Any, dict[str, Any]]:
    """The model of a folder, which may be packed in 4 bits already, and transformers' facts of its
    loading. `device` None: on the CPU, where weights may be views of the files."""
    in_4_bits = {"quantization_config": four_bit.config(quantization)} if quantization else {}
    is_packed = hasattr(config, "quantization_config")
    if is_packed:
        # The folder's config takes the place of the keyword, of which it has what its weights do
        # not say. With both, transformers takes the folder's compute dtype.
        config.quantization_config = in_4_bits.pop("quantization_config").to_dict()
    placed = {} if device is None else {"device_map": {"": device}}
    model, facts = pretrained(
        folder,
        config.is_encoder_decoder,
        config=config,
        dtype=dtype,
        output_loading_info=True,
        **in_4_bits,
        **placed,
        **options,
    )
    if quantization:
        four_bit.settle(model)
    if is_packed:
        four_bit.convert(model, dtype)
    return model, facts


def _keeping(rows_of: tuple[int, int] | None, family: ModelFamily) -> AbstractContextManager[None]:
    """Inside, a folder's weights of 4 bits are divided as soon as they are there, and the others
    stay on the host."""
    if rows_of is None:
        return nullcontext()

    def divide(model: Network, name: str, weight: Any) -> None:
        four_bit.keep_rows(weight, *rows_of)

    def is_on_host(name: str) -> bool:
        return name.split(".")[-2] not in (family.quantizable or ())

    return levers_private.each_packed(divide, is_on_host)


def _leaving_card(levers: Levers, keeps: bool) -> AbstractContextManager[None]:
    """Inside, a weight of 4 bits of a layer that is streamed goes to the host as soon as it is
    there. A rank that does not keep them has one value in the place of all."""
    of_streamed = cache(partial(_are_of_streamed, levers))

    def leave(model: Network, name: str, weight: Any) -> None:
        if name.startswith(of_streamed(model)):
            values = weight.data if keeps else weight.data.flatten()[:1]
            weight.data = values.cpu().expand(weight.shape)

    return levers_private.each_packed(leave)


def streamed_layers(network: torch.nn.Module, levers: Levers) -> list[torch.nn.Module]:
    """The decoder layers whose frozen weights are streamed: of the longest list of those that
    transformers checkpoints one by one."""
    lists = (
        module
        for module in network.modules()
        if isinstance(module, torch.nn.ModuleList)
        and all(isinstance(layer, GradientCheckpointingLayer) for layer in module)
    )
    layers = list(max(lists, key=len, default=torch.nn.ModuleList()))
    return [layers[index] for index in levers.streamed_of(len(layers))]


def _are_of_streamed(levers: Levers, model: torch.nn.Module) -> tuple[str, ...]:
    """The beginnings of the names of weights in streamed layers."""
    streamed = set(map(id, streamed_layers(model, levers)))
    return tuple(f"{name}." for name, module in model.named_modules() if id(module) in streamed)


@torch.no_grad()
def _leave_files(model: Network) -> None:
    """Copy the weights that are views of the files beside weights of 4 bits, so that the files are
    mapped no longer, of which most has been read and is not needed again."""
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.clone()


def grow_vocabulary(model: Network, vocab_size: int, seed: int = 0) -> None:
    """Add rows to the embeddings, if they have fewer: near the mean of the others, the same for the
    same seed on every rank."""
    if vocab_size > model.get_input_embeddings().num_embeddings:
        torch.manual_seed(seed)
        verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()  # it warns that the rows are near the mean
        model.resize_token_embeddings(vocab_size)
        transformers_logging.set_verbosity(verbosity)


def decoder_start(config: PreTrainedConfig, pad_token_id: Any) -> int:
    """The token that the input of an encoder-decoder's decoder begins with. Raises ConfigError for
    a type of which its config alone can say it."""
    start = getattr(config, "decoder_start_token_id", None)
    if start is None:  # T5Gemma
        start = getattr(getattr(config, "decoder", None), "bos_token_id", None)
    if start is None and config.model_type in (*_PAD_STARTS, *_LABEL_STARTS):
        start = pad_token_id
    if start is None:
        raise ConfigError(
            f"the model, a {config.model_type}, has no decoder_start_token_id, the token that each"
            " answer begins with; add it to config.json (the model's documentation, or"
            " generation_config.json, names it)"
        )
    return start


class _AsLoaded(GenerationConfig):
    """Settings that are saved as they are: a base may come with settings that have a fault, with
    which transformers refuses to save a model."""

    def validate(self, strict: bool = False, user_set_attributes: set[str] | None = None) -> None:
        """Accept them."""


def set_special_tokens(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keeps_ids: bool = False
) -> None:
    """Name the tokenizer's special tokens and the ends of answers in the configs. With `keeps_ids`
    the base's own ends are named too, and its BOS where the tokenizer has none."""
    is_pair = model.config.is_encoder_decoder
    bos = tokenizer.bos_token_id
    ends = [tokenizer.eos_token_id] if is_pair else ConversationRenderer(tokenizer).end_ids
    if keeps_ids:
        of_base = model.generation_config.eos_token_id
        ends = list(dict.fromkeys([*ends, *(of_base if isinstance(of_base, list) else [of_base])]))
        bos = model.generation_config.bos_token_id if bos is None else bos
    ends = [end for end in ends if end is not None]
    for config in (model.config, model.generation_config):
        config.pad_token_id = tokenizer.pad_token_id
        config.eos_token_id = ends[0]
        if len(ends) > 1:
            with suppress(StrictDataclassFieldValidationError):  # Inkling's config takes no list
                config.eos_token_id = ends
        config.bos_token_id = bos
        if is_pair:
            config.decoder_start_token_id = decoder_start(model.config, tokenizer.pad_token_id)
    generation = model.generation_config
    if generation.suppress_tokens:  # a base may suppress the token that now ends an answer
        generation.suppress_tokens = [
            token for token in generation.suppress_tokens if token not in ends
        ] or None
    if generation.bad_words_ids:
        generation.bad_words_ids = [
            ids for ids in generation.bad_words_ids if ids not in [[end] for end in ends]
        ] or None
    _set_target_language(model, tokenizer)
    model.generation_config = _AsLoaded.from_dict(generation.to_dict())


def _set_target_language(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the decoder begin as it is trained to: with the language code of a tokenizer that has
    one, or with the token that the model's own shift of the labels puts before it."""
    if not model.config.is_encoder_decoder or not getattr(tokenizer, "tgt_lang", None):
        return
    before, behind = data_tokenizer.around_target(tokenizer)
    model.generation_config.forced_bos_token_id = before[-1] if before else None
    if shift := getattr(model, "prepare_decoder_input_ids_from_labels", None):
        model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = int(
            shift(labels=torch.tensor([[*before, *behind]]))[0, 0]
        )


def prepare_base(model: Network, tokenizer: PreTrainedTokenizerBase, adapter: Path) -> None:
    """Give a base the rows that its adapter trained, the generation settings with which the adapter
    was saved, and the tokenizer's special tokens."""
    grow_vocabulary(model, len(tokenizer))
    file = adapter / "generation_config.json"
    if file.is_file():
        model.generation_config = GenerationConfig.from_dict(json.loads(file.read_bytes()))
    set_special_tokens(model, tokenizer, keeps_ids=True)


def with_lora(
    model: PreTrainedModel, lora: LoraSection, targets: tuple[str, ...]
) -> torch.nn.Module:
    """Add the adapters, and copies of the modules in lora.modules_to_save, which peft trains in
    their place."""
    from peft import LoraConfig, TaskType, get_peft_model

    tied = _tied_copies(model, lora)
    saved = tied or list(lora.modules_to_save)
    config = LoraConfig(
        r=lora.r,
        lora_alpha=lora.lora_alpha,
        lora_dropout=lora.lora_dropout,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=lora.init_lora_weights,
        target_modules=list(targets),
        modules_to_save=list(saved) or None,
        ensure_weight_tying=tied is not None,
        trainable_token_indices=_trained_tokens(model, lora) if tied is None else None,
        task_type=TaskType.SEQ_2_SEQ_LM if model.config.is_encoder_decoder else TaskType.CAUSAL_LM,
    )
    network: Network = get_peft_model(
        model, config, autocast_adapter_dtype=lora.autocast_adapter_dtype
    )
    # dropout and DoRA compute in the type of the cast
    if not (lora.lora_dropout or lora.use_dora):
        peft_private.leave_casts_to_autocast(network)
    if not lora.autocast_adapter_dtype:
        _cast_adapters(network)
        network.load_adapter = partial(network.load_adapter, autocast_adapter_dtype=False)
    if tied:  # peft takes lm_head out of its list, but needs it there to load the adapter
        config.modules_to_save = tied
    # else peft would save the embeddings that have grown
    if config.trainable_token_indices or saved:
        network.save_pretrained = partial(network.save_pretrained, save_embedding_layers=False)
    return network


def _cast_adapters(network: torch.nn.Module) -> None:
    """Give adapters the type of their layers, as PEFT does unless they are on the meta device."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in network.modules():
        if isinstance(layer, BaseTunerLayer):
            base: Network = layer.get_base_layer()
            dtype = getattr(base, "compute_dtype", base.weight.dtype)
            for parameter in layer.parameters():
                if parameter.requires_grad and parameter.dtype != dtype:
                    parameter.data = parameter.data.to(dtype)


def _tied_copies(model: PreTrainedModel, lora: LoraSection) -> list[str] | None:
    """The modules of lora.modules_to_save as PEFT has to read them to tie the copies of embeddings
    and output head, if it copies any of the two and they share their weight; else None.

    PEFT takes a name that it knows for embeddings (lm_head), once, and no other end of the head's
    name. It cannot tie the copies of a T5's encoder and decoder."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if model.config.is_encoder_decoder or getattr(head, "weight", None) is not embedding.weight:
        return None
    names = {name: module for name, module in model.named_modules() if name}
    saved: list[str] = []
    is_copied = False
    for entry in lora.modules_to_save:
        copies = [name for name in names if name.endswith(entry)]
        if any(names[name] in (embedding, head) for name in copies):
            is_copied = True
            saved += [name for name in copies if names[name] is not head]
        else:
            saved.append(entry)
    return list(dict.fromkeys([*saved, "lm_head"])) if is_copied else None


def _trained_tokens(model: PreTrainedModel, lora: LoraSection) -> dict[str, list[int]] | None:
    """Last names of the modules with rows that are trained beside the adapters. An output head that
    is tied to the input's embeddings shares them; a module of lora.modules_to_save has them."""
    if not lora.trainable_token_indices:
        return None
    modules: list[Network] = [model.get_input_embeddings()]
    if not model.config.get_text_config().tie_word_embeddings:
        modules.append(model.get_output_embeddings())
    return {
        name.rpartition(".")[2]: list(lora.trainable_token_indices)
        for name, module in model.named_modules()
        if module in modules and not name.endswith(lora.modules_to_save)
    }
