"""Check that a chat template writes a conversation completely. Templates leave out reasoning, tools, calls of tools,
all calls but the first, and unknown turns such as those of a tool or the system.

There are two checks. What a template writes, and in which order, mostly depends on which turns have what: it is tried
once for each such form, with unique words in every place. Then every content is searched in the text, in that order,
since some templates cut contents, such as everything before `</think>`. The search goes from the end to the beginning:
reasoning is left out of earlier answers, and a later answer may contain the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from tunebook.data.conversation import Conversation, split_reasoning

Render = Callable[[Conversation], str]
What = Literal["turn", "content", "reasoning", "calls", "tools", "name"]

_MOST_FORMS = 10_000  # kept; a data set has far fewer


@dataclass(frozen=True)
class Missing:
    """What the template does not write of one turn, or of the tools."""

    turn: int  # its index; of tools 0
    what: What  # left out: such turns, this content, its reasoning, calls of tools, the tools, or a name


@dataclass(frozen=True)
class _Tried:
    """What a template does with conversations of one form."""

    order: list[int]  # of the turns with a content, as the template writes them
    missing: list[Missing]


class ContentCheck:
    """Compares conversations with the text of one template. `render`: conversation -> text; it may raise anything."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self._tried: dict[tuple[object, ...], _Tried] = {}

    def missing(self, conversation: Conversation, text: str) -> list[Missing]:
        """What `text`, rendered from the conversation, does not contain of it."""
        messages = conversation.messages
        tried = self._form(conversation)
        readings = [_Reading(len(text), ())]
        for turn in reversed(tried.order):
            is_answer = messages[turn]["role"] == "assistant"
            content = messages[turn]["content"].strip()
            readings = _best([longer for one in readings for longer in one.before(turn, content, text, is_answer)])
        found = min(readings, key=_Reading.cost).missing
        return sorted([*tried.missing, *found], key=lambda missing: missing.turn)

    def _form(self, conversation: Conversation) -> _Tried:
        form = (
            bool(conversation.tools),
            json.dumps(conversation.template_kwargs, sort_keys=True) if conversation.template_kwargs else None,
            *(_form_of_turn(turn) for turn in conversation.messages),
        )
        if form not in self._tried:
            if len(self._tried) >= _MOST_FORMS:
                self._tried.clear()
            self._tried[form] = self._try(conversation)
        return self._tried[form]

    def _try(self, conversation: Conversation) -> _Tried:
        """Render a conversation of the same form with unique words; all is written if the template refuses these."""
        messages = conversation.messages
        with_content = [turn for turn, message in enumerate(messages) if message["content"]]
        tools = None
        if conversation.tools:
            function = {"name": "zqtoolqz", "description": "zqaboutqz", "parameters": _parameters("zqparameterqz")}
            tools = [{"type": "function", "function": function}]
        marked = [_marked(turn, message) for turn, message in enumerate(messages)]
        try:
            text = self._render(replace(conversation, messages=marked, tools=tools))
        except Exception:  # templates raise anything, from their own messages to TypeError
            return _Tried(order=with_content, missing=[])
        missing = [one for turn, message in enumerate(marked) for one in _missing_words(turn, message, text)]
        if tools and not all(word in text for word in ("zqtoolqz", "zqaboutqz", "zqparameterqz")):
            missing.append(Missing(0, "tools"))
        places = {turn: text.find(marked[turn]["content"]) for turn in with_content}
        order = sorted((turn for turn, place in places.items() if place >= 0), key=lambda turn: places[turn])
        return _Tried(order=order, missing=missing)


def _form_of_turn(turn: dict[str, Any]) -> tuple[object, ...]:
    return (
        turn["role"],
        bool(turn["content"]),
        "reasoning" in turn,
        len(turn.get("tool_calls", ())),
        "name" in turn,
        "tool_call_id" in turn,
    )


def _marked(turn: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message of the same form with unique words."""
    made = {"role": message["role"], "content": f"zqc{turn:05d}qz" if message["content"] else message["content"]}
    for key in ("reasoning", "name", "tool_call_id"):
        if key in message:
            made[key] = f"zq{key[0]}{turn:05d}qz"
    if "tool_calls" in message:
        made["tool_calls"] = [
            {
                **call,
                "function": {"name": f"zqf{turn:05d}x{number}qz", "arguments": {"argument": f"zqa{turn}x{number}qz"}},
            }
            for number, call in enumerate(message["tool_calls"])
        ]
    return made


def _parameters(name: str) -> dict[str, Any]:
    parameter = {"type": "string", "description": "a word"}
    return {"type": "object", "properties": {name: parameter}, "required": [name]}


def _missing_words(turn: int, message: dict[str, Any], text: str) -> list[Missing]:
    """Which parts of a marked message are not in the text. `tool_call_id` is not asked for: it only links turns."""
    missing = []
    calls = [call["function"] for call in message.get("tool_calls", ())]
    if any(call["name"] not in text or call["arguments"]["argument"] not in text for call in calls):
        missing.append(Missing(turn, "calls"))
    if message.get("reasoning", "") not in text:
        missing.append(Missing(turn, "reasoning"))
    if message["content"] and message["content"] not in text:
        missing = [Missing(turn, "turn" if not calls or missing else "content")]
    if message["role"] != "tool" and message.get("name", "") not in text:
        missing.append(Missing(turn, "name"))
    return missing


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
        reasoning, answer = split_reasoning(content)
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


def _start_of(content: str, text: str, end: int) -> int | None:
    """The last start of a content before `end` in the text: unchanged, as JSON, or with other white space."""
    for written in (content, json.dumps(content, ensure_ascii=False)[1:-1], json.dumps(content)[1:-1]):
        place = text.rfind(written, 0, end)
        if place >= 0:
            return place
    places = re.finditer(r"\s+".join(map(re.escape, content.split())), text[:end])
    return max((place.start() for place in places), default=None)
