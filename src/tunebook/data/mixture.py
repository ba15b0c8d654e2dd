"""Combine sources into a mixture, and split off a validation part.

Mixtures interleave their parts evenly and take no document twice. Without weights every document of every part is
taken; with weights, which are relative shares of documents, as many as possible until the first part is used up.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from tunebook.config.choices import Source
from tunebook.config.schema import DatasetConfig, MixturePart
from tunebook.data.corpus import CONTENT_HASH, Loaded, way_to_one_kind
from tunebook.data.problems import Skipped
from tunebook.errors import DataError, RequestError, counted

if TYPE_CHECKING:
    import datasets
    import numpy as np

_SAMPLE_SEED = 0  # not the run's seed: one mixture has one fingerprint


def plan_counts(sizes: dict[str, int], weights: dict[str, float | None]) -> dict[str, int]:
    """The number of documents of each part.

    Raises: RequestError for weights of some parts only, or so uneven that a part gets no document.
    """
    unweighted = [name for name, weight in weights.items() if weight is None]
    if len(unweighted) == len(weights):
        return dict(sizes)
    if unweighted:
        raise RequestError(
            f"dataset.parts: a weight is missing for {', '.join(unweighted)}, and other parts have one; give every "
            "part a weight (relative shares of documents) or none (all documents of all parts)",
            problem_id="mixture-weights",
        )
    # Fractions, so that 0.1 and 0.3 of 1000 and 3000 documents is not one document short.
    shares = {name: Fraction(str(weight)) for name, weight in weights.items()}
    scale = min(sizes[name] / share for name, share in shares.items())
    counts = {name: math.floor(scale * share) for name, share in shares.items()}
    if empty := [name for name, count in counts.items() if count == 0]:
        raise RequestError(
            f"dataset.parts.{empty[0]}.weight={weights[empty[0]]} leaves no document of it: none is taken twice, and "
            "another part is used up before; raise this weight",
            problem_id="mixture-weights",
        )
    return counts


def mix(parts: dict[str, Loaded], configs: dict[str, MixturePart]) -> Loaded:
    """All parts as one source. Raises: DataError when their documents are of different kinds."""
    import datasets

    kinds = {loaded.kind for loaded in parts.values()}
    if len(kinds) > 1:
        listed = ", ".join(f"{name} is {loaded.kind.value}" for name, loaded in parts.items())
        raise DataError(
            f"the parts of a mixture must hold documents of one kind, but {listed}; {way_to_one_kind(kinds)}",
            problem_id="mixture-kinds",
        )
    sizes = {name: len(loaded.dataset) for name, loaded in parts.items()}
    counts = plan_counts(sizes, {name: configs[name].weight for name in parts})
    merged = datasets.concatenate_datasets([loaded.dataset for loaded in parts.values()])
    notes = [note for loaded in parts.values() for note in loaded.notes]
    notes.append(f"mixture, in documents: {', '.join(f'{name} {counts[name]:,} of {sizes[name]:,}' for name in parts)}")
    skipped = Skipped()
    for loaded in parts.values():
        skipped.update(loaded.skipped)
    return Loaded(
        kind=kinds.pop(),
        dataset=merged.select(interleave(list(sizes.values()), list(counts.values()))),
        records=[record for loaded in parts.values() for record in loaded.records],
        notes=notes,
        skipped=skipped,
    )


def interleave(sizes: list[int], counts: list[int]) -> np.ndarray:
    """Indices into the concatenated parts, so that any stretch of the mixture has about the right shares.

    Of a part that is not taken completely, the documents are a fixed random sample in their own order: files are often
    sorted, so their beginning differs from the rest.
    """
    import numpy as np

    indices, places = [], []
    start = 0
    for part, (size, count) in enumerate(zip(sizes, counts, strict=True)):
        sample = np.arange(size)
        if count < size:
            sample = np.sort(np.random.default_rng([_SAMPLE_SEED, part]).choice(size, count, replace=False))
        indices.append(start + sample)
        places.append((np.arange(count) + 0.5) / count)
        start += size
    order = np.argsort(np.concatenate(places), kind="stable")
    return np.asarray(np.concatenate(indices)[order])


def check_validation(config: DatasetConfig) -> None:
    """Raises: RequestError for a validation part named in two ways, or in a way its source does not have."""
    named = {
        "validation_split": config.validation_split,
        "validation_path": config.validation_path,
        "validation_share": config.validation_share or None,
    }
    named_in = [f"dataset.{key}={value}" for key, value in named.items() if value is not None]
    problem = None
    if len(named_in) > 1:
        problem = f"{' and '.join(named_in)}: keep one of them"
    elif config.validation_split is not None and config.source is not Source.hub:
        problem = (
            f"{named_in[0]} needs dataset.source=hub, which has splits; with files type dataset.validation_path=FILE"
        )
    elif config.validation_split is not None and config.validation_split == config.train_split:
        problem = f"{named_in[0]} is the training split too; name another one"
    elif config.validation_path is not None and config.source is Source.synthetic:
        problem = "dataset.validation_path does not go with dataset.source=synthetic, whose tokens are its own"
    if problem is not None:
        raise RequestError(problem, problem_id="validation-source")


def hold_out(dataset: datasets.Dataset, share: float) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The training and the validation part.

    Only a document's content decides: it stays in its part if others are added or the order changes, and equal
    documents are in one part. Raises: RequestError if a part is empty.
    """
    import numpy as np

    held = content_hashes(dataset) < np.uint64(share * 2**64)
    num_held = int(held.sum())
    if num_held == 0 or num_held == len(dataset):
        empty = "validation" if num_held == 0 else "training"
        raise RequestError(
            f"dataset.validation_share={share} of {counted(len(dataset), 'document')} leaves the {empty} part empty; "
            f"try a {'larger' if num_held == 0 else 'smaller'} share, more documents, or dataset.validation_path=FILE",
            problem_id="validation-empty",
        )
    return dataset.select(np.flatnonzero(~held)), dataset.select(np.flatnonzero(held))


def content_hashes(dataset: datasets.Dataset) -> np.ndarray:
    """The content hash of every document."""
    import numpy as np

    return np.asarray(dataset.with_format("numpy", columns=[CONTENT_HASH])[:][CONTENT_HASH], dtype=np.uint64)
