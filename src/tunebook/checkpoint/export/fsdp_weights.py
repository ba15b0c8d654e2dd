"""FSDP's sharded checkpoints (`torch.distributed.checkpoint`), read tensor by tensor in one process without a group.

accelerate 1.15 saves `{"model": state_dict}` (`save_fsdp_model`), so every name begins with `model.`. Nothing in them
runs code: see `checkpoint.unpickling`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.checkpoint.export.formats import damaged
from tunebook.checkpoint.unpickling import METADATA_FILE, load_list, restricted_unpickling, root_cause
from tunebook.model.weight_files import Shapes

if TYPE_CHECKING:
    import torch

_PREFIX = "model."


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
            raise damaged(folder / METADATA_FILE, "it lists no tensor of a model")

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Some of the tensors, one at a time."""
        import torch
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = _reader(self._folder)
        for name in names:
            tensor = torch.empty(self.shapes[name], dtype=self.dtypes[name])
            try:
                with restricted_unpickling(), warnings.catch_warnings():  # that no group of processes is asked is meant
                    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                    load({_PREFIX + name: tensor}, storage_reader=reader, no_dist=True)
            except (Exception, CheckpointException) as error:  # the latter is none of the former
                cause = root_cause(error)
                if not isinstance(cause, Exception):  # Ctrl-C comes wrapped, too
                    raise cause from error
                raise damaged(self._folder, f"{name}: {type(cause).__name__}: {cause}") from error
            yield name, tensor


def read_metadata(folder: Path) -> Any:
    """The list of what is where. Raises: RequestError for a damaged one, or for one that holds anything else."""
    file = folder / METADATA_FILE
    try:
        with file.open("rb") as stream:
            return load_list(stream)
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
