"""Texts as tokens, and the tokens that hold given spans of their characters: by pieces where that is sure, or else
by the tokenizer and its offsets. Both say the same, and of the first the tokenizer is asked now and then whether so.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tunebook.data.pieces import CutText, piece_tokenizer
from tunebook.data.special_tokens import Span, SpecialTokens
from tunebook.errors import TunebookError

BY_LIBRARY = "TUNEBOOK_TOKENIZE_BY_LIBRARY"  # set to anything in the environment, every text goes to the tokenizer
_COMPARE_EVERY = 100  # of the texts cut by pieces; costs 1% of the tokenizer's time


@dataclass(frozen=True)
class Tokenised:
    """One text. Shapes: `ids` (num_tokens,), `ranges` (num_spans,)."""

    ids: list[int]
    ranges: list[Span]  # of tokens: the first that has a character of the span, and one after the last
    num_straddling: int = 0  # spans whose first token begins before them


class SpanTokenizer:
    """Tokenises texts that have their special tokens written out: none is added."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self._pieces = None if os.environ.get(BY_LIBRARY) else piece_tokenizer(backend)

    def tokenise(self, texts: Sequence[str], spans: Sequence[list[Span]]) -> list[Tokenised]:
        """Every text, with the tokens of its spans. Raises: TunebookError where the two ways differ."""
        done = [self._by_pieces(text, wanted) for text, wanted in zip(texts, spans, strict=True)]
        left = [number for number, one in enumerate(done) if one is None]
        compared = [number for number, one in enumerate(done) if one is not None][::_COMPARE_EVERY]
        asked = left + compared
        encodings = self._backend.encode_batch([texts[number] for number in asked], add_special_tokens=False)
        for number, encoding in zip(asked, encodings, strict=True):
            theirs = _by_offsets(encoding, spans[number])
            if done[number] not in (None, theirs):
                raise _differs(texts[number])
            done[number] = theirs
        return [one for one in done if one is not None]

    def tokenise_apart(self, special: SpecialTokens, text: str, spans: list[Span]) -> Tokenised:
        """A text that hides the text of special tokens, which become tokens of their letters."""
        return _by_offsets(*special.encode_apart(text, spans))

    def _by_pieces(self, text: str, spans: list[Span]) -> Tokenised | None:
        if self._pieces is None:
            return None
        cut: CutText | None = self._pieces.cut(text)
        ranges = cut.tokens_of_spans(spans) if cut is not None else None
        return Tokenised(cut.ids, ranges) if cut is not None and ranges is not None else None


def tokens_of_span(starts: list[int], ends: list[int], span: Span) -> Span:
    """The tokens that share at least one character with a span: first, and one after the last.

    Shapes: `starts` and `ends` (num_tokens,), the characters of each token, neither ever decreasing.
    """
    return bisect_right(ends, span[0]), bisect_left(starts, span[1])


def _differs(text: str) -> TunebookError:
    return TunebookError(
        f"a text becomes other tokens by pieces than by the tokenizer itself: {text[:200]!r}. Nothing was written; "
        f"type {BY_LIBRARY}=1 before the command to tokenise without pieces, and report the text",
        problem_id="tokens-differ",
    )


def _by_offsets(encoding: Any, spans: Sequence[Span]) -> Tokenised:
    if not spans:
        return Tokenised(encoding.ids, [])
    offsets = encoding.offsets
    starts, ends = [start for start, _ in offsets], [end for _, end in offsets]
    ranges = [tokens_of_span(starts, ends, span) for span in spans]
    num_straddling = sum(starts[first : first + 1] < [span[0]] for (first, _), span in zip(ranges, spans, strict=True))
    return Tokenised(encoding.ids, ranges, num_straddling)
