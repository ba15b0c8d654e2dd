"""Check that a chat template writes a conversation completely. Templates leave out reasoning, and unknown turns such as
those of a tool or the system.

There are two checks. Which turns a template writes, and in which order, mostly depends on the roles alone: it is tried
once for each sequence of roles, with unique contents. Then every content is searched in the text, in that order, since
some templates cut contents, such as everything before `</think>`. The search goes from the end to the beginning:
reasoning is left out of earlier answers, and a later answer may contain the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Messages = Sequence[dict[str, Any]]
RenderMessages = Callable[[Messages], str]

# The marks at the end and the beginning of reasoning in a content.
_REASONING_ENDS = re.compile(r"</think(?:ing)?>|</reasoning>|\[/THINK\]|<\|end_of_thought\|>")
_REASONING_BEGINS = re.compile(r"<think(?:ing)?>|<reasoning>|\[THINK\]|<\|begin_of_thought\|>")


@dataclass(frozen=True)
class Missing:
    """One turn that the template does not write completely."""

    turn: int  # its index
    what: Literal["turn", "content", "reasoning"]  # left out: all such turns, this content, or its reasoning


class ContentCheck:
    """Compares conversations with the text of one template. `render`: messages -> text; it may raise anything."""

    def __init__(self, render: RenderMessages) -> None:
        self._render = render
        self._orders: dict[tuple[str, ...], list[int] | None] = {}

    def missing(self, messages: Messages, text: str) -> list[Missing]:
        """The turns that `text`, rendered from the messages, does not contain completely."""
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
        """The turns in the order of the template, without those that it leaves out."""
        roles = tuple(message["role"] for message in messages)
        if roles not in self._orders:
            self._orders[roles] = self._try(roles)
        order = self._orders[roles]
        return list(range(len(messages))) if order is None else order

    def _try(self, roles: tuple[str, ...]) -> list[int] | None:
        """`_order` for unique contents; None if the template refuses these."""
        marks = [f"zq{number:05d}qz" for number in range(len(roles))]
        try:
            text = self._render([{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)])
        except Exception:  # templates raise anything, from their own messages to TypeError
            return None
        places = {number: text.find(mark) for number, mark in enumerate(marks)}
        return sorted((number for number, place in places.items() if place >= 0), key=lambda number: places[number])


@dataclass(frozen=True)
class _Reading:
    """One way to find the contents of the last turns in a text: all after `start`, except the missing ones."""

    start: int
    missing: tuple[Missing, ...]

    def cost(self) -> tuple[int, int]:
        """The number of missing contents and of missing reasonings."""
        num_contents = sum(one.what == "content" for one in self.missing)
        return num_contents, len(self.missing) - num_contents

    def before(self, turn: int, content: str, text: str, is_answer: bool) -> list[_Reading]:
        """The ways to find the content of the previous turn as well."""
        start = _start_of(content, text, self.start)
        if start is not None:
            return [_Reading(start, self.missing)]
        reasoning, answer = _split(content)
        after = _start_of(answer, text, self.start) if is_answer and answer != content else None
        if after is None:
            return [_Reading(self.start, (*self.missing, Missing(turn, "content")))]
        readings = [_Reading(after, (*self.missing, Missing(turn, "reasoning")))]
        start = _start_of(reasoning, text, after)  # it may belong to an earlier turn, which then is not found
        return readings if start is None else [*readings, _Reading(start, self.missing)]


def _best(readings: list[_Reading]) -> list[_Reading]:
    """Those that leave more text to the previous turns than any other with as few missing."""
    kept: list[_Reading] = []
    for one in sorted(readings, key=lambda reading: (-reading.start, reading.cost())):
        if not kept or one.cost() < kept[-1].cost():
            kept.append(one)
    return kept


def _split(content: str) -> tuple[str, str]:
    """The reasoning in a content, without its marks, and the answer after it."""
    ends = list(_REASONING_ENDS.finditer(content))
    if not ends:
        return "", content
    reasoning = _REASONING_BEGINS.sub("", content[: ends[-1].start()], count=1)
    return reasoning.strip(), content[ends[-1].end() :].strip()


def _start_of(content: str, text: str, end: int) -> int | None:
    """The last start of a content before `end` in the text: unchanged, as JSON, or with other white space."""
    for written in (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1]):
        place = text.rfind(written, 0, end)
        if place >= 0:
            return place
    places = re.finditer(r"\s+".join(map(re.escape, content.split())), text[:end])
    return max((place.start() for place in places), default=None)
