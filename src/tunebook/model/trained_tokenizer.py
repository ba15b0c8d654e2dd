"""Whether a tokenizer still is the one that a run was trained with: by the hashes in the run's manifest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tunebook.errors import DataError
from tunebook.model.tokenizer import tokenizer_hash
from tunebook.record.manifest import MANIFEST_FILE, read_manifest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def check_tokenizer(run: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Refuse a chat template or tokenizer other than the manifest says was trained with. Raises: DataError."""
    from tunebook.data.template import template_hash

    if not (run / MANIFEST_FILE).is_file():
        return
    manifest = read_manifest(run)
    template = manifest["chat_template_sha256"]
    if template is not None and template != template_hash(tokenizer):
        raise DataError(
            f"the chat template is not the one that {run} was trained with: it changed since (the tokenizer is "
            f"{tokenizer.name_or_path}); put it back, since a model answers badly under another template",
            problem_id="template-changed",
        )
    if manifest["tokenizer_sha256"] not in (None, *_hashes(tokenizer)):
        raise DataError(
            f"the tokenizer {tokenizer.name_or_path} is not the one that {run} was trained with: it changed since; put "
            "it back, since the same text would become other tokens",
            problem_id="tokenizer-changed",
        )


def _hashes(tokenizer: PreTrainedTokenizerBase) -> set[str]:
    """The tokenizer's hash, and the one without a padding token: the trainer gives one to a tokenizer that has none."""
    padding = tokenizer.pad_token
    hashes = {tokenizer_hash(tokenizer)}
    tokenizer.pad_token = None
    hashes.add(tokenizer_hash(tokenizer))
    tokenizer.pad_token = padding
    return hashes
