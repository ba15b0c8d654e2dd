"""A fingerprint of the weights in a model's folder, computed from samples of every tensor.

An adapter belongs to one base model. config.json identifies the architecture but not the weights. Their fingerprint is
compared when an adapter is loaded on its base, and when a run is repeated.

It covers the name, number format and shape of every tensor, and blocks of 16 KiB spread over it, one for every 2 MiB
and at least 4; a tensor of at most 1 MiB is read whole. Hashing all bytes of a large model would take minutes, during
which the GPUs wait. Training changes numbers everywhere in a tensor; a few edited numbers of a large one may not be
detected. The division of the tensors into files does not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

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
_NUM_THREADS = 16  # they mostly wait for the disk
_WAY = "weights:"  # separates cached fingerprints from SHA-256 hashes


class _Tensor(NamedTuple):
    title: str  # its name, number format and shape
    begin: int  # in its file
    end: int


def weights_fingerprint(model: ModelConfig) -> str | None:
    """The fingerprint of the pretrained weights in a model's folder, cached until the files change.

    None for random weights (known by their seed), hub models (known by their revision) and folders without weights.
    Raises: RequestError for files that are missing, damaged or truncated.
    """
    if model.path is None or model.weights is not Weights.pretrained:
        return None
    files = find_weight_files(resolve_path(model.path))
    if not files:
        return None
    # A sum does not depend on the order, nor on which file contains a tensor.
    return _digits(sum(int(found, 16) for found in remembered_hashes(files, _of_file, _WAY).values()))


def recorded_in(described: Mapping[str, Any]) -> str | None:
    """The fingerprint in a manifest's or checkpoint's description of a model; None if there is none."""
    fingerprint: str | None = described.get("weights_fingerprint")
    return fingerprint


def fingerprint_text(fingerprint: str | None) -> str:
    """The current weights of a folder in words, for messages."""
    return f"have the fingerprint {fingerprint[:12]}..." if fingerprint is not None else "are not there"


def _of_file(file: Path) -> str:
    try:
        # Only torch can find the tensors in a pickled file.
        whole = _Tensor(file.name, 0, file.stat().st_size)
        tensors = _tensors_in(file) if file.suffix == ".safetensors" else [whole]
        with file.open("rb") as stream, ThreadPoolExecutor(_NUM_THREADS) as threads:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # do not read ahead between the blocks
            return _digits(sum(threads.map(lambda tensor: _of_tensor(stream.fileno(), tensor), tensors)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise damaged_file(file, error) from error


def _tensors_in(file: Path) -> list[_Tensor]:
    """The tensors in a file's header. Raises: ValueError, KeyError, TypeError for an invalid header."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > _LONGEST_HEADER_BYTES:
            raise ValueError("it is no safetensors file")
        header = json.loads(stream.read(length))
    found = []
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            found.append(_Tensor(json.dumps([name, tensor["dtype"], tensor["shape"]]), begin, end))
    return found


def _of_tensor(descriptor: int, tensor: _Tensor) -> int:
    digest = hashlib.sha256(f"{tensor.title}\0{tensor.end - tensor.begin}\0".encode())
    for offset, size in _blocks(tensor.begin, tensor.end):
        block = os.pread(descriptor, size, offset)
        if len(block) != size:
            raise ValueError(f"it ends at byte {offset + len(block):,}, before the end of {tensor.title}")
        digest.update(block)
    return int.from_bytes(digest.digest(), "big")


def _blocks(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Offsets and sizes to read: all of a small tensor, or evenly spread blocks including the first and last."""
    size = end - begin
    if size <= _WHOLE_BYTES:
        yield begin, size
        return
    count = max(_LEAST_BLOCKS, size // _BLOCK_EVERY_BYTES)
    for number in range(count):
        yield begin + (size - _BLOCK_BYTES) * number // (count - 1), _BLOCK_BYTES


def _digits(total: int) -> str:
    return f"{total % 2**256:064x}"
