"""The table of what fits a machine: for a terminal, as Markdown, as JSON, and as lines to paste."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from launch.plan.fit import MICRO_BATCH_TOKENS, Fit, accumulation
from launch.predict.budgets import host_bytes
from launch.report.plan_lines import LORA_RATE
from launch.schema.machine import GIB

NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
NO = "-"
COLUMNS = ("model", "train", "tokens", "tok/s", "VRAM, GiB", "RAM, GiB", "with, or why not")
_LEGEND = (
    "full: float32 weights, or, if that does not fit, bf16 weights. LoRA: bf16 base. QLoRA: 4-bit"
    " base.",
    "tok/s and GiB of a card (VRAM) and of the machine (RAM) are predicted, not measured. batch N:"
    " N rows at once, in more steps.",
    "checkpointing: activations are computed again in backward. zero2_offload, zero3_offload:"
    " optimizer states in host RAM.",
    "short by: what the nearest plan lacks. all: at every length. --lines prints, of each row that"
    " fits, the line that trains it.",
)
_LINES_BEGIN = (
    "# --model.path=FOLDER, the downloaded model, replaces --model.shape, which has random weights",
    "# --data.train_file=FILE names your rows; plan in place of run shows what would run",
)


def legend(num_gpus: int) -> tuple[str, ...]:
    """Sentences on the table for so many cards."""
    steps = num_gpus * accumulation(num_gpus)
    asked = (
        f"Asked for: micro-batches of {MICRO_BATCH_TOKENS:,} tokens, {steps} of them a step,"
        " bf16 autocast, sdpa, AdamW, LoRA r=16. All rows have the same tokens."
    )
    return asked, *_LEGEND


def table(fits: Sequence[Fit], title: str) -> Table:
    """A table of at most 100 columns: the rows of each training."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    for name in COLUMNS[:-1]:
        justify = "left" if name in COLUMNS[:2] else "right"
        shown.add_column(name.replace(", ", "\n"), no_wrap=True, justify=justify)
    shown.add_column(COLUMNS[-1])
    for row in _rows(fits):
        shown.add_row(*row)
    return shown


def markdown(fits: Sequence[Fit]) -> str:
    """The table in Markdown, and the margin of its seconds."""
    rows = [COLUMNS, ["---"] * len(COLUMNS), *_rows(fits)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows) + f"\n{margin_line(fits)}\n"


def margin_line(fits: Sequence[Fit]) -> str:
    """A sentence on the margin of the tokens a second, and on autocast where the card has no
    bf16."""
    margin = fits[0].margin
    line = (
        f"tok/s in brackets: {margin.reason}."
        if margin
        else "tok/s: no evidence for this card: too few trainings on cards like it were measured."
    )
    chosen = (fit.chosen.candidate for fit in fits if fit.chosen)
    is_fp16 = any(candidate.mixed_precision == "fp16" for candidate in chosen)
    return f"{line} fp16 autocast: this card has no bf16." if is_fp16 else line


def as_json(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """An object for each training; what only a choice has is null if it does not fit."""
    return [
        {
            "model": fit.model,
            "method": fit.method,
            "length": fit.length,
            "fits": fit.chosen is not None,
            "refused": fit.refused or None,
            "shortage": fit.shortage or None,
            "fits_with": fit.fits_with or None,
            "tokens_per_s": fit.tokens_per_s,
            "tokens_per_s_range": fit.tokens_per_s_range,
            "device_bytes": fit.chosen and fit.chosen.memory.device_bytes,
            "budget_bytes": fit.chosen and fit.chosen.budget_bytes,
            "host_bytes": fit.chosen and host_bytes(fit.chosen.candidate, fit.chosen.memory),
            "changes": list(fit.changes),
            "strategy": fit.chosen and asdict(fit.chosen.candidate),
            "model_dtype": fit.recipe.model.dtype,
            "line": fit.chosen and line(fit),
        }
        for fit in fits
    ]


def lines(fits: Sequence[Fit]) -> Iterator[str]:
    """Yield the line that trains each row that fits, below a comment with its name."""
    yield from _LINES_BEGIN
    for fit in fits:
        if fit.chosen is not None:
            yield f"# {fit.model} {NAMES[fit.method]}, {fit.length:,} tokens: {_speed(fit)} tok/s"
            yield line(fit)


def line(fit: Fit) -> str:
    """The command that trains a row. A plan of it takes faster kernels than sdpa where there are
    some, and counts the recipe's held-out rows, so that it may choose otherwise."""
    recipe, training = fit.recipe, fit.recipe.training
    typed = {
        "model.shape": recipe.model.shape,
        "model.dtype": recipe.model.dtype,
        "data.max_length": recipe.data.max_length,
        "training.gradient_accumulation_steps": training.gradient_accumulation_steps,
    }
    if recipe.lora:
        typed |= {"lora.r": recipe.lora.r, "training.learning_rate": f"{LORA_RATE:g}"}
    if recipe.quantization:
        typed["quantization.load_in_4bit"] = "true"
    flags = " ".join(f"--{key}={value}" for key, value in typed.items())
    return f"python -m launch run sft_fast {training.per_device_train_batch_size} {flags}"


def _rows(fits: Sequence[Fit]) -> Iterator[list[str]]:
    """Yield the cells of each training; of a model that fits at no length, all lengths as one."""
    for _, group in groupby(fits, key=lambda fit: (fit.model, fit.method)):
        rows = [_cells(fit) for fit in group]
        if len(rows) > 1 and all(row[3:] == [NO, NO, NO, rows[0][-1]] for row in rows):
            rows = [[*rows[0][:2], "all", *rows[0][3:]]]
        yield from rows


def _cells(fit: Fit) -> list[str]:
    names = [fit.model, NAMES[fit.method], f"{fit.length:,}"]
    if fit.chosen is None:
        helps = f"; fits with {fit.fits_with}" if fit.fits_with else ""
        return [*names, NO, NO, NO, fit.refused or fit.shortage + helps]
    memory = fit.chosen.memory
    ram_bytes = host_bytes(fit.chosen.candidate, memory)
    gib = (f"{size / GIB:.1f}" for size in (memory.device_bytes, ram_bytes))
    return [*names, _speed(fit), *gib, ", ".join(fit.changes)]


def _speed(fit: Fit) -> str:
    if fit.tokens_per_s is None:
        return "?"
    within = fit.tokens_per_s_range
    return f"{fit.tokens_per_s:,.0f}" + (
        f" ({within[0]:,.0f} to {within[1]:,.0f})" if within else ""
    )
