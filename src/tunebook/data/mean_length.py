"""The number of documents, their mean and their longest length, as far as they are known before the data is prepared.

They come from the data set's facts (`dataset.num_documents`, `.mean_tokens`). The lengths of generated documents are
drawn as `data.synthetic` draws them.
"""

from __future__ import annotations

from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np

from tunebook.config.choices import Source
from tunebook.config.schema import RunConfig, SyntheticConfig
from tunebook.data.packing import Lengths
from tunebook.data.synthetic import draw_lengths

_MOST_DRAWN = 100_000  # lengths of generated documents, in about 20 ms


def longest_document(config: RunConfig) -> int:
    """Tokens that no document of the data exceeds: `training.max_length`, or less if generated ones are shorter."""
    longest, dataset = config.training.max_length, config.dataset
    return min(longest, dataset.synthetic.max_tokens) if dataset.source is Source.synthetic else longest


def mean_tokens(config: RunConfig) -> float | None:
    """Mean tokens of a document that is cut to `training.max_length`; None if unknown."""
    dataset, longest = config.dataset, config.training.max_length
    if dataset.mean_tokens is not None:
        return min(dataset.mean_tokens, longest)  # the facts are of uncut documents
    if dataset.source is not Source.synthetic:
        return None
    drawn = dataset.synthetic
    num_documents = min(drawn.num_documents, dataset.max_documents or drawn.num_documents, _MOST_DRAWN)
    return float(np.minimum(_drawn_lengths(tuple(asdict(drawn).items()), num_documents), longest).mean())


def count_documents(config: RunConfig) -> int | None:
    """Documents of an epoch, without those held out; None if unknown."""
    dataset = config.dataset
    there_are = dataset.num_documents
    if there_are is None and dataset.source is Source.synthetic:
        there_are = dataset.synthetic.num_documents
    if there_are is None:
        return None
    return max(1, round(min(there_are, dataset.max_documents or there_are) * (1 - dataset.validation_share)))


@lru_cache(maxsize=8)
def _drawn_lengths(settings: tuple[tuple[str, Any], ...], num_documents: int) -> Lengths:
    return draw_lengths(SyntheticConfig(**dict(settings)), num_documents)
