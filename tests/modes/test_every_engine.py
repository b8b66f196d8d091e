"""Each engine once, with one of four models: it trains, fits, agrees with one process, resumes and
exports. `make modes` has every mode with every model."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import modes
from benchmarks.modes import Case

ENGINES = (
    ("deepspeed_zero1", 1, "llama-tiny", False),
    ("deepspeed_zero2_offload", 2, "llama-tiny", True),
    ("deepspeed_zero3", 2, "t5-tiny", False),
    ("fsdp2", 2, "t5-tiny", True),
)


@pytest.mark.parametrize(("mode", "ranks", "family", "lora"), ENGINES)
def test_an_engine_keeps_every_promise(tmp_path: Path, mode, ranks, family, lora):
    modes.write_rows(tmp_path)
    if lora and family == modes.LOADED:
        modes.pretrain(tmp_path, "cpu")
    plain = {}
    for case in (Case("cpu", 1, family, lora), Case(mode, ranks, family, lora)):
        row = modes.measure(tmp_path, case, plain)
        assert all(modes.verdicts(row).values()), row
