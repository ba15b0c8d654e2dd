"""Stored weights as one list of names with shapes, read a few at a time: what an export writes from.

Every form is read without running code (safetensors; pickles through an unpickler that knows tensors and a handful of
named classes) and without a process group. Files are opened anew for each call and mapped, not read whole, so that what
was looked at can be given back: host memory holds what is being copied and no more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tunebook.checkpoint.export.formats import Form, Stored, damaged
from tunebook.model.weight_files import Shapes

if TYPE_CHECKING:
    import torch

_BATCH_BYTES = 256 * 2**20


class Weights(Protocol):
    """Named tensors that are somewhere; `read` gives them one by one, valid until the next one is asked for."""

    is_in_memory: bool  # whether they stay valid, so that a copy of one would only be a second one
    shapes: Shapes
    dtypes: dict[str, torch.dtype]

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of the tensors. Raises: RequestError for a file that is damaged or cut off."""


def open_weights(stored: Stored) -> Weights:
    """The weights of a folder. Raises: RequestError for files that are missing, damaged, or of another layout."""
    if stored.form is Form.fsdp:
        from tunebook.checkpoint.export.fsdp_weights import ShardedWeights

        return ShardedWeights(stored.folder)
    if stored.form is Form.zero:
        from tunebook.checkpoint.export.zero_weights import PartitionedWeights

        return PartitionedWeights(stored.folder)
    return FileWeights(stored.files)


def read_in_batches(weights: Weights, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Some of the tensors, read a few at a time, so that the pages of mapped files are given back on the way."""
    batch: list[str] = []
    held = 0
    for name in names:
        batch.append(name)
        held += math.prod(weights.shapes[name]) * weights.dtypes[name].itemsize
        if held >= _BATCH_BYTES:
            yield from weights.read(batch)
            batch, held = [], 0
    yield from weights.read(batch)


class FileWeights:
    """Tensors of safetensors files."""

    is_in_memory = False

    def __init__(self, files: list[Path]) -> None:
        self.shapes: Shapes = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._files: dict[str, Path] = {}
        for file in files:
            with _opened(file) as weights:
                for name in weights.keys():  # noqa: SIM118  no mapping
                    piece = weights.get_slice(name)
                    self.shapes[name] = tuple(piece.get_shape())
                    self.dtypes[name] = _torch_dtype(piece.get_dtype(), file)
                    self._files[name] = file

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of the tensors, as they are in the mapped file."""
        wanted: dict[Path, list[str]] = {}
        for name in names:
            wanted.setdefault(self._files[name], []).append(name)
        for file, here in wanted.items():
            with _opened(file) as weights:
                for name in here:
                    yield name, weights.get_tensor(name)


class HeldWeights:
    """Tensors that are in memory already, such as those of a merged model."""

    is_in_memory = True

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self.shapes: Shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self.dtypes = {name: tensor.dtype for name, tensor in tensors.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of the tensors, as they are."""
        for name in names:
            yield name, self._tensors[name]


class RenamedWeights:
    """Some of other weights' tensors under other names."""

    def __init__(self, weights: Weights, names: dict[str, str]) -> None:
        """`names`: from the new name to the one there."""
        self._weights, self._names = weights, names
        self.is_in_memory = weights.is_in_memory
        self.shapes: Shapes = {new: weights.shapes[old] for new, old in names.items()}
        self.dtypes = {new: weights.dtypes[old] for new, old in names.items()}

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of the tensors."""
        back = {self._names[name]: name for name in names}
        for old, tensor in self._weights.read(back):
            yield back[old], tensor


def _opened(file: Path) -> Any:
    from safetensors import safe_open

    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors has its own, and so has the system
        raise damaged(file, error) from error


def _torch_dtype(name: str, file: Path) -> torch.dtype:
    import torch

    known = {
        "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
        "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    }  # fmt: skip
    if name not in known:
        raise damaged(file, f"it holds numbers of the format {name}, which no run of Tunebook writes")
    return known[name]
