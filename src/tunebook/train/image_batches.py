"""Batches of rows with images: the pixels are read from the files of the images when a batch is made."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tunebook.config.choices import ModelPart
from tunebook.config.schema import RunConfig
from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.images import open_image
from tunebook.data.sampler import IMAGES
from tunebook.facts.strategies import strategy_facts
from tunebook.model.processor import ImageProcessor
from tunebook.processes import own_cores

if TYPE_CHECKING:
    from PIL.Image import Image

_MOST_WORKERS = 8  # of a rank; with two a GPU waited for SmolVLM2's images, which take 0.25 s of a core each
Rows = list[dict[str, Any]]
Collate = Callable[[Rows], dict[str, Any]]


def image_workers() -> int:
    """How many processes of a rank read images: no more than its share of this machine's cores."""
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, min(_MOST_WORKERS, len(own_cores()) // ranks - 1))


def needs_image_in_each(config: RunConfig) -> bool:
    """Whether every pass has to run the parts for images, since the ranks exchange their weights or gradients."""
    return strategy_facts(config).divides_weights or set(config.model.train) != {ModelPart.language}


class ImageCollator:
    """Adds the images of the rows to the batch of their tokens.

    With `needs_image`, a batch without an image gets a small one after the end of its first row. The loss does not
    count it, and no token before it sees it.

    Pixels are in `dtype`, the number format in which the first layer reads them: they pass through shared memory and a
    page-locked copy, 0.2 GB for four documents of SmolVLM2 in fp32.
    """

    def __init__(
        self,
        collate: Collate,
        processor: ImageProcessor,
        *,
        needs_image: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._collate, self.processor, self._needs_image, self._dtype = collate, processor, needs_image, dtype

    def __call__(self, rows: Rows) -> dict[str, Any]:
        """The batch of tokens, with pixels and the kinds of tokens as the model reads them."""
        return self.with_images(rows, [open_image(reference) for row in rows for reference in row.get(IMAGES, ())])

    def with_images(self, rows: Rows, images: list[Image]) -> dict[str, Any]:
        """The batch of rows that have these images."""
        if not images and self._needs_image:
            ids, blank = self.processor.blank()
            images, rows = [blank], [_extended(rows[0], ids), *rows[1:]]
        batch = self._collate(rows)
        batch |= self.processor.token_types(batch["input_ids"])
        if images:
            pixels = self.processor.pixels(images).items()
            batch |= {name: value.to(self._dtype) if value.is_floating_point() else value for name, value in pixels}
        return batch


def _extended(row: dict[str, Any], ids: list[int]) -> dict[str, Any]:
    ignored = np.full(len(ids), IGNORED_LABEL)
    return row | {
        "input_ids": np.concatenate([row["input_ids"], ids]),
        "labels": np.concatenate([row["labels"], ignored]),
        "seq_lengths": [*row["seq_lengths"], len(ids)],
    }
