"""kill -9 of all ranks at random moments, half of them during a save: nothing that was verified is
lost."""

from __future__ import annotations

import pytest

from benchmarks import kills


@pytest.mark.shows(
    "F1", "kill -9 of all ranks at random moments, half in saves; the ranks were alive before each"
)
@pytest.mark.parametrize(
    ("mode", "count"),
    [
        pytest.param("multi_cpu", 6, marks=pytest.mark.fast_faults),
        ("multi_cpu", 20),
        ("cpu", 4),
        ("deepspeed_zero2", 4),
    ],
)
def test_killed_again_and_again_a_run_ends_with_the_weights_of_one_that_was_not(
    tmp_path, mode, count
):
    """Bit for bit, and each row is trained once an epoch; the runs of a campaign are resumed
    several times each."""
    seen = kills.campaign(tmp_path, count, seed=23333, mode=mode)
    assert seen.is_clean, seen
    assert seen.kills == count
    assert seen.in_saves >= count // 4
