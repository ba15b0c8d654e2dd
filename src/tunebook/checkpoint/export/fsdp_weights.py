"""FSDP's sharded checkpoints (`torch.distributed.checkpoint`), read tensor by tensor in one process without a group.

accelerate 1.15 saves `{"model": state_dict}` (`save_fsdp_model`), so every name begins with `model.`. The list of what
is where, `.metadata`, is a pickle that torch loads with Python's own unpickler; here it is loaded with one that knows
only the classes of such a list.
"""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.checkpoint.export.stored_weights import damaged
from tunebook.model.weight_files import Shapes

if TYPE_CHECKING:
    import torch

_PREFIX = "model."
_METADATA = ".metadata"
# Besides the classes of torch.distributed.checkpoint's own lists: what stands for shapes, formats and paths in them.
_KNOWN = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
}  # fmt: skip
_KNOWN_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_KNOWN_CLASSES = (
    "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
    "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix",
)  # fmt: skip


class _Unpickler(pickle.Unpickler):
    """Loads what a list of tensors is made of and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        is_list = module in _KNOWN_MODULES and name in _KNOWN_CLASSES
        import torch

        is_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_list or is_format or (module, name) in _KNOWN:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it wants {module}.{name}, which no list of tensors needs")


class ShardedWeights:
    """The tensors of one sharded checkpoint, each put together from all ranks' pieces when it is read."""

    is_in_memory = False

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._folder = folder
        self.shapes: Shapes = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, entry in read_metadata(folder).state_dict_metadata.items():
            if isinstance(entry, TensorStorageMetadata) and name.startswith(_PREFIX):
                self.shapes[name.removeprefix(_PREFIX)] = tuple(entry.size)
                self.dtypes[name.removeprefix(_PREFIX)] = entry.properties.dtype
        if not self.shapes:
            raise damaged(folder / _METADATA, "it lists no tensor of a model")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of the tensors, one at a time."""
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = _reader(self._folder)
        for name in names:
            tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
            try:
                with warnings.catch_warnings():  # that no group of processes is asked is meant
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                    load({_PREFIX + name: tensor}, storage_reader=reader, no_dist=True)
            except (Exception, CheckpointException) as error:  # the latter is none of the former
                cause = _root(error)
                if not isinstance(cause, Exception):  # Ctrl-C comes wrapped, too
                    raise cause from error
                raise damaged(self._folder, f"{name}: {type(cause).__name__}: {cause}") from error
            yield name, tensor


def read_metadata(folder: Path) -> Any:
    """The list of what is where. Raises: RequestError for a damaged one, or for one that holds anything else."""
    file = folder / _METADATA
    try:
        with file.open("rb") as stream:
            return _Unpickler(stream).load()
    except Exception as error:  # a pickle that is cut off raises whatever its bytes happen to mean
        raise damaged(file, error) from error


def _reader(folder: Path) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta

    metadata = read_metadata(folder)
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()

    class Reader(FileSystemReader):
        """Torch's reader, with the list that was read above."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            metadata.storage_meta.load_id = self.load_id
            return metadata

    return Reader(folder)


def _root(error: BaseException) -> BaseException:
    failures = getattr(error, "failures", None)  # of a CheckpointException: by rank, the error and its traceback
    if not failures:
        return error
    first: Any = next(iter(failures.values()))
    cause: BaseException = first[0] if isinstance(first, tuple) else first
    return cause
