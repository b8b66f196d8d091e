"""The fixture of tests with holders of leases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.process.queue.holders import Hold, holders


@pytest.fixture
def hold(tmp_path) -> Iterator[Hold]:
    """Start a holder of a lease in `tmp_path`; all of them end with the test."""
    with holders(tmp_path) as start:
        yield start
