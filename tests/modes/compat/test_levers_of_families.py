"""No family has fewer levers than when lists of names decided on them."""

from __future__ import annotations

import pytest

from benchmarks.families import FAMILIES
from launch.schema.levers import PLAIN, ROWS
from training.trace.model_parts import model_parts

# model types that had a lever by lists of names, before each model was asked for it
FLATTENED = ("gpt2", "llama", "mistral", "qwen2", "qwen3")
CHUNKED = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "t5")
AT_TARGETS = (
    *("apertus", "arcee", "bart", "biogpt", "bitnet", "blenderbot", "bloom", "codegen"),
    *("cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm"),
    *("glm4", "gpt2", "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_oss", "gptj", "granite"),
    *("granitemoe", "helium", "hunyuan_v1_dense", "llama", "longt5", "mbart", "minimax"),
    *("mistral", "mixtral", "mpt", "mt5", "nemotron", "olmo", "olmo2", "olmo3", "olmoe"),
    *("opt", "pegasus", "persimmon", "phi", "phi3", "phimoe", "qwen2", "qwen2_moe"),
    *("qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    *("switch_transformers", "t5", "umt5", "xglm"),
)
TILED = (
    *("apertus", "arcee", "bitnet", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4"),
    *("gemma", "gemma2", "gemma3_text", "glm", "glm4", "gpt2", "gpt_bigcode", "gpt_neo"),
    *("gpt_neox", "gptj", "granite", "helium", "hunyuan_v1_dense", "llama", "longt5"),
    *("mistral", "mt5", "nemotron", "olmo", "olmo2", "olmo3", "persimmon", "phi", "phi3"),
    *("qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2", "t5", "umt5"),
)
BY_NAME = {
    "tiled_mlp_num_shards": TILED,
    "num_output_chunks": CHUNKED,
    "logits_at_targets": AT_TARGETS,
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_levers_that_it_had_and_a_refusal_says_what_it_lacks(name):
    family = model_parts(dict(FAMILIES[name])).family
    for lever, had in BY_NAME.items():
        reason = ROWS[lever].refusal(PLAIN, family)
        if family.model_type in had:
            assert reason is None
        elif reason is not None:
            assert reason.startswith(f"the model is a {family.model_type}, ")
    assert family.forward.flattens or family.model_type not in FLATTENED
