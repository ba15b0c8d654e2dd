"""Distinguish special tokens from text of the same spelling.

A tokenizer takes every `</s>` in a text for the token. In a conversation only the chat template's own tokens count: one
in a user's text would be a control token from the user, one in an answer would end it. So such text is replaced by
placeholders, one private-use character for each token, before the template renders the conversation. Afterwards the
text is restored, or tokenized as text by a copy of the tokenizer whose special tokens have other names.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tunebook.errors import DataError, RequestError
from tunebook.model.tokenizer import stop_token_ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Span = tuple[int, int]  # characters of a text: start, end

# Private-use characters of plane 15: the first half stands for hidden text, the second for a renamed token.
_HIDDEN, _RENAMED, _END = 0xF0000, 0xF8000, 0xFFFFE
_PLACEHOLDERS = re.compile(f"[{chr(_HIDDEN)}-{chr(_END - 1)}]")


class SpecialTokens:
    """The control tokens of one tokenizer: those marked as special, and those that end generation."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._backend: Any = tokenizer.backend_tokenizer
        stops = stop_token_ids(tokenizer)
        added = sorted(tokenizer.added_tokens_decoder.items())
        self._names = [token.content for number, token in added if token.special or number in stops]
        self._numbers = {name: number for number, name in enumerate(self._names)}
        self.any = any_of(self._names)

    def first_in(self, text: str) -> str | None:
        """The first special token whose text is in `text`; None if there is none."""
        match = self.any.search(text)
        return None if match is None else match.group()

    def hide(self, content: str, names: Collection[str] | None = None) -> str:
        """The content with a placeholder for the text of each special token, or of those in `names`.

        Raises: DataError for a content that holds such placeholders itself.
        """
        if _PLACEHOLDERS.search(content):
            raise DataError(
                "it holds the text of a special token and private-use characters of Unicode plane 15, which stand "
                "for such text here; remove one of them",
                problem_id="special-token-in-content",
            )
        pattern = self.any if names is None else any_of([name for name in names if name in self._numbers])
        return pattern.sub(lambda match: chr(_HIDDEN + self._numbers[match.group()]), content)

    def show(self, text: str, spans: Sequence[Span]) -> tuple[str, list[Span]]:
        """A text with the hidden texts restored, and its spans."""
        return substitute(_PLACEHOLDERS, text, spans, self._shown)

    def encode_apart(self, text: str, spans: Sequence[Span]) -> tuple[Any, list[Span]]:
        """The `tokenizers.Encoding` of a text with hidden texts as plain text, and its spans in that encoding.

        Raises: RequestError for a tokenizer that cannot distinguish the two.
        """
        if not _PLACEHOLDERS.search(text):
            return self._backend.encode(text, add_special_tokens=False), list(spans)
        written = re.compile(f"{self.any.pattern}|{_PLACEHOLDERS.pattern}")
        renamed, moved = substitute(written, text, spans, self._renamed)
        return self.plain_backend.encode(renamed, add_special_tokens=False), moved

    def _shown(self, placeholder: str) -> str:
        return self._names[ord(placeholder) - _HIDDEN]

    def _renamed(self, written: str) -> str:
        number = self._numbers.get(written)
        return self._shown(written) if number is None else chr(_RENAMED + number)

    @cached_property
    def plain_backend(self) -> Any:
        """A copy of the tokenizer that treats the text of a special token as plain text.

        Raises: RequestError for a tokenizer whose special tokens cannot be renamed.
        """
        from tokenizers import Tokenizer

        content = json.loads(self._backend.to_str())
        new = {name: chr(_RENAMED + number) for name, number in self._numbers.items()}
        for token in content["added_tokens"]:
            if token["content"] in new:
                token |= {"content": new[token["content"]], "normalized": False}
        model = content["model"]
        words = model.get("vocab")
        if isinstance(words, dict):
            model["vocab"] = {new.get(word, word): number for word, number in words.items()}
        elif isinstance(words, list):
            model["vocab"] = [[new.get(word, word), score] for word, score in words]
        if model.get("unk_token") in new:
            model["unk_token"] = new[model["unk_token"]]
        renamed = Tokenizer.from_str(json.dumps(content))
        if any(renamed.token_to_id(new[name]) != self._backend.token_to_id(name) for name in self._names):
            raise RequestError(
                "dataset.special_tokens_in_content: this tokenizer cannot distinguish a special token from text of "
                "the same spelling; type dataset.special_tokens_in_content=keep to take such text for the token, or "
                "dataset.special_tokens_in_content=refuse",
                problem_id="special-token-in-content",
            )
        return renamed


def any_of(names: Collection[str]) -> re.Pattern[str]:
    """An expression for the longest of these names."""
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")  # which matches nothing


def substitute(
    pattern: re.Pattern[str], text: str, spans: Sequence[Span], replace: Callable[[str], str]
) -> tuple[str, list[Span]]:
    """The text with every match replaced, and its spans, whose ends lie between matches."""
    pieces: list[str] = []
    starts, shifts = [0], [0]  # the shift from each character on
    end = 0
    for match in pattern.finditer(text):
        new = replace(match.group())
        pieces += [text[end : match.start()], new]
        end = match.end()
        starts.append(end)
        shifts.append(shifts[-1] + len(new) - len(match.group()))
    pieces.append(text[end:])

    def moved(position: int) -> int:
        return position + shifts[bisect_right(starts, position) - 1]

    return "".join(pieces), [(moved(start), moved(stop)) for start, stop in spans]
