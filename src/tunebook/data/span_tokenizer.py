"""Texts as tokens, and the tokens of given spans of characters: fast by pieces, or by the tokenizer and its offsets.

A byte-level BPE cuts text at its special tokens, then by a regular expression into pieces (mostly words), and turns
each piece into tokens separately. Most of its time is spent on cutting. Here Python's regular expressions cut, and the
tokenizer's model computes the tokens of each piece once. A conversation of 500 tokens takes 0.45 ms of a core this
way and 1.4 ms with `encode_batch`. Preparing 8,000 conversations takes 12 s of CPU time, 19 s with the tokenizer's
offsets alone, and 37 s with TRL (tests/bench/preparation.py): too little of the difference would be left.

Both ways give the same tokens: only tokenizers with a known expression are cut, every character is compared in both
engines before a piece with it is used, and of the texts that were cut the tokenizer encodes every hundredth again. All
others go to the tokenizer.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from tunebook.data.special_tokens import Span, any_of
from tunebook.errors import TunebookError

BY_LIBRARY = "TUNEBOOK_TOKENIZE_BY_LIBRARY"  # environment variable: if set, every text goes to the tokenizer
_COMPARE_EVERY = 100  # of the texts cut by pieces: 1% of the tokenizer's time


@dataclass(frozen=True)
class Tokenized:
    """One text. Shapes: `ids` (num_tokens,), `ranges` (num_spans,)."""

    ids: list[int]
    ranges: list[Span]  # of tokens: the first that has a character of the span, and one after the last
    num_straddling: int = 0  # spans whose first token begins before them


class SpanTokenizer:
    """Tokenizes texts that contain their special tokens; none is added."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._pieces = None if os.environ.get(BY_LIBRARY) else piece_tokenizer(backend)

    def tokenize(self, texts: Sequence[str], spans: Sequence[list[Span]]) -> list[Tokenized]:
        """The tokens of every text and of its spans. Raises: TunebookError if the two ways differ."""
        done: list[Tokenized | None] = [None] * len(texts)
        if self._pieces is not None:
            done = [self._pieces.tokenize(text, wanted) for text, wanted in zip(texts, spans, strict=True)]
        left = [number for number, one in enumerate(done) if one is None]
        compared = [number for number, one in enumerate(done) if one is not None][::_COMPARE_EVERY]
        asked = left + compared
        encodings = self._backend.encode_batch([texts[number] for number in asked], add_special_tokens=False)
        for number, encoding in zip(asked, encodings, strict=True):
            theirs = by_offsets(encoding, spans[number])
            if done[number] not in (None, theirs):
                raise _differs(texts[number])
            done[number] = theirs
        return [one for one in done if one is not None]


def tokens_of_span(starts: list[int], ends: list[int], span: Span) -> Span:
    """The tokens that share at least one character with a span: the first, and one after the last.

    Shapes: `starts` and `ends` (num_tokens,), the characters of each token, neither ever decreasing.
    """
    return bisect_right(ends, span[0]), bisect_left(starts, span[1])


def _differs(text: str) -> TunebookError:
    return TunebookError(
        f"a text becomes other tokens by pieces than by the tokenizer itself: {text[:200]!r}. Nothing was written; "
        f"type {BY_LIBRARY}=1 before the command to tokenize without pieces, and report the text",
        problem_id="tokens-differ",
    )


def by_offsets(encoding: Any, spans: Sequence[Span]) -> Tokenized:
    """The tokens of a `tokenizers.Encoding` and of spans of its text."""
    if not spans:
        return Tokenized(encoding.ids, [])
    offsets = encoding.offsets
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    ranges = [tokens_of_span(starts, ends, span) for span in spans]
    num_straddling = sum(starts[first : first + 1] < [span[0]] for (first, _), span in zip(ranges, spans, strict=True))
    return Tokenized(encoding.ids, ranges, num_straddling)


# Expressions of tokenizer.json, and the same for Python, which has no \p{L} and \p{N}: its \w is letters, digits and
# the underscore. Characters that the two engines classify differently (such as "½") are found below.
_CONTRACTIONS = r"'(?:[sdmt]|re|ve|ll|[SDMT]|[rR][eE]|[vV][eE]|[lL][lL])"
_WORDS = r"(?:[^\r\n\w]|_)?[^\W\d_]+"
_REST = r" ?(?:[^\s\w]|_)+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_RUST_START = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_RUST_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# Most pieces are words of Latin letters, with or without a space before: tried first, which is faster.
_LATIN = f"[{''.join(letter for letter in map(chr, range(0x180)) if letter.isalpha())}]"
_COMMON = rf" ?{_LATIN}+(?![^\W\d_])"
_CUTS = {
    rf"{_RUST_START}\p{{N}}{_RUST_REST}": rf"{_COMMON}|{_CONTRACTIONS}|{_WORDS}|\d|{_REST}",  # Qwen 2, 2.5 and 3
    rf"{_RUST_START}\p{{N}}{{1,3}}{_RUST_REST}": rf"{_COMMON}|{_CONTRACTIONS}|{_WORDS}|\d{{1,3}}|{_REST}",  # Llama 3
}
# The classes by which the expressions cut: both engines must agree on every character.
_CLASSES = (
    (r"\p{L}", re.compile(r"[^\W\d_]")),
    (r"\p{N}", re.compile(r"\d")),
    (r"\s", re.compile(r"\s")),
    (r"(?i:[sdmtrevl])", re.compile(r"[sdmtrevlSDMTREVL]")),
)
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized")  # of added tokens that match more than their text
_MOST_PIECES = 400_000  # remembered, about 100 MB; then all are forgotten
# Tools and system prompts are the same in many documents: from this length on a text between two special tokens is
# remembered whole when it comes again.
_SHORTEST_REPEATED = 400  # characters
_MOST_REPEATED_CHARACTERS = 4_000_000  # of such texts, with their tokens about 8 MB
_MOST_SEEN = 100_000  # hashes of such texts, about 8 MB
_TOKEN_BYTES = array("i").itemsize


class PieceTokenizer:
    """Tokenizes texts with the special tokens, the expression and the model of one tokenizer."""

    def __init__(self, backend: Any, settings: dict[str, Any], expression: str) -> None:
        self._form: Literal["NFC"] | None = "NFC" if settings["normalizer"] else None
        special = {token["content"]: token["id"] for token in settings["added_tokens"]}
        self._special = any_of(special)
        self._cut = re.compile(_CUTS[expression]).findall
        self._known = _KnownPieces(backend.model, special)
        self._seen: set[int] = set()  # hashes of long texts between special tokens that came once
        self._num_repeated_characters = 0

    def tokenize(self, text: str, spans: Sequence[Span] = ()) -> Tokenized | None:
        """A text's tokens; None if only the tokenizer itself can be trusted with it, or a span ends inside a piece."""
        known = self._known
        if len(known) > _MOST_PIECES or self._num_repeated_characters > _MOST_REPEATED_CHARACTERS:
            known.forget()
            self._num_repeated_characters = 0
        if len(self._seen) > _MOST_SEEN:
            self._seen.clear()
        boundaries = sorted(position for span in spans for position in span)
        pieces: list[str] = []
        position = 0
        try:
            for found in self._special.finditer(text):
                self._add_pieces(text[position : found.start()], position, boundaries, pieces)
                pieces.append(found.group())
                position = found.end()
            self._add_pieces(text[position:], position, boundaries, pieces)
            tokens = [known[piece] for piece in pieces]
        except _UnsureError:
            return None
        ranges = _tokens_of_spans(pieces, tokens, spans) if spans else []
        return None if ranges is None else Tokenized(array("i", b"".join(tokens)).tolist(), ranges)

    def _add_pieces(self, text: str, start: int, boundaries: list[int], pieces: list[str]) -> None:
        """Add the pieces of a text without special tokens, which begins at `start` of the whole.

        Where a span begins or ends, no piece is longer than what the tokenizer's expression cuts. Raises: _UnsureError
        if the text would be normalized first.
        """
        inside = bisect_right(boundaries, start), bisect_left(boundaries, start + len(text))
        is_whole = len(text) >= _SHORTEST_REPEATED and inside[0] >= inside[1]  # no span begins or ends inside
        if is_whole and text in self._known:
            pieces.append(text)
            return
        if self._form is not None and not text.isascii() and not unicodedata.is_normalized(self._form, text):
            raise _UnsureError
        found = self._cut(text)
        if is_whole and hash(text) in self._seen:
            self._known[text] = b"".join([self._known[piece] for piece in found])
            self._num_repeated_characters += len(text)
        elif is_whole:
            self._seen.add(hash(text))
        pieces += found


def _tokens_of_spans(pieces: list[str], tokens: list[bytes], spans: Sequence[Span]) -> list[Span] | None:
    """The first token of each span, and one after its last; None if a span begins or ends inside a piece.

    No token crosses the boundary of two pieces, so the tokens of a span are those of its pieces. Shapes: `pieces` and
    `tokens`, which are 32-bit integers, (num_pieces,).
    """
    ends = list(accumulate(map(len, pieces), initial=0))
    num_bytes = list(accumulate(map(len, tokens), initial=0))
    found = []
    for span in spans:
        first, after_last = (bisect_left(ends, position) for position in span)
        if (ends[first], ends[after_last]) != span:
            return None
        found.append((num_bytes[first] // _TOKEN_BYTES, num_bytes[after_last] // _TOKEN_BYTES))
    return found


class _KnownPieces(dict[str, bytes]):
    """The tokens by piece; those of a new piece are computed when they are first needed.

    Raises: _UnsureError for a piece with a character that the two engines classify differently.
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
        """Keep only the special tokens."""
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
        # A character that this Python does not know may also be composed with others.
        return unicodedata.category(character) != "Cn" and all(
            (not theirs(character)) == (ours.match(character) is not None) for theirs, ours in self._classes
        )


class _UnsureError(Exception):
    """Only the tokenizer itself can be trusted with a text. Never leaves this module."""


def piece_tokenizer(backend: Any) -> PieceTokenizer | None:
    """A tokenizer by pieces with the same tokens as `backend` (of tokenizers); None if equality is not certain."""
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
    """Whether a post-processor does not move the tokens' offsets; it is not asked to add special tokens."""
    if step is None or step["type"] == "TemplateProcessing":
        return True
    if step["type"] == "Sequence":
        return all(map(_keeps_offsets, step["processors"]))
    return step["type"] == "ByteLevel" and not step["trim_offsets"]


def _expression(settings: dict[str, Any]) -> str | None:
    """The expression of a byte-level pre-tokenizer; None if it does anything else."""
    steps = (settings["pre_tokenizer"] or {}).get("pretokenizers", [])
    if len(steps) != 2 or [step["type"] for step in steps] != ["Split", "ByteLevel"]:
        return None
    split, letters = steps
    if split["behavior"] != "Isolated" or split["invert"] or letters["add_prefix_space"] or letters["use_regex"]:
        return None
    expression: str | None = split["pattern"].get("Regex")
    return expression
