"""Answers to held-out prompts, compared with the right ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from launch.schema import DataFormat
from training.rows import BadRows, samples


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
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[list[dict[str, str]]],
    max_new_tokens: int,
    device: torch.device | None = None,
) -> list[str]:
    """Greedy answers, one batch, on `device` or where the model is. The model's mode is left as it was."""
    if model.config.is_encoder_decoder:
        texts = ["\n".join(message["content"] for message in messages) for messages in conversations]
        rows = [[*ids, tokenizer.eos_token_id] for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    else:
        texts = [
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            for messages in conversations
        ]
        rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    width = max(map(len, rows))
    padded = torch.full((len(rows), width), tokenizer.pad_token_id)
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


def exact_match(
    model: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    pairs: Sequence[tuple[list[dict[str, str]], str]],
    max_new_tokens: int,
    device: torch.device,
    between_batches: Callable[[], None],
    batch_size: int = 125,
) -> float:
    """Share of prompts answered exactly, ranks dividing the work; all call `between_batches` before each batch.

    Collective when there are several ranks."""
    rank, world_size = 0, 1
    if torch.distributed.is_initialized():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    right = torch.zeros(1, dtype=torch.long, device=device)
    mine = sorted(pairs[rank::world_size], key=lambda pair: sum(len(m["content"]) for m in pair[0]))
    largest_share = -(-len(pairs) // world_size)
    for at in range(0, largest_share, batch_size):
        between_batches()
        batch = mine[at : at + batch_size]
        if not batch:  # ranks that hold parts of the weights answer together, or wait for ever
            answer(model, tokenizer, [pairs[0][0]], max_new_tokens, device)
            continue
        answers = answer(model, tokenizer, [messages for messages, _ in batch], max_new_tokens, device)
        right += sum(given.strip() == wanted.strip() for given, (_, wanted) in zip(answers, batch, strict=True))
    if world_size > 1:
        torch.distributed.all_reduce(right)
    return right.item() / len(pairs)
