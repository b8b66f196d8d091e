"""From a traced log to the few lines that give the peak of each section at any micro-batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from training.trace.recorder import Log, Work

SECTIONS = ("forward", "backward", "optimizer", "evaluation")  # of the step and of what follows it
START = {"start:weights": "weights", "start:optimizer": "optimizer"}


def kinds(log: Log) -> list[str]:
    """What each block is for, by where it is born and where it dies; logits and buffers say so
    themselves."""
    died = {event.block: event.phase for event in log.events if not event.birth}
    return [
        block.kind or _kind(block.born, died.get(number)) for number, block in enumerate(log.blocks)
    ]


def _kind(born: str, died: str | None) -> str:
    if born in START:
        return START[born]
    if born == "input":
        return "input"
    if born == died:
        return "temporaries"
    section = born.partition(":")[0]
    return {"forward": "activations", "backward": "gradients", "optimizer": "optimizer"}.get(
        section, "temporaries"
    )


def peaks(log: Log) -> list[dict[str, Any]]:
    """Per section the moments that are its peak at some micro-batch: bytes of each kind as [fixed,
    per sample]."""
    kind_of = kinds(log)
    names = sorted(set(kind_of))
    column = {name: at for at, name in enumerate(names)}
    changes = np.zeros((len(log.events), len(names), 2), dtype=np.int64)
    for at, event in enumerate(log.events):
        block = log.blocks[event.block]
        sign = 1 if event.birth else -1
        changes[at, column[kind_of[event.block]]] = (
            sign * block.fixed_bytes,
            sign * block.sample_bytes,
        )
    live = changes.cumsum(axis=0)
    totals = live.sum(axis=1)
    sections = np.array([event.phase.partition(":")[0] for event in log.events])
    found = []
    for section in SECTIONS:
        inside = np.flatnonzero(sections == section)
        for at in _upper(totals[inside]) if len(inside) else ():
            moment = inside[at]
            event = log.events[moment]
            found.append(
                {
                    "section": section,
                    "op": log.blocks[event.block].op.removeprefix("aten::"),
                    "parts": {
                        name: live[moment, column[name]].tolist()
                        for name in names
                        if live[moment, column[name]].any()
                    },
                }
            )
    return found


def _upper(lines: np.ndarray) -> Iterator[int]:
    """Indices of the lines fixed + samples * x that are highest for some x >= 1, in the order of
    x."""
    fixed, slope = lines[:, 0].astype(np.float64), lines[:, 1].astype(np.float64)
    at = int(np.lexsort((slope, fixed + slope))[-1])
    while True:
        yield at
        steeper = np.flatnonzero(slope > slope[at])
        if not len(steeper):
            return
        crossing = (fixed[at] - fixed[steeper]) / (slope[steeper] - slope[at])
        nearest = crossing.min()
        tied = steeper[crossing <= nearest]
        at = int(tied[slope[tied].argmax()])


def work(log: Log) -> dict[str, Any]:
    """What a micro-step gives the device to do, all layers together; of one micro-batch, however
    many were traced."""
    total, micro_steps = (
        Work(),
        len({event.phase for event in log.events if event.phase.startswith("forward")}),
    )
    for one in log.work.values():
        total.add(one)
    share = 1 / max(micro_steps, 1)
    return {
        "matmul_flops": {
            dtype: [share * part for part in parts] for dtype, parts in total.flops.items()
        },
        "attention_flops": {
            dtype: [share * part for part in parts]
            for dtype, parts in total.attention_flops.items()
        },
        "bytes_moved": [share * part for part in total.bytes],
        "num_kernels": share * total.kernels,
        "num_matmuls": share * total.products,
    }
