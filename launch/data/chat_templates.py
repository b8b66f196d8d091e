"""Chat templates: the bundled ones, a file, or the tokenizer folder's own; and the tags in them."""

import json
import re
from pathlib import Path
from typing import Any

from launch.base.errors import ConfigError, DataError
from launch.base.text import suggestion
from launch.base.workspace import FILES
from launch.schema.recipe import Recipe

FOLDER = FILES / "configs" / "chat_templates"
# endings of template files; other values without a slash are names
SUFFIXES = (".jinja", ".j2", ".txt")
MAX_BYTES = 1 << 18  # the longest template of a model has 20 kB
_TOO_LONG = f"has more than {MAX_BYTES >> 10} KiB, more than a chat template can have"
# control tags, which a model reads as a token each; <think> and <tool_call> are often plain text
TAG = re.compile(
    r"<\|[^|<>{}'\"\s]{1,40}\|>|<｜[^｜<>{}'\"\s]{1,40}｜>|\[/?[A-Z]{2,}(?:_[A-Z]+)*\]|\[gMASK\]|<sop>"
    r"|<(?:start|end)_of_[a-z]+>"
)
COMMENT = re.compile(r"{#.*?(?:#}|\Z)", re.DOTALL)  # one that is open hides all behind it
# the object whose name a template reads: a message, or a function that is called
NAME = re.compile(r"""(?<!\w)(\w+)(?:['"]\])?(?:\.name\b|\[['"]name['"]\]|\.get\(['"]name['"])""")
_FUNCTIONS = frozenset({"function", "tool", "tool_call", "call", "tc", "func", "fn"})
TOKENIZER_FILES = ("tokenizer.json", "added_tokens.json", "tokenizer_config.json", "vocab.json")


def names() -> list[str]:
    """The bundled templates."""
    return sorted(file.stem for file in FOLDER.glob("*.jinja"))


def is_file(template: str) -> bool:
    """True if a value of tokenizer.chat_template is a path; else it is the name of a bundled
    template."""
    return "/" in template or template.endswith(SUFFIXES)


def file_of(template: str) -> Path:
    """The file of a value of tokenizer.chat_template. Raises ConfigError if there is none."""
    if is_file(template):
        if not Path(template).is_file():
            kind = "is no file" if Path(template).exists() else "is not there"
            raise ConfigError(
                f"tokenizer.chat_template: {template} {kind}; give a file with a Jinja template, or"
                f" a name: {', '.join(names())}"
            )
        return Path(template)
    if template not in names():
        raise ConfigError(
            f"tokenizer.chat_template: there is no bundled template {template!r};"
            f" {suggestion(template, names())}; all: {', '.join(names())}; a file has a slash in"
            " its path, or ends with .jinja"
        )
    return FOLDER / f"{template}.jinja"


def read(template: str) -> str:
    """The text of the template. Raises ConfigError without a file, DataError if it is no text."""
    file = file_of(template)
    try:
        if file.stat().st_size > MAX_BYTES:
            raise DataError(f"{file}: {_TOO_LONG}")
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as text: {error}") from error


def check(text: str, source: object) -> None:
    """Raise DataError for a text that is no template, with the file that holds it."""
    import jinja2  # takes 50 ms, which only a recipe with a template should cost
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}, by which a template marks what the assistant writes."""

        tags = {"generation"}  # noqa: RUF012  jinja2 reads this attribute of the class

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    if len(text) > MAX_BYTES:
        raise DataError(f"{source}: {_TOO_LONG}")
    try:
        # not optimized: that would compute {{ 10**10**8 }}
        ImmutableSandboxedEnvironment(
            optimized=False, extensions=[Generation, "jinja2.ext.loopcontrols"]
        ).compile(text)
    except (jinja2.TemplateSyntaxError, SyntaxError, RecursionError, MemoryError) as error:
        reason = (
            f"line {error.lineno}: {error.message}"
            if isinstance(error, jinja2.TemplateSyntaxError)
            else f"{type(error).__name__}: {error}"  # Python's compiler refuses deep nesting
        )
        raise DataError(
            f"{source}: {reason}; this chat template cannot be read: mend it, or name another with"
            " --tokenizer.chat_template=FILE|NAME"
        ) from error


def in_folder(folder: Path) -> Path | None:
    """The file of a tokenizer folder that holds its template, or None."""
    for name in ("chat_template.jinja", "chat_template.json"):
        if (folder / name).is_file():
            return folder / name
    config = folder / "tokenizer_config.json"
    return config if _json(config).get("chat_template") else None


def describe(recipe: Recipe, is_encoder_decoder: bool, is_text: bool) -> str:
    """The template that a recipe's rows are rendered with, and where it is from; `is_text`: the
    rows are texts.

    Raises ConfigError for a template that does not exist, or that no row would use."""
    section = recipe.tokenizer
    if is_encoder_decoder:
        if section.chat_template:
            raise ConfigError(
                "tokenizer.chat_template: an encoder-decoder has no chat template: it reads"
                " the turns before the last answer, a line each; leave it out"
            )
        if is_text:
            return "none: the encoder reads the first half of a text, the decoder writes the second"
        return "none: the encoder reads the turns before the last answer, a line each"
    own = _own(recipe)
    if recipe.task == "pretrain" and is_text:
        exported = f"; the model is exported with {own}" if section.chat_template else ""
        return f"none: texts are trained as they are{exported}"
    return own


def _own(recipe: Recipe) -> str:
    requested = recipe.tokenizer.chat_template
    folder = recipe.tokenizer.path or recipe.model.path
    if requested:
        file = file_of(requested)
        if not is_file(requested):
            return f"{requested}, bundled with this program"
        check(read(requested), file)
        return str(file)
    if folder is None:
        return "of the tokenizer that is trained on the data: a token for each role"
    if in_folder(Path(folder)) is None:
        return f"{folder} has none: a line for each turn, an end token after each answer"
    return f"of {folder}"


def name_of(recipe: Recipe) -> str:
    """The template of a recipe in errors of rows."""
    requested, folder = recipe.tokenizer.chat_template, recipe.tokenizer.path or recipe.model.path
    if requested or folder is None:
        return (
            f"the chat template {requested}"
            if requested
            else "the template of the trained tokenizer"
        )
    return f"the chat template of {folder}"


def unread_keys(recipe: Recipe) -> tuple[str, ...]:
    """Keys of messages that the recipe's template never reads: the speaker's name."""
    objects = {match[1] for match in NAME.finditer(COMMENT.sub("", _text_of(recipe)))}
    return () if objects - _FUNCTIONS else ("name",)


def _text_of(recipe: Recipe) -> str:
    """The text of a named template, or of a folder's own; "" for those of this program."""
    requested, folder = recipe.tokenizer.chat_template, recipe.tokenizer.path or recipe.model.path
    if requested:
        return read(requested)
    file = in_folder(Path(folder)) if folder else None
    return _template_in(file) if file else ""


def missing_tags(recipe: Recipe) -> list[str]:
    """Control tags in the recipe's template that are no tokens of its tokenizer, nor become tokens
    by tokenizer.add_tokens. Read from the files, without a tokenizer."""
    folder = recipe.tokenizer.path or recipe.model.path
    if not (text := _text_of(recipe)):
        return []
    there = _vocabulary_text(Path(folder)) if folder else TRAINED_TAGS
    return [
        tag
        for tag in dict.fromkeys(TAG.findall(COMMENT.sub("", text)))
        if tag not in recipe.tokenizer.add_tokens
        and not any(form in there for form in _written(tag))
    ]


# tokens of a tokenizer that is trained on the data: training/data/tokenizer.py
TRAINED_TAGS = b'"<|pad|>" "<|end|>" "<|user|>" "<|assistant|>" "<|system|>"'


def tags_note(missing: list[str]) -> str:
    """A line on tags that are no tokens, with the flag that adds them."""
    listed = ",".join(json.dumps(tag, ensure_ascii=False) for tag in missing)
    return (
        f"the chat template writes {len(missing)} tag{'' if len(missing) == 1 else 's'} that the"
        " vocabulary lacks: plain text in training, or at the end of an answer the tokenizer's end"
        f" token; --tokenizer.add_tokens='[{listed}]' makes tokens of them"
    )


def _template_in(file: Path) -> str:
    if file.suffix != ".json":
        return file.read_text(encoding="utf-8", errors="replace")
    template = _json(file).get("chat_template")
    if isinstance(template, list):  # named templates
        return " ".join(str(entry.get("template")) for entry in template if isinstance(entry, dict))
    return str(template or "")


def _vocabulary_text(folder: Path) -> bytes:
    """The files that hold the tokens of a folder."""
    files = [
        *(folder / name for name in TOKENIZER_FILES),
        *sorted([*folder.glob("*.model"), *folder.glob("vocab.txt")]),
    ]
    return b"\n".join(_without_template(file) for file in files if file.is_file())


def _without_template(file: Path) -> bytes:
    if file.name != "tokenizer_config.json":
        return file.read_bytes()
    config = {key: value for key, value in _json(file).items() if key != "chat_template"}
    return json.dumps(config, ensure_ascii=False).encode()


def _written(tag: str) -> tuple[bytes, ...]:
    """The ways in which a token stands in JSON; as it is in a sentencepiece model."""
    protobuf = b"\n" + bytes([len(tag.encode())]) + tag.encode()  # a string, field 1
    return json.dumps(tag, ensure_ascii=False).encode(), json.dumps(tag).encode(), protobuf


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):  # named where the tokenizer is loaded
        return {}
    return content if isinstance(content, dict) else {}
