"""Every launch mode has a row, and each row agrees with itself."""

from __future__ import annotations

from typing import get_args

import pytest

from launch.schema.modes import LAUNCH_MODES, Mode, States


def test_each_name_has_a_row():
    assert set(LAUNCH_MODES) == set(get_args(Mode))


@pytest.mark.parametrize("name", LAUNCH_MODES)
def test_a_row_agrees_with_itself(name):
    row = LAUNCH_MODES[name]
    assert row.shards == get_args(States)[: len(row.shards)]  # a stage shares more than the last
    assert row.zero_stage == (len(row.shards) if row.engine == "deepspeed" else 0)
    assert row.is_whole == (row.engine in ("plain", "ddp"))
    assert (row.processes == "one") == (row.engine == "plain")
    assert row.shards_parameters == ("output chunks" in row.refuses)
    assert not (row.offloads and row.is_whole)
    assert row.backend is None or (row.device, row.processes) == ("cuda", "several")
