"""Questions are few and short enough for the memory of an evaluation."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import LlamaConfig, T5Config

from launch.data.conversation import Conversation
from tests.builders import machine, plan, recipe_of
from training.loop import sample_answers


def planned(mode: str = "cpu", eval_batch: int = 8, length: int = 100):
    made = plan(recipe_of(), machine())
    strategy = replace(made.strategy, mode=mode, per_device_eval_batch_size=eval_batch)
    return replace(made, strategy=strategy, lengths=(length, length))


@pytest.mark.parametrize(
    ("evaluation", "mode", "number"),
    [
        ({}, "cpu", 0),
        ({"exact_match_rows": 5}, "deepspeed_zero2", 3),
        ({"exact_match_rows": 5}, "deepspeed_zero3", 0),
        ({"exact_match_rows": 5}, "fsdp2", 0),
        ({"sample_answers": 2}, "fsdp2", 2),
        ({"exact_match_rows": 5, "sample_answers": 0}, "cpu", 0),
    ],
)
def test_a_few_questions_by_default_where_answers_are_asked_for_and_cheap(evaluation, mode, number):
    assert sample_answers.count(recipe_of(evaluation=evaluation), planned(mode)) == number


def test_keys_and_values_of_all_rows_are_less_than_a_layer_of_the_evaluation():
    llama = SimpleNamespace(config=LlamaConfig(num_hidden_layers=32))
    tokens = sample_answers.most_tokens(planned(), llama)  # pyright: ignore[reportArgumentType]
    assert tokens == 8 * 800 // (2 * 32 + 8)
    t5 = SimpleNamespace(config=T5Config(num_layers=10))
    assert sample_answers.most_tokens(planned(), t5) == 8 * 800 // (4 * 10 + 8)  # pyright: ignore


class Words:
    """A tokenizer of a T5: a token for each word."""

    eos_token_id = 0

    def __call__(self, text, add_special_tokens=True, split_special_tokens=False):
        ids = [list(range(len(row.split()))) for row in ([text] if isinstance(text, str) else text)]
        return {"input_ids": ids[0] if isinstance(text, str) else ids}


@pytest.mark.parametrize(
    ("row_tokens", "all_tokens", "chosen", "new_tokens", "batch_size"),
    [
        (100, 1000, ["a " * 3, "a " * 50], 32, 12),
        (30, 1000, ["a " * 3, "a " * 10], 19, 33),  # 11 tokens, and 19 for the answer
        (30, 12, ["a " * 3], 8, 1),
        (30, 7, [], 7, 1),
    ],
)
def test_short_questions_are_chosen_and_answers_fit_beside_them(
    row_tokens, all_tokens, chosen, new_tokens, batch_size
):
    pairs = [
        (Conversation([{"role": "user", "content": "a " * count}]), "yes")
        for count in (3, 50, 10, 4)
    ]
    if row_tokens == 30 and all_tokens == 12:
        pairs = pairs[:3]
    samples = sample_answers.SampleAnswers(
        pairs, Words(), 2, 32, row_tokens, all_tokens, is_pair=True
    )
    asked = [row.messages[0]["content"] for row, _ in samples._pairs]
    assert asked == chosen
    assert (samples._new_tokens, samples._batch_size) == (new_tokens, batch_size)


@pytest.mark.parametrize(
    ("number", "row_tokens", "all_tokens", "said"),
    [
        (2, 100, 1000, ""),
        (5, 100, 1000, "evaluation.sample_answers 5: 2 of 2 held-out questions are answered"),
        (
            *(2, 20, 1000),
            "evaluation.sample_answers 2: 0 of 2 held-out questions are answered: the shortest has"
            " 21 tokens, and 16 fit beside an answer; rows have at most 20 (data.max_length cuts"
            " longer ones)",
        ),
        (
            *(2, 100, 40),
            "evaluation.sample_answers 2: 1 of 2 held-out questions are answered: the shortest has"
            " 21 tokens, and 36 fit beside an answer; a larger training.per_device_eval_batch_size"
            " has memory for more",
        ),
    ],
)
def test_why_fewer_questions_are_answered_is_said(number, row_tokens, all_tokens, said):
    pairs = [(Conversation([{"role": "user", "content": "a " * n}]), "yes") for n in (50, 20)]
    samples = sample_answers.SampleAnswers(
        pairs, Words(), number, 32, row_tokens, all_tokens, is_pair=True
    )
    assert samples.shortfall == said
