"""Loading a checkpoint runs no code from it: its pickles may name only the few classes of real checkpoints.

`complete.json` proves that a checkpoint is what was written, not who wrote it: whoever changes a file can change its
hash. A pickle is a program, and two libraries use Python's own unpickler: DeepSpeed for its states
(`weights_only=False`), torch.distributed.checkpoint for its list of tensors (`.metadata`) and for values that are no
tensors. Inside `restricted_unpickling` torch's `weights_only` loads them, as the Trainer loads its own files.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import EnumMeta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException

from tunebook.errors import DataError

# The classes in DeepSpeed 0.19's states, in addition to tensors and Python's own types.
_OF_DEEPSPEED = (
    ("deepspeed.utils.tensor_fragment", "fragment_address"),
    ("deepspeed.runtime.fp16.loss_scaler", "LossScaler"),
    ("deepspeed.runtime.fp16.loss_scaler", "DynamicLossScaler"),
    ("deepspeed.runtime.zero.config", "ZeroStageEnum"),
)
# Shapes, formats and paths in the lists of torch.distributed.checkpoint.
_OF_LISTS = {
    ("torch", "Size"), ("torch.serialization", "_get_layout"), ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"), ("pathlib", "Path"), ("pathlib._local", "PosixPath"),
}  # fmt: skip
_LIST_MODULES = ("torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem")
_LIST_CLASSES = (
    "Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties",
    "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING", "_StorageInfo", "_StoragePrefix",
)  # fmt: skip
_GETATTR = ("builtins", "getattr")


def enum_member(owner: Any, name: str) -> Any:
    """What `getattr` may do in a pickle: Python 3.11.2, which Debian 12 has, writes members of enums so.

    Raises: UnpicklingError for any other attribute.
    """
    if isinstance(owner, EnumMeta) and name in owner.__members__:
        return owner.__members__[name]
    raise pickle.UnpicklingError("builtins.getattr is for members of enums only")


class _ListUnpickler(pickle.Unpickler):
    """Loads the classes of a list of tensors and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == _GETATTR:
            return enum_member
        is_list = module in _LIST_MODULES and name in _LIST_CLASSES
        is_format = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_list or is_format or (module, name) in _OF_LISTS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"no list of tensors needs {module}.{name}")


def load_list(stream: Any) -> Any:
    """The `.metadata` of a checkpoint of torch.distributed.checkpoint. Raises: any error, for damaged bytes."""
    return _ListUnpickler(stream).load()


@contextmanager
def restricted_unpickling() -> Iterator[None]:
    """Inside, no file that torch, DeepSpeed or torch.distributed.checkpoint loads runs code.

    Raises: DataError for a file that names any other class, also if a library wrapped that error.
    """
    filesystem: Any = import_module("torch.distributed.checkpoint.filesystem")
    upstream = torch.load, filesystem.pickle
    refused: list[DataError] = []

    def load_list_of_file(stream: Any) -> Any:
        try:
            return load_list(stream)
        except pickle.UnpicklingError as error:
            refused.append(_unsafe(stream))
            raise refused[-1] from error

    torch.load = _load_restricted(torch.load)
    filesystem.pickle = SimpleNamespace(**vars(pickle) | {"load": load_list_of_file})
    try:
        yield
    except CheckpointException as error:  # no Exception; it holds one error and its traceback for each rank
        causes = [*refused, *(cause[0] for cause in error.failures.values())]
        if causes and isinstance(causes[0], DataError):
            raise causes[0] from error
        raise
    finally:
        torch.load, filesystem.pickle = upstream


def _load_restricted(upstream: Callable[..., Any]) -> Callable[..., Any]:
    def load(f: Any, map_location: Any = None, *_pickle_module: Any, **options: Any) -> Any:
        """As `torch.load`, but always with `weights_only`."""
        options |= {"weights_only": True}
        options.pop("pickle_module", None)
        with torch.serialization.safe_globals([*_deepspeeds_classes(), (enum_member, ".".join(_GETATTR))]):
            try:
                return upstream(f, map_location, **options)
            except pickle.UnpicklingError as error:
                raise _unsafe(f) from error

    return load


def _deepspeeds_classes() -> list[Any]:
    """The classes of DeepSpeed's states, if DeepSpeed is imported."""
    return [getattr(sys.modules[module], name) for module, name in _OF_DEEPSPEED if module in sys.modules]


def _unsafe(file: Any) -> DataError:
    name = file if isinstance(file, str | Path) else getattr(file, "name", "a value in a .distcp file")
    return DataError(
        f"{name} holds something that no checkpoint of a run needs, and loading it could run any code; nothing of it "
        "was run. Its record proves that it was not damaged, not who wrote it. Use a checkpoint from a source that you "
        "trust (training.resume=FOLDER), or start again with training.resume=never",
        problem_id="checkpoint-unsafe",
    )
