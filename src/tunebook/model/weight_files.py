"""What a checkpoint on disk holds, read from the headers of its files: every weight's name and shape, and no weight.

It takes milliseconds and no memory, so every rank does it before anything is read. safetensors looks at a file's length
when it opens it, which finds a download that broke off.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunebook.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable

Shapes = dict[str, tuple[int, ...]]  # by the weight's name in the file

# What transformers looks for in a model's folder, in its order (modeling_utils._get_resolved_checkpoint_files, 5.23).
_SINGLE_AND_INDEX = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
STORED_PATTERNS = (
    ("model*.safetensors", "model.safetensors.index.json"),
    (
        "pytorch_model*.bin",
        "pytorch_model.bin.index.json",
    ),
)


def find_weight_files(folder: Path) -> list[Path]:
    """The files that transformers reads the weights of a model's folder from; none where it would find none.

    Raises: RequestError for an index that cannot be read or names a file that is not there.
    """
    for single, index in _SINGLE_AND_INDEX:
        if (folder / single).is_file():
            return [folder / single]
        if (folder / index).is_file():
            return _files_of_index(folder / index)
    return []


def _files_of_index(index: Path) -> list[Path]:
    try:
        places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [index.parent / name for name in sorted(set(places.values()))]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_file(index, error) from error
    absent = [file for file in files if not file.is_file()]
    if absent:
        num_weights = sum(place == absent[0].name for place in places.values())
        raise RequestError(
            f"{index} names {len(files)} files and {len(absent)} of them {'is' if len(absent) == 1 else 'are'} not "
            f"there: {absent[0]} should hold {num_weights} weights, which would be random without it; copy the missing "
            "files or download the model again",
            problem_id="weights-file-missing",
        )
    return files


def read_shapes(files: Iterable[Path]) -> Shapes:
    """The name and shape of every weight in some files. Raises: RequestError for a file that is damaged or cut off."""
    shapes: Shapes = {}
    for file in files:
        try:
            shapes |= _in_safetensors(file) if file.suffix == ".safetensors" else _in_pickle(file)
        except Exception as error:  # safetensors and torch each have their own, and so has the zip file inside
            raise damaged_file(file, error) from error
    return shapes


def _in_safetensors(file: Path) -> Shapes:
    from safetensors import safe_open

    with safe_open(file, framework="numpy") as weights:
        return {name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()}  # noqa: SIM118  no mapping


def _in_pickle(file: Path) -> Shapes:
    import torch

    weights: dict[str, Any] = torch.load(file, map_location="meta", weights_only=True)
    return {name: tuple(weight.shape) for name, weight in weights.items()}


def damaged_file(file: Path, error: Exception) -> RequestError:
    """The error for a file of weights that cannot be read."""
    size = f"{file.stat().st_size:,} bytes" if file.is_file() else "not there"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return RequestError(
        f"{file} ({size}) cannot be read: {reason}; it is damaged or was cut off. Copy or download it again",
        problem_id="weights-file-damaged",
    )
