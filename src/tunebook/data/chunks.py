"""Encode a corpus chunk by chunk, on one core or several, in order and in bounded memory.

Workers are spawned, not forked: if the tokenizer of a process has used its threads, it waits for them forever in a
fork. Each worker gets a copy of the tokenizer, which needs no torch, and reads its documents from the corpus' file.
"""

from __future__ import annotations

import os
import signal
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from itertools import chain
from multiprocessing import get_context
from typing import TYPE_CHECKING

from tunebook.config.choices import BadDocuments, Overlong
from tunebook.config.schema import DatasetConfig
from tunebook.data.corpus import IGNORED_LABEL, CorpusKind, Row
from tunebook.data.encode import Document, Encoder, pair_of
from tunebook.data.prepared import PartCounts
from tunebook.data.sampler import IMAGES
from tunebook.errors import DataError, TunebookError
from tunebook.model.tokenizer import fix_template_date
from tunebook.processes import die_with_parent, own_cores

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

    from tunebook.model.processor import ImageProcessor

DOCUMENTS_PER_CHUNK = 1000
_WITH_ANSWERS = (CorpusKind.conversation, CorpusKind.prompt_completion)
# Number of short conversations that one core encodes in the seconds that a worker takes to start.
_DOCUMENTS_PER_WORKER = 8_000

EQUAL = "with the same tokens on both sides, cut to training.max_length or as the chat template writes them"
TOO_LONG = "longer than training.max_length (dataset.overlong=drop)"
NOTHING_TRAINED = "without a token to train on within training.max_length"


def fit(document: Document, max_length: int, overlong: Overlong) -> list[Document]:
    """The document, or pieces of it, none longer than `max_length` tokens; none if it is dropped."""
    num_tokens = len(document.input_ids)
    if num_tokens <= max_length:
        return [document]
    if overlong is Overlong.drop:
        return []
    if document.images:
        return [_until(document, max_length)]
    pieces = []
    for start in range(0, num_tokens if overlong is Overlong.split else 1, max_length):
        end = start + max_length
        # Nothing predicts the first token of a piece.
        labels = [IGNORED_LABEL, *document.labels[start + 1 : end]]
        pieces.append(Document(document.input_ids[start:end], labels))
    return pieces


def _until(document: Document, max_length: int) -> Document:
    """The beginning of a document, without an image that would be cut."""
    end = min([max_length, *(image.start for image in document.images if image.start < max_length < image.end)])
    images = [image for image in document.images if image.end <= end]
    return Document(document.input_ids[:end], document.labels[:end], images=images)


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """Everything that decides how documents become tokens; every worker gets a copy."""

    kind: CorpusKind
    tokenizer: PreTrainedTokenizerBase | None  # None for documents that are tokens already
    dataset: DatasetConfig
    max_length: int  # tokens
    vocab_size: int | None  # of the model; None if not known
    images: ImageProcessor | None = None  # None: no document has images
    template_date: str | None = None  # for workers, which have their own clocks; None: already set


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Prepared documents, and the counts of those that were read."""

    batch: pa.RecordBatch
    counts: PartCounts


def prepared_schema(kind: CorpusKind, *, has_images: bool = False) -> pa.Schema:
    """The columns of prepared documents; pairs also have the length of their chosen sides.

    Images are references to files, `SHA256 PATH`.
    """
    import pyarrow as pa

    tokens, columns = pa.list_(pa.int32()), ["length", *(["chosen_length"] if kind.reads == "pairs" else [])]
    images = [(IMAGES, pa.list_(pa.string()))] if has_images else []
    numbers = [(column, pa.int32()) for column in columns]
    return pa.schema([("input_ids", tokens), ("labels", tokens), *numbers, *images])


def encode_chunks(documents: datasets.Dataset, settings: ChunkSettings) -> Iterator[Chunk]:
    """The documents, encoded and fitted to length, in their order. Raises: what `ChunkEncoder.encode` raises."""
    starts = range(0, len(documents), DOCUMENTS_PER_CHUNK)
    ranges = [range(start, min(start + DOCUMENTS_PER_CHUNK, len(documents))) for start in starts]
    workers = min(settings.dataset.num_workers or len(own_cores()), len(documents) // _DOCUMENTS_PER_WORKER)
    # A tokenizer whose class came with the model cannot be sent to another process.
    if type(settings.tokenizer).__module__.startswith("transformers_modules"):
        workers = 1
    if workers <= 1:
        encoder = ChunkEncoder(settings, documents)
        yield from map(encoder.encode, ranges)
        return
    try:
        with ProcessPoolExecutor(
            workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(settings, documents)
        ) as pool:
            yield from pool.map(_encode_in_worker, ranges)
    except BrokenProcessPool as error:
        raise TunebookError(
            f"one of {workers} processes that tokenize was killed, most often because memory ran out; try fewer: "
            f"dataset.num_workers={max(1, workers // 2)}",
            problem_id="worker-killed",
        ) from error


class ChunkEncoder:
    """Encodes the chunks of a corpus."""

    def __init__(self, settings: ChunkSettings, documents: datasets.Dataset) -> None:
        self.settings = settings
        self._documents = documents.with_format("arrow")
        if settings.tokenizer is not None and settings.template_date is not None:
            fix_template_date(settings.tokenizer, settings.template_date)
        data = settings.dataset
        self._encoder = Encoder(
            settings.kind,
            data.train_on,
            settings.tokenizer,
            data.special_tokens_in_content,
            data.reasoning,
            settings.images,
        )

    def encode(self, chosen: range) -> Chunk:
        """One chunk. Raises: DataError for a document that cannot be encoded, naming it."""
        rows = self._documents[chosen].to_pylist()
        counts = self._encoder.counts = PartCounts()
        try:
            documents = self._encode(rows)
        except DataError:
            if self.settings.dataset.bad_documents is BadDocuments.refuse:
                raise
            counts = self._encoder.counts = PartCounts()
            documents = []
            for row in rows:
                try:
                    documents += self._encode([row])
                except DataError as error:
                    counts.skipped.add(error.message.removeprefix(f"{row['origin']}: "), row["origin"])
        kept = [piece for document in documents for piece in self._fit(document, counts)]
        counts.num_read, counts.num_documents = len(documents), len(kept)
        if num_with_images := sum(bool(document.images) for document in kept):
            counts.contents["with images"] = num_with_images
        counts.num_tokens = sum(len(document.input_ids) for document in kept)
        counts.num_trained_tokens = sum(document.num_trained for document in kept)
        counts.num_tokens_lost = sum(len(document.input_ids) for document in documents) - counts.num_tokens
        return Chunk(
            batch=_to_batch(kept, self.settings.kind, has_images=self.settings.images is not None), counts=counts
        )

    def _encode(self, rows: list[Row]) -> list[Document]:
        max_length, vocab_size = self.settings.max_length, self.settings.vocab_size
        documents = self._encoder.encode(rows)
        for row, document in zip(rows, documents, strict=True):
            is_split = self.settings.dataset.overlong is Overlong.split
            if is_split and document.images and document.longest_side > max_length:
                raise DataError(
                    f"{row['origin']}: it has images and {document.longest_side:,} tokens, more than "
                    f"training.max_length={max_length}, and a document with images cannot be split; raise "
                    "training.max_length, lower dataset.max_image_pixels, or type dataset.overlong=cut or drop",
                    problem_id="document-too-long",
                )
            if self.settings.dataset.overlong is Overlong.refuse and document.longest_side > max_length:
                others = "cut or drop" if document.num_chosen else "cut, split or drop"
                raise DataError(
                    f"{row['origin']}: it has {document.longest_side:,} tokens, more than training.max_length="
                    f"{max_length}, and dataset.overlong=refuse allows none; raise training.max_length, or type "
                    f"dataset.overlong={others}",
                    problem_id="document-too-long",
                )
            if vocab_size is not None and (largest := max(document.input_ids)) >= vocab_size:
                raise DataError(
                    f"{row['origin']}: it holds token {largest}, but the model's vocabulary ends at {vocab_size - 1}: "
                    "it was made with another model's tokenizer. Name the model's own: model.tokenizer=DIR, or null "
                    "for the one in the model's folder",
                    problem_id="token-outside-vocabulary",
                )
        return documents

    def _fit(self, document: Document, counts: PartCounts) -> list[Document]:
        """The pieces of a document that train something, with what was lost counted."""
        max_length, overlong = self.settings.max_length, self.settings.dataset.overlong
        if document.num_chosen:
            return self._fit_pair(document, counts)
        is_long = len(document.input_ids) > max_length
        pieces = fit(document, max_length, overlong)
        kept = [piece for piece in pieces if piece.num_trained]
        if not pieces:
            counts.dropped[TOO_LONG] += 1
        if len(kept) < len(pieces):
            counts.dropped[NOTHING_TRAINED] += len(pieces) - len(kept)
        counts.num_cut += is_long and bool(pieces)
        if is_long and kept and overlong is Overlong.cut and self.settings.kind in _WITH_ANSWERS:
            counts.num_answers_cut += _ends_within_answer(document, max_length)
        return kept

    def _fit_pair(self, pair: Document, counts: PartCounts) -> list[Document]:
        """A pair, with sides that are too long cut; none if it is dropped."""
        max_length = self.settings.max_length
        is_long = pair.longest_side > max_length
        if is_long and self.settings.dataset.overlong is Overlong.drop:
            counts.dropped[TOO_LONG] += 1
            return []
        chosen, rejected = (fit(side, max_length, Overlong.cut)[0] for side in pair.sides)
        counts.num_cut += is_long
        if not (chosen.num_trained and rejected.num_trained):
            counts.dropped[NOTHING_TRAINED] += 1
            return []
        if chosen.input_ids == rejected.input_ids:
            counts.dropped[EQUAL] += 1
            return []
        long = [side for side in pair.sides if len(side.input_ids) > max_length]
        counts.num_answers_cut += any(_ends_within_answer(side, max_length) for side in long)
        return [pair_of(chosen, rejected)]


def _ends_within_answer(document: Document, max_length: int) -> bool:
    return IGNORED_LABEL not in document.labels[max_length - 1 : max_length + 1]


def _to_batch(documents: Sequence[Document], kind: CorpusKind, *, has_images: bool) -> pa.RecordBatch:
    """The columns of prepared documents, from flat arrays of integers: Arrow reads nested lists far slower."""
    import numpy as np
    import pyarrow as pa

    lengths = np.array([len(document.input_ids) for document in documents], dtype=np.int32)
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    columns = []
    for name in ("input_ids", "labels"):
        values = array("i", chain.from_iterable(getattr(document, name) for document in documents))
        columns.append(pa.ListArray.from_arrays(offsets, pa.array(np.frombuffer(values, dtype=np.int32))))
    columns.append(pa.array(lengths))
    if kind.reads == "pairs":
        columns.append(pa.array([document.num_chosen for document in documents], type=pa.int32()))
    if has_images:
        images = [[image.reference for image in document.images] for document in documents]
        columns.append(pa.array(images, type=pa.list_(pa.string())))
    return pa.RecordBatch.from_arrays(columns, schema=prepared_schema(kind, has_images=has_images))


_worker_encoder: ChunkEncoder | None = None  # of this process, if it is a worker


def _start_worker(settings: ChunkSettings, documents: datasets.Dataset) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    die_with_parent()  # or workers of a killed parent wait for work forever
    _worker_encoder = ChunkEncoder(settings, documents)


def _encode_in_worker(chosen: range) -> Chunk:
    assert _worker_encoder is not None
    return _worker_encoder.encode(chosen)
