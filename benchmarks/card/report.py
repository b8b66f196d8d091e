"""Rows of a card's rates as tables that people read, and as a result of the benchmark. No torch."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks import recording
from benchmarks.card.rows import Row

MIB, GIB = 1 << 20, 1 << 30
LARGE_BYTES = 100e6  # of kernels: beyond any cache
RATED = ("products", "attention", "elementwise", "reductions", "movement", "four_bit", "optimizer")
LISTED = {  # groups whose rows are shown one by one: title, figures
    "floor": ("Least seconds of a kernel, us", {"s": 1e6}),
    "profile": ("Kernels and gaps between them by the profiler, us", {"s": 1e6, "gap_s": 1e6}),
    "copies": ("Copies and pinning", {"gb_s": 1, "s": 1e3, "s_per_gib": 1e3}),
    "host": ("Host memory", {"gb_s": 1, "gflops": 1}),
    "calls": ("Host, us of a call: wall and processor", {"s": 1e6, "processor_s": 1e6}),
    "triton": ("Triton's launches, us", {"s": 1e6, "processor_s": 1e6}),
    "compiled": ("A compiled function, ms", {"s": 1e3, "processor_s": 1e3}),
    "allocation": ("Device memory, us", {"s": 1e6, "free_s": 1e6}),
    "layers": (
        "A transformers layer on the host, us",
        {"forward_s_per_layer": 1e6, "backward_s_per_layer": 1e6},
    ),
    "process": (
        "A process, library by library: MiB of the host and of the card, s",
        {"pss_bytes": 1 / MIB, "anonymous_bytes": 1 / MIB, "card_bytes": 1 / MIB, "s": 1},
    ),
    "cpu_calls": ("The same calls with tensors of the host, us", {"s": 1e6, "processor_s": 1e6}),
}


def row_named(rows: Sequence[Row], case: str) -> Row:
    return next((row for row in rows if row.get("case") == case), {})


def card_name(rows: Sequence[Row]) -> str:
    return row_named(rows, "card").get("name", "no card")


def result_name(rows: Sequence[Row]) -> str:
    """card_rates_h200, card_rates_geforce_rtx_3080, ..."""
    words = re.findall(r"[a-z0-9]+", card_name(rows).lower().removeprefix("nvidia "))
    return "_".join(["card_rates", *words])


def circumstances(rows: Sequence[Row]) -> Row:
    """Date, machine and versions of the measurement, as recording.write() has those of its own."""
    host, driver = row_named(rows, "host"), row_named(rows, "nvidia-smi name")
    card = row_named(rows, "card")
    versions = {
        **{"python": host.get("python"), **host.get("versions", {})},
        **{"torch": host.get("torch"), "cuda": host.get("cuda"), "cudnn": card.get("cudnn")},
        "driver": driver.get("driver_version"),
    }
    return {
        "date": host.get("date"),
        "machine": (
            f"{host.get('processor')}, {host.get('cores')} cores,"
            f" {host.get('ram_bytes', 0) / GIB:.1f} GiB RAM, {card_name(rows)}"
        ),
        "versions": versions,
        "command": "python -m benchmarks.card_rates",
    }


def kind_of(row: Row) -> str:
    """The class that a row's rate is a sample of."""
    if row["group"] == "products":
        return f"{row['dtype']} {row.get('kind', row['case'].split()[-1])}"
    if row["group"] == "attention":
        return " ".join(str(row[key]) for key in ("kernel", "mask", "dtype", "direction"))
    if row["group"] in ("elementwise", "reductions", "movement"):
        return f"{row['kind']}, {'large' if row['bytes'] > LARGE_BYTES else 'small'}"
    return re.sub(r" \d+x\d+.*|, .*", "", row["case"])


def rated_lines(rows: Sequence[Row]) -> Iterator[list[str]]:
    """Least, median and most of each class, in TFLOP/s or GB/s."""
    for group in RATED:
        classes: dict[tuple[str, str], list[float]] = {}
        for row in rows:
            unit = next((unit for unit in ("tflops", "gb_s") if row.get(unit)), None)
            if row["group"] == group and unit:
                classes.setdefault((kind_of(row), unit), []).append(row[unit])
        for (kind, unit), values in classes.items():
            figures = (statistics.median(values), min(values), max(values))
            name = {"tflops": "TFLOP/s", "gb_s": "GB/s"}[unit]
            yield [group, kind, str(len(values)), *map(number, figures), name]


def number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def listed(rows: Sequence[Row], group: str) -> str:
    """The table of a group whose rows are shown one by one."""
    title, figures = LISTED[group]
    lines = [
        [row["case"], *(number(row[key] * by) if key in row else "" for key, by in figures.items())]
        for row in rows
        if row["group"] == group and any(key in row for key in figures)
    ]
    return f"{title}:\n\n{recording.table(['case', *figures], lines)}\n" if lines else ""


def error_text(rows: Sequence[Row]) -> str:
    lines = [[row["group"], row["case"], row["error"]] for row in rows if "error" in row]
    table = recording.table(["group", "case", "error"], lines)
    return f"Cases that ended in an error:\n\n{table}\n" if lines else ""


def clock_text(rows: Sequence[Row]) -> str:
    """Clocks and power of the groups that were watched: least, median, most."""
    lines = [
        [row["group"], *("/".join(number(value) for value in row.get(key, [])) for key in keys)]
        for keys in [("sm_mhz", "memory_mhz", "watts", "celsius")]
        for row in rows
        if row.get("case") == "clocks and power" and "sm_mhz" in row
    ]
    head = ["group", "SM MHz", "memory MHz", "W", "degrees C"]
    table = recording.table(head, lines)
    return f"Clocks and power, least/median/most:\n\n{table}\n" if lines else ""


def text(rows: Sequence[Row]) -> str:
    head = ["group", "class", "rows", "median", "least", "most", "unit"]
    rated = list(rated_lines(rows))
    parts = [f"Rates by class:\n\n{recording.table(head, rated)}\n"] if rated else []
    parts += [clock_text(rows), *(listed(rows, group) for group in LISTED), error_text(rows)]
    return "".join(parts)


def record(rows: Sequence[Row], write: Callable[..., None] = recording.write) -> str:
    """Write results/card_rates_<card>; the name."""
    if any(row.get("rehearsal") for row in rows):
        raise SystemExit("the rows are of a rehearsal without a card: no figures to record")
    name = result_name(rows)
    write(name, {"rows": list(rows)}, text(rows), about=circumstances(rows))
    return name
