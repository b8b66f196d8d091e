"""Scores of answers to held-out prompts, which are compared with the right answers."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from launch.base.errors import DataError
from launch.data.conversation import Conversation, Sample, text_of
from training.compat.transformers_private import Network
from training.data import tokenizer as data_tokenizer
from training.data.chat.loss_spans import ConversationRenderer
from training.data.encode import source_and_target
from training.model import varlen_attention


def questions(
    dataset: Iterable[Sample], limit: int, tokenizer: PreTrainedTokenizerBase, is_pair: bool
) -> list[tuple[Conversation, str]]:
    """(conversation before the last answer, that answer) of the first `limit` samples that have an
    answer and that the model can be asked. `is_pair`: a T5."""
    renderer = None if is_pair else ConversationRenderer(tokenizer)
    answered = (
        (replace(sample, messages=sample.messages[:-1]), reference)
        for sample in dataset
        if isinstance(sample, Conversation)
        and (reference := _reference(sample, tokenizer, renderer)) is not None
    )
    return list(islice(answered, limit))


def _reference(
    sample: Conversation,
    tokenizer: PreTrainedTokenizerBase,
    renderer: ConversationRenderer | None,
) -> str | None:
    """The text of the last answer, of tool calls as the chat template writes them; None if there is
    no answer, or the template does not take the row (which is then a bad row)."""
    last = sample.messages[-1]
    if last["role"] != "assistant":
        return None
    try:
        if renderer is None:
            pair = source_and_target(sample)
            return pair and pair.target
        prompt = renderer.text_in_use(sample.messages[:-1], sample.tools, prompt=True)
        text = renderer.text_in_use(sample.messages, sample.tools)
    except DataError:
        return None
    if not last.get("tool_calls"):
        return last["content"]
    if not text.startswith(prompt):
        return None
    ids = tokenizer(text[len(prompt) :], add_special_tokens=False)["input_ids"]
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def prompts(
    tokenizer: PreTrainedTokenizerBase, conversations: Sequence[Conversation], is_pair: bool
) -> list[list[int]]:
    """The tokens of each conversation before its answer. `is_pair`: a T5."""
    if is_pair:
        texts = [
            "\n".join(message["content"] for message in conversation.messages)
            for conversation in conversations
        ]
        before, behind = data_tokenizer.around_source(tokenizer)
        rows: Any = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)
        return [[*before, *ids, *behind] for ids in rows["input_ids"]]
    renderer = ConversationRenderer(tokenizer)
    texts = [
        renderer.text_in_use(conversation.messages, conversation.tools, prompt=True)
        for conversation in conversations
    ]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def greedy_answers(
    model: Network,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Conversation],
    max_new_tokens: int,
    device: torch.device | None = None,
    **options: Any,
) -> list[str]:
    """Greedy answers to a batch, computed on `device` or on the model's device. The model's mode
    does not change. `options` are of generate(), and may draw the tokens instead."""
    rows = prompts(tokenizer, conversations, model.config.is_encoder_decoder)
    width = max(map(len, rows))
    padded = torch.full((len(rows), width), int(tokenizer.pad_token_id))  # pyright: ignore
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, ids in enumerate(rows):  # padding on the left, so that all answers start together
        padded[i, width - len(ids) :] = torch.tensor(ids)
        mask[i, width - len(ids) :] = 1
    was_training = model.training
    model.eval()
    device = device or next(model.parameters()).device
    with torch.no_grad(), varlen_attention.answering_with_masks(model):
        output = model.generate(
            input_ids=padded.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            **{"do_sample": False, "num_beams": 1, "use_cache": True, **options},
        )
    model.train(was_training)
    if not model.config.is_encoder_decoder:
        output = output[:, width:]
    return tokenizer.batch_decode(output, skip_special_tokens=True)


def scores(
    model: Network,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[Conversation, str]],
    max_new_tokens: int,
    device: torch.device,
    between_batches: Callable[[], None],
    batch_size: int,
    watch: Callable[[str, str], object] = lambda text, reference: None,
) -> dict[str, float]:
    """exact_match, the share of prompts with exactly the right answer, and bleu, both from 0 to 1.
    Ranks divide the work, and all call `between_batches` before each batch. `watch` is called with
    each answer of this rank and the right one.

    Collective if there are several ranks."""
    rank, world_size = 0, 1
    if torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    num_exact, counts = 0, Counter[str]()
    own_pairs = sorted(pairs[rank::world_size], key=lambda pair: len(text_of(pair[0])))
    largest_share = -(-len(pairs) // world_size)
    for start in range(0, largest_share, batch_size):
        between_batches()
        batch = own_pairs[start : start + batch_size]
        # ranks that hold parts of the weights answer together: an idle rank answers a question too
        questions = [conversation for conversation, _ in batch] or [pairs[0][0]]
        answers = greedy_answers(model, tokenizer, questions, max_new_tokens, device)
        for text, (_, reference) in zip(answers, batch, strict=False):
            num_exact += text.strip() == reference.strip()
            counts += overlap(text, reference)
            watch(text, reference)
    total = torch.tensor(
        [num_exact, *(counts[key] for key in COUNTED)], dtype=torch.long, device=device
    )
    if world_size > 1:
        torch.distributed.all_reduce(total)
    num_exact, *summed = total.tolist()
    return {
        "exact_match": num_exact / len(pairs),
        "bleu": bleu(dict(zip(COUNTED, summed, strict=True))),
    }


# ---- BLEU
# ---------------------------------------------------------------------------

ORDERS = range(1, 5)
COUNTED = (
    "answer",
    "reference",
    *(f"{what}{order}" for order in ORDERS for what in ("same", "of")),
)
_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# a Chinese character, a word, a sign
TOKEN = re.compile(f"[{_IDEOGRAPHS}]|[^\\W{_IDEOGRAPHS}]+|[^\\w\\s]")


def overlap(text: str, reference: str) -> Counter[str]:
    """The counts of an answer's text for BLEU: lengths in tokens, and for each order the n-grams of
    the answer (`of`) and those that the reference has too (`same`)."""
    texts = TOKEN.findall(text), TOKEN.findall(reference)
    counts = Counter(dict(zip(COUNTED, map(len, texts), strict=False)))
    for order in ORDERS:
        answered, right = (
            Counter(zip(*(tokens[start:] for start in range(order)), strict=False))
            for tokens in texts
        )
        counts[f"same{order}"], counts[f"of{order}"] = (
            (answered & right).total(),
            answered.total(),
        )
    return counts


def bleu(counts: Mapping[str, int]) -> float:
    """Corpus BLEU from 0 to 1, of the orders for which the answers are long enough. An order
    without a match counts as half a match, the next as a quarter, and so on. Source: Papineni et
    al. 2002; smoothing of Lin and Och 2004 as sacrebleu's `exp`."""
    if not counts["same1"]:
        return 0.0
    logs, missing = [], 1.0
    for order in ORDERS:
        same, of = float(counts[f"same{order}"]), counts[f"of{order}"]
        if of and not same:
            missing /= 2
            same = missing
        if of:
            logs.append(math.log(same / of))
    brevity = min(0.0, 1 - counts["reference"] / counts["answer"])
    return math.exp(brevity + sum(logs) / len(logs))


# ---- ROUGE-L
# ---------------------------------------------------------------------------


def rouge_l(text: str, reference: str) -> float:
    """ROUGE-L of an answer from 0 to 1: the F1 of its longest common subsequence with the
    reference, in the tokens of BLEU. Source: Lin 2004."""
    tokens, right = TOKEN.findall(text), TOKEN.findall(reference)
    lengths = [0] * (len(right) + 1)  # of the longest one with each beginning of the reference
    for token in tokens:
        before = lengths
        lengths = [0]
        for i, other in enumerate(right):
            longer = before[i] + 1 if token == other else max(before[i + 1], lengths[i])
            lengths.append(longer)
    return 2 * lengths[-1] / max(len(tokens) + len(right), 1)
