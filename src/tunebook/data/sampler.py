"""Which documents make up each optimizer step, which of them each GPU gets, and the rows of those documents.

Order of decisions: seed and epoch fix a permutation; the permutation is cut into optimizer steps; a step's documents
are assigned to rows; rows are assigned to accumulation rounds and ranks. Only the last two depend on the number of GPUs
and on packing, so each step has the same documents on any machine, each exactly once per epoch. The last step of an
epoch may be smaller: the loss is weighted by tokens, so an empty row counts nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add, sub
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.packing import BestFit, Lengths, pack_balanced, pack_within

if TYPE_CHECKING:
    from datasets import Dataset

Row = list[int]  # documents, by their number in the prepared data

# Documents that a token budget looks ahead for one that still fits.
_LOOK_AHEAD = 256


@dataclass(frozen=True, kw_only=True)
class StepSize:
    """An optimizer step's size: a number of documents, or a budget of tokens in rows. Exactly one is set."""

    documents: int | None = None
    tokens: int | None = None
    row_length: int = 0  # tokens; with a token budget only: what one row holds


def epoch_order(num_documents: int, seed: int | None, epoch: int) -> Lengths:
    """The order of documents in one epoch; as stored if `seed` is None (validation)."""
    if seed is None:
        return np.arange(num_documents, dtype=np.int64)
    return np.random.default_rng([seed, epoch]).permutation(num_documents).astype(np.int64)


def cut_into_steps(order: Lengths, lengths: Lengths, size: StepSize) -> list[Lengths]:
    """Cut an epoch's documents into optimizer steps, losing and repeating none."""
    if size.documents is not None:
        return [order[start : start + size.documents] for start in range(0, len(order), size.documents)]
    assert size.tokens is not None
    return list(_fill_budgets(order, lengths, max(1, size.tokens // size.row_length), size.row_length))


def _fill_budgets(order: Lengths, lengths: Lengths, num_rows: int, row_length: int) -> Iterator[Lengths]:
    """Steps of `num_rows` rows filled best-fit; a document that no longer fits waits for the next step."""
    waiting: deque[int] = deque()
    upcoming = iter(order.tolist())
    tokens_of = lengths.tolist()
    exhausted = False
    while True:
        rows = BestFit(num_rows, row_length)
        step: list[int] = []
        skipped: list[int] = []
        while len(skipped) < _LOOK_AHEAD and rows.free_tokens > 0:
            document = waiting.popleft() if waiting else next(upcoming, None)
            if document is None:
                exhausted = True
                break
            (skipped if rows.put(tokens_of[document]) is None else step).append(document)
        waiting.extendleft(reversed(skipped))
        if step:
            yield np.asarray(step, dtype=np.int64)
        if exhausted and not waiting:
            return


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Everything that decides the batches of a run, the same on every rank.

    `lengths` (num_documents,) in tokens; `widths` likewise, of padded rows; None: the lengths. `rows_per_step` =
    data_ranks x accumulation x micro_batch_size; padded rows hold one document each.
    """

    lengths: Lengths
    size: StepSize
    rows_per_step: int
    is_packed: bool
    seed: int | None
    widths: Lengths | None = None

    def steps_of_epoch(self, epoch: int) -> list[Lengths]:
        """The documents of every optimizer step of one epoch."""
        return cut_into_steps(epoch_order(len(self.lengths), self.seed, epoch), self.lengths, self.size)

    def rows_of_step(self, documents: Lengths) -> list[Row]:
        """Assign one step's documents to exactly `rows_per_step` rows; some are empty in a short last step."""
        if self.is_packed:
            lengths = self.lengths[documents]
            if self.size.tokens is None:
                packed = pack_balanced(lengths, self.rows_per_step)
            else:
                packed = pack_within(lengths, self.rows_per_step, self.size.row_length)
            return [[int(documents[position]) for position in row] for row in packed]
        rows: list[Row] = [[int(document)] for document in documents]
        return rows + [[] for _ in range(self.rows_per_step - len(rows))]


class Totals(NamedTuple):
    """Totals of a range of optimizer steps, over all ranks; `computed_tokens` includes padding."""

    documents: int
    tokens: int
    computed_tokens: int


class RankBatches:
    """The micro-batches of one data rank over the whole run, as a batch sampler: each is a list of rows.

    `world_size` counts the ranks that get different rows: those of a sequence group get the same ones. One pass over
    all epochs, so that a resumed run skips a number of micro-batches. Rows are assigned to the ranks of one
    accumulation round after the other, in order.
    """

    def __init__(
        self, schedule: Schedule, *, num_steps: int, micro_batch_size: int, rank: int, world_size: int
    ) -> None:
        self.schedule = schedule
        self.num_steps = num_steps
        self.micro_batch_size = micro_batch_size
        self.rank = rank
        self.world_size = world_size
        self.accumulation = schedule.rows_per_step // (world_size * micro_batch_size)
        self._totals: list[Totals] = []

    def __len__(self) -> int:
        return self.num_steps * self.accumulation

    def __iter__(self) -> Iterator[list[Row]]:
        self._totals = [Totals(documents=0, tokens=0, computed_tokens=0)]
        for documents in self.steps():
            rows = self.schedule.rows_of_step(documents)
            self._count(documents, rows)
            for accumulated in range(self.accumulation):
                first = (accumulated * self.world_size + self.rank) * self.micro_batch_size
                yield rows[first : first + self.micro_batch_size]

    def totals(self, first: int, last: int) -> Totals:
        """Documents and tokens of the optimizer steps after `first` up to and including `last`, all ranks together."""
        return Totals(*map(sub, self._totals[last], self._totals[first]))

    def steps(self) -> Iterator[Lengths]:
        """The first `num_steps` optimizer steps, epoch after epoch."""
        done, epoch = 0, 0
        while done < self.num_steps:
            for documents in self.schedule.steps_of_epoch(epoch):
                yield documents
                done += 1
                if done == self.num_steps:
                    return
            epoch += 1

    def _count(self, documents: Lengths, rows: list[Row]) -> None:
        """Add one step to the totals. Every rank knows all rows, so nothing has to be communicated."""
        lengths = self.schedule.lengths
        tokens = int(lengths[documents].sum())
        computed = tokens
        if not self.schedule.is_packed:
            micro = self.micro_batch_size
            passes = [rows[first : first + micro] for first in range(0, len(rows), micro)]
            widths = lengths if self.schedule.widths is None else self.schedule.widths
            computed = sum(micro * max((int(widths[row[0]]) for row in rows_ if row), default=0) for rows_ in passes)
        self._totals.append(Totals(*map(add, self._totals[-1], (len(documents), tokens, computed))))


IMAGES = "image_files"  # a column of documents that have images: `SHA256 PATH` of each
# A row without documents (in the short last step of an epoch): two tokens that the loss does not count.
_EMPTY_ROW_LENGTH = 2


class DocumentRows:
    """Rows of a prepared `datasets.Dataset` as a map-style data set: a list of documents -> the collator's input.

    Columns: input_ids, labels (num_tokens,) per document. Documents stay on disk, memory-mapped. Rows are filled up to
    a `multiple` of tokens, with a document that the loss does not count.
    """

    def __init__(self, documents: Dataset, filler_token_id: int, multiple: int = 1) -> None:
        self.documents = documents.with_format("arrow")  # ten times as fast as Python numbers
        self.filler_token_id = filler_token_id
        self.multiple = multiple
        self._further = [name for name in (IMAGES,) if name in documents.column_names]  # of references to files

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, row: Row) -> dict[str, Any]:
        """Input ids and labels (num_tokens,) in int64 of the row's documents end to end, and each one's length.

        Documents with images also have references to these.
        """
        if not row:
            return self._filler(max(_EMPTY_ROW_LENGTH, self.multiple))
        table: Any = self.documents[row]
        ids, labels = (table[name].combine_chunks() for name in ("input_ids", "labels"))
        whole = {name: table[name].combine_chunks().flatten().to_pylist() for name in self._further}
        whole |= {
            "input_ids": ids.flatten().to_numpy().astype(np.int64),
            "labels": labels.flatten().to_numpy().astype(np.int64),
            "seq_lengths": ids.value_lengths().to_pylist(),
        }
        if not (num_missing := -len(whole["input_ids"]) % self.multiple):
            return whole
        filler = self._filler(num_missing)
        arrays = {name: np.concatenate([whole[name], filler[name]]) for name in ("input_ids", "labels")}
        return whole | arrays | {"seq_lengths": whole["seq_lengths"] + filler["seq_lengths"]}

    def _filler(self, num_tokens: int) -> dict[str, Any]:
        """A document that the loss does not count."""
        return {
            "input_ids": np.full(num_tokens, self.filler_token_id),
            "labels": np.full(num_tokens, IGNORED_LABEL),
            "seq_lengths": [num_tokens],
        }
