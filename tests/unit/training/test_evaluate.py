"""BLEU and ROUGE-L of answers, against figures computed by hand; questions for a model."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from launch.data.conversation import Conversation
from launch.data.rows import read_samples
from launch.schema.model_sections import TokenizerSection
from launch.schema.plan import DataFormat
from training.data import tokenizer
from training.loop.evaluate import (
    COUNTED,
    TOKEN,
    bleu,
    greedy_answers,
    overlap,
    questions,
    rouge_l,
    scores,
)


def corpus(*pairs: tuple[str, str]) -> float:
    counts = sum((overlap(*pair) for pair in pairs), Counter())
    return bleu({key: counts[key] for key in COUNTED})


def test_chinese_is_cut_by_character_and_other_text_by_word_and_sign():
    assert TOKEN.findall("2024年3月5日 is a day, 好") == [
        "2024",
        "年",
        "3",
        "月",
        "5",
        "日",
        "is",
        "a",
        "day",
        ",",
        "好",
    ]


@pytest.mark.parametrize("text", ["a", "a b", "one two three four five", "二百零五", "2024-03-05"])
def test_the_right_answer_scores_one_however_short(text):
    assert corpus((text, text)) == pytest.approx(1)


def test_nothing_in_common_or_nothing_said_scores_zero():
    assert corpus(("x y z", "a b c")) == corpus(("", "a")) == 0


def test_the_figure_of_a_partly_right_answer():
    """5 of 6 words, 3 of 5 pairs, 2 of 4 triples, 1 of 3 quadruples; and what counts for orders
    without a match."""
    given, wanted = "the cat sat on a mat", "the cat sat on the mat"
    same = [overlap(given, wanted)[f"same{n}"] for n in (1, 2, 3, 4)]
    assert same == [5, 3, 2, 1]
    assert corpus((given, wanted)) == pytest.approx((5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)
    assert corpus(("a b x d", "a b c d")) == pytest.approx(
        (3 / 4 * 1 / 3 * 0.5 / 2 * 0.25 / 1) ** 0.25
    )


def test_an_answer_that_stops_early_pays_for_it():
    assert corpus(("a b", "a b c d")) == pytest.approx(math.exp(1 - 4 / 2))
    assert corpus(("a b c d", "a b")) == pytest.approx((2 / 4 * 1 / 3 * 0.5 / 2 * 0.25 / 1) ** 0.25)


def test_a_word_said_twice_counts_once():
    assert overlap("the the the", "the cat")["same1"] == 1


def test_the_corpus_is_counted_together_not_averaged():
    pairs = ("a b c d e", "a b c d e"), ("x", "y")
    assert corpus(*pairs) == pytest.approx((5 / 6 * 4 / 4 * 3 / 3 * 2 / 2) ** 0.25)


USER = {"role": "user", "content": "5 + 7 = ?"}
CALL = {"function": {"name": "calculator", "arguments": {"a": 5, "b": 7}}}
CALLS = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "12"}
TOOLS = [{"type": "function", "function": {"name": "calculator"}}]


def asked(
    folder, *rows: tuple[list[dict[str, Any]], Any], template: str = "", is_pair: bool = False
) -> list[tuple[Conversation, str]]:
    made = tokenizer.train(iter(["5 + 7 = ? calculator"]), TokenizerSection(), 300)
    made.chat_template = template or made.chat_template
    file = folder / "rows.jsonl"
    file.write_text(
        "".join(json.dumps({"messages": talk, "tools": tools}) + "\n" for talk, tools in rows)
    )
    data_format = DataFormat("messages", {"messages": "messages"}, "jsonl", "")
    return questions(read_samples(file, data_format), 10, made, is_pair)


def test_a_model_is_asked_for_the_last_answer_with_the_tools_of_the_row(tmp_path):
    talk = [USER, CALLS, RESULT, {"role": "assistant", "content": "It is 12."}]
    pairs = asked(tmp_path, (talk, TOOLS), (talk[:2], TOOLS), (talk[:3], TOOLS))
    call = '<tool_call>{"name": "calculator", "arguments": {"a": 5, "b": 7}}</tool_call>'
    assert [reference for _, reference in pairs] == ["It is 12.", call]
    assert [len(question.messages) for question, _ in pairs] == [3, 1]
    assert all(question.tools == TOOLS for question, _ in pairs)


def test_rows_that_the_model_does_not_take_are_not_asked(tmp_path):
    talk = [USER, {"role": "assistant", "content": "12"}]
    refused = [{"role": "system", "content": "Be kind."}, *talk]
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}"
        "{{ m.content }}<|end|>{% endfor %}"
    )
    assert len(asked(tmp_path, (talk, None), (refused, None), template=template)) == 1
    of_t5 = asked(tmp_path, (talk, None), (talk, TOOLS), ([USER, CALLS], TOOLS), is_pair=True)
    assert [reference for _, reference in of_t5] == ["12"]


def test_answers_of_questions_of_like_length_are_computed_together_and_scored():
    made = tokenizer.train(iter(["5 + 7 = ? calculator"]), TokenizerSection(), 300)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=300, n_embd=16, n_layer=1, n_head=1, n_positions=256, bos_token_id=1
    )
    model, device, watched = GPT2LMHeadModel(config), torch.device("cpu"), list[str]()
    conversations = [Conversation([{**USER, "content": "5" * n}]) for n in (40, 1, 20)]
    (right,) = greedy_answers(model, made, conversations[:1], 2)
    pairs = list(zip(conversations, (right, "a" * 9, "b" * 99), strict=True))
    found = scores(
        *(model, made, pairs, 2, device, lambda: watched.append("batch"), 2),
        watch=lambda text, reference: watched.append(reference),
    )
    assert watched == ["batch", "a" * 9, "b" * 99, "batch", right]
    assert found["exact_match"] == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("given", "wanted", "score"),
    [
        ("the cat sat on a mat", "the cat sat on the mat", 10 / 12),  # 5 words in order
        ("police kill the gunman", "police killed the gunman", 6 / 8),  # the example of Lin 2004
        ("the gunman kill police", "police killed the gunman", 4 / 8),  # of "the gunman"
        ("今天天气好", "今天的天气很好", 2 * 5 / 12),  # by character
        ("c b a", "a b c", 2 / 6),
        ("same", "same", 1),
        ("", "a", 0),
        ("", "", 0),
    ],
)
def test_rouge_l_is_the_f1_of_the_longest_common_subsequence(given, wanted, score):
    assert rouge_l(given, wanted) == rouge_l(wanted, given) == pytest.approx(score)
