"""Answers to a few held-out questions at each evaluation, which show over time what a model learns.

They are short: the keys and values of all rows take no more memory than one layer of the evaluation
holds."""

from collections.abc import Iterable
from dataclasses import asdict

import torch
from transformers import PreTrainedTokenizerBase

from launch.base import files
from launch.data.conversation import Conversation, text_of
from launch.run_folder.layout import AttemptDir, RunDir
from launch.schema.plan import Plan
from launch.schema.recipe import Recipe
from launch.schema.result import Answers, Question, Questions
from training.compat.transformers_private import Network
from training.log import logger
from training.loop import evaluate

_DEFAULT_COUNT = 3
_LEAST_NEW_TOKENS = 4  # a question that leaves fewer is not asked
MOST_READ = 200  # held-out rows among which short questions are looked for
MOST_CHARACTERS = 2000  # longest question or answer that is written down
# Vectors of the hidden size for each token that a layer holds at once in an evaluation: its input,
# the residual, queries, keys, values, and those of an MLP, which is wider than all of them.
_VECTORS_OF_LAYER = 8


def count(recipe: Recipe, plan: Plan) -> int:
    """The number of questions. By default a few where the recipe asks for answers, and none where
    ranks share the weights, which they would have to gather for each token."""
    if recipe.evaluation.sample_answers is not None:
        return recipe.evaluation.sample_answers
    is_slow = plan.strategy.launch_mode.shards_parameters
    return _DEFAULT_COUNT if recipe.evaluation.exact_match_rows and not is_slow else 0


def most_tokens(plan: Plan, network: Network) -> int:
    """Tokens of all rows together, questions and answers, for which there is memory: keys and
    values are two vectors in each layer, and twice as many where a decoder attends to an
    encoder."""
    layers = network.config.get_text_config().num_hidden_layers
    vectors = 2 * layers * (2 if network.config.is_encoder_decoder else 1)
    evaluated = plan.strategy.per_device_eval_batch_size * max(plan.lengths)
    return _VECTORS_OF_LAYER * evaluated // (vectors + _VECTORS_OF_LAYER)


class SampleAnswers:
    """The questions of a run, and the files for them and their answers."""

    def __init__(
        self,
        pairs: Iterable[tuple[Conversation, str]],
        tokenizer: PreTrainedTokenizerBase,
        num_questions: int,
        max_new_tokens: int,
        row_tokens: int,
        all_tokens: int,
        is_pair: bool,
    ) -> None:
        """Choose short ones of `pairs` (conversation before the last answer, that answer).
        `row_tokens`: most tokens of a row, question and answer; `all_tokens`: of all rows that are
        answered together; `is_pair`: a T5."""
        most = min(row_tokens, all_tokens)
        limit = most - _LEAST_NEW_TOKENS
        chosen, lengths = [], []
        for conversation, reference in pairs:
            (ids,) = evaluate.prompts(tokenizer, [conversation], is_pair)
            lengths.append(len(ids))
            if len(ids) <= limit and len(chosen) < num_questions:
                chosen.append((conversation, reference, len(ids)))
        self.shortfall = ""  # why fewer questions are answered than the recipe asks for
        if len(chosen) < num_questions:
            self.shortfall = (
                f"evaluation.sample_answers {num_questions}: {len(chosen)} of {len(lengths)}"
                " held-out questions are answered"
            )
            if len(chosen) < len(lengths):
                limited_by = (
                    f"rows have at most {row_tokens} (data.max_length cuts longer ones)"
                    if row_tokens <= all_tokens
                    else "a larger training.per_device_eval_batch_size has memory for more"
                )
                self.shortfall += (
                    f": the shortest has {min(lengths)} tokens, and {limit} fit beside an answer;"
                    f" {limited_by}"
                )
        prompt_tokens = max((length for _, _, length in chosen), default=0)
        self._tokenizer = tokenizer
        self._pairs = [(conversation, reference) for conversation, reference, _ in chosen]
        self._new_tokens = min(max_new_tokens, most - prompt_tokens)
        self._batch_size = max(1, all_tokens // max(prompt_tokens + self._new_tokens, 1))

    def __len__(self) -> int:
        return len(self._pairs)

    def replies(self, model: Network, device: torch.device) -> tuple[str, ...]:
        """Greedy answers of the model as it is now."""
        texts: list[str] = []
        for start in range(0, len(self), self._batch_size):
            batch = self._pairs[start : start + self._batch_size]
            texts += evaluate.greedy_answers(
                *(model, self._tokenizer, [question for question, _ in batch]),
                *(self._new_tokens, device),
            )
        return tuple(map(_shortened, texts))

    def write(self, run: RunDir, attempt: AttemptDir, answers: Answers) -> None:
        """Add answers to the run's files. A disk that refuses them costs the answers, not the
        run."""
        questions = [
            Question(_shortened(text_of(row)), _shortened(reference))
            for row, reference in self._pairs
        ]
        try:
            if not run.questions_file.exists():
                files.write_json(run.questions_file, Questions(tuple(questions)))
            with attempt.answers_file.open("a", encoding="utf-8") as lines:
                lines.write(files.to_json(asdict(answers)) + "\n")
        except OSError as error:
            logger.warning("%s: %s; it lacks answers", attempt.answers_file.name, error.strerror)


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
