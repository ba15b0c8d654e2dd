"""Write weights as safetensors, shard by shard: checked, cast to one number format, flushed to the disk.

One shard is in memory at a time, without copies of weights that are in memory already. Names and shapes are compared
with the architecture before anything is read; numbers are checked while they are written. An error names every problem,
and then no file is kept.

Sharded and merged weights have module names. Published files have other names: separate experts, other prefixes.
transformers reads both, but inference servers know only the published names. So weights are written as transformers
itself would save them. `save_pretrained` and `save_torch_state_dict` need all tensors in memory at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_state_dict_into_shards_factory
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tunebook.checkpoint.export.stored_weights import Weights, close, shapes_of
from tunebook.errors import RequestError, first_few
from tunebook.files import sha256_file
from tunebook.model.weight_files import Shapes

SHARD_BYTES = 2 * 10**9
Problems = dict[str, list[str]]  # tensors by problem
Tensors = dict[str, "torch.Tensor"]
_NUM_NAMED = 5
_EMPTY, _MISSING, _MISSHAPEN, _UNEXPECTED, _NOT_FINITE, _TOO_LARGE = (
    "empty",
    "missing",
    "misshapen",
    "not of this model",
    "not finite",
    "too large for the number format",
)


def refuse(problems: Problems, place: str) -> None:
    """Raise a RequestError that names the tensors with problems, if there are any."""
    found = [f"{len(names)} {kind}: {first_few(names, _NUM_NAMED)}" for kind, names in problems.items() if names]
    if not found:
        return
    is_only_large = problems.get(_TOO_LARGE) and len(found) == 1
    advice = "Export with --dtype bf16 or fp32" if is_only_large else "Name another checkpoint with --checkpoint"
    raise RequestError(
        f"the weights in {place} cannot be exported: {'; '.join(found)}; a model of them would fail to load or "
        f"answer nonsense. {advice}",
        problem_id="export-weights",
    )


def compare_with(expected: Shapes, weights: Weights) -> Problems:
    """Stored names and shapes against the expected ones."""
    empty = _empty(weights)
    return {
        _EMPTY: empty,
        _MISSING: sorted(set(expected) - set(weights)),
        _MISSHAPEN: [
            f"{name} of shape {list(tensor.shape)}, where the model has {list(expected[name])}"
            for name, tensor in sorted(weights.items())
            if name not in empty and tensor.shape != expected.get(name, tensor.shape)
        ],
        _UNEXPECTED: sorted(set(weights) - set(expected)),
    }


def compare_with_model(model: PreTrainedModel, weights: Weights) -> Problems:
    """The same for a whole model, with the names that transformers knows: older, tied and converted ones."""
    from tunebook.model.weight_files import compare_shapes

    empty, found = _empty(weights), compare_shapes(model, shapes_of(weights))
    return {
        _EMPTY: empty,
        _MISSING: found["missing"],
        _MISSHAPEN: [text for text in found["mismatched"] if text.partition(" ")[0] not in empty],
        _UNEXPECTED: found["unexpected"],
    }


def without_tied(model: PreTrainedModel, weights: Weights, place: str) -> Weights:
    """The tensors to write: of tensors that the architecture ties, the one that the others are tied to.

    Raises: RequestError if stored copies of one tensor differ.
    """
    tied = {name: kept for name, kept in model.all_tied_weights_keys.items() if {name, kept} <= set(weights)}
    for name, kept in tied.items():
        if not torch.equal(weights[name].load(), weights[kept].load()):
            raise RequestError(
                f"the weights in {place} cannot be exported: {name} and {kept} are one tensor in this architecture "
                "(tie_word_embeddings) and differ here, so one of them is not what was trained; name another "
                "checkpoint with --checkpoint",
                problem_id="export-weights",
            )
    return {name: tensor for name, tensor in weights.items() if name not in tied}


def num_bytes(weights: Weights, dtype: torch.dtype | None) -> int:
    """The size of the tensors on disk in a number format; None: as they are stored."""
    return sum(tensor.num_bytes(dtype) for tensor in weights.values())


def write_weights(
    weights: Weights,
    folder: Path,
    *,
    stem: str = "model",
    dtype: torch.dtype | None,
    place: str,
    shard_bytes: int = SHARD_BYTES,
    convert: Callable[[Tensors], Tensors] | None = None,
) -> dict[str, str]:
    """Write tensors as `<stem>.safetensors`, or as several files with an index; returns the SHA-256 of each file.

    `convert` is that of `as_stored`. Raises: RequestError naming every tensor that is not finite, before or after the
    cast. The caller removes the folder with the files written so far.
    """
    layers: dict[str, list[str]] = {}  # tensors by layer, kept together for the conversion
    for name in weights:
        layers.setdefault(layer_of(name) if convert is not None else name, []).append(name)
    split = split_state_dict_into_shards_factory(
        layers,
        get_storage_size=lambda names: sum(weights[name].num_bytes(dtype) for name in names),
        filename_pattern=f"{stem}{{suffix}}.safetensors",
        max_shard_size=shard_bytes,
    )
    hashes: dict[str, str] = {}
    places: dict[str, str] = {}
    problems: Problems = {_NOT_FINITE: [], _TOO_LARGE: []}
    for file_name, keys in split.filename_to_tensors.items():
        tensors = _loaded({name: weights[name] for key in keys for name in layers[key]}, dtype, problems)
        if any(problems.values()):
            continue  # check the other shards, write no more
        if convert is not None:
            tensors = convert(tensors)
        file = folder / file_name
        save_file(tensors, file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file_name)
        del tensors
        share(file)
        flush(file)
        hashes[file_name] = sha256_file(file)
    close(weights)
    refuse(problems, place)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": dict(sorted(places.items()))}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return hashes


def as_stored(model: PreTrainedModel, names: Collection[str]) -> Callable[[Tensors], Tensors] | None:
    """A function from tensors with the names of modules to those of a file; None if they have the names of files.

    It needs whole layers: some tensors of a file are made of several tensors of a layer.
    """
    if not set(names) <= set(model.state_dict()):
        return None

    def convert(tensors: Tensors) -> Tensors:
        reverted: Any = revert_weight_conversion(model, tensors)
        return {name: _own_memory(tensor) for name, tensor in reverted.items()}

    return convert


def layer_of(name: str) -> str:
    """The part of a tensor's name that all tensors of its layer share; outside of layers, the whole name."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: number + 1])


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with its own memory: safetensors refuses to write two views of one tensor."""
    is_view = tensor.untyped_storage().nbytes() != tensor.nbytes
    return tensor.clone().contiguous() if is_view else tensor.contiguous()


def share(file: Path) -> None:
    """Set a file's permissions by the user's umask: safetensors makes files readable by their owner only."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def flush(file: Path) -> None:
    """Make the content of a file survive a power cut."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def _loaded(weights: Weights, dtype: torch.dtype | None, problems: Problems) -> Tensors:
    """Tensors in the number format to write, in memory of their own; problems with them are added."""
    tensors = {}
    for name, stored in weights.items():
        tensor = stored.load()
        if not _is_finite(tensor):
            problems[_NOT_FINITE].append(name)
            continue
        is_cast = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
        kept = tensor.to(dtype) if is_cast else tensor if stored.is_in_memory else tensor.clone()
        if is_cast and not _is_finite(kept):
            problems[_TOO_LARGE].append(name)
        tensors[name] = kept.contiguous()
    return tensors


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # a NaN is both; makes no second tensor
    return bool(low.isfinite() and high.isfinite())


def _empty(weights: Weights) -> list[str]:
    return sorted(name for name, tensor in weights.items() if 0 in tensor.shape)
