"""Replays that are kept beside a trace: read again instead of made again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from launch.predict.memory import loading
from launch.predict.memory.allocator import FREED
from launch.predict.memory.allocator_config import TORCH_DEFAULTS
from launch.predict.memory.phases import RunEvents, allocated_bytes
from launch.predict.traces import Trace
from tests.unit.predict.test_estimate import RECORDED, recorded_trace

UNLIMITED = 1 << 60


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    content = json.loads(RECORDED.read_text(encoding="utf-8"))
    recorded = recorded_trace(RECORDED, content)
    return replace(recorded, file=tmp_path / RECORDED.name, keeps_replays=True)


def without_log(trace: Trace) -> Trace:
    def composed() -> dict[str, object]:
        raise AssertionError("the log is composed again")

    return replace(trace, log=composed)


def run(trace: Trace, num_samples: int = 8) -> RunEvents:
    return RunEvents(trace, num_samples, 24, loading.plain)


def test_a_replay_is_made_once_for_all_that_it_is_of(trace):
    first = run(trace)
    made = first.replays(TORCH_DEFAULTS, UNLIMITED), first.allocated_bytes
    resident = first.resident_bytes({}, False)
    again = run(without_log(trace))
    assert (again.replays(TORCH_DEFAULTS, UNLIMITED), again.allocated_bytes) == made
    assert again.resident_bytes({}, False) == resident
    for other in (run(without_log(trace), 4), again):
        config = replace(TORCH_DEFAULTS, expandable_segments=other is again)
        with pytest.raises(AssertionError, match="composed again"):
            other.replays(config, UNLIMITED)


def test_less_memory_than_it_takes_is_another_replay(trace):
    (_, highest), *_ = sorted(
        run(trace).replays(TORCH_DEFAULTS, UNLIMITED), key=lambda part: -part[1].peak_reserved_bytes
    )
    for _ in range(2):  # made, then read
        limited = run(trace).replays(TORCH_DEFAULTS, highest.peak_reserved_bytes - 1)
        most = max(replay.peak_reserved_bytes for _, replay in limited)
        retries = sum(replay.retries for _, replay in limited)
        assert retries or most == highest.peak_reserved_bytes


def test_a_run_that_does_not_fit_counts_what_it_would_like(trace):
    events = run(trace)
    unlimited = events.replays(TORCH_DEFAULTS, UNLIMITED)
    for available_bytes in (0, max(events.allocated_bytes.values()) // 2):
        assert events.replays(TORCH_DEFAULTS, available_bytes) == unlimited


def test_each_part_of_a_run_holds_what_the_parts_before_have_left():
    parts = [
        ("load", [(1, 10), (2, 5), (2, FREED)]),
        ("step", [(3, 2), (3, FREED)]),
        ("save", []),
        ("step", [(3, 4), (1, FREED), (3, FREED)]),
        ("save", []),
    ]
    assert allocated_bytes(parts) == {"load": 15, "step": 14, "save": 10}


def test_a_damaged_file_is_made_again(trace):
    made = run(trace).replays(TORCH_DEFAULTS, UNLIMITED)
    (file,) = trace.file.parent.glob("*.replay")
    text = file.read_text()
    for content in ("", "[]", text[1:], text[:-1], text.replace("step", "load", 1), text + "\n"):
        file.write_text(content)
        assert run(trace).replays(TORCH_DEFAULTS, UNLIMITED) == made
        assert file.read_text() == text


def test_a_folder_that_cannot_be_written_to_keeps_no_replay(trace):
    gone = replace(trace, file=trace.file.parent / "gone" / trace.file.name)
    made = run(trace).replays(TORCH_DEFAULTS, UNLIMITED)
    assert run(gone).replays(TORCH_DEFAULTS, UNLIMITED) == made
