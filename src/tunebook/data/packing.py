"""Pack the documents of one optimizer step into rows.

An optimizer step is a fixed set of documents; packing only decides which of them share a row, so it changes speed and
never the gradient. Rows have no padding, so they should be equally long: then every GPU does the same work between two
synchronizations. Longest-processing-time-first does that (Graham 1969: at most 4/3 of the best possible longest row).
Where a token budget has filled every row almost completely, it may overfill one; then the rows of the budget are used.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Lengths = npt.NDArray[np.int64]


def pack_balanced(lengths: Sequence[int] | Lengths, num_rows: int) -> list[list[int]]:
    """Put every document in the shortest row so far, longest documents first.

    Shapes: `lengths` (num_documents,) in tokens -> `num_rows` lists of positions in `lengths`. Rows are empty where
    there are fewer documents than rows. Deterministic: ties go to the document and the row that come first.
    """
    order = sorted(range(len(lengths)), key=lambda position: (-int(lengths[position]), position))
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    heap = [(0, row) for row in range(num_rows)]
    for position in order:
        tokens, row = heap[0]
        rows[row].append(position)
        heapq.heapreplace(heap, (tokens + int(lengths[position]), row))
    for row_positions in rows:
        row_positions.sort()
    return rows


class BestFit:
    """`num_rows` rows of `row_length` tokens; each document goes into the fullest one that it fits into."""

    def __init__(self, num_rows: int, row_length: int) -> None:
        self._free = [(row_length, row) for row in range(num_rows)]  # free tokens of each row, fewest first

    @property
    def free_tokens(self) -> int:
        """Free tokens of the emptiest row."""
        return self._free[-1][0]

    def put(self, tokens: int) -> int | None:
        """The number of the row that the next document goes into; None if it fits into none."""
        if tokens > self.free_tokens:
            return None
        left, row = self._free.pop(bisect_left(self._free, (tokens, 0)))
        insort(self._free, (left - tokens, row))
        return row


def pack_within(lengths: Sequence[int] | Lengths, num_rows: int, row_length: int) -> list[list[int]]:
    """As `pack_balanced`, but never more than `row_length` tokens in a row.

    `lengths` (num_documents,) are of documents that `BestFit` can place in this order.
    """
    balanced = pack_balanced(lengths, num_rows)
    if _longest(lengths, balanced) <= row_length:
        return balanced
    filling = BestFit(num_rows, row_length)
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for position, tokens in enumerate(lengths):
        row = filling.put(int(tokens))
        if row is None:
            raise ValueError(f"document {position} of {int(tokens)} tokens does not fit into {num_rows} x {row_length}")
        rows[row].append(position)
    return rows


def longest_row(lengths: Sequence[int] | Lengths, num_rows: int) -> int:
    """Tokens in the longest row that `pack_balanced` makes."""
    return _longest(lengths, pack_balanced(lengths, num_rows))


def _longest(lengths: Sequence[int] | Lengths, rows: list[list[int]]) -> int:
    return max(sum(int(lengths[position]) for position in row) for row in rows)


def rows_needed(steps: Sequence[Lengths], row_length: int, multiple_of: int) -> int:
    """The fewest rows, in multiples, with which every step's documents fit into rows of `row_length` tokens.

    Raises: ValueError for a document longer than a row (the caller cuts documents first).
    """
    longest = max((int(step.max()) for step in steps if len(step)), default=0)
    if longest > row_length:
        raise ValueError(f"a document has {longest} tokens, a row {row_length}")
    num_rows = multiple_of
    for step in steps:
        total, widest = int(step.sum()), int(step.max(initial=0))
        # No row is longer than the mean plus the longest document minus its share; most steps need no packing.
        while (
            total + widest * (num_rows - 1) >= num_rows * (row_length + 1) and longest_row(step, num_rows) > row_length
        ):
            num_rows += multiple_of
    return num_rows
