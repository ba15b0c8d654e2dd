"""The validation part: a share of the documents held out by a hash of their content."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tunebook.config.choices import Source
from tunebook.config.schema import DatasetConfig
from tunebook.data.corpus import CONTENT_HASH
from tunebook.errors import RequestError

if TYPE_CHECKING:
    import datasets
    import numpy as np

_LARGEST_SHARE = 0.5


def check_validation(config: DatasetConfig) -> None:
    """Raises: RequestError for a validation part named in two ways, or in a way its source does not have."""
    named = {
        "validation_split": config.validation_split,
        "validation_path": config.validation_path,
        "validation_share": config.validation_share or None,
    }
    said = [f"dataset.{key}={value}" for key, value in named.items() if value is not None]
    if len(said) > 1:
        raise RequestError(f"{' and '.join(said)}: keep one of them", problem_id="validation-twice")
    if not 0 <= config.validation_share <= _LARGEST_SHARE:
        raise RequestError(
            f"dataset.validation_share={config.validation_share} is not between 0 and {_LARGEST_SHARE}; try 0.05",
            problem_id="validation-share",
        )
    if config.validation_split is not None and config.source is not Source.hub:
        raise RequestError(
            f"dataset.validation_split={config.validation_split} needs dataset.source=hub, which has splits; "
            "with files say dataset.validation_path=FILE, and with any source dataset.validation_share=0.05",
            problem_id="validation-source",
        )
    if config.validation_split is not None and config.validation_split == config.train_split:
        raise RequestError(
            f"dataset.validation_split={config.validation_split} is the training split too; name another one, or say "
            "dataset.validation_share=0.05",
            problem_id="validation-source",
        )
    if config.validation_path is not None and config.source is Source.synthetic:
        raise RequestError(
            "dataset.validation_path does not go with dataset.source=synthetic, whose tokens are its own; say "
            "dataset.validation_share=0.05",
            problem_id="validation-source",
        )


def hold_out(dataset: datasets.Dataset, share: float) -> tuple[datasets.Dataset, datasets.Dataset]:
    """The training and the validation part.

    A document's content alone decides: its part does not move when others are added or the order changes, and equal
    documents are in one part. Raises: RequestError when that leaves a part empty.
    """
    import numpy as np

    held = content_hashes(dataset) < np.uint64(share * 2**64)
    num_held = int(held.sum())
    if num_held == 0 or num_held == len(dataset):
        empty = "validation" if num_held == 0 else "training"
        raise RequestError(
            f"dataset.validation_share={share} of {len(dataset):,} documents leaves the {empty} part empty; try a "
            f"{'larger' if num_held == 0 else 'smaller'} share, more documents, or dataset.validation_path=FILE",
            problem_id="validation-empty",
        )
    return dataset.select(np.flatnonzero(~held)), dataset.select(np.flatnonzero(held))


def count_repeated(dataset: datasets.Dataset) -> int:
    """How many documents repeat an earlier one."""
    import numpy as np

    return len(dataset) - len(np.unique(content_hashes(dataset)))


def count_shared(train: datasets.Dataset, validation: datasets.Dataset) -> int:
    """How many validation documents are among the training documents."""
    import numpy as np

    return int(np.isin(content_hashes(validation), content_hashes(train)).sum())


def content_hashes(dataset: datasets.Dataset) -> np.ndarray:
    """The content hash of every document."""
    import numpy as np

    return np.asarray(dataset.with_format("numpy", columns=[CONTENT_HASH])[:][CONTENT_HASH], dtype=np.uint64)
