"""Rows of prepared documents, as a map-style data set: a row (a list of documents) -> the collator's input.

The documents stay on disk, memory-mapped; a row is put together when its step comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.sampler import Row

if TYPE_CHECKING:
    from datasets import Dataset

# A row without documents (the short last step of an epoch): two tokens that no loss counts.
_EMPTY_ROW_LENGTH = 2


class DocumentRows:
    """Rows over a prepared `datasets.Dataset` with columns input_ids, labels (num_tokens,) per document.

    `multiple`: rows are filled up to a multiple of this many tokens, by a document that no loss counts.
    """

    def __init__(self, documents: Dataset, filler_token_id: int, multiple: int = 1) -> None:
        self.documents = documents.with_format("arrow")  # as Python's own numbers a row took ten times as long
        self.filler_token_id = filler_token_id
        self.multiple = multiple

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, row: Row) -> dict[str, Any]:
        """Input ids and labels (num_tokens,) in int64 of the row's documents end to end, and each one's length."""
        import numpy as np

        if not row:
            return self._filler(max(_EMPTY_ROW_LENGTH, self.multiple))
        found: Any = self.documents[row]
        ids, labels = (found[name].combine_chunks() for name in ("input_ids", "labels"))
        whole = {
            "input_ids": ids.flatten().to_numpy().astype(np.int64),
            "labels": labels.flatten().to_numpy().astype(np.int64),
            "seq_lengths": ids.value_lengths().to_pylist(),
        }
        if not (lacking := -len(whole["input_ids"]) % self.multiple):
            return whole
        filler = self._filler(lacking)
        arrays = {name: np.concatenate([whole[name], filler[name]]) for name in ("input_ids", "labels")}
        return arrays | {"seq_lengths": whole["seq_lengths"] + filler["seq_lengths"]}

    def _filler(self, num_tokens: int) -> dict[str, Any]:
        """A document that no loss counts."""
        import numpy as np

        return {
            "input_ids": np.full(num_tokens, self.filler_token_id),
            "labels": np.full(num_tokens, IGNORED_LABEL),
            "seq_lengths": [num_tokens],
        }
