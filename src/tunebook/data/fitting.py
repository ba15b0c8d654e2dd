"""What happens to documents longer than `training.max_length`, with a reason for everything that is lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from tunebook.config.choices import Overlong
from tunebook.data.corpus import IGNORED_LABEL
from tunebook.data.encode import Document

TOO_LONG = "longer than training.max_length (dataset.overlong=drop)"
NOTHING_TRAINED = "nothing left to train on after cutting to training.max_length"
PIECE_NOT_TRAINED = "pieces of split documents without a token to train on"
NEVER_TRAINED = "no token of it is trained on"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """What is kept of one document, and why the rest is not."""

    pieces: list[Document]  # one, unless the document was split or dropped
    was_cut: bool = False  # or split
    num_tokens_lost: int = 0
    dropped: list[str] = field(default_factory=list)  # a reason for the document, or for each of its pieces


def fit(document: Document, max_length: int, overlong: Overlong) -> Fitted:
    """Cut, drop or split one document so that no piece is longer than `max_length` tokens.

    Pieces without a trained token are dropped: they would cost time and teach nothing.
    """
    num_tokens = len(document.input_ids)
    if num_tokens <= max_length:
        if document.num_trained:
            return Fitted(pieces=[document])
        return Fitted(pieces=[], num_tokens_lost=num_tokens, dropped=[NEVER_TRAINED])
    if overlong is Overlong.drop:
        return Fitted(pieces=[], num_tokens_lost=num_tokens, dropped=[TOO_LONG])
    last_start = num_tokens if overlong is Overlong.split else 1
    pieces = [_piece(document, start, max_length) for start in range(0, last_start, max_length)]
    kept = [piece for piece in pieces if piece.num_trained]
    reason = PIECE_NOT_TRAINED if overlong is Overlong.split else NOTHING_TRAINED
    return Fitted(
        pieces=kept,
        was_cut=True,
        num_tokens_lost=num_tokens - sum(len(piece.input_ids) for piece in kept),
        dropped=[reason] * (len(pieces) - len(kept)),
    )


def _piece(document: Document, start: int, length: int) -> Document:
    """Some tokens of a document as a document of its own, whose first token nothing predicts."""
    end = start + length
    return Document(document.input_ids[start:end], [IGNORED_LABEL, *document.labels[start + 1 : end]])
