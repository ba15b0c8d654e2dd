"""What of a hub model's weights is in the hub's cache: a download that was ended leaves the index and some shards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")


@dataclass(frozen=True, kw_only=True)
class CachedWeights:
    """Whether they are all there, and the bytes that are where they are not."""

    is_complete: bool
    num_bytes: int = 0


def cached_weights(name: str, revision: str | None) -> CachedWeights:
    """A single file, or every shard that an index names."""
    if any(_cached(name, file, revision) is not None for file in _WHOLE):
        return CachedWeights(is_complete=True)
    num_bytes = 0
    for index in _INDICES:
        file = _cached(name, index, revision)
        shards = _shards(file) if file is not None else []
        found = [path for shard in shards if (path := _cached(name, shard, revision)) is not None]
        if shards and len(found) == len(shards):
            return CachedWeights(is_complete=True)
        num_bytes = max(num_bytes, sum(path.stat().st_size for path in found))
    return CachedWeights(is_complete=False, num_bytes=num_bytes)


def _cached(name: str, file: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, file, revision=revision)
    except HFValidationError:
        return None
    return Path(path) if isinstance(path, str) and Path(path).exists() else None


def _shards(index: Path) -> list[str]:
    """The files that an index names; none where it is damaged."""
    try:
        return sorted({str(shard) for shard in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []
