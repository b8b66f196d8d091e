"""Garbage collection during imports, and after them."""

from __future__ import annotations

import gc

import pytest

from launch.base import modules

pytestmark = pytest.mark.unit


def test_objects_of_imports_are_visited_by_no_collection_of_all_objects():
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    full = gc.get_stats()[2]["collections"]
    with modules.uncollected():
        objects = [[] for _ in range(2_000_000)]
        assert gc.get_stats()[2]["collections"] == full
    assert gc.get_freeze_count() - frozen >= len(objects)
    assert gc.get_threshold() == thresholds
