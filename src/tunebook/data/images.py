"""The images of conversations: found where a document names them, checked, and hashed. Pixels are not stored.

A turn's content has `IMAGE` at the place of each image, and `images` of the turn names them in order: the file, its
SHA-256, and width and height. Images that are not files of their own (bytes in Parquet, data URLs, downloads) are kept
in the cache by their hash.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import http.client
import io
import string
import urllib.error
import urllib.parse
import urllib.request
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.data.problems import DocumentError, is_empty, type_name
from tunebook.data.special_tokens import Span, any_of, substitute
from tunebook.data.turns import IMAGE, IMAGE_PART_KEYS, Turn
from tunebook.errors import DataError, counted
from tunebook.files import atomic_write_bytes, cache_root

if TYPE_CHECKING:
    from PIL.Image import Image

    from tunebook.model.processor import ImageProcessor

Size = tuple[int, int]  # width and height in pixels
MARK = "<image>"  # in the text of a document that has IMAGE_KEYS
IMAGE_KEYS = ("images", "image")
_VALUE_KEYS = ("bytes", "url", "path", "image", "image_url", "file", "base64")  # of an image that is an object
_MOST_PIXELS = 89_478_485  # Pillow's own limit against files that would fill the memory
_NO_RANGE = ("I", "F")  # modes of Pillow, which would cut their values at 0 and 255
_MOST_BYTES = 100 * 2**20  # of a download
_DOWNLOAD_TIMEOUT_S = 30
_LONGEST_EDGE = 256  # pixels of a thumbnail
_LONGEST_NAME = 200  # characters of a file's name in a message
_BAD = "data-image"


@dataclass(kw_only=True)
class ImageReader:
    """Reads the images of one source. `folder` is that of the file being read; None: its documents name no files."""

    may_download: bool = False
    folder: Path | None = None
    num_read: int = 0
    num_as_text: int = 0  # documents with MARK in a text, and no image
    _known: dict[str, dict[str, Any]] = field(default_factory=dict)

    def read(self, value: object, place: str) -> dict[str, Any]:
        """An image as a turn names it. Raises: DocumentError, naming `place`."""
        self.num_read += 1
        data, name, file = self._find(value, place)
        if data is None:
            assert file is not None
            known = self._known.get(str(file))
            if known is None:
                known = self._known[str(file)] = self._checked(_bytes_of(file, name, place), name, place, file)
            return known
        return self._checked(data, name, place, None)

    def _find(self, value: object, place: str) -> tuple[bytes | None, str, Path | None]:
        """The bytes of an image, or else its file; and what it is called in a message."""
        if isinstance(value, Mapping):  # `datasets` has bytes and path, OpenAI url
            key = next((key for key in _VALUE_KEYS if value.get(key)), None)
            if key is None:
                raise DocumentError(
                    f"{place} names nothing: its keys are: {', '.join(value) or 'none'}; known are "
                    f"{', '.join(_VALUE_KEYS)}",
                    problem_id=_BAD,
                )
            value = f"data:image;base64,{value[key]}" if key == "base64" else value[key]
            if isinstance(value, Mapping):
                return self._find(value, place)
        if isinstance(value, bytes):
            return value, f"{len(value):,} bytes in the document", None
        if not isinstance(value, str) or not value.strip():
            what = "empty" if isinstance(value, str) else f"{type_name(value)} where a path, a URL or bytes belong"
            raise DocumentError(f"{place} is {what}", problem_id=_BAD)
        if value.startswith("data:"):
            return _of_data_url(value, place), "a data URL", None
        if value.startswith(("http://", "https://")):
            if not self.may_download:
                raise DocumentError(
                    f"{place} is at {value[:80]}; to fetch such images while the data is prepared, type "
                    "dataset.download_images=true",
                    problem_id="data-image-url",
                )
            return None, value, _download(value, place)
        path = Path(urllib.parse.unquote(value.removeprefix("file://")) if value.startswith("file://") else value)
        if not path.is_absolute():
            if self.folder is None:
                raise DocumentError(
                    f"{place} is the file {value}, and the documents are in no folder; write its absolute path",
                    problem_id=_BAD,
                )
            path = self.folder / path
        name = str(path)
        if len(name) > _LONGEST_NAME:
            name = f"{name[:_LONGEST_NAME]}... (an image in base64 begins with data:image/png;base64,)"
        return None, name, path

    def _checked(self, data: bytes, name: str, place: str, file: Path | None) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        size = check_image(data, name, place)
        if file is None:
            file = cache_root() / "images" / digest
            if not file.is_file():
                file.parent.mkdir(parents=True, exist_ok=True)
                atomic_write_bytes(file, data)
        return {"file": str(file), "sha256": digest, "size": list(size)}


def check_image(data: bytes, name: str, place: str) -> Size:
    """Width and height of an image that can be read to its end. Raises: DocumentError."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise DocumentError(f"{place} is empty: {name} has no bytes", problem_id=_BAD)
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
            width, height = image.size
            if width * height > _MOST_PIXELS:
                raise DocumentError(
                    f"{place} is too large: {name} has {width:,} x {height:,} pixels, and at most {_MOST_PIXELS:,} in "
                    "all are read; scale it down",
                    problem_id=_BAD,
                )
            if image.mode in _NO_RANGE:
                raise DocumentError(
                    f"{place}: {name} has one number of 32 bits for each pixel, and nothing says which is white; save "
                    "it with 8 or 16 bits",
                    problem_id=_BAD,
                )
            return ImageOps.exif_transpose(image).size  # reads all of it
    except DocumentError:
        raise
    except Image.DecompressionBombError as error:
        raise DocumentError(
            f"{place} is too large: {name} has more than {_MOST_PIXELS:,} pixels; scale it down", problem_id=_BAD
        ) from error
    except Exception as error:  # Pillow raises anything for a broken file
        is_known = not isinstance(error, UnidentifiedImageError)
        reason = f"broken: {error}" if is_known else "no image that Pillow knows"
        message = f"{place} cannot be read: {name} ({len(data):,} bytes) is {reason}"
        raise DocumentError(message, problem_id=_BAD) from error


class LostImageError(DataError):
    """An image that was checked when the data was prepared, and cannot be read now."""

    def __init__(self, message: str) -> None:
        # From a worker process, torch makes it again with a traceback before the message.
        super().__init__(message.rpartition(f"{type(self).__name__}: ")[2], problem_id=_BAD)


def reference_to(image: Mapping[str, Any]) -> str:
    """A prepared document's reference to an image of a turn: `SHA256 PATH`."""
    return f"{image['sha256']} {image['file']}"


def open_image(reference: str) -> Image:
    """The image of a prepared document, `SHA256 PATH`, in RGB on white, upright as its EXIF data say.

    Raises: LostImageError.
    """
    from PIL import Image, ImageOps

    file = reference.partition(" ")[2]
    try:
        with Image.open(file) as opened:
            image = ImageOps.exif_transpose(opened)
    except (OSError, SyntaxError) as error:  # Pillow's for a broken PNG
        reason = getattr(error, "strerror", None) or error
        raise LostImageError(
            f"the image {file} was read when the data was prepared, and cannot be read now: {reason}. Put it back, and "
            "start the same command again"
        ) from error
    if image.mode.startswith("I;16"):  # gray in 16 bits, of which `convert` makes white
        image = image.point(lambda value: value / 257)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return image.convert("RGB")


def thumbnail(reference: str) -> str:
    """A small JPEG of the image of a prepared document, `SHA256 PATH`, as a data URL for a page."""
    image, buffer = open_image(reference), io.BytesIO()
    image.thumbnail((_LONGEST_EDGE, _LONGEST_EDGE))
    image.save(buffer, "JPEG")
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def place_images(turns: list[Turn], record: Mapping[str, Any], images: ImageReader) -> list[Turn]:
    """The turns with every image read: those of parts, and those of the document's IMAGE_KEYS at the marks in order.

    Raises: DocumentError for a mark without an image, an image without a mark, and one in an answer.
    """
    keys = [key for key in IMAGE_KEYS if not is_empty(record.get(key))]
    if len(keys) > 1:
        raise DocumentError(f"the images are in two places, {' and '.join(keys)}; keep one", problem_id=_BAD)
    value = record[keys[0]] if keys else []
    waiting = list(value) if isinstance(value, list) else [value]
    if any(record.get(key) is not None for key in IMAGE_KEYS):
        turns = [_with_marks(turn, number) for number, turn in enumerate(turns, 1)]
    elif not any(turn.get("images") for turn in turns):
        images.num_as_text += any(MARK in (turn["content"] or "") for turn in turns)
    placed: list[Turn] = []
    num_marks = sum(value is None for turn in turns for value in turn.get("images", ()))
    if num_marks != len(waiting):
        marks = ", ".join(
            f"turn {number} ({turn['role']}): {turn['images'].count(None)}"
            for number, turn in enumerate(turns, 1)
            if None in turn.get("images", ())
        )
        raise DocumentError(
            f"it names {counted(len(waiting), 'image')} under '{keys[0] if keys else 'images'}', and its turns have "
            f"{counted(num_marks, 'mark')} ({marks or 'none'}); each image needs one, {MARK} in a text or a part of "
            f"type image without a value (under {', '.join(IMAGE_PART_KEYS)}). Where {MARK} is meant as text, name all "
            "images in such parts",
            problem_id="data-image-marks",
        )
    for number, turn in enumerate(turns, 1):
        if not turn.get("images"):
            placed.append(turn)
            continue
        if turn["role"] == "assistant":
            raise DocumentError(
                f"turn {number} (assistant) has an image, and the model answers in text; images belong to turns of the "
                "user, of tools and of the system",
                problem_id=_BAD,
            )
        values = [waiting.pop(0) if value is None else value for value in turn["images"]]
        read = [
            images.read(value, f"image {position} of turn {number} ({turn['role']})")
            for position, value in enumerate(values, 1)
        ]
        placed.append(turn | {"images": read})
    return placed


def write_images(
    text: str, spans: Sequence[Span], images: Sequence[Mapping[str, Any]], processor: ImageProcessor | None, origin: str
) -> tuple[str, list[Span], list[Span]]:
    """A rendered text with all tokens of each image in the place of the template's one, as the model's processor does.

    Returns the text, its spans, and those of the images. Raises: DataError for a template that does not write each
    image, and for an image that the model does not take.
    """
    assert processor is not None, "it is loaded where a document has images"
    mark = any_of([processor.placeholder])
    places = [match.start() for match in mark.finditer(text)]
    if len(places) != len(images):
        raise DataError(
            f"{origin}: it has {counted(len(images), 'image')}, and the chat template writes "
            f"{counted(len(places), 'place')} for them ({processor.placeholder}); move images of a system or tool turn "
            "to a user's, or name a template of this model that writes them: model.chat_template=FILE",
            problem_id="template-leaves-out",
        )
    texts = []
    for number, image in enumerate(images, 1):
        try:
            texts.append(processor.text_of_size(tuple(image["size"])))
        except ValueError as error:
            width, height = image["size"]
            raise DataError(
                f"{origin}: image {number} of the document, {image['file']}, has {width} x {height} pixels, which the "
                f"model does not take: {error}",
                problem_id=_BAD,
            ) from error
    written = iter(texts)
    whole, moved = substitute(mark, text, spans, lambda _: next(written))
    shift, placed = 0, []
    for place, inserted in zip(places, texts, strict=True):
        placed.append((place + shift, place + shift + len(inserted)))
        shift += len(inserted) - len(processor.placeholder)
    return whole, moved, placed


def _with_marks(turn: Turn, number: int) -> Turn:
    """A turn with IMAGE for each mark in its text. Marks and parts with images would have no order."""
    content = turn["content"] or ""
    if MARK not in content:
        return turn
    if turn.get("images"):
        raise DocumentError(
            f"turn {number} ({turn['role']}) has {MARK} in its text and parts that are images; keep one of the ways: "
            f"where {MARK} is meant as text, name all images of the document in such parts",
            problem_id="data-image-marks",
        )
    return turn | {"content": content.replace(MARK, IMAGE), "images": [None] * content.count(MARK)}


def _bytes_of(file: Path, name: str, place: str) -> bytes:
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:  # a path with a null character
        why = getattr(error, "strerror", None) or error
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {why}"
        raise DocumentError(f"{place}: the file {name} {reason}", problem_id=_BAD) from error


def _of_data_url(url: str, place: str) -> bytes:
    head, comma, body = url.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("it does not begin with data:image/...;base64,")
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise DocumentError(f"{place} is a broken data URL, {url[:40]!r}...: {error}", problem_id=_BAD) from error


def _download(url: str, place: str) -> Path:
    """The file of a URL in the cache, fetched if it is not there."""
    file = cache_root() / "images" / f"url-{hashlib.sha256(url.encode()).hexdigest()}"
    if file.is_file():
        return file
    try:
        quoted = urllib.parse.quote(url, safe=string.punctuation)  # spaces and letters beyond ASCII, as a browser does
        with urllib.request.urlopen(quoted, timeout=_DOWNLOAD_TIMEOUT_S) as answer:
            data = answer.read(_MOST_BYTES + 1)
    except (OSError, ValueError, http.client.HTTPException) as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        raise DocumentError(f"{place} cannot be fetched from {url[:80]}: {error}", problem_id=_BAD) from error
    if len(data) > _MOST_BYTES:
        raise DocumentError(f"{place}, {url[:80]}, has more than {_MOST_BYTES:,} bytes", problem_id=_BAD)
    check_image(data, url[:80], place)  # before it is kept: a server may answer with a page about an error
    file.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(file, data)
    return file
