"""Documents that are tokens already, with labels or masks, read as TRL reads them, without padding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.data.corpus import IGNORED_LABEL, Row
from tunebook.data.problems import DocumentError

Record = Mapping[str, Any]

LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # of tokens; 0: the loss does not count it
TOKEN_KEYS = ("labels", *LOSS_MASKS, "attention_mask", "seq_lengths", "position_ids", "token_type_ids")
_LARGEST_TOKEN_ID = 2**31 - 1  # token ids are stored in 32 bits


def token_row(record: Record, vocab_size: int | None) -> Row:
    """A document of tokens. Labels are those of the same position, as in transformers; without labels or masks the loss
    counts every token.

    As in TRL the loss counts a token if all its masks are 1. Tokens with `attention_mask` 0 are padding and left out.
    """
    input_ids = _integers(record["input_ids"], "input_ids")
    limit = _LARGEST_TOKEN_ID if vocab_size is None else vocab_size - 1
    _check_range(input_ids, "input_ids", 0, limit)
    kept = _without_padding(record, len(input_ids))
    _refuse_packed(record, kept, len(input_ids))
    labels = _masked(record, input_ids)
    if record.get("labels") is not None:
        labels = _given_labels(record, masked=labels)
        _check_range([label for label in labels if label != IGNORED_LABEL], "labels", 0, limit)
    input_ids, labels = input_ids[kept], labels[kept]
    _refuse_shifted(input_ids, labels)
    # Nothing predicts the first label, so it alone trains nothing.
    if all(label == IGNORED_LABEL for label in labels[1:]):
        raise DocumentError("labels or masks leave no token after the first to train on")
    return {"input_ids": input_ids, "labels": labels}


def _refuse_shifted(input_ids: list[int], labels: list[int]) -> None:
    """Raises: DocumentError for labels that are the next position's tokens: the model would shift them once more."""
    trained = [
        (label, *ids) for label, *ids in zip(labels, input_ids, input_ids[1:], strict=False) if label != IGNORED_LABEL
    ]
    if any(label != own for label, own, _ in trained) and all(label == following for label, _, following in trained):
        raise DocumentError(
            "'labels' has the token of the next position at each position, and the model shifts labels by one itself; "
            "write the label of a token at its own position"
        )


def _masked(record: Record, input_ids: list[int]) -> list[int]:
    """Every token as its own label, except those that a mask leaves out."""
    masks = [_mask(record, name, len(input_ids)) for name in LOSS_MASKS if record.get(name) is not None]
    if not masks:
        return list(input_ids)
    return [token_id if all(bits) else IGNORED_LABEL for token_id, *bits in zip(input_ids, *masks, strict=True)]


def _given_labels(record: Record, *, masked: list[int]) -> list[int]:
    """The document's own labels. Raises: DocumentError if a mask contradicts them."""
    labels = _integers(record["labels"], "labels")
    _check_length(labels, "labels", len(masked))
    for position, (label, by_masks) in enumerate(zip(labels, masked, strict=True)):
        if label != IGNORED_LABEL and by_masks == IGNORED_LABEL:
            names = " and ".join(f"'{name}'" for name in LOSS_MASKS if record.get(name) is not None)
            raise DocumentError(
                f"'labels' trains on position {position} (label {label}), which {names} leaves out; keep one of them"
            )
    return labels


def _without_padding(record: Record, num_tokens: int) -> slice:
    """The positions between the padding. Raises: DocumentError for an attention mask with a gap inside."""
    if record.get("attention_mask") is None:
        return slice(0, num_tokens)
    mask = _mask(record, "attention_mask", num_tokens)
    if 1 not in mask:
        raise DocumentError("'attention_mask' is 0 everywhere, so nothing to train on")
    start, stop = mask.index(1), num_tokens - mask[::-1].index(1)
    if 0 in mask[start:stop]:
        raise DocumentError(
            f"'attention_mask' is 0 at position {start + mask[start:stop].index(0)}, between tokens that are attended "
            "to; only padding before and after a document can be left out"
        )
    return slice(start, stop)


def _refuse_packed(record: Record, kept: slice, num_tokens: int) -> None:
    """Refuse rows that hold several documents: they would become one document whose parts attend to each other."""
    is_packed = record.get("seq_lengths") not in (None, [kept.stop - kept.start], [num_tokens])
    if record.get("position_ids") is not None:
        positions = _integers(record["position_ids"], "position_ids")
        _check_length(positions, "position_ids", num_tokens)
        positions = positions[kept]
        is_packed = is_packed or positions != list(range(positions[0], positions[0] + len(positions)))
    if is_packed:
        raise DocumentError(
            "'seq_lengths' or 'position_ids' say that several documents are packed into this row; write each as a "
            "document of its own, Tunebook packs them (packing.mode)"
        )
    kinds = record.get("token_type_ids")
    if isinstance(kinds, list) and any(kinds):
        raise DocumentError("'token_type_ids' is not 0 everywhere, which causal language models do not read")


def _mask(record: Record, name: str, num_tokens: int) -> list[int]:
    value = record[name]
    if not isinstance(value, list) or not all(isinstance(bit, int) and bit in (0, 1) for bit in value):
        raise DocumentError(f"'{name}' must be a list of 0 and 1")
    _check_length(value, name, num_tokens)
    return value


def _check_length(values: list[int], field: str, num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise DocumentError(f"'{field}' has {len(values)} entries and 'input_ids' {num_tokens}; they must be as many")


def _integers(value: object, field: str) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise DocumentError(f"'{field}' must be a list of whole numbers")
    if not value:
        raise DocumentError(f"'{field}' is empty")
    return value


def _check_range(token_ids: list[int], field: str, smallest: int, largest: int) -> None:
    outside = next((token_id for token_id in token_ids if not smallest <= token_id <= largest), None)
    if outside is not None:
        raise DocumentError(
            f"'{field}' holds {outside}, but the vocabulary goes from {smallest} to {largest}; "
            "were these tokens made by another tokenizer?"
        )
