"""Documents that are tokens already, with labels or with masks of what the loss counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.data.corpus import IGNORED_LABEL, Row
from tunebook.data.problems import DocumentError

LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # of tokens; 0: the loss does not count it
TOKEN_KEYS = ("labels", *LOSS_MASKS, "attention_mask", "seq_lengths", "position_ids", "token_type_ids")
_LARGEST_TOKEN_ID = 2**31 - 1  # token ids are stored in 32 bits


def read_tokens(record: Mapping[str, Any], vocab_size: int | None) -> Row:
    """Token ids and labels of a document, read as TRL reads them. `vocab_size`: of the model; None: not known.

    Labels are those of the same position, as in transformers; without labels or masks the loss counts every token. It
    counts a token if all its masks are 1. Tokens with `attention_mask` 0 are padding and left out.
    Raises: DocumentError.
    """
    limit = _LARGEST_TOKEN_ID if vocab_size is None else vocab_size - 1
    input_ids = _integers(record, "input_ids", None)
    _check_range(input_ids, "input_ids", limit)
    labels = list(input_ids)
    if record.get("labels") is not None:
        labels = list(_integers(record, "labels", len(input_ids)))
        _check_range([label for label in labels if label != IGNORED_LABEL], "labels", limit)
    for name in LOSS_MASKS:
        if record.get(name) is not None:
            mask = _mask(record, name, len(input_ids))
            labels = [label if bit else IGNORED_LABEL for label, bit in zip(labels, mask, strict=True)]
    kept = list(range(len(input_ids)))
    if record.get("attention_mask") is not None:
        kept = [position for position, bit in enumerate(_mask(record, "attention_mask", len(input_ids))) if bit]
    lengths, positions = record.get("seq_lengths") or [], record.get("position_ids") or []
    if len(lengths) > 1 or [positions[position] for position in kept if position < len(positions)].count(0) > 1:
        raise DocumentError(
            "'seq_lengths' or 'position_ids' say that several documents are packed into this row; write each as a "
            "document of its own, Tunebook packs them (packing.mode)"
        )
    input_ids, labels = [input_ids[position] for position in kept], [labels[position] for position in kept]
    # Nothing predicts the first label, so it alone trains nothing.
    if all(label == IGNORED_LABEL for label in labels[1:]):
        raise DocumentError("labels or masks leave no token after the first to train on")
    return {"input_ids": input_ids, "labels": labels}


def _mask(record: Mapping[str, Any], name: str, num_tokens: int) -> list[int]:
    value = record[name]
    if not isinstance(value, list) or not all(isinstance(bit, int) and bit in (0, 1) for bit in value):
        raise DocumentError(f"'{name}' must be a list of 0 and 1")
    _check_length(value, name, num_tokens)
    return value


def _integers(record: Mapping[str, Any], name: str, num_tokens: int | None) -> list[int]:
    value = record[name]
    if not isinstance(value, list) or not value or not set(map(type, value)) <= {int}:
        raise DocumentError(f"'{name}' must be a list of whole numbers that is not empty")
    if num_tokens is not None:
        _check_length(value, name, num_tokens)
    return value


def _check_length(values: list[int], name: str, num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise DocumentError(f"'{name}' has {len(values)} entries and 'input_ids' {num_tokens}; they must be as many")


def _check_range(token_ids: list[int], name: str, largest: int) -> None:
    outside = next((token_id for token_id in token_ids if not 0 <= token_id <= largest), None)
    if outside is not None:
        raise DocumentError(
            f"'{name}' holds {outside}, but the vocabulary goes from 0 to {largest}; were these tokens made by another "
            "tokenizer?"
        )
