"""Evaluate a finished model on the rows of a file, as a run evaluates itself on its held-out rows.
`python -m launch evaluate` starts it."""

import math
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from launch.base import files, modules, processes
from launch.base.errors import ResourceError
from launch.base.text import shown, size
from launch.data import sources
from launch.data.rows import IGNORED
from launch.data.token_cache import TOKENS_READY, TokenCache, token_files
from launch.schema.result import Evaluation, FinishedModel

MOST_ROWS = 64  # at once: more are hardly faster
# float32 values of a token, in units of the hidden size: states, queries, keys, values and the MLP
WIDTHS = 24
_LOGITS = 3  # copies of the logits in float32: the model's, the loss's, and their softmax


@dataclass(frozen=True)
class Work:
    """A loaded model, and the rows that it is evaluated on."""

    tokens: TokenCache
    model: Any
    tokenizer: Any
    device: torch.device
    dtype: torch.dtype | None  # of the autocast
    rows_at_once: int

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None)


def token_bytes(model: Any) -> int:
    """An upper bound for the bytes of a token of a batch: its logits, the values of a layer, and
    the keys and values of all layers."""
    config = model.config.get_text_config()
    of_layers = config.hidden_size * (WIDTHS + 2 * config.num_hidden_layers)
    return 4 * (_LOGITS * model.get_output_embeddings().weight.shape[0] + of_layers)


def rows_at_once(row_bytes: int, free_bytes: int, num_rows: int, file: str) -> int:
    """The rows of a batch: as many as half of the free memory takes, of the longest row each.
    Raises ResourceError."""
    if row_bytes > free_bytes:
        raise ResourceError(
            f"{file}: its longest row takes up to {size(row_bytes)} beside the weights, and"
            f" {size(free_bytes)} are free; lower --data.max_length or --evaluation.max_new_tokens"
        )
    return max(1, min(MOST_ROWS, num_rows, free_bytes // 2 // row_bytes))


def mean_loss(work: Work) -> tuple[float, int]:
    """(mean loss over the target tokens, their number)."""
    from training.data.batches import Collator, TokenRows
    from training.levers.logits import summed_loss, target_loss_sum

    is_pair, count = work.tokens.model.is_encoder_decoder, work.rows_at_once
    rows = TokenRows(*token_files(work.tokens.folder, "train"))
    start = work.model.config.decoder_start_token_id if is_pair else None
    collator = Collator(
        work.tokenizer.pad_token_id, start, is_packed=work.tokens.recipe.data.packing
    )
    order = rows.lengths().sum(axis=1).argsort(kind="stable").tolist()
    _say(f"the loss of {len(rows):,} rows, {count} at once")
    totals = torch.zeros(2, dtype=torch.float64, device=work.device)
    for begin in range(0, len(rows), count):
        batch = collator(rows.__getitems__(order[begin : begin + count]))
        for name, value in batch.items():
            batch[name] = value.to(work.device) if isinstance(value, torch.Tensor) else value
        labels = batch.pop("labels")
        loss_sum = partial(target_loss_sum, labels=labels, shift=not is_pair)
        with work.autocast():
            # with a cache, transformers keeps packed documents not apart
            batch["use_cache"] = False
            totals[0] += summed_loss(work.model, batch, loss_sum)
        totals[1] += (labels != IGNORED).sum()
    return (totals[0] / totals[1]).item(), int(totals[1])


def scores(work: Work) -> dict[str, Any]:
    """The number of questions of the file, and exact_match, bleu and rouge_l of greedy answers."""
    from training.loop import evaluate

    tokens, data, overlaps = work.tokens, work.tokens.recipe.data, list[float]()
    dataset = sources.samples_in(tokens.of_part("train"), data.max_bad_rows)
    limit, is_pair = data.max_train_samples or sys.maxsize, tokens.model.is_encoder_decoder
    pairs = evaluate.questions(dataset, limit, work.tokenizer, is_pair)
    if not pairs:
        return {"questions": 0}
    new_tokens = tokens.recipe.evaluation.max_new_tokens
    _say(f"greedy answers to {len(pairs):,} questions, of up to {new_tokens} tokens")
    with work.autocast():
        shares = evaluate.scores(
            *(work.model, work.tokenizer, pairs, new_tokens, work.device),
            *(lambda: None, work.rows_at_once),
            lambda text, right: overlaps.append(evaluate.rouge_l(text, right)),
        )
    return {
        "questions": len(pairs),
        "exact_match": shares["exact_match"],
        "bleu": 100 * shares["bleu"],
        "rouge_l": 100 * sum(overlaps) / len(overlaps),
    }


def _evaluate(
    folder: Path, device: torch.device, precision: str, free_bytes: int, fuses: bool
) -> None:
    """Write the figures of the model and the rows that the folder's files describe. `precision` is
    that of the training's autocast; `fuses`: the adapters are computed with their layers, as in
    training. Raises LaunchError."""
    tokens = files.read(folder / "tokens.json", TokenCache)
    source = files.read(folder / "model.json", FinishedModel)
    assert tokens is not None and source is not None
    used = {"peft": source.is_adapter, "bitsandbytes": source.quantization}
    modules.leave_out(package for package in modules.OPTIONAL if not used.get(package))
    with modules.uncollected():
        from training.data import prepare, tokenizer
        from training.levers import adapters
        from training.model import finished

    prepare.ensure(tokens, _say)
    counts = (files.read(tokens.folder / TOKENS_READY, dict[str, Any]) or {})["train"]
    recipe, loaded = tokens.recipe, tokenizer.load(tokens.folder / "tokenizer")
    model, file = finished.load(source, loaded, device), recipe.data.train_names
    if fuses:
        adapters.fuse(model)
    most_targets = max(counts["longest_target"], recipe.evaluation.max_new_tokens)
    row_bytes = (counts["longest_input"] + most_targets) * token_bytes(model)
    count = rows_at_once(row_bytes, free_bytes, counts["rows"], file)
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    work = Work(tokens, model, loaded, device, dtype, count)
    loss, target_tokens = mean_loss(work)
    evaluation = Evaluation(
        model=str(source.folder),
        file=file,
        device="the CPU" if device.type == "cpu" else torch.cuda.get_device_name(device),
        rows=counts["samples"],
        rows_left_out=counts["dropped"],
        rows_truncated=counts["truncated"],
        target_tokens=target_tokens,
        loss=loss,
        perplexity=math.inf if loss >= 700 else math.exp(loss),
        rows_at_once=count,
        **scores(work),
    )
    files.write_json(folder / "evaluation.json", evaluation)


def _say(line: str) -> None:
    print(shown(line), flush=True)


if __name__ == "__main__":
    folder, device, free_bytes, precision, *fuses = sys.argv[1:]
    work = (Path(folder), torch.device(device), precision, int(free_bytes), bool(fuses))
    sys.exit(processes.child_main(_evaluate, *work))
