"""The time left, as people read it and as the launcher's screen parses it."""

from __future__ import annotations

import pytest

from launch.base.progress import RowProgress, eta
from launch.supervise.screen import STEP_LINE


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "ETA 0:00:00"),
        (3_725, "ETA 1:02:05"),
        (86_400, "ETA 1 day 0:00:00"),
        (30_000 * 28, "ETA 9 days 17:20:00"),
    ],
)
def test_the_time_left_has_days_and_is_a_part_of_a_line(seconds, words):
    assert eta(seconds) == words
    line = f"now  step 2/30000  epoch 0.10  {words}  loss 1.0  lr 1e-3"
    match = STEP_LINE.search(line)
    assert match and line[match.end() :] == "loss 1.0  lr 1e-3"
    rows = f"tokenising a.parquet: 5 of 50 rows, {words}"
    assert RowProgress.read(rows) == RowProgress("a.parquet", 5, 50)
