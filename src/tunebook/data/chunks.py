"""Encode a corpus chunk by chunk, on one core or several, in order and in bounded memory.

Workers are spawned, not forked: if the tokenizer of a process has used its threads, it waits for them forever in a
fork. Each worker gets a copy of the tokenizer, which needs no torch. Documents and tokens are sent as Arrow, which
costs almost nothing.
"""

from __future__ import annotations

import os
import signal
import threading
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from multiprocessing import connection, get_context, parent_process
from typing import TYPE_CHECKING

from tunebook.config.choices import Overlong, Reasoning, SpecialText, TrainOn
from tunebook.data.corpus import IGNORED_LABEL, CorpusKind, Row
from tunebook.data.encode import Document, Encoder
from tunebook.data.prepared import PartCounts
from tunebook.data.problems import Skipped
from tunebook.errors import DataError, TunebookError
from tunebook.model.tokenizer import fix_template_date
from tunebook.processes import own_cores

if TYPE_CHECKING:
    import datasets
    import pyarrow as pa
    from transformers import PreTrainedTokenizerBase

DOCUMENTS_PER_CHUNK = 1000
_WITH_ANSWERS = (CorpusKind.conversation, CorpusKind.prompt_completion)
# Number of short conversations that one core encodes in the seconds that a worker takes to start.
_DOCUMENTS_PER_WORKER = 8_000
_CHUNKS_IN_FLIGHT_PER_WORKER = 3

TOO_LONG = "longer than training.max_length (dataset.overlong=drop)"
NOTHING_TRAINED = "nothing left to train on after cutting to training.max_length"
PIECE_NOT_TRAINED = "pieces of split documents without a token to train on"
NEVER_TRAINED = "no token of it is trained on"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The pieces of one document that are kept, and why others are dropped."""

    pieces: list[Document]  # one, unless the document was split or dropped
    was_cut: bool = False  # or split
    is_answer_cut: bool = False  # by a cut, so that its end of turn is lost
    num_tokens_lost: int = 0
    dropped: list[str] = field(default_factory=list)  # a reason for the document, or for each of its pieces


def fit(document: Document, max_length: int, overlong: Overlong) -> Fitted:
    """Cut, drop or split one document so that no piece is longer than `max_length` tokens.

    Pieces without a trained token are dropped: they would cost time and train nothing.
    """
    num_tokens = len(document.input_ids)
    if num_tokens <= max_length:
        if document.num_trained:
            return Fitted(pieces=[document])
        return Fitted(pieces=[], num_tokens_lost=num_tokens, dropped=[NEVER_TRAINED])
    if overlong is Overlong.drop:
        return Fitted(pieces=[], num_tokens_lost=num_tokens, dropped=[TOO_LONG])
    last_start = num_tokens if overlong is Overlong.split else 1
    pieces = [_piece(document, start, max_length) for start in range(0, last_start, max_length)]
    kept = [piece for piece in pieces if piece.num_trained]
    reason = PIECE_NOT_TRAINED if overlong is Overlong.split else NOTHING_TRAINED
    return Fitted(
        pieces=kept,
        was_cut=True,
        is_answer_cut=overlong is Overlong.cut and _is_within_answer(document, max_length) and bool(kept),
        num_tokens_lost=num_tokens - sum(len(piece.input_ids) for piece in kept),
        dropped=[reason] * (len(pieces) - len(kept)),
    )


def _is_within_answer(document: Document, position: int) -> bool:
    """Whether the loss counts the tokens before and after a position."""
    return IGNORED_LABEL not in document.labels[position - 1 : position + 1]


def _piece(document: Document, start: int, length: int) -> Document:
    """Some tokens of a document as a document of its own, whose first token nothing predicts."""
    end = start + length
    return Document(document.input_ids[start:end], [IGNORED_LABEL, *document.labels[start + 1 : end]])


@dataclass(frozen=True, kw_only=True)
class ChunkSettings:
    """Everything that decides how documents become tokens; every worker gets a copy."""

    kind: CorpusKind
    tokenizer: PreTrainedTokenizerBase | None  # None for documents that are tokens already
    train_on: TrainOn
    overlong: Overlong
    max_length: int  # tokens
    vocab_size: int | None  # of the model; None if not known
    special_text: SpecialText = SpecialText.auto
    reasoning: Reasoning = Reasoning.keep
    max_bad_share: float | None = None  # of documents that may be left out; None: a bad one is an error
    template_date: str | None = None  # for workers, which have their own clocks; None: already set


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Prepared documents as an Arrow stream of one record batch, and the counts of those that were read."""

    stream: bytes
    counts: PartCounts


def prepared_schema() -> pa.Schema:
    """The columns of prepared documents."""
    import pyarrow as pa

    tokens = pa.list_(pa.int32())
    return pa.schema([("input_ids", tokens), ("labels", tokens), ("length", pa.int32())])


def choose_num_workers(num_documents: int, num_workers: int | None) -> int:
    """The number of processes: as asked for, or one for each core, but only as many as save time."""
    return max(1, min(num_workers or len(own_cores()), num_documents // _DOCUMENTS_PER_WORKER))


def encode_chunks(documents: datasets.Dataset, settings: ChunkSettings, num_workers: int | None) -> Iterator[Chunk]:
    """The documents, encoded and fitted to length, in their order. Raises: what `ChunkEncoder.encode` raises."""
    workers = choose_num_workers(len(documents), num_workers) if _can_be_sent(settings.tokenizer) else 1
    streams = _read_chunks(documents)
    if workers == 1:
        encoder = ChunkEncoder(settings)
        yield from map(encoder.encode, streams)
        return
    pool = ProcessPoolExecutor(
        workers, mp_context=get_context("spawn"), initializer=_start_worker, initargs=(settings,)
    )
    waiting: deque[Future[Chunk]] = deque()
    try:
        for stream in streams:
            waiting.append(pool.submit(_encode_in_worker, stream))
            if len(waiting) >= workers * _CHUNKS_IN_FLIGHT_PER_WORKER:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise TunebookError(
            f"one of {workers} processes that tokenize was killed, most often because memory ran out; try fewer: "
            f"dataset.num_workers={max(1, workers // 2)}",
            problem_id="worker-killed",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class ChunkEncoder:
    """Encodes the chunks of a corpus."""

    def __init__(self, settings: ChunkSettings) -> None:
        self.settings = settings
        if settings.tokenizer is not None and settings.template_date is not None:
            fix_template_date(settings.tokenizer, settings.template_date)
        self._encoder = Encoder(
            settings.kind, settings.train_on, settings.tokenizer, settings.special_text, settings.reasoning
        )

    def encode(self, stream: bytes) -> Chunk:
        """One chunk. Raises: DataError for a document that cannot be encoded, naming it."""
        import pyarrow as pa

        rows = pa.ipc.open_stream(stream).read_all().to_pylist()
        fitted, counts = self._fit(rows)
        pieces = [piece for one in fitted for piece in one.pieces]
        self._check_vocabulary(max((max(piece.input_ids) for piece in pieces), default=0))
        lengths = [len(piece.input_ids) for piece in pieces]
        counts.num_read, counts.num_documents, counts.num_tokens = len(fitted), len(pieces), sum(lengths)
        counts.num_trained_tokens = sum(piece.num_trained for piece in pieces)
        counts.num_cut = sum(one.was_cut for one in fitted)
        if self.settings.kind in _WITH_ANSWERS:
            counts.num_answers_cut = sum(one.is_answer_cut for one in fitted)
        counts.num_tokens_lost = sum(one.num_tokens_lost for one in fitted)
        counts.dropped.update(reason for one in fitted for reason in one.dropped)
        return Chunk(stream=_to_stream(_to_batch(pieces, lengths)), counts=counts)

    def _fit(self, rows: list[Row]) -> tuple[list[Fitted], PartCounts]:
        """The rows encoded and fitted to length, with remarks, and counts of those that cannot be.

        Raises: DataError for the first that cannot be, if it may not be left out.
        """
        counts = self._encoder.counts = PartCounts()
        try:
            return [self._fit_one(*one) for one in zip(rows, self._encoder.encode(rows), strict=True)], counts
        except DataError:
            if self.settings.max_bad_share is None:
                raise
        counts = self._encoder.counts = PartCounts()
        fitted, skipped = [], Skipped()
        for row in rows:
            try:
                fitted.append(self._fit_one(row, *self._encoder.encode([row])))
            except DataError as error:
                skipped.add(error.message.removeprefix(f"{row['origin']}: "), row["origin"])
        counts.skipped, counts.first = skipped.reasons, counts.first | skipped.first
        return fitted, counts

    def _fit_one(self, row: Row, document: Document) -> Fitted:
        length, max_length = len(document.input_ids), self.settings.max_length
        if self.settings.overlong is Overlong.refuse and length > max_length:
            raise DataError(
                f"{row['origin']}: it has {length:,} tokens, more than training.max_length={max_length}, and "
                "dataset.overlong=refuse allows none; raise the one, or type dataset.overlong=cut, split or drop",
                problem_id="document-too-long",
            )
        return fit(document, max_length, self.settings.overlong)

    def _check_vocabulary(self, largest_id: int) -> None:
        if self.settings.vocab_size is not None and largest_id >= self.settings.vocab_size:
            raise DataError(
                f"the documents hold token {largest_id}, but the model's vocabulary ends at "
                f"{self.settings.vocab_size - 1}: they were made with another model's tokenizer. Name the model's own "
                "(model.tokenizer=null)",
                problem_id="token-outside-vocabulary",
            )


def _can_be_sent(tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether another process can import the tokenizer's class: not if it came with the model."""
    return not type(tokenizer).__module__.startswith("transformers_modules")


def _to_batch(documents: Sequence[Document], lengths: Sequence[int]) -> pa.RecordBatch:
    """The columns of prepared documents, from flat arrays of integers: Arrow reads nested lists far slower."""
    import pyarrow as pa

    ids, labels, ends = array("i"), array("i"), array("i", accumulate(lengths, initial=0))
    for document in documents:
        ids.extend(document.input_ids)
        labels.extend(document.labels)
    offsets = _to_integers(ends)
    columns = [pa.ListArray.from_arrays(offsets, _to_integers(values)) for values in (ids, labels)]
    return pa.RecordBatch.from_arrays([*columns, _to_integers(array("i", lengths))], schema=prepared_schema())


def _to_integers(values: array[int]) -> pa.Int32Array:
    import numpy as np
    import pyarrow as pa

    return pa.array(np.frombuffer(values, dtype=np.int32))


def _read_chunks(documents: datasets.Dataset) -> Iterator[bytes]:
    """The documents as Arrow streams."""
    for table in documents.with_format("arrow").iter(batch_size=DOCUMENTS_PER_CHUNK):
        yield _to_stream(table.combine_chunks().to_batches()[0])


def _to_stream(batch: pa.RecordBatch) -> bytes:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    stream: bytes = sink.getvalue().to_pybytes()
    return stream


_worker_encoder: ChunkEncoder | None = None  # of this process, if it is a worker


def _start_worker(settings: ChunkSettings) -> None:
    global _worker_encoder
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process group; the parent ends its workers
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core for each worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_encoder = ChunkEncoder(settings)


def _end_with_parent() -> None:
    """A killed parent cannot end its workers, which would wait for work forever."""
    parent = parent_process()
    if parent is not None:
        with suppress(OSError):
            connection.wait([parent.sentinel])
        os._exit(1)


def _encode_in_worker(stream: bytes) -> Chunk:
    assert _worker_encoder is not None
    return _worker_encoder.encode(stream)
