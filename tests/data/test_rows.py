"""Rows of prepared documents, as the collator gets them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset

from tunebook.data.rows import DocumentRows

DOCUMENTS = {
    "input_ids": [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]],
    "labels": [[-100, 2, 3], [-100, 5], [6], [7, 8, 9, 10]],
}


@pytest.fixture(params=[1, 4], ids=["many_batches", "one_batch"])
def rows(request, tmp_path) -> DocumentRows:
    """Memory-mapped from a file of int32 lists, as prepared data are, in batches of one document or of all."""
    column = pa.list_(pa.int32())
    table = pa.table(DOCUMENTS, schema=pa.schema([("input_ids", column), ("labels", column)]))
    file = tmp_path / "documents.arrow"
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table, max_chunksize=request.param)
    return DocumentRows(Dataset.from_file(str(file)), filler_token_id=99)


@pytest.fixture
def rows_of_8(rows) -> DocumentRows:
    """The same, filled up to multiples of eight tokens."""
    return DocumentRows(rows.documents, filler_token_id=99, multiple=8)


def test_a_row_is_its_documents_end_to_end_in_the_order_asked(rows):
    found = rows[[3, 0]]
    assert found["input_ids"].tolist() == [7, 8, 9, 10, 1, 2, 3]
    assert found["labels"].tolist() == [7, 8, 9, 10, -100, 2, 3]
    assert found["seq_lengths"] == [4, 3]
    assert found["input_ids"].dtype == found["labels"].dtype == np.int64


def test_a_document_may_be_asked_for_alone_and_twice(rows):
    assert rows[[2]]["input_ids"].tolist() == [6]
    assert rows[[1, 1]]["labels"].tolist() == [-100, 5, -100, 5]


def test_a_row_without_documents_is_two_tokens_that_no_loss_counts(rows):
    found = rows[[]]
    assert found["input_ids"].tolist() == [99, 99]
    assert found["labels"].tolist() == [-100, -100]
    assert found["seq_lengths"] == [2]


def test_a_row_is_filled_up_by_a_document_that_no_loss_counts(rows_of_8):
    found = rows_of_8[[3, 0]]
    assert found["input_ids"].tolist() == [7, 8, 9, 10, 1, 2, 3, 99]
    assert found["labels"].tolist() == [7, 8, 9, 10, -100, 2, 3, -100]
    assert found["seq_lengths"] == [4, 3, 1]
    assert found["input_ids"].dtype == found["labels"].dtype == np.int64


def test_a_row_that_is_a_multiple_already_stays_as_it_is(rows, rows_of_8):
    found = rows_of_8[[3, 3]]
    assert found["seq_lengths"] == [4, 4]
    assert found["input_ids"].tolist() == rows[[3, 3]]["input_ids"].tolist()


def test_a_row_without_documents_is_a_whole_multiple(rows_of_8):
    found = rows_of_8[[]]
    assert (found["input_ids"].tolist(), found["labels"].tolist()) == ([99] * 8, [-100] * 8)
    assert found["seq_lengths"] == [8]
