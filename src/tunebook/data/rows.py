"""Rows of prepared documents, as a map-style data set: a row (a list of documents) -> the collator's input.

The documents stay on disk, memory-mapped; a row is put together when its step comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook.data.formats import IGNORED_LABEL
from tunebook.data.sampler import Row

if TYPE_CHECKING:
    from datasets import Dataset

# A row without documents (the short last step of an epoch): two tokens that no loss counts.
_EMPTY_ROW_LENGTH = 2


class DocumentRows:
    """Rows over a prepared `datasets.Dataset` with columns input_ids, labels (num_tokens,) per document."""

    def __init__(self, documents: Dataset, filler_token_id: int) -> None:
        self.documents = documents.with_format("arrow")  # as Python's own numbers a row took ten times as long
        self.filler_token_id = filler_token_id

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, row: Row) -> dict[str, Any]:
        """Input ids and labels (num_tokens,) in int64 of the row's documents end to end, and each one's length."""
        import numpy as np

        if not row:
            return {
                "input_ids": np.full(_EMPTY_ROW_LENGTH, self.filler_token_id),
                "labels": np.full(_EMPTY_ROW_LENGTH, IGNORED_LABEL),
                "seq_lengths": [_EMPTY_ROW_LENGTH],
            }
        found: Any = self.documents[row]
        ids, labels = (found[name].combine_chunks() for name in ("input_ids", "labels"))
        return {
            "input_ids": ids.flatten().to_numpy().astype(np.int64),
            "labels": labels.flatten().to_numpy().astype(np.int64),
            "seq_lengths": ids.value_lengths().to_pylist(),
        }
