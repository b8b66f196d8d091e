"""The data of a run on one rank: its rows, their order, and the callbacks that feed a stream."""

from collections.abc import Callable, Sequence
from pathlib import Path

from transformers import TrainerCallback, TrainingArguments

from launch.data import token_cache
from launch.run_folder.layout import AttemptDir, RankStart, RunDir
from launch.schema.plan import MULTIPLE
from training.data import streaming, tokenise
from training.data.batches import NumberedRows, TokenRows
from training.data.sample_order import SampleOrder, TokenBudget


def make_dataset(
    start: RankStart,
    run: RunDir,
    attempt: AttemptDir,
    args: TrainingArguments,
    tokens: Path,
    goes_on: Callable[[], None],
) -> tuple[NumberedRows | streaming.StreamRows, SampleOrder, Sequence[TrainerCallback]]:
    """Return the rows of the training, their order from the sample at which the run continues, and
    the callbacks that feed a stream: on rank 0.

    `goes_on` is called while a rank waits for a stream."""
    recipe, plan = start.recipe, start.plan
    continues = run.read_continues()
    place = (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.world_size,
        args.process_index,
        args.seed,
    )
    begin = continues.samples_seen if continues else 0
    if recipe.data.streaming:
        # the job that turns units into files in the attempt's folder, which all ranks see
        sources, window = start.tokens.of_part("train"), attempt.root / streaming.WINDOW
        job = tokenise.job(start.tokens, sources, window, "train")
        counts = tokens / streaming.COUNTS
        stream = streaming.StreamRows(job, counts, args.seed, number(start, tokens), goes_on)
        positions = streaming.StreamOrder(len(stream), *place, start=begin)
        feeders = [streaming.Feeder(job, counts, positions)] if args.process_index == 0 else []
        return stream, positions, feeders
    rows = NumberedRows(*token_cache.token_files(tokens, "train"))
    # the tokens of a micro-batch of the longest rows, for which the plan was made
    budget = TokenBudget(rows.lengths, *plan.micro_batch_tokens, MULTIPLE[plan.strategy.device])
    order = SampleOrder(
        len(rows),
        *place,
        start=begin,
        lengths=rows.lengths if recipe.data.group_by_length else None,
        group_size=continues.group_size if continues else None,
        budget=budget if plan.strategy.levers.batch_by_tokens else None,
    )
    return rows, order, []


def number(start: RankStart, tokens: Path) -> int:
    """Count the samples of an epoch. A stream has no end: all samples of the run are one epoch."""
    if start.recipe.data.streaming:
        return start.recipe.training.max_steps * start.plan.strategy.effective_batch_size
    return len(NumberedRows(*token_cache.token_files(tokens, "train")))


def held_out(tokens: Path) -> TokenRows | None:
    """Return the rows to evaluate on, if there are any."""
    files = token_cache.token_files(tokens, "validation")
    return TokenRows(*files) if files else None
