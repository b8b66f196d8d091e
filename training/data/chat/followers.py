"""Messages whose characters are replaced by others, which are followed into a render."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

# characters that stay where contents are followed: what templates look for, trim or escape,
# and the noncharacters around special tokens
KEPT = re.compile(r'[\s"\\\x00-\x1f]|<[^<>\s]*>|\[/?[A-Z_]+\]|\ufdd0|\ufdd1')
# values that a template compares instead of writing them, or writes in another message too
COMPARED = frozenset({"role", "type", "id", "tool_call_id", "name"})
# letters of rare scripts: filters and repr() write them as they are
_FOLLOWERS = "".join(filter(str.isprintable, map(chr, range(0x20000, 0x323B0))))


def strings(value: Any) -> Iterator[str]:
    """The texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


class Followers:
    """Messages whose characters are replaced by characters that the row does not hold."""

    def __init__(self, messages: list[dict[str, Any]]) -> None:
        texts = list(strings(messages))
        used = set().union(*texts)
        self._free = (letter for letter in _FOLLOWERS if letter not in used)
        # Characters that are followed at the beginning and at the end of a longer text; 0: there
        # are too many texts
        self.each = len(_FOLLOWERS) // (4 * max(len(texts), 1))
        self.originals: dict[int, str] = {}
        self.message_of: dict[str, int] = {}
        self.names: set[str] = set()
        self.kept_ends: dict[int, str] = {}  # text after a message's last followed character
        self.messages = [self._replaced(message, i) for i, message in enumerate(messages)]

    def _replaced(self, value: Any, message: int, is_name: bool = False) -> Any:
        if isinstance(value, Mapping):
            names = {"name"} if "arguments" in value else set()  # name of a function that is called
            return {
                key: self._replaced(item, message, key in names)
                if key not in COMPARED or key in names
                else item
                for key, item in value.items()
            }
        if isinstance(value, list):
            return [self._replaced(item, message) for item in value]
        if not isinstance(value, str):
            return value
        characters = list(value)
        unfollowed = {i for match in KEPT.finditer(value) for i in range(*match.span())}
        places = [i for i in range(len(characters)) if i not in unfollowed]
        if len(places) > 2 * self.each:
            places = places[: self.each] + places[len(places) - self.each :]
        for i in places:
            follower = next(self._free)
            self.originals[ord(follower)] = value[i]
            self.message_of[follower] = message
            if is_name:
                self.names.add(follower)
            characters[i] = follower
        if value:
            self.kept_ends[message] = value[places[-1] + 1 :] if places else value
        return "".join(characters)
