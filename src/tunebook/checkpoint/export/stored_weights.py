"""The tensors of a checkpoint by name, in every form that a strategy saves them in; each is read when it is loaded.

Nothing that is read here runs code (safetensors; pickles through an unpickler that knows tensors and a few named
classes), and no process group is needed. Files are mapped, and mapped again after every 256 MiB, since pages that were
read count as host memory of the process until the file is closed.

FSDP's sharded checkpoints are read by torch.distributed.checkpoint, one tensor at a time. Its own converters
(`format_utils`) would hold the whole checkpoint in memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import _TYPES
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

from tunebook.checkpoint.export.source import damaged
from tunebook.checkpoint.unpickling import METADATA_FILE, load_list, restricted_unpickling, root_cause
from tunebook.model.weight_files import Shapes

Files = TypeVar("Files")

_MAPPED_BYTES = 256 * 2**20
_FSDP_PREFIX = "model."  # accelerate 1.15 saves {"model": state_dict} (`save_fsdp_model`)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that is in memory only after `load`, which raises RequestError for a damaged file."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    load: Callable[[], torch.Tensor]  # may return a view of a mapped file
    is_in_memory: bool = False  # then a copy would only be a second one
    files: Mapped[Any] | None = None  # that it is loaded from

    @property
    def num_parameters(self) -> int:
        """Its elements."""
        return math.prod(self.shape)

    def num_bytes(self, dtype: torch.dtype | None = None) -> int:
        """Its size in a number format; None: as it is stored."""
        written = dtype if dtype is not None and self.dtype.is_floating_point else self.dtype
        return self.num_parameters * written.itemsize


Weights = dict[str, StoredTensor]


def close(weights: Weights) -> None:
    """Give back the memory of mapped files, except of views that are still used. Loading opens them again."""
    for tensor in weights.values():
        if tensor.files is not None:
            tensor.files.close()


def shapes_of(weights: Weights) -> Shapes:
    """The shapes by name."""
    return {name: tensor.shape for name, tensor in weights.items()}


def held_weights(tensors: dict[str, torch.Tensor]) -> Weights:
    """Tensors that are in memory already, such as those of a merged model."""
    return {
        name: StoredTensor(
            shape=tuple(tensor.shape), dtype=tensor.dtype, load=partial(_same, tensor), is_in_memory=True
        )
        for name, tensor in tensors.items()
    }


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Mapped(Generic[Files]):
    """Opened files, opened again after `_MAPPED_BYTES` were read of them."""

    def __init__(self, open_files: Callable[[], Files]) -> None:
        self._open = open_files
        self._files: Files | None = None
        self._num_bytes = 0

    def for_reading(self, num_bytes: int) -> Files:
        """The files, to read so many bytes."""
        if self._num_bytes >= _MAPPED_BYTES:
            self.close()
        if self._files is None:
            self._files = self._open()
        self._num_bytes += num_bytes
        return self._files

    def close(self) -> None:
        """Close the files."""
        self._files, self._num_bytes = None, 0


def file_weights(files: Sequence[Path]) -> Weights:
    """The tensors of safetensors files."""
    weights: Weights = {}
    for file in files:
        mapped = Mapped(partial(_open_safetensors, file))
        opened = mapped.for_reading(0)
        for name in opened.keys():  # noqa: SIM118  no mapping
            piece = opened.get_slice(name)
            shape, dtype = tuple(piece.get_shape()), _torch_dtype(piece.get_dtype(), file)
            load = partial(_load_from_file, mapped, name, math.prod(shape) * dtype.itemsize)
            weights[name] = StoredTensor(shape=shape, dtype=dtype, load=load, files=mapped)
        mapped.close()
    return weights


def _load_from_file(mapped: Mapped[Any], name: str, num_bytes: int) -> torch.Tensor:
    tensor: torch.Tensor = mapped.for_reading(num_bytes).get_tensor(name)
    return tensor


def _open_safetensors(file: Path) -> Any:

    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors has its own errors, and so has the system
        raise damaged(file, error) from error


def _torch_dtype(name: str, file: Path) -> torch.dtype:

    found: torch.dtype | None = _TYPES.get(name)
    if found is None:
        raise damaged(file, f"it holds numbers of the format {name}, which no run of Tunebook writes")
    return found


def sharded_weights(folder: Path) -> Weights:
    """The tensors of an FSDP checkpoint, each assembled from the pieces of all ranks."""
    metadata = read_metadata(folder)
    reader = _reader(folder, metadata)
    weights: Weights = {}
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and name.startswith(_FSDP_PREFIX):
            shape, dtype = tuple(entry.size), entry.properties.dtype
            load = partial(_load_sharded, reader, folder, name, shape, dtype)
            weights[name.removeprefix(_FSDP_PREFIX)] = StoredTensor(shape=shape, dtype=dtype, load=load)
    if not weights:
        raise damaged(folder / METADATA_FILE, "it lists no tensor of a model")
    return weights


def _load_sharded(reader: Any, folder: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:

    tensor = torch.empty(shape, dtype=dtype)
    try:
        with restricted_unpickling(), warnings.catch_warnings():  # reading without a process group is intended
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            state_dict_loader.load({name: tensor}, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # CheckpointException is no Exception
        cause = root_cause(error)
        if not isinstance(cause, Exception):  # Ctrl-C is wrapped, too
            raise cause from error
        raise damaged(folder, f"{name.removeprefix(_FSDP_PREFIX)}: {type(cause).__name__}: {cause}") from error
    return tensor


def read_metadata(folder: Path) -> Any:
    """The metadata that locates each tensor. Raises: RequestError if it is damaged or names any other class."""
    file = folder / METADATA_FILE
    try:
        with file.open("rb") as stream:
            return load_list(stream)
    except Exception as error:  # a truncated pickle may raise any error
        raise damaged(file, error) from error


def _reader(folder: Path, metadata: Any) -> Any:

    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()

    class Reader(FileSystemReader):
        """Torch's reader with the list that was read above."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(folder)
