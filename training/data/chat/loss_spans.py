"""The texts that a conversation is trained as, and the spans of them that have a loss.

A text is the chat template's render of the whole conversation. The spans of its answers are found
by, in this order:

1. marks: the template says with {% generation %} what the assistant writes;
2. prefixes: the prompt of each answer, and the conversation up to it, begin the whole render;
3. characters: the contents' characters are replaced by others that the row does not hold, and
   followed into a second render, which must be the first one with these characters;
4. turns: a sample for each answer, which is the render of the conversation up to it.

Marked spans are taken as they are. Others begin where the generation prompt ends, and end with the
first end token behind the answer. What a template writes behind that (a newline, a second end
token) is no target.

If a template ends answers with no token of the vocabulary, each answer is a sample of its own that
ends with it, so that the end token can be appended.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any

from launch.base.errors import DataError
from launch.data import chat_templates
from training.data.chat import rendering
from training.data.chat.followers import Followers, strings
from training.data.chat.rendering import Span, TemplateRefusal

Messages = Sequence[Mapping[str, Any]]
# noncharacters, around the text of a special token that a content holds
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
OPTIONAL = {  # key of a message -> names under which a template reads it
    "tool_calls": ("tool_calls",),
    "reasoning_content": ("reasoning_content", "thinking", "reasoning"),
}
TAG = re.compile(r"[<\[].*[>\]]")
# thoughts with their tags, and other tags alone
_THOUGHTS = re.compile(r"<([\w:]*think\w*|thought|reasoning)>.*?</\1>|<[^<>]*>", re.DOTALL)
WORD = re.compile(r"[^\W_]+")
_MOST_WORDS = 16  # words of a content that are looked up in the render
_PROBE = tuple(map(chr, range(0xE000, 0xE004)))  # contents of a conversation of two turns


@dataclass(frozen=True)
class Rendered:
    """A text to train on, with the spans that have a loss."""

    text: str
    targets: list[Span]
    method: str = ""  # marks, prefixes, characters or turns
    # text of special tokens that the row's contents hold: it is no token
    plain: list[Span] = field(default_factory=list)
    ends: bool = True  # False: the last answer has no end token in the text
    place: object = ""  # place of the row, for errors


class ConversationRenderer:
    """Renders conversations with the chat template of a tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        splits_special_tokens: bool = True,
        name: str = rendering.NAME,
        limit_s: float = rendering.LIMIT_S,
    ) -> None:
        """If `splits_special_tokens` is False, the text of a special token in a row is the
        token. `name` is that of the template in errors, `limit_s` the CPU time of a render."""
        self._tokenizer, self.name, self._limit_s = tokenizer, name, limit_s
        self._calls_dropped: dict[tuple[str | None, bool], bool] = {}
        self._splits_special_tokens = splits_special_tokens
        added = {
            token.content: token
            for token in tokenizer.added_tokens_decoder.values()
            if token.special or TAG.fullmatch(token.content)  # Gemma adds line ends too
        }
        self.added = any_of(added)
        turns = self._probe()
        self.ends_turns, self.text_end = self._ending(turns) if turns else (True, "")
        # one answer ends with the first, the tokens of turns are never text of a row
        self.ends = [*filter(None, dict.fromkeys([*self._ends(turns), tokenizer.eos_token]))]
        self.end_ids = [tokenizer.convert_tokens_to_ids(end) for end in self.ends]
        special = [content for content, token in added.items() if token.special]
        self._calls = any_of(set(special) - set(self.added.findall("".join(turns))))
        self.protected = {*special, *self._structure(turns), *(set(self.ends) & added.keys())}
        self._protected = any_of(self.protected)
        self.end = any_of(self.ends)
        end = self.end.pattern
        self.tail = re.compile(rf"({end})(?:\s*{end})*\s*\Z")
        self.special_tail = re.compile(rf"{any_of(special).pattern}\s*\Z")

    def _probe(self) -> list[str]:
        """Renders of one and two turns; none if the template takes no such conversation."""
        roles = ("user", "assistant", "user", "assistant")
        talk = [{"role": role, "content": text} for role, text in zip(roles, _PROBE, strict=True)]
        texts = [self.text_or_none(talk[:2]) or "", self.text_or_none(talk) or ""]
        contents = [[c for c in text if c in _PROBE] for text in texts]
        return texts if contents == [[*_PROBE[:2]], [*_PROBE]] else []

    @cached_property
    def drops_names(self) -> bool:
        """True if the template renders a speaker's name for no role."""
        talk = [{"role": role, "content": "a", "name": _PROBE[0]} for role in ("user", "assistant")]
        text = self.text_or_none(talk)
        return text is not None and _PROBE[0] not in text

    def _drops_call(self, content: str | None, tools: Any) -> bool:
        """True if the template renders no call of a message with such a content: none, "" or a
        text."""
        kind = content and _PROBE[1], bool(tools)
        if kind not in self._calls_dropped:
            called = {"name": _PROBE[2], "arguments": {"a": "b"}}
            call = {"type": "function", "id": "123456789", "function": called}
            content_field = {} if content is None else {"content": kind[0]}
            talk = [
                {"role": "user", "content": _PROBE[0]},
                {"role": "assistant", **content_field, "tool_calls": [call]},
                {"role": "tool", "content": _PROBE[3], "tool_call_id": "123456789"},
            ]
            text = self.text_or_none(talk, tools)
            self._calls_dropped[kind] = text is not None and _PROBE[2] not in text
        return self._calls_dropped[kind]

    def _ending(self, turns: list[str]) -> tuple[bool, str]:
        """False if the template writes no token of the vocabulary behind an answer, and the tag
        that it writes instead."""
        behind_last = turns[0].split(_PROBE[1])[1].strip()
        behind_earlier = re.split(f"[{_PROBE[1]}{_PROBE[2]}]", turns[1])[1]
        is_ended = all(map(self.added.search, (behind_last or behind_earlier, behind_earlier)))
        tag = None if is_ended else chat_templates.TAG.match(behind_last)
        return is_ended, tag[0] if tag and not self.added.match(tag[0]) else ""

    def _ends(self, turns: list[str]) -> Iterator[str]:
        """The tokens that end an answer: the first one behind the last answer, and the one behind
        an earlier answer if it ends other messages too."""
        if not turns:
            return
        first, second = turns
        for text, content in ((first, _PROBE[1]), (second, _PROBE[3])):
            yield from self.added.findall(text.split(content)[1])[:1]
        _, behind_question, behind_answer, _ = re.split(f"[{''.join(_PROBE[:3])}]", second)
        end = set(self.added.findall(behind_answer)[:1])
        yield from end & set(self.added.findall(behind_question))

    def _structure(self, turns: list[str]) -> Iterator[str]:
        """The added tokens of a question: before it, and the first one behind it."""
        if turns:
            before, after = turns[0].split(_PROBE[0])
            yield from self.added.findall(before)
            yield from self.added.findall(after)[:1]

    def text(
        self,
        messages: Messages,
        tools: Any = None,
        *,
        prompt: bool = False,
        place: object = "",
    ) -> str:
        return self._rendered(messages, tools, place, prompt=prompt)[0]

    def text_or_none(
        self,
        messages: Messages,
        tools: Any = None,
        *,
        prompt: bool = False,
        place: object = "",
    ) -> str | None:
        """The text; None if the template refuses the messages, of which a row's own render tells
        the user."""
        try:
            return self.text(messages, tools, prompt=prompt, place=place)
        except TemplateRefusal:
            return None

    def text_in_use(self, messages: Messages, tools: Any = None, *, prompt: bool = False) -> str:
        """The text of a conversation with the finished model."""
        return self.text(_plain_messages(messages), tools, prompt=prompt)

    def _rendered(
        self, messages: Messages, tools: Any, place: object, **options: Any
    ) -> tuple[str, list[Span]]:
        template = self._tokenizer.get_chat_template(None, tools)
        special_tokens = self._tokenizer.special_tokens_map
        options = {"place": place, "name": self.name, "limit_s": self._limit_s, **options}
        return rendering.render(template, messages, tools, special_tokens, **options)

    def whole_text(self, messages: Messages, tools: Any = None, *, place: object = "") -> Rendered:
        """A conversation as a text for pretraining: every token is a target."""
        if not all(_weight(message, place) for message in messages):
            raise DataError(
                f"{place}: found weight 0 of a message, but pretraining learns every message; leave"
                " the row out, or add --data.ignore_columns=[weight]"
            )

        def render(shielded: list[dict[str, Any]], shielded_tools: Any) -> list[Rendered]:
            text = self.text(shielded, shielded_tools, place=place)
            self._check_contents(text, shielded, place)
            ends = self.tail.search(text) is not None
            return [Rendered(text, [(0, len(text))], ends=ends, place=place)]

        return self._shielded(messages, tools, place, render)[0]

    def render(
        self, messages: Messages, tools: Any = None, *, place: object = ""
    ) -> list[Rendered]:
        """The samples of a conversation; none if no message is a target.

        Raises DataError when the template does not take the conversation, or drops a part of it."""
        targets = [
            i
            for i, message in enumerate(messages)
            if message["role"] == "assistant" and _weight(message, place) and not _is_empty(message)
        ]
        if not targets:
            return []
        return self._shielded(
            *(messages, tools, place),
            lambda shielded, its_tools: self._rendered_talk(
                _Talk(self, shielded, its_tools, targets, place)
            ),
        )

    def _shielded(
        self,
        messages: Messages,
        tools: Any,
        place: object,
        render: Callable[[list[dict[str, Any]], Any], list[Rendered]],
    ) -> list[Rendered]:
        """The samples that `render` makes of a conversation. Texts of special tokens in it are
        shielded meanwhile."""
        plain = _plain_messages(messages)
        self._check_keys(self._tokenizer.get_chat_template(None, tools), plain, tools, place)
        if not self._splits_special_tokens or not any(
            map(self._protected.search, strings([plain, tools]))
        ):
            return render(plain, tools)
        return self._unshielded(render(*self._shield([plain, tools], place)), plain, tools)

    def _unshielded(
        self, rendered: list[Rendered], messages: Messages, tools: Any
    ) -> list[Rendered]:
        """The samples of shielded messages, as the messages themselves are rendered.

        Raises DataError when the template renders the shielded messages differently."""
        unshielded = [_unshielded(sample) for sample in rendered]
        place = unshielded[0].place
        if unshielded[0].method != "turns" and not self.text(
            messages, tools, place=place
        ).startswith(unshielded[0].text):
            raise DataError(
                f"{place}: a text of the row holds a special token of the tokenizer, and"
                f" {self.name} renders it in another way than other text; remove it from the row"
            )
        return unshielded

    def _shield(self, value: Any, place: object) -> Any:
        """The value with the text of special tokens between _OPEN and _CLOSE."""
        if isinstance(value, str):
            if _OPEN in value or _CLOSE in value:
                raise DataError(
                    f"{place}: a text of the row holds the noncharacters U+FDD0 or U+FDD1, which"
                    " no text may hold; remove them"
                )
            return self._protected.sub(f"{_OPEN}\\g<0>{_CLOSE}", value)
        if isinstance(value, Mapping):
            return {key: self._shield(item, place) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._shield(item, place) for item in value]
        return value

    def _rendered_talk(self, talk: "_Talk") -> list[Rendered]:
        if not self.ends_turns and talk.targets != [len(talk.messages) - 1]:
            turns = [self._rendered_talk(talk.turn(i)) for i in talk.targets]
            return [replace(sample, method="turns") for (sample,) in turns]
        method, spans, full = "marks", None, ""
        if rendering.has_marks(self._tokenizer.get_chat_template(None, talk.tools)):
            full, marks = self._rendered(talk.messages, talk.tools, talk.place, marks=True)
            spans = talk.by_marks(full, marks)
        if spans is None:
            full = talk.full_text()
            method, spans = "prefixes", talk.by_prefixes(full)
        if spans is None:
            method, spans = "characters", talk.by_characters(full)
        self._check_contents(full, talk.messages, talk.place)
        return talk.by_turns() if spans is None else [talk.rendered(full, spans, method)]

    def _check_keys(self, template: str, messages: Messages, tools: Any, place: object) -> None:
        """Raise DataError for content under a key that the template never reads, and for calls that
        it drops."""
        unread = ["tools"] if tools and "tools" not in template else []
        unread += [
            key
            for key, names in OPTIONAL.items()
            if not any(name in template for name in names)
            and any(message.get(key) for message in messages)
        ]
        if unread:
            raise DataError(
                f"{place}: {self.name} does not render {' and '.join(unread)}, which would be"
                " dropped; name a template that does with --tokenizer.chat_template=FILE|NAME, or"
                f" train on the rest with --data.ignore_columns=[{','.join(unread)}]"
            )
        for number, message in enumerate(messages, 1):
            content = message.get("content")
            if message.get("tool_calls") and self._drops_call(content, tools):
                beside = "no content" if content is None else f"content {content[:40]!r}"
                raise DataError(
                    f"{place}: {self.name} does not render tool_calls beside {beside} (message"
                    f" {number}), which would be dropped; name a template that does with"
                    " --tokenizer.chat_template=FILE|NAME"
                )

    def _check_contents(self, full: str, messages: Messages, place: object) -> None:
        """Raise DataError for a content that is missing in the render. Of an answer, a template may
        leave out its thoughts, and what stands beside calls."""
        for number, message in enumerate(messages, 1):
            content = message.get("content") or ""
            if message["role"] == "assistant":
                if message.get("tool_calls"):
                    continue
                content = _THOUGHTS.sub("\0", content).split("\0")
            # a template may rewrite an answer behind its first word
            most_words = 1 if message["role"] == "assistant" else _MOST_WORDS
            for text in strings(content):
                if text.strip() not in full and not _has_words(full, text, most_words):
                    raise DataError(
                        f"{place}: {self.name} does not render message {number} of role"
                        f" {message['role']!r}, which would be dropped; leave the row out, or name"
                        " a template that does with --tokenizer.chat_template=FILE|NAME"
                    )

    def end_of(self, turn: str) -> int:
        """The end of a target that a turn's text begins: behind its first end token."""
        tail = self.tail.search(turn) or self.special_tail.search(turn)
        if tail is None:
            return len(turn)
        return tail.end(1) if tail.re is self.tail else len(turn.rstrip())

    def has_end(self, turn: str) -> bool:
        """True if a text ends with an end token, or another special token."""
        return bool(self.tail.search(turn) or self.special_tail.search(turn))

    def end_behind(self, text: str, start: int, end: int) -> int | None:
        """The end of the first end token in a part of a text that holds no content."""
        token = self.end.search(text, start, end) or self._calls.search(text, start, end)
        return token.end() if token else None


@dataclass(frozen=True)
class _Talk:
    """A conversation whose answers are looked for in its render."""

    renderer: ConversationRenderer
    messages: list[dict[str, Any]]
    tools: Any
    targets: list[int]  # messages with a loss
    place: object
    _texts: dict[tuple[int, bool], str | None] = field(default_factory=dict)

    def full_text(self) -> str:
        text = self.renderer.text(self.messages, self.tools, place=self.place)
        self._texts[len(self.messages), False] = text
        return text

    def text(self, count: int, prompt: bool = False) -> str | None:
        """The render of the first messages; None if the template does not take them alone."""
        if (count, prompt) not in self._texts:
            self._texts[count, prompt] = self.renderer.text_or_none(
                self.messages[:count], self.tools, prompt=prompt, place=self.place
            )
        return self._texts[count, prompt]

    def by_marks(self, full: str, marks: list[Span]) -> list[Span] | None:
        """The marked spans, each with the end token behind it if it has none; None if it is not
        clear whose they are."""
        joined: list[Span] = []
        for start, end in marks:
            if joined and joined[-1][1] == start:
                joined[-1] = (joined[-1][0], end)
            elif start < end:
                joined.append((start, end))
        answers = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if len(self.targets) < len(answers):
            if len(joined) != len(answers):
                return None
            joined = [span for i, span in zip(answers, joined, strict=True) if i in self.targets]
        spans = []
        for start, end in joined:
            if not self.renderer.has_end(full[start:end]):
                following = self.renderer.end.match(full, end)
                end = following.end() if following else end
            spans.append((start, end))
        return spans or None

    def by_prefixes(self, full: str) -> list[Span] | None:
        spans: list[Span] = []
        done = 0
        for i in self.targets:
            prompt, answered = self.text(i, True), self.text(i + 1)
            if prompt is None or answered is None or len(prompt) < done:
                return None
            if not (full.startswith(answered) and answered.startswith(prompt)):
                return None
            start, done = len(prompt), len(answered)
            if start < done:
                spans.append((start, start + self.renderer.end_of(answered[start:])))
        return spans

    def by_characters(self, full: str) -> list[Span] | None:
        followed = Followers(self.messages)
        marked = self.renderer.text_or_none(followed.messages, self.tools, place=self.place)
        if marked is None or not followed.each or marked.translate(followed.originals) != full:
            return None
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        placed: set[str] = set()
        for place, character in enumerate(marked):
            message = followed.message_of.get(character)
            if message is None:
                continue
            if character in placed:
                if character in followed.names:  # the turn of a tool repeats it
                    continue
                return None  # a content that is written twice
            placed.add(character)
            first.setdefault(message, place)
            last[message] = place
        spans: list[Span] = []
        for i in self.targets:
            before = max((place for j, place in last.items() if j < i), default=-1) + 1
            limit = min((place for j, place in first.items() if j > i), default=len(full))
            start = self._start(i, full, before, min(first.get(i, limit), limit))
            if start is None or last.get(i, start) >= limit:
                return None
            content_end = last[i] + 1 if i in last else start
            end = self.renderer.end_behind(full, content_end, limit)
            if end is None:
                kept_end = followed.kept_ends.get(i, "")
                end = content_end + _common(kept_end, full[content_end:limit])
            if i in last or end > start:
                spans.append((start, end))
        return spans

    def _start(self, i: int, full: str, lowest: int, highest: int) -> int | None:
        """The place where message i begins to answer: the end of the prompt that generation would
        see, or of its beginning if the answer goes on in another way."""
        prompt, before = self.text(i, True), self.text(i)
        if prompt is not None and full.startswith(prompt) and len(prompt) <= highest:
            return len(prompt)
        if prompt is not None and before is not None and full.startswith(before):
            common = _common(prompt, full[:highest])
            for text in (prompt, full):  # two tokens may begin alike
                for token in self.renderer.added.finditer(text, lowest):
                    if token.start() < common < token.end():
                        common = token.start()
            return common if common >= lowest else None
        if prompt is not None and before is not None and prompt.startswith(before):
            header = prompt[len(before) :]
            place = full.rfind(header, lowest, highest) if header else -1
            if place >= 0:
                return place + len(header)
        return highest if highest < len(full) else None

    def by_turns(self) -> list[Rendered]:
        rendered = []
        for i in self.targets:
            turn, text = self.turn(i), self.text(i + 1)
            spans = text and (turn.by_prefixes(text) or turn.by_characters(text))
            if not text or not spans:
                raise DataError(
                    f"{self.place}: {self.renderer.name} renders message {i + 1} differently once"
                    " it is answered, or changes its text, so the answer cannot be separated from"
                    " its prompt; leave the row out, or name a plainer template with"
                    " --tokenizer.chat_template=FILE|NAME"
                )
            rendered.append(turn.rendered(text, spans, "turns"))
        return rendered

    def turn(self, i: int) -> "_Talk":
        """The conversation up to an answer, which is its only target."""
        return replace(self, messages=self.messages[: i + 1], targets=[i])

    def rendered(self, text: str, spans: list[Span], method: str) -> Rendered:
        """The sample. A text that needs an end token ends with its last answer."""
        is_last = bool(spans) and self.targets[-1] == len(self.messages) - 1
        ends = not is_last or self.renderer.has_end(text[spans[-1][0] :])
        if spans and (tag := self.renderer.text_end):
            start, end = spans[-1]
            place = text.rfind(tag, start, end)
            behind = self.renderer.added.sub("", text[place + len(tag) : end])
            if place >= 0 and not behind.strip() and not text.startswith(tag, end):
                ends, spans = False, [*spans[:-1], (start, place)]
        text = text if ends else text[: spans[-1][1]]
        return Rendered(text, spans, method, ends=ends, place=self.place)


def _common(text: str, other: str) -> int:
    """The length of the common beginning of two texts."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(text), len(other)))


def _has_words(full: str, text: str, most_words: int) -> bool:
    """True if the first words of a text are in another, in any case of letters."""
    matches = islice(WORD.finditer(text), most_words)
    missing = [match[0].lower() for match in matches if match[0] not in full]
    return all(word in full.lower() for word in missing)


def any_of(tokens: Any) -> re.Pattern[str]:
    """A pattern of any of the tokens that a template writes."""
    longest_first = sorted(tokens, key=len, reverse=True)
    return re.compile(f"(?<!{_OPEN})(?:{'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _unshielded(sample: Rendered) -> Rendered:
    """The sample without _OPEN and _CLOSE, with the spans that were between them."""
    marks = [match.start() for match in re.finditer(f"[{_OPEN}{_CLOSE}]", sample.text)]

    def moved(place: int) -> int:
        return place - bisect_left(marks, place)

    pairs = zip(marks[::2], marks[1::2], strict=True)
    return replace(
        sample,
        text=sample.text.replace(_OPEN, "").replace(_CLOSE, ""),
        targets=[(moved(start), moved(end)) for start, end in sample.targets],
        plain=[(moved(start + 1), moved(end)) for start, end in pairs],
    )


def _weight(message: Mapping[str, Any], place: object) -> bool:
    """True if an answer has a loss."""
    weight = message.get("weight", 1)
    if weight not in (0, 1, None):
        raise DataError(
            f"{place}: found weight {weight!r} of a message, expected 0 (no loss) or 1; mend"
            " the row"
        )
    return weight != 0


def _is_empty(message: Mapping[str, Any]) -> bool:
    """True for an answer that says nothing: it has no loss."""
    parts = map(message.get, ("content", "tool_calls", "reasoning_content"))
    return not any(part.strip() if isinstance(part, str) else part for part in parts)


def _plain_messages(messages: Messages) -> list[dict[str, Any]]:
    """The messages for a template: without nulls, as transformers does, and without weights."""
    return [
        {key: value for key, value in message.items() if value is not None and key != "weight"}
        for message in messages
    ]
