"""Sections of a recipe that say what is trained: model, tokenizer, LoRA, quantization."""

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
)

from launch.schema.section import AFFECTS_STEP, Section, affects, as_tuple

Dtype = Literal["float32", "bfloat16", "float16"]


AttnImplementation = Literal["sdpa", "eager", "flash_attention_2", "varlen_attn"]


TokenizerLoading = Literal["auto", "file"]


def _not_blank(token: str) -> str:
    if not token.strip():
        raise ValueError(f"found {token!r}, expected the text of a token, e.g. '<|im_end|>'")
    return token


Token = Annotated[str, StringConstraints(max_length=64), AfterValidator(_not_blank)]


DTYPE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


class ModelSection(Section):
    """The model: a named shape in configs/models/, or a local Hugging Face folder."""

    shape: Annotated[str | None, affects("weights")] = Field(
        default=None, description="Name of a model in configs/models/, built with random weights."
    )
    path: Annotated[str | None, affects("weights")] = Field(
        default=None,
        description="Hugging Face folder of the model (safetensors), or, with --download, a name on"
        " a hub, e.g. Qwen/Qwen2.5-0.5B-Instruct.",
    )
    path_if_there: Annotated[str | None, affects("source")] = Field(
        default=None, description="Folder that is used instead of the shape if it holds a model."
    )
    freeze: Annotated[tuple[str, ...], BeforeValidator(as_tuple), AFFECTS_STEP] = Field(
        default=(),
        description="Names of modules whose parameters are not trained, e.g. [shared, encoder].",
    )
    dtype: Annotated[Dtype, AFFECTS_STEP] = Field(
        default="float32",
        description="Type of the weights in memory; training.bf16 is the autocast on top of it.",
    )
    output_dtype: Annotated[Dtype | None, affects("interruptions")] = Field(
        default=None,
        description="Type of the weights in output_dir, which answers are scored in after training."
        " null: that of the folder's config.json; of a shape, model.dtype. Not of an adapter.",
    )
    tie_word_embeddings: Annotated[bool | None, AFFECTS_STEP] = Field(
        default=None,
        description="false: the output head is a matrix of its own, which begins as a copy of the"
        " embeddings if the folder's config.json ties the two. null: as in the config.",
    )
    attn_implementation: Annotated[
        AttnImplementation | None, affects("memory", "step_time", "planned")
    ] = Field(
        default=None,
        description="Attention kernels; eager keeps every score (length x length per head),"
        " varlen_attn is PyTorch's own for rows without padding. null: planned.",
    )

    def _faults(self) -> Sequence[tuple[object, str]]:
        return [
            (
                (self.shape is None) == (self.path is None),
                "give exactly one of model.shape (a name in configs/models/) and model.path (a"
                " local folder)",
            )
        ]


class TokenizerSection(Section):
    """A tokenizer folder, or how to train a byte-level BPE from the data at first start."""

    path: Annotated[str | None, affects("source")] = Field(
        default=None,
        description="Local folder of a tokenizer. null: the model folder's, or one trained from"
        " the data.",
    )
    path_if_there: Annotated[str | None, affects("source")] = Field(
        default=None,
        description="Folder that is used instead of training a tokenizer if it exists and path "
        "is not given.",
    )
    vocab_size: Annotated[PositiveInt | None, affects("weights", "rows", "memory", "step_time")] = (
        Field(
            default=None,
            description="Vocabulary of a trained tokenizer. null: that of the model's shape.",
        )
    )
    chat_template: Annotated[str | None, affects("source")] = Field(
        default=None,
        description="Chat template: a file (with a slash in its path, or ending with .jinja), or a"
        " bundled template: chatml, deepseek-r1, deepseek-v3, gemma, glm4, llama3, mistral-tekken,"
        " mistral-v1, mistral-v3, phi3, phi3.5, phi4-reasoning, qwen2.5, qwen3, qwen3-2507, zephyr."
        " null: that of the tokenizer's folder, or a line for each turn.",
    )
    add_tokens: Annotated[
        tuple[Token, ...],
        BeforeValidator(as_tuple),
        affects("weights", "rows", "memory", "step_time"),
    ] = Field(
        default=(),
        description="Special tokens to add, e.g. ['<|im_start|>', '<|im_end|>'], if the vocabulary"
        " lacks them. The embeddings grow with them, and are trained under LoRA too.",
    )
    loading: Annotated[TokenizerLoading | None, affects("weights", "rows")] = Field(
        default=None,
        description="How a folder's tokenizer is read. auto: as AutoTokenizer reads it beside the"
        " model's config.json, whose type may bring a normaliser and a pre-tokenizer of its own."
        " file: as its tokenizer.json says. null: auto, or as an exported model was trained.",
    )
    split: Annotated[Literal["word", "character"], affects("weights", "rows")] = Field(
        default="word",
        description="How a trained tokenizer splits text; with character, merges never cross a "
        "character.",
    )
    split_special_tokens: Annotated[bool | None, affects("rows")] = Field(
        default=None,
        description="Train the text of a special token in a row (<|im_end|>) as plain text. null:"
        " in conversations, but not in rows that are one text.",
    )
    src_lang: Annotated[str | None, affects("rows")] = Field(
        default=None,
        description="Language of the inputs, for an encoder-decoder whose tokenizer marks it with a"
        " code (mBART: de_DE, NLLB: deu_Latn, M2M100: de). null: that of the tokenizer's folder.",
    )
    tgt_lang: Annotated[str | None, affects("rows")] = Field(
        default=None,
        description="Language of the answers, likewise; the exported model begins an answer with"
        " its code.",
    )


class LoraSection(Section):
    """PEFT's LoraConfig, in its own words."""

    r: Annotated[PositiveInt, AFFECTS_STEP] = Field(default=16, description="Rank of the adapters.")
    lora_alpha: Annotated[PositiveInt, affects("weights")] = Field(
        default=32,
        description="Scale of the adapters: their output is multiplied by lora_alpha / r.",
    )
    lora_dropout: Annotated[float, AFFECTS_STEP] = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the adapters' input that is dropped during training.",
    )
    target_modules: Annotated[tuple[str, ...] | Literal["all-linear"] | None, AFFECTS_STEP] = Field(
        default=None,
        description="Names of the modules that get an adapter, or all-linear: every linear layer"
        " but the output head. null: chosen by architecture, all-linear if it is not known.",
    )
    modules_to_save: Annotated[tuple[str, ...], BeforeValidator(as_tuple), AFFECTS_STEP] = Field(
        default=(),
        description="Ends of names of modules of which all weights are trained beside the adapters,"
        " in model.dtype, and saved with them: ['lm_head'], ['model.norm'].",
    )
    trainable_token_indices: Annotated[
        tuple[NonNegativeInt, ...] | None, BeforeValidator(as_tuple), AFFECTS_STEP
    ] = Field(
        default=None,
        description="Ids of tokens whose embeddings are trained beside the adapters. null: those"
        " that tokenizer.add_tokens adds.",
    )
    autocast_adapter_dtype: Annotated[bool, AFFECTS_STEP] = Field(
        default=True,
        description="Train the adapters in float32. false: in the type of their layer (model.dtype;"
        " of 4-bit layers bnb_4bit_compute_dtype), half the bytes in bfloat16.",
    )
    use_rslora: Annotated[bool, affects("weights")] = Field(
        default=False, description="Multiply the adapters' output by lora_alpha / sqrt(r)."
    )
    use_dora: Annotated[bool, AFFECTS_STEP] = Field(
        default=False,
        description="Train the length of each output's weights apart from their direction (DoRA).",
    )
    fused_adapters: Annotated[bool | None, affects("memory", "step_time", "planned")] = Field(
        default=None,
        description="Add the adapters' products to those of their layers under autocast, without"
        " PEFT's tensors between them, and round the sum once. null: planned.",
    )
    init_lora_weights: Annotated[bool | Literal["gaussian", "orthogonal"], affects("weights")] = (
        Field(
            default=True,
            description="First values of the adapters. true: as Microsoft's LoRA, which changes"
            " nothing at first; false: random values, for tests.",
        )
    )


class QuantizationSection(Section):
    """transformers' BitsAndBytesConfig, in its own words: weights of 4 bits, frozen under LoRA
    (QLoRA)."""

    load_in_4bit: Annotated[bool, AFFECTS_STEP] = Field(
        description="Keep the linear weights in 4 bits under LoRA (QLoRA); false is the same as"
        " no section."
    )
    bnb_4bit_quant_type: Annotated[Literal["nf4", "fp4"], AFFECTS_STEP] = Field(
        default="nf4", description="Kind of the 4-bit numbers."
    )
    bnb_4bit_use_double_quant: Annotated[bool, AFFECTS_STEP] = Field(
        default=True, description="Quantize the scales of the 4-bit blocks too."
    )
    bnb_4bit_compute_dtype: Annotated[Dtype | None, AFFECTS_STEP] = Field(
        default=None,
        description="Type of the arithmetic. null: the precision of training, else model.dtype.",
    )
