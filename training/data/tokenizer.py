"""Load a tokenizer from a local folder, or train a byte-level BPE on the run's data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from launch.base.errors import ResourceError
from launch.data import chat_templates
from launch.schema.model_sections import TokenizerSection

PAD, END, USER, ASSISTANT, SYSTEM = SPECIAL_TOKENS = [
    "<|pad|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
]

CHAT_TEMPLATE = (  # of a trained tokenizer: a token for each role, END after each answer
    "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}<|assistant|>"
    "{% if message['reasoning_content'] %}<think>{{ message['reasoning_content'] }}</think>"
    "{% endif %}"
    "{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}"
    "<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN_TEMPLATE = (  # for a folder without a template: a line for each turn, END after each answer
    # The newlines are expressions: transformers renders with trim_blocks, which removes one that
    # follows a block.
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


def load(folder: Path, template: str | None = None) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer, with the pad token and chat template that training needs:
    `template` (a value of tokenizer.chat_template), the folder's own, or a plain one.

    Raises ResourceError when the folder holds no tokenizer, or a tokenizer without an end token,
    and DataError for a template that cannot be read."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except MemoryError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader meets: KeyError, ...
        reason = [*str(error).strip().splitlines(), ""][0].rstrip(" :")
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}; is {_files(folder)} damaged?"
        raise ResourceError(
            f"{folder}: no tokenizer can be loaded from this folder ({reason}); name one with"
            " --tokenizer.path=FOLDER"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ResourceError(
            f"{folder}: the tokenizer has no eos_token; a model could never learn where to stop"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if template is not None:
        set_template(tokenizer, template)
    elif isinstance(tokenizer.chat_template, str):
        chat_templates.check(tokenizer.chat_template, chat_templates.in_folder(folder) or folder)
    elif tokenizer.chat_template is None:
        # BOS where the tokenizer puts it before a text, as the base model was trained
        begins = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        tokenizer.chat_template = ("{{ bos_token }}" if begins else "") + PLAIN_TEMPLATE
    return tokenizer


def _files(folder: Path) -> str:
    """The files that hold a folder's tokens."""
    names = [name for name in chat_templates.TOKENIZER_FILES if (folder / name).is_file()]
    return " or ".join(names) or "a file of it"


def set_template(tokenizer: PreTrainedTokenizerBase, template: str) -> None:
    """Give the tokenizer a template, by a value of tokenizer.chat_template. Raises DataError."""
    text = chat_templates.read(template)
    chat_templates.check(text, chat_templates.file_of(template))
    tokenizer.chat_template = text


def add_tokens(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[str]) -> dict[str, int]:
    """Add special tokens that the vocabulary lacks; their ids. A row cannot write them."""
    vocabulary = tokenizer.get_vocab()
    missing = [token for token in dict.fromkeys(tokens) if token not in vocabulary]
    tokenizer.add_tokens(
        [AddedToken(token, special=True, normalized=False) for token in missing],
        special_tokens=True,
    )
    vocabulary = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in missing}


def train(
    texts: Iterator[str], section: TokenizerSection, vocab_size: int
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of at most `vocab_size` tokens, which can encode every Unicode text.

    With split "character", merges never cross a character, so a token is a character or a byte of a
    rare character.
    """
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=section.split == "word")
    if section.split == "character":
        isolate = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([isolate, byte_level])
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(dict.fromkeys([*SPECIAL_TOKENS, *section.add_tokens])),
        # sorted: the same ids every time
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
    wrapped.chat_template = CHAT_TEMPLATE
    return wrapped
