"""Prepared data on disk: documents as tokens and labels, counts of all documents that were read, and the data's hash.

A folder holds `prepared.json` and per part an Arrow file and `lengths.npy`. Columns: input_ids and labels (num_tokens,)
int32, length int32; labels are -100 where the loss does not count. A pair is one document: the chosen side, then the
rejected one, each with the prompt; its column chosen_length is where the second begins. Reading the counts needs
neither torch nor datasets.

The content hash covers the documents themselves: two runs saw the same data if it is equal. A fingerprint has to be
known before anything is read, so it covers the code and libraries that prepare, and changes with them even if no token
does.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.data.corpus import CorpusKind, SourceRecord
from tunebook.data.problems import Skipped
from tunebook.errors import DataError
from tunebook.files import sha256_text

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import numpy.typing as npt

PREPARED_FILE = "prepared.json"
ARROW_FILE = "documents.arrow"
LENGTHS_FILE = "lengths.npy"
WIDTHS_FILE = "widths.npy"  # of pairs

_MOST_BINS = 20
_COUNTERS = ("dropped", "contents", "added", "notes")


@dataclass(kw_only=True)
class PartCounts:
    """How much of one part was read and kept, and why the rest was dropped. Lengths in tokens."""

    num_read: int = 0  # documents
    num_documents: int = 0  # kept; pieces of a split document count each
    num_tokens: int = 0
    num_trained_tokens: int = 0
    num_cut: int = 0  # documents that were cut or split
    num_answers_cut: int = 0  # documents that end within an answer, and so teach answers that do not end
    num_tokens_lost: int = 0  # to cutting and dropping
    shortest: int = 0
    longest: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # by reason: documents, or pieces of split ones
    contents: Counter[str] = field(default_factory=Counter)  # documents with tools, calls of them, or reasoning
    added: Counter[str] = field(default_factory=Counter)  # documents by a text that the chat template adds to them
    skipped: Skipped = field(default_factory=Skipped)  # unusable documents, not in num_read
    notes: Counter[str] = field(default_factory=Counter)  # documents by remark
    first: dict[str, str] = field(default_factory=dict)  # of each remark: the first document
    # Documents by length: bin i of `counts` is from `edges[i]` up to, but not including, `edges[i + 1]` tokens
    lengths: dict[str, list[int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Every count as plain values. Not by asdict: Python 3.11 copies a Counter wrongly."""
        first = self.skipped.first | self.first
        return vars(self) | {"skipped": self.skipped.reasons, "first": first, "num_dropped": self.dropped.total()}

    def note(self, remark: str, place: str, is_counted: bool = True) -> None:
        """Count a document with a remark, and keep the place of the first."""
        if is_counted:
            self.notes[remark] += 1
            self.first.setdefault(remark, place)

    def add(self, other: PartCounts) -> None:
        """Add the counts of more documents; lengths are summed up once, at the end, by `measure`."""
        for name, value in vars(other).items():
            if isinstance(value, int):
                setattr(self, name, getattr(self, name) + value)
        for name in _COUNTERS:
            getattr(self, name).update(getattr(other, name))
        self.skipped.update(other.skipped)
        self.first = other.first | self.first

    def measure(self, lengths: npt.NDArray[np.int32]) -> None:
        """Set what follows from all kept documents' lengths."""
        self.shortest, self.longest = int(lengths.min()), int(lengths.max())
        self.lengths = histogram(lengths)


@dataclass(frozen=True, kw_only=True)
class PreparedPart:
    """The training or the validation part."""

    folder: Path
    counts: PartCounts

    def load(self) -> datasets.Dataset:
        """The documents, memory-mapped: costs neither time nor memory."""
        import datasets

        return datasets.Dataset.from_file(str(self.folder / ARROW_FILE))

    def load_lengths(self) -> npt.NDArray[np.int32]:
        """Tokens of every document. Shape: (num_documents,)."""
        import numpy as np

        lengths: npt.NDArray[np.int32] = np.load(self.folder / LENGTHS_FILE)
        return lengths

    def load_widths(self) -> npt.NDArray[np.int32]:
        """Tokens that every document takes in a padded row, a pair in two: twice its longest side."""
        import numpy as np

        file = self.folder / WIDTHS_FILE
        return np.load(file) if file.is_file() else self.load_lengths()


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One data set, ready for training."""

    folder: Path
    fingerprint: str  # changes with anything that could change a token
    content_sha256: str  # of the tokens and labels themselves: see `hash_documents`
    kind: str  # a CorpusKind
    max_length: int  # tokens
    tokenizer_sha256: str | None  # None for documents that came as tokens
    chat_template_sha256: str | None
    template_date: str | None  # the date that the chat template writes as today's; None if it writes none
    records: list[SourceRecord]
    notes: list[str]  # of reading the sources
    seconds: float  # of the preparation
    train: PreparedPart
    validation: PreparedPart | None
    was_cached: bool  # found, not prepared now
    has_images: bool = False
    image_folders: list[str] = field(default_factory=list)  # that hold the images' files, also in their subfolders

    @property
    def unit(self) -> str:
        """What one of its documents is called."""
        return CorpusKind(self.kind).reads.removesuffix("s")

    def parts(self) -> dict[str, PreparedPart]:
        """The parts there are, by name."""
        return {"train": self.train} | ({"validation": self.validation} if self.validation else {})


def histogram(lengths: npt.NDArray[np.int32]) -> dict[str, list[int]]:
    """At most 20 bins of one width, a power of two (or 1), from the shortest document to the longest."""
    import numpy as np

    shortest, longest = int(lengths.min()), int(lengths.max())
    width = 1
    while longest // width - shortest // width + 1 > _MOST_BINS:
        width *= 2
    edges = np.arange(shortest // width, longest // width + 2) * width
    counts, _ = np.histogram(lengths, bins=edges)
    return {"edges": edges.tolist(), "counts": counts.tolist()}


def write_prepared(folder: Path, content: dict[str, Any], counts: dict[str, PartCounts]) -> None:
    """Write `prepared.json`, the last file: a folder without it is not complete."""
    parts = {name: part.to_json() for name, part in counts.items()}
    text = json.dumps({**content, "parts": parts}, indent=2)
    (folder / PREPARED_FILE).write_text(text + "\n", encoding="utf-8")


def load_prepared(folder: Path, *, was_cached: bool = True) -> Prepared:
    """Open a folder of prepared data. Raises: DataError if it is not complete."""
    try:
        content = json.loads((folder / PREPARED_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder} holds no complete prepared data; make it with `tunebook data RECIPE`, with the same overrides "
            "as the training",
            problem_id="prepared-not-found",
        ) from error
    parts = {}
    for name, part in content.pop("parts").items():
        del part["num_dropped"]
        counters: dict[str, Any] = {counter: Counter(part[counter]) for counter in _COUNTERS}
        counters["skipped"] = Skipped(reasons=Counter(part["skipped"]), first=part["first"])
        counts = PartCounts(**(part | counters))
        parts[name] = PreparedPart(folder=folder / name, counts=counts)
    content["records"] = [SourceRecord(**record) for record in content["records"]]
    train, validation = parts["train"], parts.get("validation")
    return Prepared(**content, folder=folder, train=train, validation=validation, was_cached=was_cached)


def hash_documents(parts: Iterable[Path]) -> str:
    """SHA-256 over every part's name, tokens, labels and lengths, as hexadecimal digits.

    Independent of Arrow's batches. `parts` are the folders of a complete preparation, with the columns of
    `chunks.prepared_schema`. They are read batch by batch and not mapped: mapped data stays in memory.
    """
    hashes = (f"{part.name}:{_hash_part(part / ARROW_FILE)}" for part in sorted(parts))
    return sha256_text("\n".join(hashes))


def _hash_part(file: Path) -> str:
    import pyarrow as pa

    with pa.OSFile(str(file)) as source, pa.ipc.open_stream(source) as batches:
        hashes = {name: hashlib.sha256() for name in batches.schema.names}
        for batch in batches:
            for name, column_hash in hashes.items():
                column = batch.column(name)
                values = column.flatten() if pa.types.is_list(column.type) else column
                if pa.types.is_string(values.type):  # of images the hashes, not the paths
                    lengths = column.value_lengths().to_pylist()
                    hashed = [reference.partition(" ")[0] for reference in values.to_pylist()]
                    column_hash.update(json.dumps([lengths, hashed]).encode())
                    continue
                column_hash.update(values.to_numpy().astype("<i4", copy=False).data)
    return ":".join(column_hash.hexdigest() for column_hash in hashes.values())
