"""What tells the weights in a model's folder from others of the same shapes, without reading all of them.

An adapter belongs to one base model. config.json says which architecture that is, and not which weights: those are
compared by this fingerprint wherever an adapter meets its base, and where a run is made again.

It covers every tensor of the files that transformers would read: its name, number format and shape, the whole content
of one of up to 1 MiB, and of a larger one blocks of 16 KiB spread over it, one for every 2 MiB and at least 4. Of a
model of 16 GB that are 128 MiB, which several threads read within seconds. To hash everything would keep the GPUs
waiting for as long as the disk takes to read the model, minutes for a large one.

What it can tell: training changes numbers all over a tensor, so other weights are found however little they were
trained, and so are whole tensors that were exchanged, which small ones (norms, biases) always are. What it cannot: a
change of a few neighbouring numbers in a large tensor, such as a damaged disk block or a few edited rows of an
embedding. It does not depend on how safetensors files are cut, which is not the model's content.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunebook.config.book import resolve_path
from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.files import remembered_hashes
from tunebook.model.weight_files import damaged_file, find_weight_files

_WHOLE_BYTES = 2**20
_BLOCK_BYTES = 16 * 2**10
_BLOCK_EVERY_BYTES = 2 * 2**20
_LEAST_BLOCKS = 4
_LONGEST_HEADER_BYTES = 100_000_000  # the format's own limit; anything longer is not a header
_NUM_THREADS = 16  # they wait for the disk, not for a core
_WAY = "weights:"  # what is remembered of a file beside its SHA-256


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """Where one tensor lies in its file, and what it is called there."""

    title: str
    begin: int
    end: int


def weights_fingerprint(model: ModelConfig) -> str | None:
    """The fingerprint of the pretrained weights in a model's folder; remembered as long as the files do not change.

    None where something else says which weights they are: the seed of random ones, the revision of a hub model; and
    for a folder without weights. Raises: RequestError for files that are missing, damaged or cut off.
    """
    if model.path is None or model.weights is not Weights.pretrained:
        return None
    files = find_weight_files(resolve_path(model.path))
    if not files:
        return None
    # A sum does not depend on the order, and so not on which file holds what.
    return _digits(sum(int(found, 16) for found in remembered_hashes(files, _of_file, _WAY).values()))


def recorded_in(described: Mapping[str, Any]) -> str | None:
    """The fingerprint in a recorded description of a model, a manifest's or a checkpoint's.

    None where the model had none, or in records from before there were any.
    """
    fingerprint: str | None = described.get("weights_fingerprint")
    return fingerprint


def told(fingerprint: str | None) -> str:
    """What a message says of weights in a folder, as they are now."""
    return f"have the fingerprint {fingerprint[:12]}..." if fingerprint is not None else "are not there"


def _of_file(file: Path) -> str:
    try:
        tensors = _in_safetensors(file) if file.suffix == ".safetensors" else [_whole(file)]
        descriptor = os.open(file, os.O_RDONLY)
        try:
            if hasattr(os, "posix_fadvise"):  # what lies between the blocks is not to be read ahead
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
            with ThreadPoolExecutor(_NUM_THREADS) as threads:
                return _digits(sum(threads.map(lambda tensor: _of_tensor(descriptor, tensor), tensors)))
        finally:
            os.close(descriptor)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_file(file, error) from error


def _in_safetensors(file: Path) -> list[_Tensor]:
    """The tensors that a file's header names. Raises: ValueError, KeyError, TypeError for what is no such header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER_BYTES:
            raise ValueError("it is no safetensors file")
        header = json.loads(stream.read(length))
    found = []
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            found.append(_Tensor(title=json.dumps([name, tensor["dtype"], tensor["shape"]]), begin=begin, end=end))
    return found


def _whole(file: Path) -> _Tensor:
    """A pickled file as if it were one tensor: where its tensors lie only torch knows."""
    return _Tensor(title=file.name, begin=0, end=file.stat().st_size)


def _of_tensor(descriptor: int, tensor: _Tensor) -> int:
    digest = hashlib.sha256(f"{tensor.title}\0{tensor.end - tensor.begin}\0".encode())
    for offset, size in _blocks(tensor.begin, tensor.end):
        block = os.pread(descriptor, size, offset)
        if len(block) != size:
            raise ValueError(f"it ends at byte {offset + len(block):,}, before the end of {tensor.title}")
        digest.update(block)
    return int.from_bytes(digest.digest(), "big")


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Where to read how many bytes: everything of little, evenly spread blocks of much, the first and last included."""
    size = end - begin
    if size <= _WHOLE_BYTES:
        yield begin, size
        return
    count = max(_LEAST_BLOCKS, size // _BLOCK_EVERY_BYTES)
    for number in range(count):
        yield begin + (size - _BLOCK_BYTES) * number // (count - 1), _BLOCK_BYTES


def _digits(total: int) -> str:
    return f"{total % 2**256:064x}"
