"""Chat templates x kinds of conversation: is what is trained what the template renders? On CPUs.

The templates are those that TRL's wheel ships (`pip install --target FOLDER --no-deps trl`); this
script reads them from --templates FOLDER/trl/chat_templates and keeps none. Each is rendered with a
byte-level tokenizer that has the template's tags as tokens.

A cell is right if the ids are those of tokenizer.apply_chat_template for the whole conversation
(for each answered turn, where a conversation is a row for each), every text of an answer that the
render has is in the targets, no text of another message is, and each target ends with an end token.
The rows of each template are also written to a token cache and read back as the batches of a
training, plain, packed and split by tokens: their documents must be the encoded rows.
The words of every message are its own, so this needs nothing of the code that finds the spans.
"""

from __future__ import annotations

import argparse
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks import recording
from launch.base.errors import DataError
from launch.data.conversation import Conversation, Sample
from launch.data.rows import IGNORED
from training.data.batches import Collator, TokenRows
from training.data.encode import Encoder, EncoderSettings, write_cache
from training.data.packing import Packer
from training.data.sample_order import SampleOrder, TokenBudget

Document = tuple[tuple[int, ...], tuple[int, ...]]  # input_ids, labels
WAYS = ("plain", "packed", "by tokens")
PAD = 0  # a byte that no conversation holds

TAGS = re.compile(
    r"</?[A-Za-z_][\w/ ]*>|<\|[^|<>\n]{1,40}\|>|<｜[^｜]{1,40}｜>|\[/?[A-Z_]+\]|<\|\w+>|<\w+\|>"
)
ENDS = (  # the first of these tags that a template has is the tokenizer's eos_token
    *("<|im_end|>", "<|eot_id|>", "<|return|>", "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>"),
    *("<｜end▁of▁sentence｜>", "<|endoftext|>", "</s>"),
)
TEXT_TAGS = re.compile(r"</?[a-z][\w ]*>")  # added tokens that are not special, as <think>
TURN_TAGS = {"<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "<end_of_utterance>"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"word": {"type": "string", "description": "a word"}},
                "required": ["word"],
            },
        },
    }
]


def user(word: str) -> dict[str, Any]:
    return {"role": "user", "content": f"Please explain {word} to me."}


def answer(word: str, **others: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": f"It is a {word}, 不是别的。", **others}


def calls(*words: str) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": f"callid{number:03d}",
                "function": {"name": "look_up", "arguments": {"word": word}},
            }
            for number, word in enumerate(words)
        ],
    }


def result(word: str, number: int = 0) -> dict[str, Any]:
    return {
        "role": "tool",
        "name": "look_up",
        "tool_call_id": f"callid{number:03d}",
        "content": f"found {word}",
    }


KINDS: Mapping[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "one turn": ([user("ququ"), answer("adada")], None),
    "two turns": ([user("ququ"), answer("adada"), user("qoqo"), answer("ededed")], None),
    "system": (
        [{"role": "system", "content": "Be sysys."}, user("ququ"), answer("adada")],
        None,
    ),
    "tools": ([user("ququ"), calls("cacaca"), result("rere"), answer("adada")], TOOLS),
    "parallel calls": (
        [user("ququ"), calls("cacaca", "cococo"), result("rere"), result("riri", 1), answer("ada")],
        TOOLS,
    ),
    "reasoning": (
        [
            user("ququ"),
            answer("adada", reasoning_content="Hmm tatata."),
            user("qoqo"),
            answer("ededed", reasoning_content="Hmm tototo."),
        ],
        None,
    ),
    "weights": ([user("ququ"), answer("adada", weight=0), user("qoqo"), answer("ededed")], None),
    "ends with user": ([user("ququ"), answer("adada"), user("qoqo")], None),
}
WORDS = re.compile(r"ququ|qoqo|adada|ada|ededed|sysys|cacaca|cococo|rere|riri|tatata|tototo")


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, with the template's tags as tokens."""
    vocabulary = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tags = dict.fromkeys([*TAGS.findall(template), "<s>", "</s>", "<|endoftext|>"])
    eos = next(end for end in ENDS if end in template or end == "</s>")
    backend.add_tokens(
        [AddedToken(tag, special=tag in TURN_TAGS or not TEXT_TAGS.fullmatch(tag)) for tag in tags]
    )
    made = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token=eos)
    made.chat_template = template
    return made


def template_ids(made: PreTrainedTokenizerFast, messages: list[Any], tools: Any) -> list[int]:
    plain = [{k: v for k, v in message.items() if k != "weight"} for message in messages]
    return made.apply_chat_template(plain, tools=tools, return_dict=False)  # pyright: ignore


def text_of(made: PreTrainedTokenizerFast, ids: list[int]) -> str:
    return str(made.decode(ids))


def words(value: Any) -> set[str]:
    return set(WORDS.findall(str(value)))


def faults(
    made: PreTrainedTokenizerFast,
    encoder: Encoder,
    messages: list[Any],
    tools: Any,
) -> Iterator[str]:
    """The first word is the method; then what is wrong."""
    samples = encoder.renderer.render(messages, tools, place="row")
    (rows,) = encoder.encode([Conversation(messages, tools)])
    yield samples[0].method
    asked = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight") != 0]
    parts = [messages]
    if samples[0].method == "turns":
        parts = [messages[: i + 1] for i in asked]
    if len(rows) != len(parts):
        yield f"{len(rows)} rows"
        return
    alone = text_of(made, template_ids(made, [user("ququ"), answer("adada")], None))
    has_end = not alone.endswith(answer("adada")["content"])  # GLM: a question ends an answer
    targets = ""
    for row, sample, part in zip(rows, samples, parts, strict=True):
        ids = row["input_ids"] if sample.ends else row["input_ids"][:-1]
        if ids != template_ids(made, part, tools):
            yield "ids"
        spans: list[list[int]] = [[]]
        for label in row["labels"]:
            if label != IGNORED:
                spans[-1].append(label)
            elif spans[-1]:
                spans.append([])
        texts = [text_of(made, span) for span in spans if span]
        targets += "\n".join(texts)
        tokens = set(made.added_tokens_decoder)
        ends = [[token for token in span if text_of(made, [token]).strip()] for span in spans]
        if has_end and not all(span[-1] in tokens for span in ends if span):
            yield f"no end token: {texts}"
        if any(len(span) > 1 and span[-1] == span[-2] for span in spans):
            yield "two end tokens"
    trained = words(targets)
    rendered = words(text_of(made, template_ids(made, messages, tools)))
    answers = [messages[i] for i in asked]
    others = [message for i, message in enumerate(messages) if i not in asked]
    if missing := (words(answers) & rendered) - trained:
        yield f"not trained: {missing}"
    if words([a["content"] for a in answers]) - trained:
        yield "an answer is not trained"
    if strange := trained & words(others):
        yield f"trained, but of another message: {strange}"


def cell(template: str, kind: str) -> dict[str, str]:
    messages, tools = KINDS[kind]
    made = tokenizer_of(template)
    try:
        method, *wrong = faults(
            made, Encoder(made, EncoderSettings(False, "sft", 1 << 20)), messages, tools
        )
    except DataError as error:
        return {"method": "refused", "reason": str(error)}
    return {"method": method, **({"wrong": "; ".join(wrong)} if wrong else {})}


def documents(batch: Mapping[str, Any]) -> Iterator[Document]:
    """The rows in a batch, without padding."""
    if "position_ids" not in batch:
        for ids, labels, mask in zip(
            batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True
        ):
            yield tuple(ids[mask == 1].tolist()), tuple(labels[mask == 1].tolist())
        return
    for ids, labels, places in zip(
        batch["input_ids"], batch["labels"], batch["position_ids"], strict=True
    ):
        starts = [*(places == 0).nonzero()[:, 0].tolist(), len(ids)]
        for start, end in pairwise(starts):
            document = tuple(ids[start:end].tolist()), tuple(labels[start:end].tolist())
            if set(document[0]) != {PAD} or set(document[1]) != {IGNORED}:
                yield document


def batches(way: str, file: Path) -> Iterator[Mapping[str, Any]]:
    """The micro-batches of a training on a token cache: plain, packed, or split by tokens."""
    rows = TokenRows(file)
    budget = None
    if way == "by tokens":
        most = tuple(int(length) for length in rows.lengths().max(axis=0))
        budget = TokenBudget(rows.lengths, *(3 * length for length in most))
    order = SampleOrder(len(rows), 3, 2, 1, 0, seed=7, budget=budget)
    collate = Collator(PAD, multiple=8, is_packed=way == "packed")
    yield from filter(None, (collate(rows.__getitems__(indices)) for indices in order))


def wrong_ways(template: str) -> list[str]:
    """The ways to batch whose documents are not the encoded rows of a template."""
    encoder = Encoder(tokenizer_of(template), EncoderSettings(False, "sft", 4096))
    samples: list[Sample] = []
    rows: Counter[Document] = Counter()
    for messages, tools in KINDS.values():
        try:
            (encoded,) = encoder.encode([Conversation(messages, tools)])
        except DataError:
            continue
        samples.append(Conversation(messages, tools))
        rows.update((tuple(row["input_ids"]), tuple(row["labels"])) for row in encoded)
    wrong = []
    for way in WAYS if samples else ():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.arrow"
            packer = Packer(4096, splits=False) if way == "packed" else None
            write_cache(iter(samples), encoder, file, None, lambda count: None, packer)
            read = Counter(
                document for batch in batches(way, file) for document in documents(batch)
            )
        if read != rows:
            wrong.append(way)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--templates", type=Path, required=True, help="folder of .jinja files")
    arguments = parser.parse_args()
    cells = {
        path.stem: {kind: cell(path.read_text(encoding="utf-8"), kind) for kind in KINDS}
        for path in sorted(arguments.templates.glob("*.jinja"))
    }
    ways = {
        path.stem: wrong_ways(path.read_text(encoding="utf-8"))
        for path in sorted(arguments.templates.glob("*.jinja"))
    }
    every = [one for row in cells.values() for one in row.values()]
    counts = Counter(one["method"] for one in every)
    wrong = sum("wrong" in one for one in every)
    reasons = Counter(
        re.sub(r"^row: ", "", one["reason"]).split("; ")[0] for one in every if "reason" in one
    )
    text = (
        f"{len(every)} cells ({len(cells)} templates of TRL x {len(KINDS)} kinds of conversation):"
        f" {', '.join(f'{name} {count}' for name, count in counts.most_common())}; wrong"
        f" {wrong}. Batches ({', '.join(WAYS)}) whose documents are not the encoded rows:"
        f" {sum(map(len, ways.values()))} of {len(WAYS) * len(ways)}.\n\n"
        + recording.table(
            ["template", *KINDS],
            [
                [
                    name,
                    *(one["method"] + (" WRONG" if "wrong" in one else "") for one in row.values()),
                ]
                for name, row in cells.items()
            ],
        )
        + "\n"
        + recording.table(
            ["refused because", "cells"], [[r, str(n)] for r, n in reasons.most_common()]
        )
    )
    recording.write(
        "template_matrix",
        {"counts": dict(counts), "wrong": wrong, "cells": cells, "wrong_batches": ways},
        text,
    )


if __name__ == "__main__":
    main()
