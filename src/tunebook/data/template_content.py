"""Whether a chat template writes what a conversation says: templates leave out turns they do not know, such as a tool's
or the system's, and reasoning.

Two looks at each conversation. Which turns a template writes, and in which order, mostly depends on the roles alone: it
is tried once for each sequence of roles, with contents that stand nowhere else. Then every content is looked for in the
text, in that order, since some templates cut contents, such as what stands before `</think>`. That goes from the end to
the beginning: reasoning is left out of earlier answers, and a later one may say the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Messages = Sequence[dict[str, Any]]
RenderMessages = Callable[[Messages], str]

# What ends reasoning that is written into the content, and what begins it.
_REASONING_ENDS = re.compile(r"</think(?:ing)?>|</reasoning>|\[/THINK\]|<\|end_of_thought\|>")
_REASONING_BEGINS = re.compile(r"<think(?:ing)?>|<reasoning>|\[THINK\]|<\|begin_of_thought\|>")


@dataclass(frozen=True)
class Missing:
    """One turn that the template does not write as it is."""

    turn: int  # its index
    what: Literal["turn", "content", "reasoning"]  # the template leaves out such turns, this content, or its reasoning


class ContentCheck:
    """Compares conversations with what one template writes. `render`: messages -> text; it may raise anything."""

    def __init__(self, render: RenderMessages) -> None:
        self._render = render
        self._orders: dict[tuple[str, ...], list[int] | None] = {}

    def missing(self, messages: Messages, text: str) -> list[Missing]:
        """The turns that `text`, which the template wrote of the messages, does not hold as they are."""
        order = self._order(messages)
        left_out = [Missing(turn, "turn") for turn in range(len(messages)) if turn not in order]
        readings = [_Reading(len(text), ())]
        for turn in reversed(order):
            is_answer = messages[turn]["role"] == "assistant"
            content = messages[turn]["content"].strip()
            readings = _best([longer for one in readings for longer in one.before(turn, content, text, is_answer)])
        found = min(readings, key=_Reading.cost).missing
        return sorted([*left_out, *found], key=lambda missing: missing.turn)

    def _order(self, messages: Messages) -> list[int]:
        """The turns in the order in which the template writes them, without those that it leaves out."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._orders:
            self._orders[roles] = self._try(roles)
        order = self._orders[roles]
        return list(range(len(messages))) if order is None else order

    def _try(self, roles: tuple[str, ...]) -> list[int] | None:
        """`_order` for contents that stand nowhere else; None where the template refuses these."""
        marks = [f"zq{number:05d}qz" for number in range(len(roles))]
        try:
            text = self._render([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        except Exception:  # templates raise anything, from their own messages to TypeError
            return None
        places = {number: text.find(mark) for number, mark in enumerate(marks)}
        return sorted((number for number, place in places.items() if place >= 0), key=lambda number: places[number])


@dataclass(frozen=True)
class _Reading:
    """One way to find the contents of the last turns in a text: all of them after `start`, but for what is missing."""

    start: int
    missing: tuple[Missing, ...]

    def cost(self) -> tuple[int, int]:
        """How many contents are missing, and how many reasonings."""
        num_contents = sum(one.what == "content" for one in self.missing)
        return num_contents, len(self.missing) - num_contents

    def before(self, turn: int, content: str, text: str, is_answer: bool) -> list[_Reading]:
        """The ways to find the content of the turn before as well."""
        start = _start_of(content, text, self.start)
        if start is not None:
            return [_Reading(start, self.missing)]
        reasoning, answer = _split(content)
        after = _start_of(answer, text, self.start) if is_answer and answer != content else None
        if after is None:
            return [_Reading(self.start, (*self.missing, Missing(turn, "content")))]
        readings = [_Reading(after, (*self.missing, Missing(turn, "reasoning")))]
        start = _start_of(reasoning, text, after)  # it may be that of an earlier turn, which then is not found
        return readings if start is None else [*readings, _Reading(start, self.missing)]


def _best(readings: list[_Reading]) -> list[_Reading]:
    """Those that leave more of the text to the turns before than any that misses as little."""
    kept: list[_Reading] = []
    for one in sorted(readings, key=lambda reading: (-reading.start, reading.cost())):
        if not kept or one.cost() < kept[-1].cost():
            kept.append(one)
    return kept


def _split(content: str) -> tuple[str, str]:
    """Reasoning that is written into a content, without its marks, and the answer after it."""
    ends = list(_REASONING_ENDS.finditer(content))
    if not ends:
        return "", content
    reasoning = _REASONING_BEGINS.sub("", content[: ends[-1].start()], count=1)
    return reasoning.strip(), content[ends[-1].end() :].strip()


def _start_of(content: str, text: str, end: int) -> int | None:
    """The last place before `end` where a content starts in the text: as it is, as JSON, or with other white space."""
    for written in (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1]):
        place = text.rfind(written, 0, end)
        if place >= 0:
            return place
    places = re.finditer(r"\s+".join(map(re.escape, content.split())), text[:end])
    return max((place.start() for place in places), default=None)
