from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tunebook.data.prepared import Histogram, PartCounts, histogram, is_whole, load_prepared
from tunebook.errors import DataError


def lengths_of(*lengths: int) -> np.ndarray:
    return np.asarray(lengths, dtype=np.int32)


def test_few_lengths_get_a_bin_each() -> None:
    assert histogram(lengths_of(3, 5, 5)) == Histogram(edges=[3, 4, 5, 6], counts=[1, 0, 2])


def test_many_lengths_get_bins_of_a_power_of_two() -> None:
    found = histogram(lengths_of(1, 7, 8, 99, 100))
    assert found.edges == list(range(0, 105, 8))
    assert found.counts == [2, 1, *[0] * 9, 0, 2]


def test_one_length_is_one_bin() -> None:
    assert histogram(lengths_of(1000, 1000)) == Histogram(edges=[1000, 1001], counts=[2])


def test_every_document_is_in_a_bin() -> None:
    lengths = np.random.default_rng(0).integers(1, 40_000, size=1000).astype(np.int32)
    found = histogram(lengths)
    assert sum(found.counts) == 1000
    assert len(found.counts) <= 20


def test_counts_add_up() -> None:
    total = PartCounts()
    total.add(PartCounts(num_read=3, num_documents=2, num_tokens=10, num_trained_tokens=4))
    more = PartCounts(num_read=2, num_documents=1, num_cut=1, num_tokens_lost=5)
    more.dropped["too long"] += 1
    total.add(more)
    total.add(more)
    assert (total.num_read, total.num_documents, total.num_tokens, total.num_cut) == (7, 4, 10, 2)
    assert total.dropped == {"too long": 2}
    assert total.num_dropped == 2


@pytest.mark.parametrize("content", [None, "{broken", "{}", '{"format": 0, "parts": {}}'])
def test_a_folder_that_is_not_whole_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "prepared.json").write_text(content)
    assert not is_whole(tmp_path)
    with pytest.raises(DataError, match=r"no complete prepared data.*tunebook data RECIPE"):
        load_prepared(tmp_path)
