"""The shape of a stored trace's files, as training.trace.server writes them. A file of another
shape is damaged: its step is traced again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sized
from typing import Any


def checked(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Peaks and work, as NAME.json has them. Raises ValueError, KeyError, TypeError or
    AttributeError for another shape."""
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
    if not all(map(math.isfinite, [*numbers, work["num_matmuls"]])):
        raise ValueError("a number that is not finite")
    return content


def checked_log(log: dict[str, Any]) -> dict[str, Any]:
    """Blocks and events of a step and of its special turns, as NAME.log has them. Raises as
    checked()."""
    for turn in (log, *log.get("turns", {}).values()):
        _check_turn(turn)
    return log


def _check_turn(turn: Mapping[str, Any]) -> None:
    blocks, count = turn["blocks"], len(turn["blocks"])
    _expect_lengths((3, 5), blocks)
    _expect(int, (size for fixed, sample, *_ in blocks for size in (fixed, sample)))
    _expect(str, (born for _, _, born, *_ in blocks))
    for _, _, _, of_sum, of_targets in (block for block in blocks if len(block) == 5):
        _expect(int, [of_targets])
        if of_sum is not None:
            _expect_lengths((3,), [of_sum])
            _expect(int, of_sum)
    in_layers = [number for layer in turn.get("layers", []) for number in layer]
    _expect(int, [*turn["events"], *in_layers, turn["update"], *turn["streams"].values()])
    numbers = [*(number if number >= 0 else ~number for number in turn["events"]), *in_layers]
    if not all(0 <= number < count for number in [*numbers, *map(int, turn["streams"])]):
        raise ValueError("a block that is not there")


def _expect(kind: type, values: Iterable[Any]) -> None:
    if {*map(type, values)} - {kind}:
        raise TypeError(f"expected {kind.__name__}")


def _expect_lengths(lengths: tuple[int, ...], rows: Iterable[Sized]) -> None:
    if {*map(len, rows)} - {*lengths}:
        raise ValueError(f"expected {lengths} values")
