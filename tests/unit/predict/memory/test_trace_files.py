"""A stored trace that was damaged is no trace, whatever stands in it."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.predict import trace_files
from launch.predict.traces import DAMAGE, Trace, read_work
from tests.unit.predict.test_estimate import RECORDED

pytestmark = pytest.mark.unit

CONTENT = json.loads(RECORDED.read_text(encoding="utf-8"))
WRONG = (None, 1.5, "text", [], {}, [1], True)


def few(value: Any) -> Any:
    """The same with at most four elements of each list, which still name blocks that are there."""
    if isinstance(value, dict):
        return {key: few(part) for key, part in value.items()}
    return [few(part) for part in value[:4]] if isinstance(value, list) else value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values but the outermost."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, part in inner:
        yield (*path, key)
        if isinstance(part, dict | list):
            yield from places(part, (*path, key))


def damaged(content: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    found = copy.deepcopy(content)
    outer = found
    for key in path[:-1]:
        outer = outer[key]
    outer[path[-1]] = wrong
    return found


def test_what_is_whole_passes():
    assert trace_files.checked(CONTENT) is CONTENT


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from([*places(few(CONTENT))]), wrong=st.sampled_from(WRONG))
def test_a_trace_that_passes_can_be_used(path, wrong):
    try:
        content = trace_files.checked(damaged(few(CONTENT), path, wrong))
    except DAMAGE:
        return
    trace = Trace(tuple(content["peaks"]), read_work(content["work"]), RECORDED)
    if content["peaks"]:
        assert trace.peak(4, 4).allocated_bytes >= 0
    assert trace.work.bytes_moved.total(4, 2) is not None


@pytest.mark.parametrize(
    "changed",
    [
        {"peaks": []},
        {"peaks": [peak for peak in CONTENT["peaks"] if peak["section"] == "evaluation"]},
        {"work": CONTENT["work"] | {"num_kernels": 10**400}},
        {"work": CONTENT["work"] | {"bytes_moved": [float("nan"), 0.0, 0.0]}},
    ],
)
def test_a_step_without_peaks_or_with_numbers_that_nothing_has_is_damaged(changed):
    with pytest.raises(ValueError, match=r"no moment of a step|a number that"):
        trace_files.checked(CONTENT | changed)
