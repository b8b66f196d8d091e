"""Rows of the token cache come back as they were written, in 2 or 3 bytes a token."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launch.data.rows import IGNORED
from training.data import stored_rows

ROW = st.lists(st.tuples(st.integers(0, 200_000), st.booleans()), max_size=40)


def back(rows, schema):
    return stored_rows.read(pa.Table.from_batches([stored_rows.batch(rows, schema)]))


@settings(deadline=None)
@given(st.lists(ROW, max_size=5), st.booleans())
def test_a_decoders_rows_come_back(drawn, is_large):
    rows = []
    for row in drawn:
        ids = [token if is_large else token % 60_000 for token, _ in row]
        labels = [
            token if is_target else IGNORED for token, (_, is_target) in zip(ids, row, strict=True)
        ]
        rows.append({"input_ids": ids, "labels": labels})
    schema = stored_rows.schema(200_000 if is_large else 60_000, False, False)
    found = [{name: values.tolist() for name, values in row.items()} for row in back(rows, schema)]
    assert found == rows


@settings(deadline=None)
@given(st.lists(st.tuples(ROW, ROW), max_size=5))
def test_source_and_target_of_t5_come_back(drawn):
    rows = [
        {"input_ids": [token for token, _ in source], "labels": [token for token, _ in target]}
        for source, target in drawn
    ]
    found = back(rows, stored_rows.schema(250_000, True, False))
    assert [{name: values.tolist() for name, values in row.items()} for row in found] == rows


def test_packed_sequences_keep_their_documents():
    row = {"input_ids": [1, 2, 3, 4], "labels": [IGNORED, 2, IGNORED, 4]}
    row |= {"lengths": np.array([2, 2], np.int32), "documents": np.array([7, 9], np.int32)}
    (found,) = back([row], stored_rows.schema(10, False, True))
    assert {name: list(values) for name, values in found.items()} == {
        name: list(values) for name, values in row.items()
    }


@pytest.mark.parametrize(("largest_id", "limit"), [(65_535, 2.3), (65_536, 3.4)])
def test_a_row_of_100_tokens_takes_2_or_3_bytes_a_token(largest_id, limit):
    row = {"input_ids": [largest_id] * 100, "labels": [IGNORED] * 60 + [largest_id] * 40}
    written = stored_rows.batch([row] * 1000, stored_rows.schema(largest_id, False, False))
    assert written.nbytes / 100_000 < limit
