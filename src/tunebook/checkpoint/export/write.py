"""Write weights as safetensors, shard by shard: checked on the way, cast to one number format, flushed to the disk.

One shard is in memory at a time, and none beside weights that are there already. Names and shapes are compared with the
architecture before anything is read; numbers are looked at as they pass. Everything that is wrong is named, and nothing
is written that is.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.checkpoint.export.stored_names import Tensors, layer_of
from tunebook.checkpoint.export.stored_weights import Weights, read_in_batches
from tunebook.errors import RequestError
from tunebook.files import sha256_file
from tunebook.model.weight_files import Shapes

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

SHARD_BYTES = 2 * 10**9
_NUM_NAMED = 5


@dataclass(kw_only=True)
class Problems:
    """What is wrong with weights, by kind; each entry names a tensor."""

    empty: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)
    not_finite: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)  # for the number format asked for

    def refuse(self, place: str) -> None:
        """Raise a RequestError that names what was found; nothing found, nothing raised."""
        kinds = {
            "empty": self.empty,
            "missing": self.missing,
            "misshapen": self.misshapen,
            "not of this model": self.unexpected,
            "not finite": self.not_finite,
            "too large for the number format": self.too_large,
        }
        found = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names]
        if not found:
            return
        is_only_large = self.too_large and len(found) == 1
        advice = "Export with --dtype bf16 or fp32" if is_only_large else "Name another checkpoint with --checkpoint"
        raise RequestError(
            f"the weights in {place} cannot be exported: {'; '.join(found)}; a model of them would fail to load or "
            f"answer nonsense. {advice}",
            problem_id="export-weights",
        )


def compare_with(expected: Shapes, stored: Shapes, *, may_be_missing: set[str] | None = None) -> Problems:
    """Stored names and shapes against those that are expected."""
    problems = _empties(stored)
    problems.missing = sorted(set(expected) - set(stored) - (may_be_missing or set()))
    problems.unexpected = sorted(set(stored) - set(expected))
    problems.misshapen = [
        f"{name} of shape {list(shape)}, where the model has {list(expected[name])}"
        for name, shape in sorted(stored.items())
        if name not in problems.empty and shape != expected.get(name, shape)
    ]
    return problems


def compare_with_model(model: PreTrainedModel, stored: Shapes) -> Problems:
    """The same for a whole model's names, as transformers knows them: older ones, tied ones, converted ones."""
    from tunebook.model.weight_files import compare_shapes

    problems = _empties(stored)
    found = compare_shapes(model, stored)
    problems.missing, problems.unexpected = found["missing"], found["unexpected"]
    problems.misshapen = [text for text in found["mismatched"] if text.partition(" ")[0] not in problems.empty]
    return problems


def without_tied(model: PreTrainedModel, weights: Weights, place: str) -> list[str]:
    """The names to write: of tensors that are one by the architecture, the one that the others are tied to.

    Raises: RequestError where stored copies of one tensor differ, which the model could not have both of.
    """
    import torch

    tied = {name: kept for name, kept in model.all_tied_weights_keys.items() if {name, kept} <= set(weights.shapes)}
    for name, kept in tied.items():
        (_, first), (_, second) = [(key, tensor.clone()) for key, tensor in weights.read([name, kept])]
        if not torch.equal(first, second):
            raise RequestError(
                f"the weights in {place} cannot be exported: {name} and {kept} are one tensor in this architecture "
                "(tie_word_embeddings) and differ here, so one of them is not what was trained; name another "
                "checkpoint with --checkpoint",
                problem_id="export-weights",
            )
    return [name for name in weights.shapes if name not in tied]


def num_bytes(weights: Weights, names: list[str], dtype: torch.dtype | None) -> int:
    """What the named tensors take on disk in a number format; None leaves each as it is."""
    return sum(_size(weights, name, dtype) for name in names)


def write_weights(
    weights: Weights,
    names: list[str],
    folder: Path,
    *,
    stem: str = "model",
    dtype: torch.dtype | None,
    place: str,
    shard_bytes: int = SHARD_BYTES,
    convert: Callable[[Tensors], Tensors] | None = None,
) -> dict[str, str]:
    """Write the named tensors as `<stem>.safetensors`, or in several files with an index; the SHA-256 of each file.

    `convert` turns the tensors of whole layers into those that are written, see `stored_names`.
    Raises: RequestError naming every tensor that is not finite, before or after the cast. Files written so far stay:
    the caller removes the folder.
    """
    from safetensors.torch import save_file

    shards = _shards(weights, names, dtype, shard_bytes, by_layer=convert is not None)
    hashes: dict[str, str] = {}
    places: dict[str, str] = {}
    problems = Problems()
    for number, shard in enumerate(shards, 1):
        tensors = _kept(weights, shard, dtype, problems)
        if problems.not_finite or problems.too_large:
            continue  # look at the rest, write no more
        if convert is not None:
            tensors = convert(tensors)
        part = "" if len(shards) == 1 else f"-{number:05}-of-{len(shards):05}"
        file = folder / f"{stem}{part}.safetensors"
        save_file(tensors, file, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, file.name)
        del tensors
        share(file)
        flush(file)
        hashes[file.name] = sha256_file(file)
    problems.refuse(place)
    if len(shards) > 1:
        total = num_bytes(weights, names, dtype)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return hashes


def share(file: Path) -> None:
    """Let others read a file as far as the user's own settings do: safetensors makes files for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def flush(file: Path) -> None:
    """Make what was written to a file survive a power cut."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def short_name(dtype: torch.dtype) -> str:
    """A number format as it is typed here: fp32, bf16, fp16; others as torch calls them."""
    name = str(dtype).removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)


def _kept(weights: Weights, names: list[str], dtype: torch.dtype | None, problems: Problems) -> dict[str, torch.Tensor]:
    """Tensors in the number format that is written, which stay; what is wrong with them is added to the problems."""
    tensors = {}
    for name, tensor in read_in_batches(weights, names):
        if not _is_finite(tensor):
            problems.not_finite.append(name)
            continue
        is_cast = dtype is not None and tensor.is_floating_point() and tensor.dtype != dtype
        kept = tensor.to(dtype) if is_cast else tensor if weights.is_in_memory else tensor.clone()
        if is_cast and not _is_finite(kept):
            problems.too_large.append(name)
        tensors[name] = kept.contiguous()
    return tensors


def _is_finite(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel():
        return True
    low, high = tensor.aminmax()  # a NaN is both; no second tensor is made for it
    return bool(low.isfinite() and high.isfinite())


def _shards(
    weights: Weights, names: list[str], dtype: torch.dtype | None, limit: int, *, by_layer: bool
) -> list[list[str]]:
    """The names in their order, cut where a shard would grow beyond the limit; no layer is cut where `by_layer`."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(layer_of(name) if by_layer else name, []).append(name)
    shards: list[list[str]] = []
    held = 0
    for group in groups.values():
        size = sum(_size(weights, name, dtype) for name in group)
        if not shards or held + size > limit:
            shards.append([])
            held = 0
        shards[-1].extend(group)
        held += size
    return shards


def _size(weights: Weights, name: str, dtype: torch.dtype | None) -> int:
    stored = weights.dtypes[name]
    written = dtype if dtype is not None and stored.is_floating_point else stored
    return math.prod(weights.shapes[name]) * written.itemsize


def _empties(stored: Shapes) -> Problems:
    return Problems(empty=sorted(name for name, shape in stored.items() if 0 in shape))


def _listed(names: list[str]) -> str:
    more = len(names) - _NUM_NAMED
    return ", ".join(names[:_NUM_NAMED]) + (f" and {more} more" if more > 0 else "")
