"""Base folders as the hub has them: a family's small model with random weights, its config.json in
the words of transformers 4, and a tokenizer of the kind and class that the family has."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from safetensors.torch import load_file, save_file
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from benchmarks.families import FAMILIES
from launch.data import chat_templates

# Digits, apostrophes, capitals, combined accents, blanks and lines: tokenizers split them apart.
PAIRS = (
    ("Which year comes after 2023?", "It's 2024, isn't it?"),
    ("Where is the cafe\u0301 Étoile?", "RIGHT behind the  river, 500 metres on."),
    ("Say red, blue and green", "red\nblue\n\ngreen"),
    ("What does 水 mean?", "water; 火 means fire 🔥"),
    ("we'll see: 1,234.5 x 10", "12345 (they'd say 12,345.0)"),
    ("name\ta stone", "Lapis lazuli\tis one."),
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPLIT = LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")
CHATML = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True)
class Folder:
    """The tokenizer and the settings of a base folder."""

    tokenizer_class: str
    write_tokens: Callable[[Path, Folder], None]
    bos: str | None
    eos: str
    pad: str | None = None
    unk: str | None = None
    others: Sequence[str] = ()  # other special tokens
    adds_bos: bool = False
    template: str = ""  # the name of a bundled chat template; "": the folder has none
    ends: Sequence[str] = ()  # end tokens of generation_config.json; none: eos alone
    dtype: str = "float32"  # of the stored weights
    config: Mapping[str, Any] = field(default_factory=dict)  # dropout: none, to be known by heart
    recipe: Mapping[str, Any] = field(default_factory=dict)  # its section `tokenizer`
    attention: str | None = None  # the kernels of a user's choice

    @property
    def special(self) -> list[str]:
        named = (self.bos, self.eos, self.pad, self.unk, *self.others)
        return list(dict.fromkeys(token for token in named if token))


def _corpus() -> list[str]:
    return [text for pair in PAIRS for text in pair] * 20


def byte_level(
    split: str | None = None, normalizer: Any = None, files: str = "tokenizer.json"
) -> Callable[[Path, Folder], None]:
    """Write a byte-level BPE; `split` is the pattern of its pre-tokenizer, else GPT-2's."""

    def write(path: Path, folder: Folder) -> None:
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)
        if split:
            pattern = pre_tokenizers.Split(Regex(split), "isolated")
            made.pre_tokenizer = pre_tokenizers.Sequence([pattern, made.pre_tokenizer])
        if normalizer is not None:
            made.normalizer = normalizer
        made.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=folder.special,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        )
        made.train_from_iterator(_corpus(), trainer=trainer)
        if folder.tokenizer_class == "BartTokenizer":
            ids = {token: folder.special.index(token) for token in ("<s>", "</s>")}
            made.post_processor = processors.RobertaProcessing(
                ("</s>", ids["</s>"]), ("<s>", ids["<s>"]), add_prefix_space=False
            )
        elif folder.adds_bos and folder.bos:
            made.post_processor = processors.TemplateProcessing(
                single=f"{folder.bos} $A",
                pair=f"{folder.bos} $A {folder.bos} $B",
                special_tokens=[(folder.bos, folder.special.index(folder.bos))],
            )
        if "tokenizer.json" in files:
            made.save(str(path / "tokenizer.json"))
        if "vocab.json" in files:
            made.model.save(str(path))

    return write


def sentence_pieces(kind: str, name: str, **settings: Any) -> Callable[[Path, Folder], None]:
    """Write a SentencePiece model, and the tokenizer.json that transformers makes of it."""

    def write(path: Path, folder: Folder) -> None:
        content = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(_corpus()),
            model_writer=content,
            model_type=kind,
            hard_vocab_limit=False,
            minloglevel=2,
            user_defined_symbols=list(folder.others),
            **settings,
        )
        (path / name).write_bytes(content.getvalue())
        _write_json(path / "tokenizer_config.json", _tokenizer_config(folder))
        made = AutoTokenizer.from_pretrained(path)
        aside = path / "aside"
        made.save_pretrained(aside)
        (aside / "tokenizer.json").rename(path / "tokenizer.json")
        shutil.rmtree(aside)

    return write


_PIECES = {"remove_extra_whitespaces": False, "normalization_rule_name": "identity"}
_OF_400 = {"vocab_size": 400, "byte_fallback": True, "split_digits": True, **_PIECES}
LLAMA_PIECES = sentence_pieces(
    "bpe", "tokenizer.model", unk_id=0, bos_id=1, eos_id=2, pad_id=-1, **_OF_400
)
GEMMA_PIECES = sentence_pieces(
    *("bpe", "tokenizer.model"),
    **dict(zip(("pad_id", "eos_id", "bos_id", "unk_id"), range(4), strict=True)),
    **{"pad_piece": "<pad>", "eos_piece": "<eos>", "bos_piece": "<bos>"},
    add_dummy_prefix=False,
    **_OF_400,
)
T5_PIECES = sentence_pieces(
    *("unigram", "spiece.model"),
    **{"vocab_size": 150, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    pad_piece="<pad>",
)
GPT2_FILES = byte_level(files="tokenizer.json vocab.json merges.txt")
QWEN = byte_level(QWEN_SPLIT, normalizers.NFC(), "tokenizer.json vocab.json merges.txt")


def gemma(**fields: Any) -> Folder:
    turns = {"others": ("<start_of_turn>", "<end_of_turn>")}
    tokens = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>", "unk": "<unk>", **turns}
    return Folder("GemmaTokenizer", GEMMA_PIECES, **tokens, adds_bos=True, **fields)


def llama_pieces(**fields: Any) -> Folder:
    tokens = {"bos": "<s>", "eos": "</s>", "unk": "<unk>"}
    return Folder("LlamaTokenizer", LLAMA_PIECES, **tokens, adds_bos=True, **fields)


def gpt2_like(tokenizer_class: str = "GPT2Tokenizer", **fields: Any) -> Folder:
    end = "<|endoftext|>"
    return Folder(*(tokenizer_class, GPT2_FILES), **{"bos": end, "eos": end, "unk": end, **fields})


def qwen(**fields: Any) -> Folder:
    end = "<|endoftext|>"
    tokens = {"bos": None, "eos": CHATML[1], "pad": end, "others": CHATML}
    usual = {"write_tokens": QWEN, **tokens, "ends": (CHATML[1], end)}
    return Folder("Qwen2Tokenizer", **{**usual, **fields})


def glm(**fields: Any) -> Folder:
    end, turns = "<|endoftext|>", ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
    return Folder(
        *("PreTrainedTokenizerFast", byte_level(LLAMA3_SPLIT)),
        **{"bos": None, "eos": end, "pad": end, "others": ("[gMASK]", "<sop>", *turns)},
        **{"ends": (end, "<|user|>", "<|observation|>"), **fields},
    )


def yarn(factor: float) -> dict[str, Any]:
    scaling = {"factor": factor, "original_max_position_embeddings": 256, "rope_type": "yarn"}
    return {"rope_theta": 1e6, "rope_scaling": scaling}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_type": "llama3"}
LONG = {
    f"{kind}_factor": [1.0 + step * n for n in range(16)]
    for kind, step in (("short", 0.01), ("long", 0.1))
}
T5_TOKENS = {"bos": None, "eos": "</s>", "pad": "<pad>", "unk": "<unk>"}
FOLDERS: Mapping[str, Folder] = {
    "gemma": gemma(template="gemma", ends=("<eos>", "<end_of_turn>"), dtype="bfloat16"),
    # sdpa of transformers 4 leaves the softcapping of its scores out
    "gemma2": gemma(attention="eager"),
    "gemma3": gemma(
        template="gemma",
        ends=("<eos>", "<end_of_turn>"),
        config={"rope_theta": 5e5, "rope_local_base_freq": 2e4, "query_pre_attn_scalar": 32},
    ),
    "phi": gpt2_like("CodeGenTokenizer", config={"partial_rotary_factor": 0.4}),
    "phi3 (Phi-4)": llama_pieces(
        pad="</s>",
        others=("<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        template="phi3",
        ends=("</s>", "<|end|>"),
        dtype="bfloat16",
        config={
            "original_max_position_embeddings": 256,
            "rope_scaling": {"type": "longrope", **LONG},
        },
    ),
    "opt": Folder(
        *("GPT2Tokenizer", byte_level(files="vocab.json merges.txt"), "</s>", "</s>"),
        **{"pad": "<pad>", "unk": "</s>", "adds_bos": True, "config": {"dropout": 0.0}},
    ),
    "gpt_neox": gpt2_like("GPTNeoXTokenizer", config={"rotary_pct": 0.25, "rotary_emb_base": 2e4}),
    "gpt2": gpt2_like(),
    "bloom": Folder(
        *("BloomTokenizerFast", byte_level(), "<s>", "</s>"),
        pad="<pad>",
        unk="<unk>",
    ),
    "falcon": Folder(
        *("PreTrainedTokenizerFast", byte_level(), "<|endoftext|>", "<|endoftext|>"),
        config={"rope_theta": 5e5},
    ),
    "llama (SmolLM)": Folder(
        *("PreTrainedTokenizerFast", byte_level(LLAMA3_SPLIT), "<|begin_of_text|>", "<|eot_id|>"),
        others=("<|end_of_text|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>"),
        adds_bos=True,
        template="llama3",
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        dtype="bfloat16",
        config={
            "rope_theta": 5e5,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 256},
        },
    ),
    "mistral": llama_pieces(template="mistral-v1", dtype="bfloat16", config={"rope_theta": 1e6}),
    "mixtral": llama_pieces(config={"rope_theta": 1e6}),
    "qwen2": qwen(
        template="qwen2.5",
        dtype="bfloat16",
        config={"rope_theta": 1e6, "tie_word_embeddings": True},
    ),
    # its tokenizer.json is no Qwen's
    "qwen2_moe": qwen(write_tokens=GPT2_FILES, config={"rope_theta": 1e6}),
    "qwen3": qwen(template="qwen3", config=yarn(4.0)),
    "qwen3_moe": qwen(template="chatml", config={"rope_theta": 1e7}),
    "glm": glm(template="glm4", dtype="bfloat16", config={"partial_rotary_factor": 0.5}),
    "glm4": glm(config={"rope_theta": 5e5}),
    "smollm3": Folder(
        *("PreTrainedTokenizerFast", byte_level(LLAMA3_SPLIT), None, "<|im_end|>"),
        **{"pad": "<|end_of_text|>", "others": ("<|im_start|>",)},
        template="chatml",
        dtype="bfloat16",
        config={"rope_theta": 5e6, "tie_word_embeddings": True},
    ),
    "olmo": gpt2_like("GPTNeoXTokenizer", config={"clip_qkv": 8.0}),
    "olmo2": gpt2_like(
        config={"rope_theta": 5e5},
        recipe={"chat_template": "chatml", "add_tokens": list(CHATML)},
    ),
    "olmo3": gpt2_like(
        **{"pad": "<|pad|>", "others": CHATML, "eos": CHATML[1], "template": "chatml"},
        # transformers 5 gives sliding layers this base, whatever the folder says
        config={**yarn(8.0), "rope_theta": 5e5},
    ),
    "olmoe": gpt2_like("GPTNeoXTokenizer", pad="<|padding|>"),
    "t5": Folder("T5Tokenizer", T5_PIECES, **T5_TOKENS, config={"dropout_rate": 0.0}),
    "mt5": Folder(
        *("T5Tokenizer", T5_PIECES),
        **T5_TOKENS,
        config={
            **{"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
            "dropout_rate": 0.0,
        },
    ),
    "bart": Folder(
        *("BartTokenizer", byte_level(files="tokenizer.json vocab.json merges.txt"), "<s>", "</s>"),
        **{"pad": "<pad>", "unk": "<unk>", "others": ("<mask>",)},
        config={"forced_eos_token_id": 2, "decoder_start_token_id": 2, "dropout": 0.0},
    ),
}


def write(family: str, path: Path) -> None:
    """Write the base folder of a family."""
    folder = FOLDERS[family]
    path.mkdir(parents=True)
    folder.write_tokens(path, folder)
    _write_json(path / "tokenizer_config.json", _tokenizer_config(folder))
    ids = AutoTokenizer.from_pretrained(path).get_vocab()
    of_tokens = {
        f"{name}_token_id": ids[token]
        for name in ("bos", "eos", "pad")
        if (token := getattr(folder, name))
    }
    # near 1 / sqrt(hidden_size): adapters alone can teach a model that is larger at random
    spread = dict.fromkeys(("initializer_range", "init_std"), 0.09)
    content = {**FAMILIES[family], **spread, "bos_token_id": None, "pad_token_id": None}
    content |= of_tokens
    content |= {**folder.config, "torch_dtype": folder.dtype, "transformers_version": "4.46.3"}
    _write_json(path / "config.json", content)
    config = AutoConfig.from_pretrained(path)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    torch.manual_seed(0)
    network = auto.from_config(config, dtype=getattr(torch, folder.dtype))
    network.save_pretrained(path)
    if config.is_encoder_decoder and not content.get("tie_word_embeddings", True):
        _add_head(path / "model.safetensors", network.lm_head.weight)
    _write_json(path / "config.json", {"architectures": [type(network).__name__], **content})
    generation = {name: number for name, number in of_tokens.items() if name != "eos_token_id"}
    generation["eos_token_id"] = [ids[end] for end in folder.ends] or of_tokens["eos_token_id"]
    if config.is_encoder_decoder:
        generation["decoder_start_token_id"] = content["decoder_start_token_id"]
    _write_json(path / "generation_config.json", generation)


def _add_head(file: Path, embeddings: torch.Tensor) -> None:
    """Add a head of its own to the weights of a T5, which transformers 5 makes tied."""
    head = torch.randn_like(embeddings) * embeddings.std()
    save_file({**load_file(file), "lm_head.weight": head}, file, {"format": "pt"})


def _tokenizer_config(folder: Folder) -> dict[str, Any]:
    named = {f"{name}_token": getattr(folder, name) for name in ("bos", "eos", "pad", "unk")}
    content: dict[str, Any] = {"tokenizer_class": folder.tokenizer_class, **named}
    if folder.adds_bos:
        content["add_bos_token"] = True
    if folder.tokenizer_class == "T5Tokenizer":
        content["extra_ids"] = 10
    if folder.template:
        file = chat_templates.file_of(folder.template)
        content["chat_template"] = file.read_text(encoding="utf-8")
    return content


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=1, ensure_ascii=False), encoding="utf-8")
