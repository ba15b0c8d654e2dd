"""Packing one optimizer step: every document once, rows even, the fewest rows that fit."""

import numpy as np
import pytest

from tunebook.data.packing import longest_row, pack_balanced, pack_within, rows_needed


def test_longest_documents_are_placed_first_on_the_shortest_row():
    # By hand: 7 | 6; 5 goes to the row with 6 (11), 4 to the row with 7 (11), 3 to the first of two equal rows (14).
    assert pack_balanced([3, 5, 7, 4, 6], 2) == [[0, 2, 3], [1, 4]]
    assert longest_row([3, 5, 7, 4, 6], 2) == 14


def test_every_document_is_in_exactly_one_row_and_rows_are_nearly_even():
    lengths = np.random.default_rng(1).integers(10, 200, 400)
    rows = pack_balanced(lengths, 16)
    assert sorted(position for row in rows for position in row) == list(range(400))
    sums = [int(lengths[row].sum()) for row in rows]
    assert max(sums) - min(sums) <= 200
    assert pack_balanced([5, 4], 4) == [[0], [1], [], []]


def test_rows_needed_is_a_multiple_and_fits_every_step():
    generator = np.random.default_rng(2)
    steps = [generator.integers(1, 100, 40) for _ in range(20)]
    rows = rows_needed(steps, row_length=128, multiple_of=4)
    assert rows % 4 == 0
    assert all(longest_row(step, rows) <= 128 for step in steps)
    assert any(longest_row(step, rows - 4) > 128 for step in steps)
    assert rows_needed([np.array([64, 64, 64, 64])], row_length=128, multiple_of=1) == 2
    with pytest.raises(ValueError, match="130"):
        rows_needed([np.array([130, 4])], row_length=128, multiple_of=1)


def test_rows_that_a_budget_has_filled_are_not_overfilled():
    # Longest first: 3 | 3, then 2 | 2, and the last 2 would make 7.
    documents = [3, 3, 2, 2, 2]
    assert longest_row(documents, 2) == 7
    assert pack_within(documents, 2, 6) == [[0, 1], [2, 3, 4]]
    assert pack_within(documents, 2, 7) == pack_balanced(documents, 2)
    with pytest.raises(ValueError, match="document 2 of 4 tokens"):
        pack_within([4, 4, 4], 2, 6)
