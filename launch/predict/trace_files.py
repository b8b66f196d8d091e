"""The shape of a stored trace's file. One of another shape is damaged: its step is composed
again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from typing import Any

MOST = 1e30  # FLOPs of a step, and more than its bytes


def checked(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Peaks and work, as NAME.json has them. Raises ValueError, KeyError, TypeError or
    AttributeError for another shape."""
    sections = {moment["section"] for moment in content["peaks"]}
    if not sections & {"forward", "backward", "optimizer"}:
        raise ValueError("no moment of a step")
    for moment in content["peaks"]:
        parts = moment["parts"]
        _expect(str, [moment["section"], moment["op"], *parts])
        _expect_lengths((2, 3), parts.values())
        _expect(int, (size for sizes in parts.values() for size in sizes))
    work = content["work"]
    flops = [*work["matmul_flops"].values(), *work["attention_flops"].values()]
    rows = [*flops, work["bytes_moved"], *work["offloaded"]]
    _expect_lengths((1, 2, 3), rows)
    numbers = [*(number for row in rows for number in row), work["num_kernels"]]
    if not all(abs(number) < MOST for number in [*numbers, work["num_matmuls"]]):
        raise ValueError("a number that nothing has")
    return content


def _expect(kind: type, values: Iterable[Any]) -> None:
    if {*map(type, values)} - {kind}:
        raise TypeError(f"expected {kind.__name__}")


def _expect_lengths(lengths: tuple[int, ...], rows: Iterable[Sized]) -> None:
    if {*map(len, rows)} - {*lengths}:
        raise ValueError(f"expected {lengths} values")
