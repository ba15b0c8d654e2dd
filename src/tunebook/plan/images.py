"""The images of a run as it is planned: how many a document has, of which size, and the model's inputs for them.

The first documents say so where they are at hand; else it is assumed, and the plan says what. Image processors of
transformers make the inputs, on blank images: that in the model's folder, or for a model of the book one with the
published settings (`facts.architectures`).
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from math import isqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.choices import ModelPart, Source
from tunebook.config.schema import RunConfig
from tunebook.data.sources import first_images
from tunebook.errors import RequestError
from tunebook.facts.architectures import IMAGE_PROCESSORS
from tunebook.model.base_config import config_file
from tunebook.model.parameters import known_facts
from tunebook.model.processor import Size, load_image_processor, load_transformers_part, scaled_size, usable_processor
from tunebook.model.tokenizer import load_tokenizer
from tunebook.model.tokenizer_files import PROCESSOR_FILES

if TYPE_CHECKING:
    import torch

_ASSUMED = (1024, 1024)  # pixels of an image that is not at hand


@dataclass(frozen=True, kw_only=True)
class PlannedImages:
    """The images of a run's documents."""

    number: int  # in the document with most pixels
    size: Size  # of its largest image, within dataset.max_image_pixels
    mean_number: float  # of such images in all documents
    is_assumed: bool  # no image was at hand
    processor: dict[str, Any]  # its settings, as in preprocessor_config.json
    folder: str | None  # of the model, with its tokenizer; None: not at hand

    def tokens(self, config: RunConfig) -> int | None:
        """Tokens that the model's own processor writes for an image; None if it is not at hand.

        Raises: RequestError for one that does not work.
        """
        if self.folder is None:
            return None
        try:
            tokenizer = load_tokenizer(config.model, is_padded=False)
        except RequestError:
            return None
        processor = load_image_processor(config.model, tokenizer)
        try:
            text = processor.text_of_size(self.size)
        except ValueError:
            return None
        backend: Any = tokenizer.backend_tokenizer
        return len(backend.encode(text, add_special_tokens=False).ids)

    def inputs(self, number: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The model's inputs for so many images, with pixels in `dtype`."""
        from PIL import Image

        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "preprocessor_config.json").write_text(json.dumps(self.processor))
            processor = load_transformers_part(Path(folder))
        try:
            found = processor(images=[Image.new("RGB", self.size)] * number, return_tensors="pt")
        except ValueError:  # its proportions, with which the preparation refuses the document or leaves it out
            side = isqrt(self.size[0] * self.size[1])
            found = processor(images=[Image.new("RGB", (side, side))] * number, return_tensors="pt")
        tensors = {name: value for name, value in found.items() if hasattr(value, "dtype")}
        return {name: value.to(dtype) if value.is_floating_point() else value for name, value in tensors.items()}


def planned_images(config: RunConfig) -> PlannedImages | None:
    """The images of a run; None without any, and for an architecture that is not in `IMAGE_PROCESSORS`."""
    facts, dataset, first = known_facts(config), config.dataset, first_images(config.dataset)
    are_announced = set(config.model.train) != {ModelPart.language} or dataset.max_image_pixels is not None
    are_expected = are_announced and dataset.source is not Source.synthetic
    if facts is None or not facts.unreached or not (first.are_there if first is not None else are_expected):
        return None
    processor = _stated_processor(config)
    if processor is None:
        return None
    is_assumed = first is None or not any(first.sizes)
    documents = [[_ASSUMED]] if first is None or is_assumed else first.sizes
    sizes = [[scaled_size(size, dataset.max_image_pixels) for size in sizes] for sizes in documents]
    pixels = [sum(width * height for width, height in images) for images in sizes]
    fullest = sizes[pixels.index(max(pixels))]
    size = max(fullest, key=lambda size: size[0] * size[1])
    return PlannedImages(
        number=len(fullest),
        size=size,
        mean_number=sum(pixels) / (size[0] * size[1]) / len(pixels),
        is_assumed=is_assumed,
        processor=processor,
        folder=config.model.path,
    )


def _stated_processor(config: RunConfig) -> dict[str, Any] | None:
    """The settings of the image processor in the model's folder, or the published ones of its architecture."""
    file, facts = config_file(config.model), config.model.facts
    published = None if facts is None else IMAGE_PROCESSORS.get(facts.architecture)
    for own in [] if file is None or published is None else [file.with_name(name) for name in PROCESSOR_FILES]:
        if own.is_file():
            with usable_processor(own.parent):
                load_transformers_part(own.parent)
            read: dict[str, Any] = json.loads(own.read_text(encoding="utf-8"))
            stated: dict[str, Any] = read.get("image_processor", read)
            if "image_processor_type" in stated:
                return stated
    return published
