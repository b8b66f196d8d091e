"""oasst: rows of which each is a message, as conversations."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from launch.base.errors import DataError
from launch.base.text import did_you_mean
from launch.data.conversation import Conversation, Message
from launch.data.normalise import MESSAGE_ID, PARENT_ID, SPEAKERS, text

Rows = Iterator[tuple[int, object, dict[str, Any]]]  # number, place and row
Refuse = Callable[[DataError], None]


def conversations(rows: Rows, columns: Mapping[str, str], refuse: Refuse) -> Iterator[Conversation]:
    """The conversations of messages. With `message_id` and `parent_id`, each thread of a tree is
    a conversation, and an answer of several threads is trained in the first. Without them, a
    user's message and the next row are a pair."""
    turns = _turns(rows, columns, refuse)
    first = next(turns, None)
    if first is None:
        return
    every = chain([first], turns)
    yield from _threads(every, refuse) if first.is_of_tree else _pairs(every, refuse)


@dataclass
class _Turn:
    message: Message | None  # None: a row that cannot be read
    place: object
    number: str | None  # message_id
    parent: str | None  # parent_id

    @property
    def is_of_tree(self) -> bool:
        return self.number is not None or self.parent is not None


def _turns(rows: Rows, columns: Mapping[str, str], refuse: Refuse) -> Iterator[_Turn]:
    for _, place, row in rows:
        ids = [row.get(key) or None for key in (MESSAGE_ID, PARENT_ID)]
        message = None
        try:
            speaker, content = text(row, columns["role"]), text(row, columns["text"])
            if (name := speaker.lower()) not in SPEAKERS:
                raise DataError(
                    f"found role {speaker!r}, expected one of {', '.join(SPEAKERS)}"
                    f"{did_you_mean(speaker, SPEAKERS)}"
                )
            message = {"role": SPEAKERS[name], "content": content}
        except DataError as error:
            refuse(DataError(f"{place}: {error}"))
        yield _Turn(message, place, *ids)


def _pairs(turns: Iterator[_Turn], refuse: Refuse) -> Iterator[Conversation]:
    question: Message | None = None
    for turn in turns:
        message = turn.message
        if turn.is_of_tree:
            refuse(DataError(f"{turn.place}: has {MESSAGE_ID} or {PARENT_ID}, the first row none"))
            message = None
        if message and message["role"] == "assistant" and question:
            yield Conversation([question, message], place=turn.place)
        question = message if message and message["role"] == "user" else None


def _threads(turns: Iterator[_Turn], refuse: Refuse) -> Iterator[Conversation]:
    by_id: dict[str | None, _Turn] = {}
    for turn in turns:
        if turn.number is None:
            refuse(DataError(f"{turn.place}: has no {MESSAGE_ID}, as other rows have; add it"))
            continue
        if turn.parent is None:
            yield from _of_tree(by_id)
            by_id = {}
        if turn.number in by_id:
            refuse(
                DataError(
                    f"{turn.place}: {MESSAGE_ID} {turn.number!r} is that of an earlier row of this"
                    " tree; give each message its own"
                )
            )
        elif turn.parent is not None and turn.parent not in by_id:
            refuse(
                DataError(
                    f"{turn.place}: no row of this tree before it has the message_id of its"
                    f" parent_id {turn.parent!r}; sort the rows so that each tree begins with its"
                    " first message, and each message stands before its answers"
                )
            )
        else:
            by_id[turn.number] = turn
    yield from _of_tree(by_id)


def _of_tree(by_id: Mapping[str | None, _Turn]) -> Iterator[Conversation]:
    """The threads of a tree in the order of their last messages."""
    answered = {turn.parent for turn in by_id.values()}
    trained: set[str | None] = set()
    for turn in by_id.values():
        if turn.number in answered:
            continue
        thread = [turn]
        while thread[0].parent is not None:
            thread.insert(0, by_id[thread[0].parent])
        while thread and thread[-1].message and thread[-1].message["role"] == "user":
            thread.pop()
        answers = [t.number for t in thread if t.message and t.message["role"] == "assistant"]
        if set(answers) <= trained or not all(t.message for t in thread):
            continue
        messages = [
            {**t.message, "weight": 0} if t.number in trained else t.message
            for t in thread
            if t.message
        ]
        trained.update(answers)
        yield Conversation(messages, place=turn.place)
