"""Load a tokenizer from a local folder, or train a byte-level BPE on the run's data; save it as it
will be read beside the exported model."""

import threading
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AddedToken, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from launch.base import files
from launch.base.errors import ConfigError, DataError, ResourceError
from launch.base.text import suggestion
from launch.data import chat_templates
from launch.schema.model_sections import TokenizerLoading, TokenizerSection
from launch.schema.recipe import Recipe
from launch.schema.result import ExportedModel

NAME = "the tokenizer"  # name in errors, if its folder is not known
# Limits of CPU time for a call, and for a character; ten times as much as slow tokenizers take
CALL_S, CHARACTER_S, SLOW_CHARACTER_S = 5.0, 1e-5, 2e-4
PAD, END, USER, _ASSISTANT, _SYSTEM = _SPECIAL_TOKENS = [
    "<|pad|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
]

CHAT_TEMPLATE = (  # template of a trained tokenizer: a token for each role, END after each answer
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
PLAIN_TEMPLATE = (  # template of a folder without one: a line for each turn, END after each answer
    # The newlines are expressions: transformers renders with trim_blocks, which removes one that
    # follows a block.
    "{% for message in messages %}"
    "{% if not loop.first %}{{ '\\n' }}{% endif %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '\\n' }}{% endif %}"
)


def load(
    folder: Path, template: str | None = None, loading: TokenizerLoading | None = None
) -> PreTrainedTokenizerBase:
    """Load the folder's tokenizer, with the pad token and chat template that training needs:
    `template` (a value of tokenizer.chat_template), the folder's own, or a plain one.

    Without `loading`, an exported model's folder is read as it was trained.

    Raises ResourceError when the folder holds no tokenizer, or a tokenizer without an end token,
    and DataError for a template that cannot be read."""
    is_file = loading_of(folder, loading) == "file"
    reader = PreTrainedTokenizerFast if is_file else AutoTokenizer
    try:
        tokenizer = reader.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file raises whatever its reader meets: KeyError, ...
        reason = [*str(error).strip().splitlines(), ""][0].rstrip(" :")
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}; is {_files(folder)} damaged?"
        other = "" if is_file else "; --tokenizer.loading=file reads tokenizer.json alone, or"
        raise ResourceError(
            f"{folder}: no tokenizer can be loaded from this folder ({reason}){other or ';'} name"
            " one with --tokenizer.path=FOLDER"
        ) from error
    if tokenizer.eos_token_id is None:
        raise ResourceError(
            f"{folder}: the tokenizer has no eos_token, so that a model could never learn where to"
            " stop; name one in tokenizer_config.json"
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


def loading_of(folder: Path, loading: TokenizerLoading | None) -> TokenizerLoading:
    """The way in which a folder's tokenizer is read where a recipe asks for `loading`."""
    exported = files.read_or_none(folder / "lowmem.json", ExportedModel)
    return loading or (exported.tokenizer_loading if exported else "auto")


def loading_of_recipe(recipe: Recipe) -> TokenizerLoading:
    """The way in which the tokenizer of a recipe is read; a trained one as AutoTokenizer reads
    it."""
    folder = recipe.tokenizer.path or recipe.model.path
    return loading_of(Path(folder), recipe.tokenizer.loading) if folder else "auto"


def name_of(recipe: Recipe) -> str:
    """The tokenizer of a recipe in errors of rows."""
    folder = recipe.tokenizer.path or recipe.model.path
    return f"the tokenizer of {folder}" if folder else NAME


def called(
    call: Callable[[], Any], texts: Sequence[str], name: str, character_s: float = CHARACTER_S
) -> Any:
    """The result of a tokenizer's call with texts. Raises DataError if it does not end, or
    panics, as regular expressions of a tokenizer.json can."""
    result: Future[Any] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # noqa: BLE001  it is raised below
            result.set_exception(error)

    limit_s = CALL_S + character_s * sum(map(len, texts))
    began = time.process_time()
    # Rust code cannot be interrupted; a daemon does not keep the process from ending
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive() and (left_s := began + limit_s - time.process_time()) > 0:
        thread.join(left_s)
    reason = f"did not end within {limit_s:.0f} s of CPU time"
    if result.done():
        try:
            return result.result()
        except Exception:  # an error of the tokenizer, which its caller names; only panics are ours
            raise
        except BaseException as error:  # noqa: BLE001  pyo3's PanicException is one
            reason = f"panicked: {error}"
    raise DataError(
        f"{name} {reason}, with the text that begins with {texts[0][:40]!r} or one of"
        f" {len(texts) - 1:,} behind it; is a regular expression of its tokenizer.json too slow?"
        " Mend it, or name another tokenizer with --tokenizer.path=FOLDER"
    )


def _files(folder: Path) -> str:
    """The files that hold a folder's tokens."""
    names = [
        name
        for name in (*chat_templates.TOKENIZER_FILES, "config.json")
        if (folder / name).is_file()
    ]
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


def save(
    tokenizer: PreTrainedTokenizerBase, folder: Path, config: Mapping[str, Any] | None
) -> None:
    """Save a tokenizer, beside the config.json of its model if a config is given.

    AutoTokenizer chooses a class by that file, and some classes (Qwen2's) have a normaliser and a
    pre-tokenizer of their own: rows need the ids that the exported folder gives."""
    tokenizer.save_pretrained(folder)
    if config is not None:
        names = ("model_type", "model_name", "tokenizer_class")
        files.write_json(
            folder / "config.json", {name: config[name] for name in names if name in config}
        )


def difference(by_file: Any, by_auto: Any, texts: Iterable[str]) -> str | None:
    """The first text of which two readings of a tokenizer folder make other tokens, and these; None
    without one.

    Raises ResourceError for a text of which the second keeps less than is there and less than the
    first keeps."""
    line = None
    for number, text in enumerate(texts, 1):
        readers = (by_file, by_auto)
        ids = [
            called(partial(each, text, add_special_tokens=False), [text], NAME)["input_ids"]
            for each in readers
        ]
        if ids[0] == ids[1]:
            continue
        first = next(
            (i for i, pair in enumerate(zip(*ids, strict=False)) if len({*pair}) > 1),
            min(map(len, ids)),
        )
        tokens = [
            each.convert_ids_to_tokens(ids_of_reader[first : first + 4])
            for each, ids_of_reader in zip(readers, ids, strict=True)
        ]
        this = f"row {number} has {tokens[0]} by tokenizer.json, {tokens[1]} by AutoTokenizer"
        of_file, of_auto = (
            _parts_of(each.decode(ids_of_reader, clean_up_tokenization_spaces=False))
            for each, ids_of_reader in zip(readers, ids, strict=True)
        )
        expected = (of_file, _parts_of(text))
        fewest = min(map(len, expected))
        if "".join(of_auto) not in map("".join, expected) or len(of_auto) < fewest:
            raise ResourceError(f"{this}, which loses characters of it")
        line = line or this
    return line


def _parts_of(text: str) -> list[str]:
    """The words of a text, in characters that normalisers keep."""
    return unicodedata.normalize("NFKC", text).split()


def check_ids(tokenizer: PreTrainedTokenizerBase, rows: int, folder: str | Path) -> None:
    """Raise ConfigError for a tokenizer with an id that the model's embeddings have no row for."""
    token, largest = max(tokenizer.get_vocab().items(), key=lambda pair: pair[1])
    if largest >= rows:
        raise ConfigError(
            f"{folder}: the tokenizer has ids up to {largest:,} ({token!r}), the embeddings of the"
            f" model {rows:,} rows; take the tokens from id {rows:,} on out of the tokenizer's"
            " files, name a smaller tokenizer with --tokenizer.path=FOLDER, or save the model with"
            f" more rows: model.resize_token_embeddings({largest + 1})"
        )


def set_languages(tokenizer: Any, section: TokenizerSection, is_pair: bool) -> None:
    """Give the tokenizer of an encoder-decoder (`is_pair`) the languages of its source and target:
    the section's, or those of its folder.

    Raises ConfigError without a language that the tokenizer needs, and for one that none needs."""
    kind, of_folder, names = type(tokenizer).__name__, tokenizer.init_kwargs, []
    if is_pair and hasattr(tokenizer, "set_src_lang_special_tokens"):
        codes = getattr(tokenizer, "lang_code_to_id", None) or tokenizer.extra_special_tokens
        names = [str(code).strip("_") for code in codes]
    for key, side in (("src_lang", "the inputs"), ("tgt_lang", "the answers")):
        requested = getattr(section, key)
        if not names and requested:
            raise ConfigError(
                f"tokenizer.{key}: found {requested}, but this model's tokenizer ({kind}) has no"
                " language codes; leave it out"
            )
        # src_lang may be transformers' default where tgt_lang is missing
        chosen = requested or (of_folder.get(key) if of_folder.get("tgt_lang") else None)
        if names and (chosen or "").strip("_") not in names:
            raise ConfigError(
                f"tokenizer.{key}: found {chosen or 'none'}, expected the language of {side}:"
                f" {kind} adds its code to every text"
                + (f"; {suggestion(chosen, names)}" if chosen else "")
                + f"; give --tokenizer.{key}=CODE, one of {', '.join(names)}"
            )
        if names:
            setattr(tokenizer, key, chosen)


def around(tokenizer: Any, argument: str = "text") -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer's own call puts before and behind a text."""
    text = tokenizer(**{argument: "a"}, add_special_tokens=False)["input_ids"]
    ids = tokenizer(**{argument: "a"})["input_ids"]
    start = next(i for i in range(len(ids) - len(text) + 1) if ids[i : i + len(text)] == text)
    return ids[:start], ids[start + len(text) :]


def around_source(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens around what an encoder reads. Where the tokenizer's own call adds none, the end
    token."""
    before, behind = around(tokenizer)
    return before, behind if before or behind else [tokenizer.eos_token_id]


def end_inputs(tokenizer: Any) -> None:
    """Let the tokenizer's own call end a text with the end token where it adds nothing, as rows of
    an encoder-decoder end."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None and around(tokenizer) == ([], []):
        end = tokenizer.eos_token
        fast.post_processor = processors.TemplateProcessing(
            single=f"$A {end}",
            pair=f"$A {end} $B {end}",
            special_tokens=[(end, tokenizer.eos_token_id)],
        )


def around_target(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens around what the decoder of a pair writes, of which one is the end token."""
    before, behind = around(tokenizer, "text_target")
    has_end = tokenizer.eos_token_id in behind
    return before, behind if has_end else [*behind, tokenizer.eos_token_id]


def read_beside(
    tokenizer: PreTrainedTokenizerBase, config: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """The tokenizer as AutoTokenizer reads it beside a model's config.json."""
    with TemporaryDirectory() as folder:
        save(tokenizer, Path(folder), config)
        return load(Path(folder))


def train(
    texts: Iterator[str],
    section: TokenizerSection,
    vocab_size: int,
    config: Mapping[str, Any] | None = None,
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE of at most `vocab_size` tokens, which can encode every Unicode text,
    with the normaliser and the pre-tokenizer that AutoTokenizer puts beside a model's `config`.

    With split "character", merges never cross a character, so a token is a character or a byte of a
    rare character, whatever the pre-tokenizer.
    """
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=section.split == "word")
    if section.split == "character":
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), byte_level]
        )
    else:
        tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = decoders.ByteLevel()
    special_tokens = [*_SPECIAL_TOKENS, *section.add_tokens]
    if config is not None:
        read: Any = read_beside(_wrapped(tokenizer), config)
        special_tokens += sorted(read.all_special_tokens)  # a class of its own adds some
        tokenizer.normalizer = read.backend_tokenizer.normalizer
        if section.split == "word":
            tokenizer.pre_tokenizer = read.backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(dict.fromkeys(special_tokens)),
        # sorted: the same ids every time
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    trained = _wrapped(tokenizer)
    trained.chat_template = CHAT_TEMPLATE
    return trained if config is None else read_beside(trained, config)


def _wrapped(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END)
