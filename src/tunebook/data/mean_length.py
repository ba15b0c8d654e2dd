"""The number of documents, their mean and their longest length, as far as they are known before the data is prepared.

They come from the data set's facts (`dataset.num_documents`, `.mean_tokens`), or follow from the settings of generated
documents: lengths are drawn from a log-normal distribution, rounded and clipped to two bounds (`data.synthetic`). For
local files there is an upper bound by their sizes (`with_file_estimate`), which only decides what a short run leaves.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

from tunebook.config.choices import Overlong, Source
from tunebook.config.schema import DatasetConfig, RunConfig, SyntheticConfig
from tunebook.data.files import CSV_SUFFIXES, JSON_SUFFIXES, LINES_SUFFIXES, TSV_SUFFIXES, find_files
from tunebook.errors import DataError

# One kept document for each; refuse allows no longer one, so a run that starts has none.
_KEPT_WHOLE = (Overlong.cut, Overlong.refuse)

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
    return _of_generated(dataset, longest) if dataset.source is Source.synthetic else None


def count_documents(config: RunConfig) -> int | None:
    """Documents of an epoch, without those held out; None if unknown."""
    dataset = config.dataset
    is_generated = dataset.num_documents is None and dataset.source is Source.synthetic
    there_are = dataset.synthetic.num_documents if is_generated else dataset.num_documents
    if there_are is None:
        return None
    read = min(there_are, dataset.max_documents or there_are)
    kept = _kept_of_generated(dataset, config.training.max_length) if is_generated else 1.0
    return max(1, round(read * (1 - dataset.validation_share) * kept)) if kept else None


def _kept_of_generated(dataset: DatasetConfig, longest: int) -> float:
    """Mean number of kept documents per document: above one if it is split, below one if it may be dropped."""
    drawn = dataset.synthetic
    if drawn.max_tokens <= longest or dataset.overlong in _KEPT_WHOLE:
        return 1.0
    if dataset.overlong is Overlong.split:
        return _pieces(drawn, longest)
    return 1 - _share_above(drawn, longest)


def _pieces(drawn: SyntheticConfig, longest: int) -> float:
    return sum(_share_above(drawn, length) for length in range(0, drawn.max_tokens, longest))


def _of_generated(dataset: DatasetConfig, longest: int) -> float | None:
    drawn = dataset.synthetic
    if drawn.max_tokens <= longest:
        return _mean_up_to(drawn, drawn.max_tokens)
    if dataset.overlong in _KEPT_WHOLE:
        return _mean_up_to(drawn, longest)
    if dataset.overlong is Overlong.split:
        return _mean_up_to(drawn, drawn.max_tokens) / _pieces(drawn, longest)
    dropped = _share_above(drawn, longest)
    return (_mean_up_to(drawn, longest) - longest * dropped) / (1 - dropped) if dropped < 1 else None


def _mean_up_to(drawn: SyntheticConfig, longest: int) -> float:
    """Mean of lengths that are clipped to the lower bound and `longest`."""
    low, high = min(drawn.min_tokens, longest), longest
    center, sigma = drawn.log_mean_tokens, drawn.log_sigma_tokens
    if sigma == 0:
        return min(max(math.exp(center), low), high)
    below, above = (NormalDist(center, sigma).cdf(math.log(length)) for length in (low, high))
    # The partial expectation of a log-normal variable is the distribution with its center shifted by sigma squared.
    first, last = (NormalDist(center + sigma**2, sigma).cdf(math.log(length)) for length in (low, high))
    between = math.exp(center + sigma**2 / 2) * (last - first)
    return low * below + between + high * (1 - above)


def _share_above(drawn: SyntheticConfig, length: int) -> float:
    """The share of longer documents."""
    if length < drawn.min_tokens:
        return 1.0
    if length >= drawn.max_tokens:
        return 0.0
    if drawn.log_sigma_tokens == 0:
        return float(math.exp(drawn.log_mean_tokens) > length)
    return 1 - NormalDist(drawn.log_mean_tokens, drawn.log_sigma_tokens).cdf(math.log(length))
