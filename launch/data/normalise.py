"""Make the sample of a row: the conversation, or the text, that its columns hold."""

import json
from typing import Any

from launch.base.errors import DataError
from launch.base.text import did_you_mean
from launch.data import untrained
from launch.data.conversation import Conversation, Message, Sample
from launch.data.files.shards import TABLES
from launch.schema.plan import DataFormat

SPEAKERS = {  # name of a speaker in lower case -> role
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "bot", "model", "chatgpt", "chatbot"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
}
# turns of tools: their results; calls are JSON text {"name", "arguments"}, or a list of such
RESULTS = frozenset({"tool", "observation", "function", "function_response", "tool_response"})
CALLS = frozenset({"function_call", "tool_call"})
OPENAI, SHAREGPT = ("role", "content"), ("from", "value")
FIELDS = {  # other keys of a message, in lower case -> the key of a Message
    **dict.fromkeys(("tool_calls", "function_call"), "tool_calls"),
    **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "reasoning_content"),
    **dict.fromkeys(("weight", "train", "training", "loss_mask"), "weight"),
    **{"tool_call_id": "tool_call_id", "name": "name"},
    **dict.fromkeys(untrained.TOOLS, "tools"),  # keys of a system message
}
_ROLES_OF_FIELDS = {  # other roles that have such a key are mistakes
    **{"tool_calls": "assistant", "reasoning_content": "assistant", "tool_call_id": "tool"},
}
# keys that link the messages of a tree in the oasst format
MESSAGE_ID, PARENT_ID = "message_id", "parent_id"
_OPTIONAL_COLUMNS = {
    "system": ("system", "system_prompt", "system_message"),
    "history": ("history",),
    "tools": untrained.TOOLS,
    **{MESSAGE_ID: (MESSAGE_ID,), PARENT_ID: (PARENT_ID,)},
}
_OPTIONAL_OF = {  # kind -> what its rows may have besides their columns
    "messages": ("system", "tools"),
    "prompt_response": ("system", "history", "tools"),
    "oasst": (MESSAGE_ID, PARENT_ID),
}


class RowReader:
    """Reads the rows of a format. A row that makes no sample is a DataError that names the column;
    whoever reads the file adds the place."""

    def __init__(self, data_format: DataFormat) -> None:
        self.kind, self.columns = data_format.kind, data_format.columns
        self.ignored = frozenset(data_format.ignored)
        self._is_table = data_format.file_type in TABLES
        used = {*self.columns.values(), *self.ignored}
        self.optional = {
            part: [name for name in _OPTIONAL_COLUMNS[part] if name not in used]
            for part in _OPTIONAL_OF.get(self.kind, ())
        }
        self._optional_names = frozenset().union(*self.optional.values())
        # columns that are no reason to refuse a row; the score of a text is its quality
        self.passed = used.union(*self.optional.values(), ["score"] if self.kind == "text" else [])

    def reads(self, column: str) -> bool:
        """True for a column that is read besides those of the format."""
        return column in self._optional_names

    def sample(self, row: dict[str, Any]) -> Sample:
        """The sample of a row. Raises Refused for content that would be dropped."""
        columns = self.columns
        if self.kind == "text":
            return text(row, columns["text"])
        messages = (
            self._messages(row.get(columns["messages"]), columns["messages"])
            if self.kind == "messages"
            else self._prompt(row) + self._response(row)
        )
        if self._optional_names.isdisjoint(row):
            return _with_tools(messages)
        if (named := self._optional(row, "history")) is not None:
            messages = self._history(*named) + messages
        if (named := self._optional(row, "system")) is not None:
            messages = _with_system(text(row, named[1]), messages, named[1])
        if (named := self._optional(row, "tools")) is None:
            return _with_tools(messages)
        where = f"column '{named[1]}'"
        return _with_tools(messages, (where, self._tools(named[0], where)))

    def _optional(self, row: dict[str, Any], part: str) -> tuple[Any, str] | None:
        """(value, column) of an optional column that has content."""
        names = [
            name for name in self.optional.get(part, ()) if not untrained.is_empty(row.get(name))
        ]
        if len(names) > 1:
            raise DataError(
                f"columns {', '.join(map(repr, names))} both have content, but a row has one"
                f" {part}; leave the other out, e.g. --data.ignore_columns=[{names[-1]}]"
            )
        return (row[names[0]], names[0]) if names else None

    def _prompt(self, row: dict[str, Any]) -> list[Message]:
        column = self.columns["prompt"]
        if isinstance(row.get(column), list):  # its answers are no targets
            return [
                {**message, "weight": 0} if message["role"] == "assistant" else message
                for message in self._messages(row[column], column)
            ]
        prompt, context = text(row, column), self.columns.get("context")
        if context is not None and row.get(context):
            prompt = f"{prompt}\n{text(row, context)}" if prompt else text(row, context)
        return [{"role": "user", "content": prompt}]

    def _response(self, row: dict[str, Any]) -> list[Message]:
        column = self.columns["response"]
        if isinstance(row.get(column), list):
            return self._messages(row[column], column)
        return [{"role": "assistant", "content": text(row, column)}]

    def _history(self, value: Any, column: str) -> list[Message]:
        pairs = self._json(value, f"column '{column}'")
        if not isinstance(pairs, list) or not all(
            isinstance(pair, list)
            and len(pair) == 2
            and all(isinstance(turn_text, str) for turn_text in pair)
            for pair in pairs
        ):
            raise DataError(f"column '{column}': expected a list of [question, answer], all text")
        return [
            {"role": role, "content": turn_text}
            for pair in pairs
            for role, turn_text in zip(("user", "assistant"), pair, strict=True)
        ]

    def _tools(self, value: Any, where: str) -> list[dict[str, Any]]:
        """Tools as templates expect them: {"type": "function", "function": {...}}."""
        tools = self._json(value, where)
        wrapped = [
            tool
            if isinstance(tool, dict) and "function" in tool
            else {"type": "function", "function": tool}
            for tool in (tools if isinstance(tools, list) else [None])
        ]
        if not all(_has_name(tool["function"]) for tool in wrapped):
            raise DataError(
                f"{where}: expected a list of tools, each an object with a name, or with"
                ' {"type": "function", "function": {"name": ...}}'
            )
        return wrapped

    # ---- messages
    # -----------------------------------------------------------------------

    def _messages(self, turns: Any, column: str) -> list[Message]:
        if isinstance(turns, str):
            turns = self._json(turns, f"column '{column}' (a list of messages, or its JSON text)")
        if not isinstance(turns, list) or not turns:
            kind = "an empty list" if turns == [] else type(turns).__name__
            raise DataError(f"column '{column}': found {kind}, expected a list of messages")
        messages = []
        for turn in turns:
            if isinstance(turn, dict) and len(turn) == 2:  # most turns are plain: read them fast
                speaker = turn.get("role") or turn.get("from")
                content = turn.get("content" if "role" in turn else "value")
                if isinstance(speaker, str) and isinstance(content, str) and speaker in SPEAKERS:
                    if not content.isascii():
                        _written(content, column)
                    messages.append({"role": SPEAKERS[speaker], "content": content})
                    continue
            messages.append(self._message(turn, column))
        return messages

    def _message(self, turn: Any, column: str) -> Message:
        turn = turn if isinstance(turn, dict) else {}
        pair, other = (OPENAI, SHAREGPT) if turn.get("role") is not None else (SHAREGPT, OPENAI)
        speaker, content = turn.get(pair[0]), turn.get(pair[1])
        if not isinstance(speaker, str):
            raise DataError(
                f"column '{column}': a message needs text in role and content (or from and value)"
            )
        name = speaker.lower()
        role = "tool" if name in RESULTS else "assistant" if name in CALLS else SPEAKERS.get(name)
        if role is None:
            roles = (*SPEAKERS, *sorted(RESULTS), *sorted(CALLS))
            raise DataError(
                f"column '{column}': found a message of role {speaker[:40]!r}, expected one of"
                f" {', '.join(roles)}{did_you_mean(speaker, roles)}"
            )
        where = f"column '{column}': a message of role {speaker!r}"
        message: Message = {"role": role, "content": None}
        if name in CALLS:
            message["tool_calls"] = self._calls(content, where)
        else:
            message["content"] = self._content(content, column, where)
        refused = []
        for key, value in turn.items():
            if key in pair or key in self.ignored or untrained.is_empty(value):
                continue
            if key in other:
                raise DataError(f"{where} has {pair[1]} and {key}; keep one of the two")
            field = FIELDS.get(key.lower())
            if field and (field != "tools" or role == "system"):
                self._add(message, field, key, value, where)
            elif untrained.is_key(key):
                refused.append(key)
        if refused:
            raise untrained.refusal(refused, column)
        if message.get("weight") != 0:
            message.pop("weight", None)
        if message["content"] is None and "tool_calls" not in message:
            for key in turn:
                if FIELDS.get(key.lower()) == "tool_calls" and turn[key]:
                    if key in self.ignored:  # without the ignored call, nothing with a loss remains
                        return {**message, "content": ""}
                    raise DataError(f"{where}: the call in {key!r} has no name; name its function")
            raise DataError(
                f'{where} has no content; write text ("" for an empty answer), or tool_calls'
            )
        return message

    def _content(self, content: Any, column: str, where: str) -> str | None:
        if isinstance(content, list):
            if not all(_is_text_part(part) for part in content):
                raise DataError(f'{where}: only parts {{"type": "text", "text": ...}} are trained')
            content = "".join(part["text"] for part in content) if content else None
        if not isinstance(content, str | None):
            raise DataError(f"{where}: found {type(content).__name__} as content, expected text")
        return content and _written(content, column)

    def _add(self, message: Message, field: str, key: str, value: Any, where: str) -> None:
        """Add a key of a turn to its message."""
        role = _ROLES_OF_FIELDS.get(field, message["role"])
        if role != message["role"]:
            raise DataError(f"{where} has {key!r}, which belongs to role {role}")
        if field == "weight":
            value = self._weight(message["role"], key, value, where)
        elif field == "tool_calls":
            value = self._calls(value, where)
        elif field == "tools":
            value = self._tools(value, f"{where}: its {key}")
        elif not isinstance(value, str):
            raise DataError(f"{where}: found {type(value).__name__} as {key!r}, expected text")
        else:
            _written(value, key)
        if message.get(field, value) != value:
            raise DataError(f"{where} has {key!r} beside another key of the same meaning; keep one")
        message[field] = value

    def _weight(self, role: str, key: str, value: Any, where: str) -> int | None:
        """0 or 1 of an answer; None of another turn, which has no loss."""
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DataError(f"{where}: found {value!r:.40} as {key!r}, expected 0 or 1")
        if role != "assistant" and value:
            raise DataError(
                f"{where} has {key!r} {value}, but the loss is on answers only; remove it, or add"
                f" --data.ignore_columns=[{key}]"
            )
        return int(value) if role == "assistant" else None

    def _calls(self, value: Any, where: str) -> list[dict[str, Any]]:
        calls = self._json(value, f"{where}: its calls")
        calls = calls if isinstance(calls, list) and calls else [calls]
        return [self._call(call, where) for call in calls]

    def _call(self, call: Any, where: str) -> dict[str, Any]:
        """A call as templates expect it: its arguments are an object, not JSON text."""
        if isinstance(call, dict) and "function" not in call:
            function = {key: call[key] for key in call if key not in ("id", "type")}
            call = {key: call[key] for key in call if key not in function} | {"function": function}
        is_call = isinstance(call, dict) and call.get("type") in (None, "function")
        if is_call and _has_name(function := call["function"]):
            arguments = function.get("arguments")
            arguments = (
                {} if arguments in (None, "") else self._json(arguments, f"{where}: arguments")
            )
            if isinstance(arguments, dict):
                function = {**function, "arguments": arguments}
                return {**call, "type": "function", "function": function}
        raise DataError(
            f'{where}: expected a call as {{"name": ..., "arguments": {{...}}}}, whose arguments'
            " are an object, or its JSON text"
        )

    def _json(self, value: Any, where: str) -> Any:
        """The value, or the value of its JSON text. A null in a table means absent."""
        try:
            if isinstance(value, str):
                value = json.loads(value, object_pairs_hook=unique_keys)
            elif self._is_table:
                value = _without_nulls(value)
            json.dumps(value, ensure_ascii=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(f"{where}: cannot be read as JSON ({error}); mend the row") from error
        return value


def text(row: dict[str, Any], column: str) -> str:
    """The text of a column. Raises DataError if it holds anything else."""
    value = row.get(column)
    if not isinstance(value, str):
        kind = "null" if value is None else type(value).__name__
        kind = kind if column in row else "no such key"
        raise DataError(f"column '{column}': found {kind}, expected text; mend or remove the row")
    return value if value.isascii() else _written(value, column)


def _written(value: str, column: str) -> str:
    """The text, which can be written as UTF-8: JSON's \\ud800 alone is half a character."""
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"column '{column}': found half a character (a surrogate) at {error.start}; mend the"
            " row"
        ) from error
    return value


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of a JSON parser's pairs. Raises ValueError for a key that stands twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)!r} twice")
    return fields


def _with_system(system: str, messages: list[Message], column: str) -> list[Message]:
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    if messages[0]["content"] != system:
        raise DataError(
            f"column '{column}' and the first message are two system prompts; keep one, or add"
            f" --data.ignore_columns=[{column}]"
        )
    return messages


def _with_tools(
    messages: list[Message], *offered: tuple[str, list[dict[str, Any]]]
) -> Conversation:
    """The conversation with the tools that are `offered` beside it, or in its system message; each
    has its place, for errors."""
    places = [
        *offered,
        *(
            (f"a message of role {message['role']!r}", message.pop("tools"))
            for message in messages
            if "tools" in message
        ),
    ]
    for where, tools in places[1:]:
        if tools != places[0][1]:
            raise DataError(
                f"{places[0][0]} and {where} offer different tools; keep one of the two"
            )
    return Conversation(messages, places[0][1] if places else None)


def _has_name(function: Any) -> bool:
    return (
        isinstance(function, dict)
        and isinstance(function.get("name"), str)
        and function["name"] != ""
    )


def _is_text_part(part: Any) -> bool:
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and all(
            untrained.is_empty(value) for key, value in part.items() if key not in ("type", "text")
        )
    )


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value
