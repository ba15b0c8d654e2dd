"""The ledger of one rank's memory in a training step: which rows hold how many bytes, from which moment to which.

A step is a short list of moments; the peak is the fullest moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum, IntEnum


class Moment(IntEnum):
    """The moments of a step, in order."""

    start = 0  # FSDP fetches the embeddings
    forward = 1  # forward pass of the last layer
    gather = 2  # the output head is gathered
    head = 3  # the output head and its gradient are computed
    cast = 4  # the head's gradient in fp32 is cast to the format of the weight
    reduce = 5  # DeepSpeed allocates gradient buffers, or divides the head's gradient among the ranks
    last = 6  # backward pass of the last layer
    middle = 7  # backward pass of an earlier layer
    first = 8  # backward pass of the first layer
    end = 9  # backward pass of the embeddings
    sent = 10  # FSDP sends the last gradients
    step = 11  # optimizer step


class Kind(Enum):
    """The part of `memory_gib` that a row counts toward."""

    weights = "weights"
    gradients = "gradients"
    optimizer = "optimizer"
    activations = "activations"
    buffers = "buffers"


@dataclass(frozen=True)
class Row:
    """Bytes that are held from one moment to another, both included."""

    label: str
    kind: Kind
    num_bytes: float
    since: Moment
    until: Moment


@dataclass(frozen=True)
class Ledger:
    """All rows of a step."""

    rows: list[Row] = field(default_factory=list)

    def at(self, moment: Moment) -> list[Row]:
        """The rows held at a moment."""
        return [row for row in self.rows if row.since <= moment <= row.until]

    @property
    def peak(self) -> Moment:
        """The fullest moment."""
        return max(Moment, key=lambda moment: _total(self.at(moment)))

    def parts(self) -> dict[Kind, float]:
        """Bytes of each kind at the peak."""
        rows = self.at(self.peak)
        return {kind: _total(row for row in rows if row.kind is kind) for kind in Kind}


def page_locked(num_bytes: float) -> float:
    """Bytes of PyTorch's page-locked block for so many bytes: the next power of two; 0 for none."""
    return 2.0 ** math.ceil(math.log2(num_bytes)) if num_bytes > 0 else 0.0


def _total(rows: Iterable[Row]) -> float:
    return sum(row.num_bytes for row in rows)
