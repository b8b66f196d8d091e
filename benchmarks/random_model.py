"""A model folder with random weights, and a tokenizer of a few words: python -m
benchmarks.random_model CONFIG DIR."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedTokenizerFast,
)

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}assistant : {% endif %}"
)


def main(content: str, folder: Path) -> None:
    config = AutoConfig.for_model(**json.loads(content))
    config.bos_token_id = config.eos_token_id = config.pad_token_id = 0
    family = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    network = family.from_config(config)
    network.generation_config.bos_token_id = network.generation_config.eos_token_id = 0
    network.generation_config.pad_token_id = 0
    network.save_pretrained(folder / "model")
    write_tokenizer(folder / "tokenizer")


def write_tokenizer(folder: Path, vocab_size: int = 0) -> None:
    """A tokenizer of a few words, and of others up to a vocabulary of this size."""
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<pad>", "<eos>", "<unk>", "<bos>"]
    made.train_from_iterator(
        ["red blue green stone user assistant :"], trainers.WordLevelTrainer(special_tokens=special)
    )
    words = {f"word{number}": number for number in range(made.get_vocab_size(), vocab_size)}
    made.model = models.WordLevel(vocab={**made.get_vocab(), **words}, unk_token="<unk>")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        bos_token="<bos>",
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
