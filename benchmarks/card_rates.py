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
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

from benchmarks.card.rows import Group, Row, Rows, read, run_group

Measure = Callable[[], Iterator[Row]]
SECONDS = 70.0
WARM_UP_S = 0.5


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


@functools.cache
def has_card() -> bool:
    """True if torch can use a card, which is then ready. The first call imports torch."""
    import torch

    gc.freeze()  # collections between groups pass by what is imported
    if torch.cuda.is_available():
        prepare_card()
        return True
    return False


def rows_of(module: str, function: str = "measure", needs_card: bool = True) -> Measure:
    """The function's rows. Its module is imported when they are asked for."""

    def rows() -> Iterator[Row]:
        if needs_card and not has_card():
            yield {"case": "all", "error": "needs a GPU that torch can use"}
            return
        yield from getattr(import_module(f"benchmarks.card.{module}"), function)()

    return rows


# In their order: a process's memory before this one imports torch, and last what may slow a process
# down
GROUPS = (
    Group("process", 25, rows_of("process_memory", needs_card=False)),
    Group("circumstances", 12, rows_of("circumstances", needs_card=False)),
    Group("floor", 3, rows_of("floor")),
    Group("products", 16, rows_of("products"), True),
    Group("attention", 10, rows_of("attention")),
    Group("elementwise", 7, rows_of("kernels", "elementwise"), True),
    Group("reductions", 5, rows_of("kernels", "reductions")),
    Group("movement", 4, rows_of("kernels", "movement")),
    Group("optimizer", 5, rows_of("updates", "optimizer")),
    Group("copies", 9, rows_of("copies")),
    Group("calls", 6, rows_of("calls", "on_card")),
    Group("allocation", 3, rows_of("allocation")),
    Group("four_bit", 4, rows_of("updates", "four_bit")),
    Group("cpu_calls", 3, rows_of("calls", "on_cpu", needs_card=False)),
    Group("host", 4, rows_of("copies", "host", needs_card=False)),
    Group("triton", 4, rows_of("calls", "triton")),
    Group("layers", 8, rows_of("steps", "layers")),
    Group("compiled", 30, rows_of("steps", "compiled")),
    Group("profile", 6, rows_of("floor", "profile")),
)


def release() -> None:
    """Memory of the last group, and the error that a failed one has left."""
    torch = sys.modules.get("torch")
    gc.collect()
    if torch and torch.cuda.is_initialized():
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


def chosen_groups(names: str) -> list[Group]:
    """The named groups in the table's order, or all; unknown names are refused."""
    every = [group.name for group in GROUPS]
    wanted = names.split(",") if names else every
    unknown = sorted(set(wanted) - set(every))
    if unknown:
        raise SystemExit(f"no group {', '.join(unknown)}; there are {', '.join(every)}")
    return [group for group in GROUPS if group.name in wanted]


def measure_here(options: argparse.Namespace) -> int:
    rows, began = Rows(options.out), time.perf_counter()
    measure(chosen_groups(options.groups), rows, options.seconds)
    print(
        f"{rows.num_rows} rows, {rows.num_errors} with an error, in"
        f" {time.perf_counter() - began:.0f} s: {options.out}"
    )
    return 0 if has_card() else 3


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
