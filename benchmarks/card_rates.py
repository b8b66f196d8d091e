"""Rates of one card and its host, for the timeline of a training step.

Products, attention, kernels that move bytes, optimizers, copies, the least that a kernel takes, the
host's seconds of issuing work, memory's own seconds, and a process's memory: in about a minute. A
row of JSON for each case goes to the file as it comes; a case that fails leaves its error, a group
that takes longer than its share is cut off, and the next goes on. Nothing on the card is set.

Measuring needs torch alone. `--record FILE` makes results/card_rates_<card> of the rows, later and
elsewhere. The exit code is 3 where no card was measured.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.card.rows import Group, Row, Rows, read, run_group

SECONDS = 70.0
WARM_UP_S = 0.5


def without_card() -> Iterator[Row]:
    yield {"case": "all", "error": "needs a GPU that torch can use"}


def groups(has_card: bool) -> list[Group]:
    """All groups in their order: what may fail a process or slow it down comes last."""
    from benchmarks.card import (
        allocation,
        attention,
        calls,
        circumstances,
        copies,
        floor,
        kernels,
        process_memory,
        products,
        steps,
        updates,
    )

    process = functools.partial(process_memory.measure, has_card)
    of_a_card = [
        Group("floor", 3, floor.measure),
        Group("products", 16, products.measure, True),
        Group("attention", 10, attention.measure),
        Group("elementwise", 7, kernels.elementwise, True),
        Group("reductions", 5, kernels.reductions),
        Group("movement", 4, kernels.movement),
        Group("optimizer", 5, updates.optimizer),
        Group("copies", 9, copies.measure),
        Group("calls", 6, calls.on_card),
        Group("allocation", 3, allocation.measure),
        Group("four_bit", 4, updates.four_bit),
    ]
    last_of_a_card = [
        Group("triton", 4, calls.triton),
        Group("layers", 8, steps.layers),
        Group("compiled", 30, steps.compiled),
        Group("profile", 6, floor.profile),
    ]
    if not has_card:
        of_a_card, last_of_a_card = (
            [Group(group.name, 1, without_card) for group in part]
            for part in (of_a_card, last_of_a_card)
        )
    return [
        Group("circumstances", 3, circumstances.measure),
        *of_a_card,
        Group("process", 20, process),
        Group("cpu_calls", 3, calls.on_cpu),
        Group("host", 4, copies.host),
        *last_of_a_card,
    ]


def prepare_card() -> None:
    """A stream that graphs can be captured from, and clocks that have risen."""
    import torch

    torch.cuda.set_stream(torch.cuda.Stream())
    x = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_UP_S:
        for _ in range(20):
            torch.mm(x, x)
        torch.cuda.synchronize()


def release() -> None:
    """Memory of the last group, and the error that a failed one has left."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_watched(group: Group, limit_s: float, rows: Rows) -> float:
    if not group.watches_clocks:
        return run_group(group, limit_s, rows)
    from benchmarks.card.circumstances import clocks_watched

    with clocks_watched() as row:
        seconds = run_group(group, limit_s, rows)
    rows.add(group.name, row)
    return seconds


def measure(chosen: Sequence[Group], rows: Rows, seconds: float) -> None:
    """Run the groups, each within its share of the seconds and of what remains of them."""
    ends_at = time.perf_counter() + seconds
    for group in chosen:
        remaining_s = ends_at - time.perf_counter()
        if remaining_s <= 0:
            rows.add(group.name, {"case": "all", "error": "no time was left"})
            continue
        limit_s = min(group.limit_s * seconds / SECONDS, remaining_s)
        group_s = run_watched(group, limit_s, rows)
        print(f"{group.name}: {group_s:.1f} s, {rows.num_rows} rows so far", flush=True)
        try:
            release()
        except Exception as error:  # noqa: BLE001  # a kernel of the group broke the context
            rows.add(group.name, {"case": "release", "error": str(error)[:200]})


def chosen_groups(names: str, has_card: bool) -> list[Group]:
    """The named groups in the table's order, or all; unknown names are refused."""
    every = groups(has_card)
    wanted = names.split(",") if names else [group.name for group in every]
    unknown = set(wanted) - {group.name for group in every}
    if unknown:
        raise SystemExit(
            f"no group {', '.join(sorted(unknown))}; there are"
            f" {', '.join(group.name for group in every)}"
        )
    return [group for group in every if group.name in wanted]


def measure_here(options: argparse.Namespace) -> int:
    import torch

    has_card = torch.cuda.is_available()
    chosen = chosen_groups(options.groups, has_card)
    rows = Rows(options.out)
    began = time.perf_counter()
    gc.freeze()  # collections between groups pass what is imported by
    if has_card:
        prepare_card()
    measure(chosen, rows, options.seconds)
    print(
        f"{rows.num_rows} rows, {rows.num_errors} with an error, in"
        f" {time.perf_counter() - began:.0f} s: {options.out}"
    )
    return 0 if has_card else 3


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path("card_rates.jsonl"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of all groups together")
    parser.add_argument("--groups", default="", help="names with commas; all without")
    parser.add_argument("--record", type=Path, help="make the result of the rows in this file")
    options = parser.parse_args()
    if options.record:
        from benchmarks.card import report

        report.record(read(options.record))
        return 0
    return measure_here(options)


if __name__ == "__main__":
    sys.exit(main())
