"""The SQLite file of earlier versions is carried over."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from launch.predict.history.calibration import Figures
from tests.unit.predict.history.entries import KEYS, lines_of, measurement, old_file, tuned


def asides(path: Path) -> list[Path]:
    return sorted(path.parent.glob("ledger.sqlite.aside-*"))


def test_what_an_earlier_version_wrote_is_carried_over_once_and_its_file_is_kept(book, said):
    old = old_file(book.path)
    content = old.read_bytes()
    result = book.recall(**KEYS)
    assert result is not None
    assert (result.time, result.step_s, result.strategy.per_device_train_batch_size) == (
        2,
        0.25,
        32,
    )
    assert book.recall(**{**KEYS, "model_key": "another"}) is not None
    first, second, third = book.measurements()
    versions = {"torch": "2.9.0", "transformers": "5.0.0"}
    assert first == measurement("sft-1", 100, 110, time=1760000000.25, versions=versions)
    assert (second.device, second.gradient_checkpointing) == ("cpu", False)
    assert second.predicted == Figures(host_pss_bytes=1 << 40, step_s=0.5)
    assert second.measured == Figures(host_pss_bytes=(1 << 40) + 7, step_s=0.75)
    assert third.predicted == Figures()
    (aside,) = asides(book.path)
    assert aside.read_bytes() == content and not old.exists()
    (line,) = said
    assert line == (
        f"ledger: {old}: its 5 row(s) are in ledger.jsonl now; it is kept as {aside.name}"
    )
    assert len(lines_of(book.path)) == 5


def test_a_writer_carries_over_too_and_what_is_new_counts(book, strategy):
    old_file(book.path)
    book.record(tuned(strategy, step_s=0.125))
    assert book.recall(**KEYS) == tuned(strategy, step_s=0.125)
    assert len(lines_of(book.path)) == 6


def test_what_a_start_had_carried_over_when_it_was_killed_is_not_there_twice(book, said):
    old_file(book.path)
    book.measurements()
    lines = book.path.read_bytes().splitlines(keepends=True)
    book.path.write_bytes(b"".join(lines[:2]) + lines[2][:40])
    asides(book.path)[0].rename(book.path.with_suffix(".sqlite"))
    said.clear()
    assert [run.run_id for run in book.measurements()] == ["sft-1", "cpu-1", "sft-2"]
    assert len(book.path.read_bytes().splitlines()) == 6
    assert len(asides(book.path)) == 1
    assert "its 5 row(s) are in" in said[0] and "line 3: " in said[1]
    assert len(said) == 2


def test_of_starts_that_carry_over_at_once_one_does(tmp_path, launchers):
    for number in range(15):
        path = tmp_path / str(number) / "ledger.jsonl"
        old_file(path)
        for who, launcher in enumerate(launchers):
            launcher.begin(path, [f"{who}-{number}" for number in range(3)])
        said = [line for launcher in launchers for line in launcher.end()[0]]
        assert len(said) == len(asides(path)) == 1, said
        assert len(lines_of(path)) == 5 + 6


def garbage(old: Path) -> None:
    old.write_bytes(b"\x00\xffno database" * 500)


def truncated(old: Path) -> None:
    old.write_bytes(old.read_bytes()[: 4096 + 100])


def overwritten(old: Path) -> None:
    """A page of the tables turns into something else; the header still says that it is a
    database."""
    content = bytearray(old.read_bytes())
    content[4096:] = b"\xa5" * (len(content) - 4096)
    old.write_bytes(content)


def foreign(old: Path) -> None:
    old.unlink()
    old_file(old, "CREATE TABLE recipes (cake TEXT)")


def empty(old: Path) -> None:
    old.write_bytes(b"")


def folder(old: Path) -> None:
    old.unlink()
    old.mkdir()


@pytest.mark.parametrize(
    "harm",
    [garbage, truncated, overwritten, foreign, empty, folder],
    ids=lambda harm: harm.__name__,
)
def test_a_damaged_file_of_an_earlier_version_is_said_and_renamed(book, said, harm):
    harm(old_file(book.path))
    assert book.measurements() == []
    book.record(measurement())
    assert book.measurements() == [measurement()]
    (aside,) = asides(book.path)
    (line,) = said
    assert "ledger.sqlite: it cannot be read (" in line
    assert line.endswith(f"it is kept as {aside.name}")


def test_a_row_that_this_version_cannot_read_costs_no_other(book, said):
    with closing(sqlite3.connect(old_file(book.path))) as db:
        db.execute("UPDATE measurements SET mode = 'sail' WHERE run_id = 'cpu-1'")
        db.commit()
    assert [run.run_id for run in book.measurements()] == ["sft-1", "sft-2"]
    assert len(said) == 2
    assert "ledger.sqlite: 1 line(s) not of this version are passed over" in said[0]
    assert "its 4 row(s) are in" in said[1]
