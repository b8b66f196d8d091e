"""Conversations and texts, as the readers of data files give them to the tokeniser."""

import json
from dataclasses import dataclass, field
from typing import Any

# Keys role and content (text or None), and of some messages: tool_calls, tool_call_id, name,
# reasoning_content, weight.
Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """The messages of a row, and the tools that it offers to the model."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    place: object = field(default="", compare=False)  # file and line of the row, for errors


Sample = Conversation | str  # str: a text


def text_of(sample: Sample) -> str:
    """The text of a sample, or of its messages and tools; a tokenizer is trained on it."""
    if isinstance(sample, str):
        return sample
    parts = [json.dumps(sample.tools, ensure_ascii=False)] if sample.tools else []
    for message in sample.messages:
        parts.append(message["content"] or "")
        if message.get("reasoning_content"):
            parts.append(message["reasoning_content"])
        if message.get("tool_calls"):
            parts.append(json.dumps(message["tool_calls"], ensure_ascii=False))
    return "\n".join(parts)
