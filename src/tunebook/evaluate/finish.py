"""How a generated answer ended: an end token, a stop sequence of its task, or the limit of new tokens.

The harness returns texts only. `FinishLog` watches its generation, and each text is returned as `GeneratedText`, which
the harness passes on like any other.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any


class Finish(StrEnum):
    """Why the generation of an answer ended."""

    eos = "eos"  # a token that ends a text or a turn
    stop = "stop"  # a stop sequence of the task
    length = "length"  # the limit of new tokens


class GeneratedText(str):
    """An answer that knows how it ended; also after pickling, as a helper sends it."""

    finish: Finish | None = None

    @classmethod
    def of(cls, text: str, finish: Finish | None) -> GeneratedText:
        """Return the text with how it ended."""
        generated = cls(text)
        generated.finish = finish
        return generated


def finish_of(tokens: Sequence[int], text: str, stop_ids: Collection[int], stops: Iterable[str]) -> Finish:
    """Return how one generation ended. `tokens` are all new ones, `text` those before the first end token.

    In a batch, a row continues after its stop sequence until all rows have ended, and the harness cuts its text.
    """
    if any(stop and stop in text for stop in stops):
        return Finish.stop
    return Finish.eos if any(token in stop_ids for token in tokens) else Finish.length


class FinishLog:
    """The ends of the requests of one call, by request."""

    def __init__(self) -> None:
        self._batch: deque[Finish] = deque()  # of the batch that was just generated, in its order
        self._found: defaultdict[tuple[str, str], deque[Finish]] = defaultdict(deque)

    def begin(self) -> None:
        """Forget earlier calls, and one that was given up because memory ran out."""
        self._batch.clear()
        self._found.clear()

    def note_batch(self, finishes: Iterable[Finish]) -> None:
        """Note the rows of a batch."""
        self._batch = deque(finishes)

    def note_answer(self, arguments: Sequence[Any]) -> None:
        """Note that the next row of the batch is the answer to the request with these arguments."""
        if self._batch:
            self._found[_key(arguments)].append(self._batch.popleft())

    def with_finish(self, requests: Iterable[Sequence[Any]], texts: Iterable[str]) -> list[GeneratedText]:
        """Return each request's text with its end. Several samples of one request were answered in their order."""
        found = [self._found[_key(request)] for request in requests]
        return [GeneratedText.of(text, one.popleft() if one else None) for one, text in zip(found, texts, strict=True)]


def _key(arguments: Sequence[Any]) -> tuple[str, str]:
    prompt, options = arguments
    return str(prompt), repr(sorted(options.items()) if isinstance(options, Mapping) else options)
