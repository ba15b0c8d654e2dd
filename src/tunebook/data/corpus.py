"""The common form of the documents of all sources, and how it is written to disk in bounded memory.

A corpus is one table of documents of one kind, memory-mapped from Arrow files. Columns by kind:
conversation: messages, tools and template_kwargs, all JSON text (`conversation.py`); text: text; prompt_completion:
prompt, completion; tokens: input_ids, labels. Of pairs, conversation_pair: as a conversation with the chosen answer,
and the messages with the rejected one in `rejected`; text_pair: prompt, chosen, rejected; token_pair (generated ones):
as tokens, with rejected_ids and rejected_labels. Every kind also has `origin`, such as `train.jsonl:17`, for messages.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.data.problems import Skipped
from tunebook.data.turns import DETAILS

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa

Row = dict[str, Any]  # one document: the columns of its kind

IGNORED_LABEL = -100  # of a token that the loss does not count: PyTorch's cross entropy skips it
CONTENT_HASH = "content_hash"  # a column only while a corpus is assembled
ROWS_PER_BATCH = 1000  # documents held in memory at once


class CorpusKind(Enum):
    """The kind of a document after reading, whatever its format was."""

    conversation = "conversation"
    text = "text"
    prompt_completion = "prompt_completion"
    tokens = "tokens"
    token_pair = "token_pair"
    conversation_pair = "conversation_pair"
    text_pair = "text_pair"

    @property
    def has_turns(self) -> bool:
        """Whether a chat template writes it."""
        return self in (CorpusKind.conversation, CorpusKind.conversation_pair)

    @property
    def reads(self) -> str:
        """What a method that trains on it reads: documents or pairs."""
        return "pairs" if self.value.endswith("_pair") else "documents"

    @property
    def has_tokens(self) -> bool:
        """Whether it is tokens already."""
        return self in (CorpusKind.tokens, CorpusKind.token_pair)


def way_to_one_kind(kinds: Iterable[CorpusKind]) -> str:
    """What to do about documents of different kinds in one run."""
    if len({kind.reads for kind in kinds}) > 1:
        return "pairs and documents are for different methods, so keep one of them"
    return "write all as lists of turns, or all as texts"


@dataclass(frozen=True, kw_only=True)
class SourceRecord:
    """One file or split that documents were read from, as the manifest keeps it."""

    location: str  # an absolute path, `book:...`, `name/subset/split` on the hub, or `synthetic`
    revision: str | None  # the hub's commit; None for what is not on the hub
    sha256: str | None  # of the file as stored; of a folder: of its files' names and hashes; None on the hub
    format: str
    num_documents: int


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """The documents of one source, still with their content hashes."""

    kind: CorpusKind
    dataset: datasets.Dataset
    records: list[SourceRecord]
    notes: list[str] = field(default_factory=list)
    skipped: Skipped = field(default_factory=Skipped)


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """All documents of a run: a training part, perhaps a validation part, and where they came from."""

    kind: CorpusKind
    train: datasets.Dataset
    validation: datasets.Dataset | None
    records: list[SourceRecord]  # of the training part, then of separate validation files or splits
    notes: list[str]  # for display: the detected format, skipped lines, counts per part
    skipped: dict[str, Skipped]  # by part: documents that could not be read
    has_images: bool = False


def arrow_schema(kind: CorpusKind) -> pa.Schema:
    """The columns of a kind on disk."""
    import pyarrow as pa

    names = {
        CorpusKind.conversation: ("messages", "tools", "template_kwargs"),
        CorpusKind.text: ("text",),
        CorpusKind.prompt_completion: ("prompt", "completion"),
        CorpusKind.tokens: ("input_ids", "labels"),
        CorpusKind.token_pair: ("input_ids", "labels", "rejected_ids", "rejected_labels"),
        CorpusKind.conversation_pair: ("messages", "rejected", "tools", "template_kwargs"),
        CorpusKind.text_pair: ("prompt", "chosen", "rejected"),
    }
    column = pa.list_(pa.int32()) if kind.has_tokens else pa.string()
    columns = [(name, column) for name in names[kind]]
    return pa.schema([*columns, ("origin", pa.string()), (CONTENT_HASH, pa.uint64())])


def content_hash(row: Row, kind: CorpusKind) -> int:
    """64 bits that depend only on a document's content, so that equal documents stay together.

    A conversation's system turn is left out: the same conversation under two system prompts is one content. Of a pair
    only the prompt counts: its answers must not be held out from a training on others of the same prompt.
    """
    if kind.has_tokens:
        return hash_bytes(array("i", row["input_ids"]).tobytes())
    if kind.has_turns:
        pieces = []
        turns = json.loads(row["messages"])
        if kind is CorpusKind.conversation_pair:
            turns = turns[: num_shared(turns, json.loads(row["rejected"]))]
        for turn in turns:
            if turn["role"] != "system":
                details = {key: turn[key] for key in DETAILS if key in turn}
                if "images" in turn:
                    details["images"] = [image["sha256"] for image in turn["images"]]
                pieces += [turn["role"], turn["content"], json.dumps(details, ensure_ascii=False) if details else None]
        pieces = [piece for piece in (*pieces, row["tools"]) if piece is not None]
    elif kind is CorpusKind.prompt_completion:
        pieces = [row["prompt"], row["completion"]]
    elif kind is CorpusKind.text_pair:
        pieces = [row["prompt"]]
    else:
        pieces = [row["text"]]
    # The lengths keep ["ab", "c"] and ["a", "bc"] apart.
    text = "".join(f"{len(piece)}:{piece}" for piece in pieces)
    return hash_bytes(text.encode())


def num_shared(first: Sequence[object], second: Sequence[object]) -> int:
    """How many items two sequences begin with in common."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((position for position, (one, other) in pairs if one != other), min(len(first), len(second)))


def hash_bytes(data: bytes) -> int:
    """The first 64 bits of the BLAKE2b hash of some bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def write_rows(rows: Iterable[Row], kind: CorpusKind, file: Path) -> datasets.Dataset:
    """Write documents to an Arrow file batch by batch, and open it memory-mapped."""
    import pyarrow as pa

    def batches() -> Iterator[pa.RecordBatch]:
        remaining = iter(rows)
        while batch := list(islice(remaining, ROWS_PER_BATCH)):
            with_hashes = [row | {CONTENT_HASH: content_hash(row, kind)} for row in batch]
            yield pa.RecordBatch.from_pylist(with_hashes, schema=arrow_schema(kind))

    return write_batches(batches(), kind, file)


def write_batches(batches: Iterable[pa.RecordBatch], kind: CorpusKind, file: Path) -> datasets.Dataset:
    """Write record batches of a kind's schema to an Arrow file, and open it memory-mapped."""
    import datasets
    import pyarrow as pa

    file.parent.mkdir(parents=True, exist_ok=True)
    with pa.OSFile(str(file), "wb") as stream, pa.ipc.new_stream(stream, arrow_schema(kind)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return datasets.Dataset.from_file(str(file))
