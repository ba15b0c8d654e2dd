"""Tokenise text by the pieces that its tokenizer would cut it into, remembering the tokens of every piece seen.

A byte-level BPE cuts text at its special tokens, then by a regular expression into pieces (mostly words), and turns
each piece into tokens by itself. Most of its time goes into the cutting. Here Python's own expressions cut, and the
tokens of a piece are asked of the tokenizer's model once, which is three to four times as fast and gives the same
tokens: only tokenizers whose cutting is exactly known are taken, and every character met is tried in both engines
before a piece that holds it is believed. What cannot be vouched for (`None`) is left to the tokenizer itself.
"""

from __future__ import annotations

import json
import re
import unicodedata
from array import array
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

Span = tuple[int, int]  # characters of a text: start, end

# Cutting expressions as tokenizer.json has them, and the same for Python, which knows no \p{L} and \p{N}: its \w is
# letters, digits and the underscore. Where the two differ over a character (such as "½"), that is found out below.
_CONTRACTIONS = r"'(?:[sdmt]|re|ve|ll|[SDMT]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORDS = r"(?:[^\r\n\w]|_)?[^\W\d_]+"
_REST = r" ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_RUST_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_RUST_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Most pieces are words of Latin letters, with or without a space before: tried first, since this way is shorter.
_LATIN = f"[{''.join(letter for letter in map(chr, range(0x180)) if letter.isalpha())}]"
_COMMON = rf" ?{_LATIN}+(?![^\W\d_])"
_CUTS = {
    rf"{_RUST_START}\p{{N}}{_RUST_REST}": rf"{_COMMON}|{_CONTRACTIONS}|{_WORDS}|\d|{_REST}",  # Qwen 2, 2.5 and 3
    rf"{_RUST_START}\p{{N}}{{1,3}}{_RUST_REST}": rf"{_COMMON}|{_CONTRACTIONS}|{_WORDS}|\d{{1,3}}|{_REST}",  # Llama 3
}
# What of a character decides where these cut: both engines must agree on each.
_CLASSES = (
    (r"\p{L}", re.compile(r"[^\W\d_]")),
    (r"\p{N}", re.compile(r"\d")),
    (r"\s", re.compile(r"\s")),
    (r"(?i:[sdmtrevl])", re.compile(r"[sdmtrevlSDMTREVL]")),
)
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of added tokens that match more than their own text
_MOST_PIECES = 400_000  # remembered, in about 100 MB; then everything is forgotten and learnt again


_TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True)
class CutText:
    """A text as tokens, with the pieces they came from. Shapes: `ids` (num_tokens,), the others (num_pieces,)."""

    ids: list[int]
    pieces: list[str]
    tokens: list[bytes]  # of each piece, as 32-bit integers

    def tokens_of_spans(self, spans: list[Span]) -> list[Span] | None:
        """First token of each span of characters, and one after its last; None where a span begins or ends in a piece.

        No token reaches over the boundary of two pieces, so the tokens of a span are those of its pieces.
        """
        if not spans:
            return []
        ends = list(accumulate(map(len, self.pieces), initial=0))
        num_bytes = list(accumulate(map(len, self.tokens), initial=0))
        found = []
        for span in spans:
            first, after_last = (bisect_left(ends, position) for position in span)
            if (ends[first], ends[after_last]) != span:
                return None
            found.append((num_bytes[first] // _TOKEN_BYTES, num_bytes[after_last] // _TOKEN_BYTES))
        return found


class PieceTokenizer:
    """Tokenises texts with one tokenizer's own special tokens, cutting expression and model."""

    def __init__(self, backend: Any, settings: dict[str, Any], expression: str) -> None:
        self._form: Literal["NFC"] | None = "NFC" if settings["normalizer"] else None
        special = {token["content"]: token["id"] for token in settings["added_tokens"]}
        longest_first = sorted(special, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # which matches nothing
        self._cut = re.compile(_CUTS[expression]).findall
        self._known = _KnownPieces(backend.model, special)

    def cut(self, text: str) -> CutText | None:
        """The text as tokens; None where only the tokenizer itself can say."""
        pieces: list[str] = []
        position = 0
        for found in self._special.finditer(text):
            if not self._cut_plain(text[position : found.start()], pieces):
                return None
            pieces.append(found.group())
            position = found.end()
        if not self._cut_plain(text[position:], pieces):
            return None
        known = self._known
        if len(known) > _MOST_PIECES:
            known.forget()
        try:
            tokens = [known[piece] for piece in pieces]
        except _UnsureError:
            return None
        return CutText(array("i", b"".join(tokens)).tolist(), pieces, tokens)

    def _cut_plain(self, text: str, pieces: list[str]) -> bool:
        """Add the pieces of text without special tokens; false where it would be normalised first."""
        if self._form is not None and not text.isascii() and not unicodedata.is_normalized(self._form, text):
            return False
        pieces += self._cut(text)
        return True


class _KnownPieces(dict[str, bytes]):
    """The tokens of every piece met; those of a new one are learnt when they are first asked for.

    Raises: _UnsureError for a piece with a character that the two engines disagree over.
    """

    def __init__(self, model: Any, special: dict[str, int]) -> None:
        from tokenizers import Regex, pre_tokenizers

        self._model = model
        self._special = {name: array("i", [number]).tobytes() for name, number in special.items()}
        self._to_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
        self._classes = [
            (pre_tokenizers.Split(Regex(theirs), "removed").pre_tokenize_str, ours) for theirs, ours in _CLASSES
        ]
        self._agreed: set[str] = set()  # characters
        self.forget()

    def forget(self) -> None:
        """Keep the special tokens alone."""
        self.clear()
        self.update(self._special)

    def __missing__(self, piece: str) -> bytes:
        if not self._agreed.issuperset(piece):
            self._agreed.update(filter(self._is_agreed, piece))
            if not self._agreed.issuperset(piece):
                raise _UnsureError
        ((letters, _),) = self._to_letters(piece)
        tokens = array("i", [token.id for token in self._model.tokenize(letters)]).tobytes()
        self[piece] = tokens
        return tokens

    def _is_agreed(self, character: str) -> bool:
        # A character that this Python does not know yet may also be composed with others.
        return unicodedata.category(character) != "Cn" and all(
            (not theirs(character)) == (ours.match(character) is not None) for theirs, ours in self._classes
        )


class _UnsureError(Exception):
    """Only the tokenizer itself can say what the tokens are. Never leaves this module."""


def piece_tokenizer(backend: Any) -> PieceTokenizer | None:
    """A tokenizer by pieces that gives what `backend` (of the tokenizers library) gives; None if it cannot be sure."""
    settings = json.loads(backend.to_str())
    model, expression = settings["model"], _expression(settings)
    is_known = (
        model.get("type") == "BPE"
        and not model.get("dropout")
        and settings["normalizer"] in (None, {"type": "NFC"})
        and not backend.encode_special_tokens
        and not any(token[flag] for token in settings["added_tokens"] for flag in _FLAGS)
        and settings["truncation"] is None
        and settings["padding"] is None
        and _keeps_offsets(settings["post_processor"])
    )
    return PieceTokenizer(backend, settings, expression) if is_known and expression in _CUTS else None


def _keeps_offsets(step: dict[str, Any] | None) -> bool:
    """Whether a post-processor leaves alone where tokens begin and end; adding special tokens is not asked of it."""
    if step is None or step["type"] == "TemplateProcessing":
        return True
    if step["type"] == "Sequence":
        return all(map(_keeps_offsets, step["processors"]))
    return step["type"] == "ByteLevel" and not step["trim_offsets"]


def _expression(settings: dict[str, Any]) -> str | None:
    """The expression a byte-level pre-tokenizer cuts by; None where it does anything else."""
    steps = (settings["pre_tokenizer"] or {}).get("pretokenizers", [])
    if len(steps) != 2 or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, letters = steps
    if split["behavior"] != "Isolated" or split["invert"] or letters["add_prefix_space"] or letters["use_regex"]:
        return None
    expression: str | None = split["pattern"].get("Regex")
    return expression
