"""Advice on naming the columns of a file in a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from launch.data import untrained
from launch.data.files.text_files import DELIMITERS
from launch.data.sniff import FileColumns

PROMPT_NAMES = ("prompt", "question", "instruction", "input", "query", "problem")
ANSWER_NAMES = ("answer", "response", "output", "completion", "target", "reply", "solution")
_SEPARATORS = {";": "semicolons", "\t": "tabs", "|": "bars", ",": "commas"}
TRAINED = "data.train_file"


@dataclass(frozen=True)
class Origin:
    """The key of a recipe that names a file."""

    key: str = TRAINED
    is_source: bool = False  # an entry of a list
    names_columns: bool = False  # the entry has the key columns
    expected: str = ""  # columns of the training file, where this is a held-out file
    train_file: str = ""  # training file whose format this held-out file must have

    def key_of(self, role: str) -> str:
        """The key that names the column of a role."""
        return f"columns.{role} of this source" if self.names_columns else f"data.{role}_column"

    def naming(self, columns: Mapping[str, str]) -> str:
        """Advice to name these columns, by role."""
        if self.expected:
            return f"give it the columns of {TRAINED}: {self.expected}"
        if not self.is_source:
            flags = (untrained.flag(f"{role}_column", name) for role, name in columns.items())
            return f"add {' '.join(flags)}"
        named = ", ".join(f"{role}: {untrained.yaml_text(name)}" for role, name in columns.items())
        return f"write columns: {{{named}}} beside its path in {TRAINED}"


def likely(file: FileColumns, origin: Origin) -> str:
    """The likeliest columns of a file in no known format, and how to name them."""
    if file.file_type in DELIMITERS and len(file.columns) == 1:
        (header,), used = file.columns, DELIMITERS[file.file_type]
        if other := next((mark for mark in _SEPARATORS if mark in header and mark != used), None):
            return (
                f"its header has {_SEPARATORS[other]} between the names: write {_SEPARATORS[used]}"
            )
    texts = [name for name, holds in file.columns.items() if holds == "string"]
    lists = [name for name, holds in file.columns.items() if holds == "messages"]
    if len(lists) > 1:
        return "of several columns with messages one is read: write the turns of each row into one"
    if lists:
        return origin.naming({"messages": lists[0]})
    if len(texts) == 1:
        return origin.naming({"text": texts[0]})
    if len(texts) > 1:
        response = next((name for name in texts if name.lower() in ANSWER_NAMES), texts[1])
        others = [name for name in texts if name != response]
        prompt = next((name for name in others if name.lower() in PROMPT_NAMES), others[0])
        return origin.naming({"prompt": prompt, "response": response})
    return "none of them holds text"


def preferred(file: FileColumns, preference_columns: Sequence[str], origin: Origin) -> str:
    """Advice to train on the preferred answers of pairs, or on labels; "" if there are none."""
    chosen = next((name for name in preference_columns if name.lower() in ("chosen", "label")), "")
    kind = file.columns.get(chosen)
    prompts = [
        name
        for name, holds in file.columns.items()
        if holds == kind and name not in preference_columns
    ]
    part = "as the answers"
    if kind in ("string", "messages") and prompts:
        prompt = next((name for name in PROMPT_NAMES if name in prompts), prompts[0])
        advice = origin.naming({"prompt": prompt, "response": chosen})
    elif kind == "messages":
        advice = origin.naming({"messages": chosen})
    elif kind == "string":  # prompt and answer in one text
        part, advice = "as whole texts", origin.naming({"text": chosen})
    else:
        return ""
    if rest := [name for name in preference_columns if name != chosen]:
        flag = untrained.flag("ignore_columns", rest)
        advice += f" {flag}" if advice.startswith("add") else f", and add {flag}"
    return f"To train on column {chosen!r} {part}, {advice}"
