"""Rows of prepared documents, as a map-style data set: a row (a list of documents) -> the collator's input.

The documents stay on disk, memory-mapped; a row is put together when its step comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook.data.sampler import Row

if TYPE_CHECKING:
    from datasets import Dataset

# A row without documents (the short last step of an epoch): two tokens that no loss counts.
_EMPTY_ROW_LENGTH = 2


class DocumentRows:
    """Rows over a prepared `datasets.Dataset` with columns input_ids, labels (num_tokens,) per document."""

    def __init__(self, documents: Dataset, filler_token_id: int) -> None:
        self.documents = documents
        self.filler_token_id = filler_token_id

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, row: Row) -> dict[str, Any]:
        """Input ids and labels (num_tokens,) of the row's documents end to end, and each document's length."""
        if not row:
            return {
                "input_ids": [self.filler_token_id] * _EMPTY_ROW_LENGTH,
                "labels": [-100] * _EMPTY_ROW_LENGTH,
                "seq_lengths": [_EMPTY_ROW_LENGTH],
            }
        found = self.documents[row]
        return {
            "input_ids": [token for document in found["input_ids"] for token in document],
            "labels": [label for document in found["labels"] for label in document],
            "seq_lengths": [len(document) for document in found["input_ids"]],
        }
