"""Every mode that the cards here allow, by the campaign that writes the GPU rows of
docs/modes.md."""

from __future__ import annotations

import pytest
import torch

from benchmarks import modes

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


def test_each_mode_runs_fits_equals_resumes_and_exports():
    runs = modes.possible(modes.GPU_RUNS, on_gpu=True)
    rows = modes.measured(runs, spread=True)
    assert len(rows) >= len(runs)
    assert [row for row in rows if not all(modes.verdicts(row).values())] == []
