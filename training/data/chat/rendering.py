"""Render a chat template as transformers does, with limits on its time and memory. Errors of a
template are DataErrors that name the row."""

import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from launch.base import processes
from launch.base.errors import DataError

NAME = "the tokenizer's chat template"  # name in errors, if its source is not known
LIMIT_S = 5.0  # CPU time; the longest conversations take milliseconds
LIMIT_BYTES = 1 << 30  # memory; the longest conversations take some MiB
# marks, and blocks whose output is not written where it is made: transformers counts the marks in
# them wrongly
_BLOCKS = re.compile(
    r"{%-?\s*(?:(?P<mark>generation)\s*-?%}"
    r"|(?P<end>end)?(?:macro|call|filter|set(?=\s*-?%}|\s+\w+\s*(?:\|[^%]*)?-?%}))\b)"
)
Span = tuple[int, int]  # first character, character after the last


class TemplateRefusal(DataError):
    """A template cannot render a conversation."""


class _TooSlow(Exception):
    """A template took more CPU time than it may."""


def has_marks(template: str) -> bool:
    """True if the template marks what the assistant writes with {% generation %}, in places that
    can be counted."""
    num_open = num_marks = 0
    for block in _BLOCKS.finditer(template):
        if not block["mark"]:
            num_open += -1 if block["end"] else 1
        elif num_open > 0:
            return False
        else:
            num_marks += 1
    return num_marks > 0


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    special_tokens: Mapping[str, Any],
    *,
    prompt: bool = False,
    marks: bool = False,
    place: object = "",
    name: str = NAME,
    limit_s: float = LIMIT_S,
) -> tuple[str, list[Span]]:
    """The text of a conversation, with the prompt of the next answer if `prompt` is set, and the
    spans that the template marks if `marks` is set.

    Raises TemplateRefusal when the template raises, DataError when it does not end."""
    named = f"{place}: {name}" if place else name
    try:
        with _limited(limit_s):
            texts, spans = render_jinja_template(
                conversations=[messages],  # pyright: ignore[reportArgumentType]
                tools=tools,  # pyright: ignore[reportArgumentType]
                chat_template=template,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **special_tokens,
            )
    except _TooSlow:
        raise DataError(
            f"{named} did not end within {limit_s:g} s of CPU time; mend it, or name another with"
            " --tokenizer.chat_template=FILE|NAME"
        ) from None
    except jinja2.TemplateSyntaxError as error:
        raise DataError(
            f"{named} is not a template: line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:  # a template is a program: a wrong key, a sum of text and a list
        kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
        raise TemplateRefusal(
            f"{named} does not take this conversation: {kind}{' '.join(str(error).split())}"
        ) from error
    return texts[0], list(spans[0]) if spans else []  # pyright: ignore[reportReturnType]


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """Raise _TooSlow in this process's main thread after so much CPU time, and MemoryError beyond
    LIMIT_BYTES."""

    def stop(*_: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        with processes.memory_limit(LIMIT_BYTES):
            yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
