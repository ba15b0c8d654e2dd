"""Prepared data: counts, histogram, folders that are not complete, and the hash of the documents themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tunebook.data.chunks import prepared_schema
from tunebook.data.prepared import (
    ARROW_FILE,
    hash_documents,
    histogram,
    load_prepared,
)
from tunebook.errors import DataError


def lengths_of(*lengths: int) -> np.ndarray:
    return np.asarray(lengths, dtype=np.int32)


def test_few_lengths_get_a_bin_each() -> None:
    assert histogram(lengths_of(3, 5, 5)) == {"edges": [3, 4, 5, 6], "counts": [1, 0, 2]}


def test_many_lengths_get_bins_of_a_power_of_two() -> None:
    found = histogram(lengths_of(1, 7, 8, 99, 100))
    assert found["edges"] == list(range(0, 105, 8))
    assert found["counts"] == [2, 1, *[0] * 9, 0, 2]


@pytest.mark.parametrize("content", [None, "{broken"])
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "prepared.json").write_text(content)
    with pytest.raises(DataError, match=r"no complete prepared data.*tunebook data RECIPE"):
        load_prepared(tmp_path)


DOCUMENTS = [([5, 6, 7], [-100, 6, 7]), ([8], [8]), ([9, 10], [-100, 10])]


def write_part(folder: Path, documents: list[tuple[list[int], list[int]]], rows_per_batch: int = 10) -> Path:
    folder.mkdir(parents=True)
    columns = {
        "input_ids": [tokens for tokens, _ in documents],
        "labels": [labels for _, labels in documents],
        "length": [len(tokens) for tokens, _ in documents],
    }
    table = pa.table(columns, schema=prepared_schema())
    with (folder / ARROW_FILE).open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=rows_per_batch):
            writer.write_batch(batch)
    return folder


def test_how_arrow_cuts_the_documents_does_not_count(tmp_path: Path) -> None:
    whole = hash_documents([write_part(tmp_path / "a" / "train", DOCUMENTS)])
    cut = hash_documents([write_part(tmp_path / "b" / "train", DOCUMENTS, rows_per_batch=1)])
    assert whole == cut
    assert len(whole) == 64


@pytest.mark.parametrize(
    "documents",
    [
        [([5, 6, 7], [-100, 6, 7]), ([8], [8]), ([9, 11], [-100, 10])],
        [([5, 6, 7], [-100, 6, -100]), ([8], [8]), ([9, 10], [-100, 10])],
        [([5, 6], [-100, 6]), ([7, 8], [7, 8]), ([9, 10], [-100, 10])],  # the same tokens in a row, cut elsewhere
        [([8], [8]), ([5, 6, 7], [-100, 6, 7]), ([9, 10], [-100, 10])],
    ],
    ids=["a_token", "a_label", "a_border", "the_order"],
)
def test_every_part_of_a_document_counts(tmp_path: Path, documents: list[tuple[list[int], list[int]]]) -> None:
    before = hash_documents([write_part(tmp_path / "a" / "train", DOCUMENTS)])
    assert hash_documents([write_part(tmp_path / "b" / "train", documents)]) != before
