"""The processor of a model for images and text: the tokens that an image takes, and its pixels as the model reads them.

transformers' own classes do both. They work on Pillow's images: torchvision would only be needed for videos, so a
processor has no part for these here. The tokens of an image follow from its size alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.config.schema import ModelConfig
from tunebook.errors import RequestError, first_line
from tunebook.model.tokenizer_files import tokenizer_folder

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase

Size = tuple[int, int]  # width and height in pixels

_SMALL = (32, 32)
_BICUBIC = 3  # of Pillow's resampling filters
_OF_TEXT = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")
_TYPES = ("mm_token_type_ids", "token_type_ids")
# Its own reads numbers of video frames as words, with one more package; images are those of Idefics 3.
_SAME_IMAGES = {"SmolVLMProcessor": "Idefics3Processor"}


def scaled_size(size: Size, max_pixels: int | None) -> Size:
    """The size of an image within the limit, in the same proportions. None: no limit."""
    width, height = size
    if max_pixels is None or width * height <= max_pixels:
        return size
    factor = (max_pixels / (width * height)) ** 0.5
    return max(1, int(width * factor)), max(1, int(height * factor))


class ImageProcessor:
    """Reads images for one model. `max_pixels`: larger images are scaled down first; None: as the model's files say."""

    def __init__(self, processor: Any, max_pixels: int | None, origin: tuple[Any, ...]) -> None:
        self._processor = processor
        self._max_pixels = max_pixels
        self._origin = origin
        self.placeholder: str = processor.image_token  # what a chat template writes for an image
        self.token_ids: list[int] = processor.image_token_ids  # in whose place the model puts what it sees
        self.text_of_size = cache(self._text_of_size)

    def __reduce__(self) -> tuple[Any, ...]:
        return load_image_processor, self._origin  # other processes load it again

    def _text_of_size(self, size: Size) -> str:
        """The text that the tokenizer reads for an image. Raises: ValueError for a size the model does not take."""
        from PIL import Image

        blank = Image.new("RGB", scaled_size(size, self._max_pixels))
        inputs = self._processor(images=[blank], text=[self.placeholder], return_text_replacement_offsets=True)
        return str(inputs["text_replacement_offsets"][0][0]["replacement"])

    def pixels(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """The model's inputs for the images of a batch, in order."""
        scaled = [image.resize(scaled_size(image.size, self._max_pixels), resample=_BICUBIC) for image in images]
        inputs = self._processor(images=scaled, text=[self.placeholder * len(scaled)], return_tensors="pt")
        return {name: value for name, value in inputs.items() if name not in _OF_TEXT}

    def blank(self) -> tuple[list[int], Image]:
        """A small image and its tokens."""
        from PIL import Image

        text = self.text_of_size(_SMALL)
        ids: list[int] = self._processor.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids, Image.new("RGB", _SMALL, "gray")

    def token_types(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """1 for the tokens of images, under the name that the model reads; nothing if it does not. Shape: as `ids`."""
        import torch

        names = [name for name in _TYPES if name in self._processor.model_input_names]
        if not self._processor.return_mm_token_type_ids or not names:
            return {}
        return {names[0]: torch.isin(ids, torch.tensor(self.token_ids)).long()}


def load_image_processor(
    model: ModelConfig, tokenizer: PreTrainedTokenizerBase, max_pixels: int | None = None
) -> ImageProcessor:
    """The processor in the folder of a model's tokenizer. Raises: RequestError for a model without one that works."""
    folder = tokenizer_folder(model)
    with usable_processor(folder):
        processor = ImageProcessor(_load(folder, tokenizer), max_pixels, (model, tokenizer, max_pixels))
        processor.text_of_size(_SMALL)
    return processor


def _load(folder: Path, tokenizer: PreTrainedTokenizerBase) -> Any:
    import transformers
    from transformers import AutoConfig, ProcessorMixin
    from transformers.models.auto import processing_auto

    stated = ProcessorMixin.get_processor_dict(str(folder))[0]
    image_processor = load_transformers_part(folder)
    named = stated.get("processor_class")
    kinds: Any = processing_auto
    named = named or kinds.PROCESSOR_MAPPING_NAMES[AutoConfig.from_pretrained(folder).model_type]
    kind: Any = getattr(transformers, _SAME_IMAGES.get(named, named))
    unchecked: Any = type(named, (kind,), {"check_argument_for_proper_class": lambda *_: None})
    parts = {"tokenizer": tokenizer, "image_processor": image_processor, "video_processor": None}
    return unchecked.from_args_and_dict([parts[name] for name in kind.get_attributes()], stated)


def load_transformers_part(folder: Path) -> Any:
    """The part of a folder's processor that makes tensors of images, which has made one of a small image."""
    from PIL import Image
    from transformers import AutoImageProcessor

    loader: Any = AutoImageProcessor  # untyped upstream
    image_processor = loader.from_pretrained(folder, backend="pil")
    image_processor(images=[Image.new("RGB", _SMALL)], return_tensors="pt")
    return image_processor


@contextmanager
def usable_processor(folder: Path) -> Iterator[None]:
    """Name the folder of a model without a processor for images, or with a broken one. Raises: RequestError."""
    try:
        yield
    except Exception as error:  # transformers raises anything for a setting of another type
        raise RequestError(
            f"there are images, and {folder} has no processor for them that can be used "
            f"({type(error).__name__}: {first_line(error)}); correct its preprocessor_config.json, or name a model "
            "that reads images, such as model=qwen25_vl_3b, or data without images",
            problem_id="model-without-images",
        ) from error
