"""Damaged files of a run that are no nouns: manifests, rows that were trained, hashes, traces."""

from __future__ import annotations

import os
from array import array

import pytest

from launch.base.errors import CheckpointError
from launch.data import token_cache
from launch.run_folder import manifest, sample_audit

pytestmark = pytest.mark.unit

WRONG = ["", "[]", "7", '{"versions": [1]}', "[" * 5000, '{"files": {"a": 3}}']


@pytest.mark.parametrize("content", WRONG)
def test_a_damaged_manifest_names_no_versions_and_is_a_fault(tmp_path, content):
    (tmp_path / manifest.FILE).write_text(content)
    assert manifest.written_with(tmp_path) == {}
    assert "cannot be read" in str(manifest.fault(tmp_path))


def test_a_manifest_that_is_a_fifo_is_a_fault(tmp_path):
    os.mkfifo(tmp_path / manifest.FILE)
    assert manifest.written_with(tmp_path) == {}
    assert "cannot be read" in str(manifest.fault(tmp_path))


def test_rows_that_were_trained_are_refused_where_their_file_is_a_fifo(tmp_path):
    os.mkfifo(tmp_path / "samples")
    with pytest.raises(CheckpointError, match="not a regular file"):
        list(sample_audit.records(tmp_path / "samples"))


def test_a_record_of_a_negative_length_ends_the_rows(tmp_path):
    file = tmp_path / "samples"
    file.write_bytes(array("i", [1, 2, 5, 6, 2, -4, 7, 8]).tobytes())
    assert list(sample_audit.records(file)) == [(1, [5, 6])]


@pytest.mark.parametrize("content", WRONG)
def test_damaged_hashes_of_a_token_cache_are_a_fault(tmp_path, content):
    (tmp_path / token_cache.HASHES).write_text(content)
    assert token_cache.counts(tmp_path) is None
    assert "cannot be read" in str(token_cache.fault(tmp_path))


def test_a_fifo_among_tokenised_rows_is_a_fault(tmp_path):
    (tmp_path / token_cache.TOKENS_READY).write_text("{}")
    (tmp_path / "rows.arrow").write_text("rows")
    token_cache.write_hashes(tmp_path)
    (tmp_path / "rows.arrow").unlink()
    os.mkfifo(tmp_path / "rows.arrow")
    assert "rows.arrow is not a regular file" in str(token_cache.fault(tmp_path))
