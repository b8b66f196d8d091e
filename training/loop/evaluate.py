"""Answers to held-out prompts, compared with the right ones."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from launch.data.rows import BadRows, samples
from launch.schema.plan import DataFormat
from training.compat.transformers_private import Network


def questions(
    path: Path, data_format: DataFormat, limit: int, max_bad_rows: int
) -> list[tuple[list[dict[str, str]], str]]:
    """(messages up to the last answer, that answer) of the first `limit` rows that have one."""
    found = []
    for sample in samples(path, data_format, BadRows(max_bad_rows)):
        if isinstance(sample, list) and sample[-1]["role"] == "assistant":
            found.append((sample[:-1], sample[-1]["content"]))
        if len(found) == limit:
            break
    return found


def answer(
    model: Network,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[dict[str, str]]],
    max_new_tokens: int,
    device: torch.device | None = None,
) -> list[str]:
    """Greedy answers, one batch, on `device` or where the model is. The model's mode is left as it
    was."""
    if model.config.is_encoder_decoder:
        texts = [
            "\n".join(message["content"] for message in messages) for messages in conversations
        ]
        rows = [
            [*ids, tokenizer.eos_token_id]
            for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]
        ]
    else:
        texts = [
            str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
            for messages in conversations
        ]
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    width = max(map(len, rows))
    padded = torch.full((len(rows), width), int(tokenizer.pad_token_id))  # pyright: ignore
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for i, ids in enumerate(rows):  # on the left, so that every answer starts at the same position
        padded[i, width - len(ids) :] = torch.tensor(ids)
        mask[i, width - len(ids) :] = 1
    was_training = model.training
    model.eval()
    device = device or next(model.parameters()).device
    with torch.no_grad():
        output = model.generate(
            input_ids=padded.to(device),
            attention_mask=mask.to(device),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            num_beams=1,
            use_cache=True,
        )
    model.train(was_training)
    if not model.config.is_encoder_decoder:
        output = output[:, width:]
    return tokenizer.batch_decode(output, skip_special_tokens=True)


def scores(
    model: Network,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[list[dict[str, str]], str]],
    max_new_tokens: int,
    device: torch.device,
    between_batches: Callable[[], None],
    batch_size: int,
) -> dict[str, float]:
    """exact_match, the share of prompts answered exactly, and bleu, from 0 to 1; ranks divide the
    work, and all call `between_batches` before each batch.

    Collective when there are several ranks."""
    rank, world_size = 0, 1
    if torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    right, counts = 0, Counter[str]()
    mine = sorted(pairs[rank::world_size], key=lambda pair: sum(len(m["content"]) for m in pair[0]))
    largest_share = -(-len(pairs) // world_size)
    for at in range(0, largest_share, batch_size):
        between_batches()
        batch = mine[at : at + batch_size]
        if not batch:  # ranks that hold parts of the weights answer together, or wait for ever
            answer(model, tokenizer, [pairs[0][0]], max_new_tokens, device)
            continue
        answers = answer(
            model, tokenizer, [messages for messages, _ in batch], max_new_tokens, device
        )
        for given, (_, wanted) in zip(answers, batch, strict=True):
            right += given.strip() == wanted.strip()
            counts += overlap(given, wanted)
    total = torch.tensor(
        [right, *(counts[key] for key in COUNTED)], dtype=torch.long, device=device
    )
    if world_size > 1:
        torch.distributed.all_reduce(total)
    found, *summed = total.tolist()
    return {
        "exact_match": found / len(pairs),
        "bleu": bleu(dict(zip(COUNTED, summed, strict=True))),
    }


# ---- BLEU
# ---------------------------------------------------------------------------

ORDERS = range(1, 5)
COUNTED = ("given", "wanted", *(f"{what}{order}" for order in ORDERS for what in ("same", "of")))
IDEOGRAPHS = "\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff"
# a Chinese character, a word, a sign
TOKEN = re.compile(f"[{IDEOGRAPHS}]|[^\\W{IDEOGRAPHS}]+|[^\\w\\s]")


def overlap(given: str, wanted: str) -> Counter[str]:
    """What BLEU counts of one answer: lengths, and n-grams of each order that are `same` `of` all
    that were given."""
    one, other = TOKEN.findall(given), TOKEN.findall(wanted)
    counts = Counter({"given": len(one), "wanted": len(other)})
    for order in ORDERS:
        found, right = (
            Counter(zip(*(words[at:] for at in range(order)), strict=False))
            for words in (one, other)
        )
        counts[f"same{order}"], counts[f"of{order}"] = (found & right).total(), found.total()
    return counts


def bleu(counts: Mapping[str, int]) -> float:
    """Corpus BLEU, from 0 to 1: of the orders that the answers are long enough for; an order
    without a match counts as half of one, a quarter, ... Source: Papineni et al. 2002; smoothing of
    Lin and Och 2004 as sacrebleu's `exp`."""
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
    brevity = min(0.0, 1 - counts["wanted"] / counts["given"])
    return math.exp(brevity + sum(logs) / len(logs))
