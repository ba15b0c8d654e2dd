"""The hash of prepared documents themselves: which tokens are trained on, whoever prepared them.

A fingerprint answers before anything is read, so it covers the code and the libraries that prepare, and changes with
them even where no token does. Two runs saw the same data where these hashes are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from tunebook.data.prepared import ARROW_FILE


def hash_documents(parts: Iterable[Path]) -> str:
    """SHA-256 over every part's name, tokens, labels and lengths, as hexadecimal digits.

    Independent of how Arrow cut the documents into batches. `parts` are the folders of a whole preparation, whose
    columns are `chunks.prepared_schema`; they are read batch by batch, and not mapped: what is mapped stays in memory.
    """
    told = (f"{part.name}:{_hash_part(part / ARROW_FILE)}" for part in sorted(parts))
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def _hash_part(file: Path) -> str:
    import pyarrow as pa

    hashes = {name: hashlib.sha256() for name in ("input_ids", "labels", "length")}
    with pa.OSFile(str(file)) as source, pa.ipc.open_stream(source) as batches:
        for batch in batches:
            for name, column_hash in hashes.items():
                column = batch.column(name)
                values = column.flatten() if pa.types.is_list(column.type) else column
                column_hash.update(values.to_numpy().astype("<i4", copy=False).data)
    return ":".join(column_hash.hexdigest() for column_hash in hashes.values())
