"""A fingerprint of the weights in a model's folder: the SHA-256 of its files.

An adapter belongs to one base model. config.json identifies the architecture but not the weights. Their fingerprint is
compared when an adapter is loaded on its base, and when a run is repeated. The first time all files are read, which
takes some seconds for a model of 16 GB; then it is known until they change.
"""

from __future__ import annotations

from tunebook.config.book import resolve_path
from tunebook.config.choices import Weights
from tunebook.config.schema import ModelConfig
from tunebook.files import remembered_hashes, sha256_text
from tunebook.model.weight_files import find_weight_files


def weights_fingerprint(model: ModelConfig) -> str | None:
    """The fingerprint of the pretrained weights in a model's folder: of one file its SHA-256, as the hub shows it.

    None for random weights (known by their seed), hub models (known by their revision) and folders without weights.
    Raises: RequestError for files that are missing.
    """
    if model.path is None or model.weights is not Weights.pretrained:
        return None
    hashes = [*remembered_hashes(find_weight_files(resolve_path(model.path))).values()]
    if not hashes:
        return None
    return hashes[0] if len(hashes) == 1 else sha256_text("\n".join(hashes))


def fingerprint_text(fingerprint: str | None) -> str:
    """The current weights of a folder in words, for messages."""
    return f"have the fingerprint {fingerprint[:12]}..." if fingerprint is not None else "are not there"
