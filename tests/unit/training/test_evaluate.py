"""BLEU of answers, against figures computed by hand."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from training.loop.evaluate import COUNTED, TOKEN, bleu, overlap


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
