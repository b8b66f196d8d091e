"""Content of a lease: bounds of what another user's may say, and the size of its file."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from launch.queue import leases
from launch.queue.leases import Needs, NoLeases, Record
from tests.process.queue.holders import held_unseen

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("of", "key", "least", "most"),
    [
        ("needs", "host_bytes", 0, 1 << 50),
        ("needs", "num_cards", 0, 1024),
        ("needs", "disk_device", 0, 1 << 64),
        ("needs", "host_limit_bytes", 0, 1 << 50),
        ("taken", "card_bytes", 0, 1 << 50),
        ("record", "priority", -100, 100),
        ("record", "place", 0, 10**9),
    ],
)
def test_a_number_outside_its_bounds_makes_a_lease_no_record(of, key, least, most):
    for number in (least, most):
        assert read(of, key, number)
    for number in (least - 1, most + 1):
        with pytest.raises(ValidationError, match=key):
            read(of, key, number)


@pytest.mark.parametrize(
    ("key", "most"), [("boot", 64), ("recipe", 100), ("waits_for", 500), ("run", 2000)]
)
def test_a_longer_text_than_a_lease_may_have_makes_it_no_record(key, most):
    assert getattr(read("record", key, "x" * most), key) == "x" * most
    with pytest.raises(ValidationError, match=key):
        read("record", key, "x" * (most + 1))


def test_a_share_of_the_vram_is_more_than_nothing_and_at_most_all():
    assert read("needs", "vram_fraction", 1.0).needs.vram_fraction == 1
    for share in (0.0, 1.01):
        with pytest.raises(ValidationError, match="vram_fraction"):
            read("needs", "vram_fraction", share)


def read(of: str, key: str, value: Any) -> Record:
    """The record of a lease whose JSON has this value."""
    record = asdict(Record("boot", "granted", Needs(1)))
    (record if of == "record" else record[of])[key] = value
    return TypeAdapter(Record).validate_json(json.dumps(record), strict=True)


def test_each_record_fills_the_8192_bytes_that_others_read(tmp_path):
    """A path of 2000 characters of four bytes is left out: only its owner's list shows it."""
    record = leases.boot_record(state="granted", needs=Needs(1), run="/runs/1")
    with leases.admission(tmp_path) as begin:
        own = begin(record)
    for run, written in (("/runs/1", "/runs/1"), ("🜚" * 2000, ""), ("/r", "/r")):
        own.write(run=run)
        content = own.path.read_bytes()
        assert (len(content), json.loads(content)["run"]) == (8192, written)
    own.release()


def test_a_lease_counts_while_it_is_locked_though_its_process_cannot_be_seen(tmp_path):
    record = leases.boot_record(state="granted", needs=Needs(1))
    with held_unseen(tmp_path, 1, record):
        (lease,) = leases.live(tmp_path)
    assert (lease.pid, lease.record) == (0, record)
    assert leases.lease_path(tmp_path, 1).exists() and leases.live(tmp_path) == []


def test_a_mutex_of_two_names_is_refused(tmp_path):
    (tmp_path / "mine").touch()
    (tmp_path / "admission").hardlink_to(tmp_path / "mine")
    with pytest.raises(NoLeases, match="not a regular file of this name alone"):
        leases.admission(tmp_path, 0.0).__enter__()
