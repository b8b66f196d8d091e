"""The table of what fits a machine: for a terminal, as Markdown and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich import box
from rich.table import Table

from launch.plan.fit import ACCUMULATION, MICRO_BATCH_TOKENS, Fit
from launch.schema.machine import GIB

NAMES = {"full": "full", "lora": "LoRA", "qlora": "QLoRA"}
NO = "-"
LEGEND = (
    f"Asked for: micro-batches of {MICRO_BATCH_TOKENS:,} tokens, {ACCUMULATION} of them a step,"
    " bf16 autocast, sdpa, AdamW, LoRA r=16. All rows have the length of the column.",
    "full: float32 weights, or, if that does not fit, bf16 weights. LoRA: bf16 base. QLoRA: 4-bit"
    " base.",
    "tok/s and GiB of a card are predicted, not measured. - does not fit. batch N: N rows at once,"
    " in more steps.",
    "checkpointing: activations are computed again in backward. zero2_offload, zero3_offload:"
    " optimizer states in host RAM.",
)


def table(fits: Sequence[Fit], title: str) -> Table:
    """A table of at most 100 columns: a line for each model and method, a column for each
    length."""
    shown = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left")
    shown.add_column("model", no_wrap=True)
    shown.add_column("train", no_wrap=True)
    lengths = _lengths(fits)
    for length in lengths:
        shown.add_column(f"{length:,} tokens", max_width=25)
    for (model, method), group in _rows(fits):
        cells = {fit.length: "\n".join(_cell(fit)) for fit in group}
        shown.add_row(model, method, *(cells.get(length, "") for length in lengths))
    return shown


def markdown(fits: Sequence[Fit]) -> str:
    """The table in Markdown."""
    lengths = _lengths(fits)
    head = ["model", "train", *(f"{length:,} tokens" for length in lengths)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for (model, method), group in _rows(fits):
        cells = {fit.length: "<br>".join(_cell(fit)) for fit in group}
        row = [model, method, *(cells.get(length, "") for length in lengths)]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines) + "\n"


def as_json(fits: Sequence[Fit]) -> list[dict[str, Any]]:
    """An object for each training; `tokens_per_s` and what follows are null if it does not fit."""
    return [
        {
            "model": fit.model,
            "method": fit.method,
            "length": fit.length,
            "fits": fit.chosen is not None,
            "refused": fit.refused or None,
            "tokens_per_s": fit.tokens_per_s,
            "device_bytes": fit.chosen and fit.chosen.memory.device_bytes,
            "budget_bytes": fit.chosen and fit.chosen.budget_bytes,
            "host_bytes": fit.chosen and fit.chosen.memory.host_bytes,
            "changes": list(fit.changes),
            "strategy": fit.chosen and asdict(fit.chosen.candidate),
            "model_dtype": fit.recipe.model.dtype,
        }
        for fit in fits
    ]


def refusals(fits: Sequence[Fit]) -> list[str]:
    """A line for each reason other than memory for which trainings are refused, with these."""
    refused: dict[str, list[str]] = {}
    for fit in fits:
        if fit.refused:
            named = f"{fit.model} {NAMES[fit.method]} at {fit.length:,} tokens"
            refused.setdefault(fit.refused, []).append(named)
    return [f"No question of memory: {', '.join(of)}: {why}." for why, of in refused.items()]


def _cell(fit: Fit) -> Iterator[str]:
    if fit.chosen is None:
        yield NO
        return
    speed = f"{fit.tokens_per_s:,.0f} tok/s, " if fit.tokens_per_s else ""
    yield f"{speed}{fit.chosen.memory.device_bytes / GIB:.1f} GiB"
    if fit.changes:
        yield ", ".join(fit.changes)


def _lengths(fits: Sequence[Fit]) -> list[int]:
    return sorted({fit.length for fit in fits})


def _rows(fits: Sequence[Fit]) -> Iterator[tuple[tuple[str, str], list[Fit]]]:
    for (model, method), group in groupby(fits, key=lambda fit: (fit.model, fit.method)):
        yield (model, NAMES[method]), list(group)
