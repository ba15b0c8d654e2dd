"""The number of documents, their mean and their longest length, as far as they are known before the data is prepared.

They come from the data set's facts (`dataset.num_documents`, `.mean_tokens`). The lengths of generated documents are
drawn as `data.synthetic` draws them. For local files there is an upper bound by their sizes (`with_file_estimate`),
which only decides what a short run leaves.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tunebook.config.choices import Overlong, Source
from tunebook.config.schema import DatasetConfig, RunConfig, SyntheticConfig
from tunebook.data.files import CSV_SUFFIXES, JSON_SUFFIXES, LINES_SUFFIXES, TSV_SUFFIXES, find_files
from tunebook.data.packing import Lengths
from tunebook.data.synthetic import draw_lengths
from tunebook.errors import DataError

_MOST_DRAWN = 100_000  # lengths of generated documents, in about 20 ms

# Fewest bytes of a file per token, of the data sets tried: English and Chinese instructions, preferences and tool calls
# with SmolLM2's tokenizer, 1.89 to 5.10 (LLaMA-Factory's demonstration files; Chinese is lowest, and counted in full).
_BYTES_PER_TOKEN = 1.89
_READ_BYTES = 2**20  # at the start of a file, to count its documents


def with_file_estimate(dataset: DatasetConfig) -> DatasetConfig:
    """The data set with its number of documents and mean length estimated from its local files, if it states neither.

    The tokens are an upper bound. Unchanged if the files are compressed, in Parquet or missing.
    """
    is_stated = dataset.mean_tokens is not None or dataset.num_documents is not None
    if dataset.source is not Source.files or not dataset.path or is_stated:
        return dataset
    try:
        files = [file.path for file in find_files(dataset.path, "dataset.path")]
        counts = [_estimate_documents(path) for path in files]
        num_bytes = sum(path.stat().st_size for path in files)
    except (OSError, ValueError, DataError):
        return dataset
    documents = round(sum(count or 0.0 for count in counts))
    if documents < 1 or None in counts:
        return dataset
    return replace(dataset, num_documents=documents, mean_tokens=num_bytes / _BYTES_PER_TOKEN / documents)


def _estimate_documents(path: Path) -> float | None:
    """The documents of a file: as many as lines at its start promise, or items of a small JSON array; else None."""
    name, size = path.name.lower(), path.stat().st_size
    if not name.endswith((*LINES_SUFFIXES, *JSON_SUFFIXES, *CSV_SUFFIXES, *TSV_SUFFIXES)) or name.endswith(".gz"):
        return None
    with path.open("rb") as stream:
        start = stream.read(_READ_BYTES)
    if not start:
        return None
    if start.lstrip().startswith(b"["):
        return float(len(json.loads(start))) if len(start) == size else None
    lines = start.count(b"\n") + (len(start) == size and not start.endswith(b"\n"))
    return lines * size / len(start) if lines else None


def longest_document(config: RunConfig) -> int:
    """Tokens that no document of the data exceeds: `training.max_length`, or less if generated ones are shorter."""
    longest, dataset = config.training.max_length, config.dataset
    return min(longest, dataset.synthetic.max_tokens) if dataset.source is Source.synthetic else longest


def mean_tokens(config: RunConfig) -> float | None:
    """Mean tokens of a document of at most `training.max_length`; None if unknown."""
    dataset, longest = config.dataset, config.training.max_length
    if dataset.mean_tokens is not None:
        return min(dataset.mean_tokens, longest)  # the facts are of uncut documents
    if dataset.source is not Source.synthetic:
        return None
    kept, tokens = _generated(dataset, longest)
    return tokens / kept if kept else None


def count_documents(config: RunConfig) -> int | None:
    """Documents of an epoch, without those held out; None if unknown."""
    dataset = config.dataset
    is_generated = dataset.num_documents is None and dataset.source is Source.synthetic
    there_are = dataset.synthetic.num_documents if is_generated else dataset.num_documents
    if there_are is None:
        return None
    read = min(there_are, dataset.max_documents or there_are)
    kept = _generated(dataset, config.training.max_length)[0] if is_generated else 1.0
    return max(1, round(read * (1 - dataset.validation_share) * kept)) if kept else None


def _generated(dataset: DatasetConfig, longest: int) -> tuple[float, float]:
    """Kept documents and their tokens for each generated one: long ones are cut, dropped or split."""
    drawn = dataset.synthetic
    read = min(drawn.num_documents, dataset.max_documents or drawn.num_documents, _MOST_DRAWN)
    lengths = _drawn_lengths(tuple(asdict(drawn).items()), read)
    num_drawn = len(lengths)
    if dataset.overlong is Overlong.drop:
        lengths = lengths[lengths <= longest]
    elif dataset.overlong is not Overlong.split:  # refuse allows no longer one, so a run that starts has none
        lengths = np.minimum(lengths, longest)
    num_pieces = -(-lengths // longest)
    return float(num_pieces.sum() / num_drawn), float(lengths.sum() / num_drawn)


@lru_cache(maxsize=8)
def _drawn_lengths(settings: tuple[tuple[str, Any], ...], num_documents: int) -> Lengths:
    return draw_lengths(SyntheticConfig(**dict(settings)), num_documents)
