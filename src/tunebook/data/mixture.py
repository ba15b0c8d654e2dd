"""Mixtures: several sources, interleaved evenly, with no document taken twice.

What users of other tools know as "concat" and "interleave_under": without weights every document of every part is
taken; with weights, which are relative shares of documents, as many as possible until the first part is used up.
Repeating a part's documents ("interleave_over") is left to more epochs: a repeated document is nearly learnt by heart.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import TYPE_CHECKING

from tunebook.config.schema import MixturePart
from tunebook.data.corpus import Loaded
from tunebook.errors import DataError, RequestError

if TYPE_CHECKING:
    import numpy as np

_SAMPLE_SEED = 0  # which documents of a part are taken does not depend on the run's seed: one mixture, one fingerprint


def plan_counts(sizes: dict[str, int], weights: dict[str, float | None]) -> dict[str, int]:
    """How many documents of each part are taken.

    Raises: RequestError for weights that are not positive, for some parts only, or so uneven that a part gets none.
    """
    unweighted = [name for name, weight in weights.items() if weight is None]
    if len(unweighted) == len(weights):
        return dict(sizes)
    if unweighted:
        raise RequestError(
            f"dataset.parts: {', '.join(unweighted)} without a weight beside parts that have one; give every part a "
            "weight (relative shares of documents) or none (all documents of all parts)",
            problem_id="mixture-weights",
        )
    # Fractions, so that 0.1 and 0.3 of 1000 and 3000 documents is not one document short.
    shares = {name: Fraction(str(weight)) for name, weight in weights.items() if _is_positive(name, weight)}
    scale = min(Fraction(sizes[name]) / share for name, share in shares.items())
    counts = {name: math.floor(scale * share) for name, share in shares.items()}
    for name, count in counts.items():
        if count == 0:
            scarce = min(shares, key=lambda part: Fraction(sizes[part]) / shares[part])
            raise RequestError(
                f"dataset.parts.{name}.weight={weights[name]} leaves no document of it: part {scarce} is used up after "
                f"{sizes[scarce]:,} documents; raise the weight of {name} or lower that of {scarce}",
                problem_id="mixture-weights",
            )
    return counts


def mix(parts: dict[str, Loaded], configs: dict[str, MixturePart]) -> Loaded:
    """All parts as one source. Raises: DataError when their documents are of different kinds."""
    import datasets

    kinds = {loaded.kind for loaded in parts.values()}
    if len(kinds) > 1:
        each = ", ".join(f"{name} is {loaded.kind.value}" for name, loaded in parts.items())
        raise DataError(
            f"the parts of a mixture must hold documents of one kind, but {each}; bring them to one format first",
            problem_id="mixture-kinds",
        )
    sizes = {name: len(loaded.dataset) for name, loaded in parts.items()}
    counts = plan_counts(sizes, {name: configs[name].weight for name in parts})
    merged = datasets.concatenate_datasets([loaded.dataset for loaded in parts.values()])
    notes = [note for loaded in parts.values() for note in loaded.notes]
    notes.append(f"mixture: {', '.join(f'{name} {counts[name]:,} of {sizes[name]:,} documents' for name in parts)}")
    return Loaded(
        kind=kinds.pop(),
        dataset=merged.select(interleave(list(sizes.values()), list(counts.values()))),
        records=[record for loaded in parts.values() for record in loaded.records],
        notes=notes,
    )


def interleave(sizes: list[int], counts: list[int]) -> np.ndarray:
    """Indices into the parts laid end to end, so that any stretch of the mixture has about the right shares.

    Of a part that is not taken whole, the documents are a fixed random sample in their own order: files are often
    sorted, and their beginning is not like the rest.
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


def _is_positive(name: str, weight: float | None) -> bool:
    if weight is None or not math.isfinite(weight) or weight <= 0:
        raise RequestError(
            f"dataset.parts.{name}.weight={weight}: a weight is a positive number; leave the part out instead",
            problem_id="mixture-weights",
        )
    return True
