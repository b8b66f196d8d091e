"""Log lines of a rank."""

from __future__ import annotations

import logging
import time
from types import SimpleNamespace

import pytest

from tests.unit.training.test_reporter import Loop
from training import log
from training.loop import callbacks


@pytest.mark.parametrize(("logging_steps", "num_lines"), [(244, 1), (243, 0)])
def test_a_minute_until_the_next_log_line_is_not_far(
    tmp_path, caplog, monkeypatch, logging_steps, num_lines
):
    """Steps of a quarter of a second: 240 of them, or one more, until the next line."""
    now_s = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], time=time.time, sleep=time.sleep)
    monkeypatch.setattr(callbacks, "time", clock)  # else the test takes the minute
    loop = Loop(tmp_path)
    arguments, state, _ = loop.said
    arguments.logging_steps, state.max_steps = logging_steps, 1000
    with caplog.at_level(logging.INFO, logger="lowmem"):
        for _ in range(3):
            loop.step()
            now_s[0] += 0.25
    assert len(caplog.records) == num_lines


@pytest.mark.parametrize(("rank", "is_written"), [(0, True), (1, False)])
def test_rank_0_alone_logs_what_is_no_warning(tmp_path, rank, is_written):
    logger, file = logging.getLogger("lowmem"), tmp_path / "logs" / "rank.log"
    before = logger.level, logger.propagate, list(logger.handlers)
    try:
        log.start_logging([file], rank)
        logger.info("step 1")
        assert file.exists() == is_written
        assert not is_written or file.read_text().endswith("  step 1\n")
        assert logger.isEnabledFor(logging.INFO) == is_written
        assert logger.isEnabledFor(logging.WARNING)
    finally:
        for handler in set(logger.handlers) - {*before[2]}:
            logger.removeHandler(handler)
            handler.close()
        logger.level, logger.propagate = before[:2]
