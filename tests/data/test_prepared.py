"""Prepared data: counts, histogram, folders that are not complete, and the hash of the documents themselves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tunebook.data.chunks import prepared_schema
from tunebook.data.corpus import CorpusKind
from tunebook.data.prepared import (
    ARROW_FILE,
    hash_documents,
    histogram,
    load_prepared,
)
from tunebook.errors import DataError


def test_lengths_are_counted_in_bins_of_a_power_of_two() -> None:
    assert histogram(np.array([3, 5, 5], dtype=np.int32)) == {"edges": [3, 4, 5, 6], "counts": [1, 0, 2]}
    bins = histogram(np.array([1, 7, 8, 99, 100], dtype=np.int32))
    assert bins == {"edges": [*range(0, 105, 8)], "counts": [2, 1, *[0] * 9, 0, 2]}


@pytest.mark.parametrize("content", [None, "{broken"])
def test_an_incomplete_folder_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "prepared.json").write_text(content)
    with pytest.raises(DataError, match="tunebook data RECIPE") as caught:
        load_prepared(tmp_path)
    assert caught.value.problem_id == "prepared-not-found"


DOCUMENTS = [([5, 6, 7], [-100, 6, 7]), ([8], [8]), ([9, 10], [-100, 10])]


def write_part(folder: Path, documents: list[tuple[list[int], list[int]]], rows_per_batch: int = 10) -> Path:
    folder.mkdir(parents=True)
    columns = {
        "input_ids": [tokens for tokens, _ in documents],
        "labels": [labels for _, labels in documents],
        "length": [len(tokens) for tokens, _ in documents],
    }
    table = pa.table(columns, schema=prepared_schema(CorpusKind.tokens))
    with (folder / ARROW_FILE).open("wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        for batch in table.to_batches(max_chunksize=rows_per_batch):
            writer.write_batch(batch)
    return folder


@pytest.mark.parametrize(
    ("documents", "is_same"),
    [
        (DOCUMENTS, True),  # in other batches
        ([([5, 6, 7], [-100, 6, 7]), ([8], [8]), ([9, 11], [-100, 10])], False),
        ([([5, 6, 7], [-100, 6, -100]), ([8], [8]), ([9, 10], [-100, 10])], False),
        ([([5, 6], [-100, 6]), ([7, 8], [7, 8]), ([9, 10], [-100, 10])], False),  # the same tokens, cut elsewhere
        ([([8], [8]), ([5, 6, 7], [-100, 6, 7]), ([9, 10], [-100, 10])], False),
    ],
)
def test_the_hash_covers_every_token_label_border_and_the_order(
    tmp_path: Path, documents: list[tuple[list[int], list[int]]], is_same: bool
) -> None:
    before = hash_documents([write_part(tmp_path / "a" / "train", DOCUMENTS)])
    after = hash_documents([write_part(tmp_path / "b" / "train", documents, rows_per_batch=1)])
    assert (after == before) is is_same
