"""The files of an exported folder, as transformers 5 and 4.57 both read them: weights, config.json,
generation_config.json, and those of the tokenizer."""

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from transformers import (
    CONFIG_MAPPING,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    TokenizersBackend,
)

from launch.base import files
from launch.schema.result import MAX_SHARD_BYTES, MAX_SMALL_SHARD_BYTES
from training.compat.transformers_private import Network
from training.model import merging

# Files of a tokenizer that transformers 5 reads, but does not write beside tokenizer.json
_VOCABULARIES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt"),
    *("vocab.txt", "added_tokens.json", "special_tokens_map.json"),
)
# Types whose configs of transformers 4.57 take a rope_scaling with the key `type` and factors alone
_TYPE_AND_FACTORS = ("phi3", "phi4_multimodal", "olmo", "olmo2", "hunyuan_v1_dense", "fuyu")


def save_model(
    model: Network, folder: Path, base: Mapping[str, Any], is_short_of_ram: bool = False
) -> None:
    """Save a whole model. `base` is the config.json of the model before training."""
    max_bytes = MAX_SMALL_SHARD_BYTES if is_short_of_ram else MAX_SHARD_BYTES
    head, weights = model.get_output_embeddings(), None
    if _is_unscaled(model.config.to_dict()) and head.weight is model.get_input_embeddings().weight:
        # transformers 4.57 would make a random head beside tie_word_embeddings: false
        weights = {**model.state_dict(), "lm_head.weight": head.weight.detach().clone()}
    model.save_pretrained(folder, state_dict=weights, max_shard_size=max_bytes)
    config = _for_both_versions(json.loads((folder / "config.json").read_bytes()), base)
    is_tied = head is None or head.weight is model.get_input_embeddings().weight
    if not is_tied and merging.can_untie(model):  # transformers 4.57 ties what this says
        for part in (config, config.get("text_config", {})):
            part |= {"tie_word_embeddings": False}
    files.write_json(folder / "config.json", config)


def _for_both_versions(config: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json beside those that transformers 4.57 reads in their place, and the
    use_cache of the base, which training turns off."""
    mended: dict[str, Any] = {
        key: _for_both_versions(value, base.get(key) or {})
        if isinstance(value, dict) and value.get("model_type") in CONFIG_MAPPING
        else value
        for key, value in config.items()
        if key != "use_cache"
    }
    if "use_cache" in base:
        mended["use_cache"] = base["use_cache"]
    model_type, rope = mended["model_type"], mended.get("rope_parameters")
    mended |= _rope_of_4(model_type, rope) if rope else {}
    experts = CONFIG_MAPPING[model_type].attribute_map.get("num_experts")
    mended |= {"num_experts": mended[experts]} if experts in mended else {}
    if _is_unscaled(mended):
        mended["tie_word_embeddings"] = False
    return mended


def _is_unscaled(config: Mapping[str, Any]) -> bool:
    """True for a T5 whose decoder's output is not scaled. transformers 4.57 scales it where the
    head is tied; transformers 5 ties it always."""
    return config["model_type"] == "mt5" or config.get("scale_decoder_outputs") is False


def _rope_of_4(model_type: str, rope: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of transformers 4.57 for rope_parameters, which may be by type of layer."""
    of_all: dict[str, Any] = {**(rope.get("full_attention") or rope)}
    theta, share = of_all.pop("rope_theta", None), of_all.pop("partial_rotary_factor", None)
    if theta is None:  # theta may differ by types of layers, which 4.57 does not have
        return {}
    rotary = {
        "rope_theta": theta,
        "partial_rotary_factor": share,
        "rope_local_base_freq": (rope.get("sliding_attention") or {}).get("rope_theta"),
        "original_max_position_embeddings": of_all.get("original_max_position_embeddings"),
    }
    if model_type.startswith("gpt_neox"):
        rotary |= {"rotary_emb_base": theta, "rotary_pct": share}
    if model_type in _TYPE_AND_FACTORS:
        factors = {key: value for key, value in of_all.items() if key.endswith("factor")}
        rotary["rope_scaling"] = {"type": of_all["rope_type"], **factors} if factors else None
    elif of_all != {"rope_type": "default"}:
        rotary["rope_scaling"] = of_all
    return {key: value for key, value in rotary.items() if value is not None}


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, source: Path | None
) -> Iterator[str]:
    """Save the tokenizer, with the files of its `source` that transformers 5 leaves out. Yields a
    line on those that lack tokens."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(config.get("extra_special_tokens"), list):
        config["additional_special_tokens"] = config.pop("extra_special_tokens")
    if config["tokenizer_class"] == "TokenizersBackend":
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(tokenizer, TokenizersBackend):
        added = tokenizer.added_tokens_decoder.items()
        config["added_tokens_decoder"] = {str(key): token.__getstate__() for key, token in added}
        ids: Any = tokenizer("a")["input_ids"]
        # Llama's, Gemma's and Cohere's of 4.57 write these tokens whatever tokenizer.json says
        config["add_bos_token"] = ids[:1] == [tokenizer.bos_token_id]
        config["add_eos_token"] = ids[-1:] == [tokenizer.eos_token_id]
    files.write_json(file, config)
    left_out = [
        name
        for name in _VOCABULARIES
        if source and (source / name).is_file() and not (folder / name).exists()
    ]
    if source is None or not left_out:
        return
    before = AutoTokenizer.from_pretrained(source, local_files_only=True, trust_remote_code=False)
    if before.get_vocab() == tokenizer.get_vocab():
        for name in left_out:
            shutil.copyfile(source / name, folder / name)
    else:
        yield (
            f"{', '.join(left_out)} of {source} not copied: without the tokens that were added;"
            " tokenizer.json has them, so give programs that read another file that one"
        )
