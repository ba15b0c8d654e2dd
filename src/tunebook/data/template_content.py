"""Find where a chat template writes each part of a conversation, and which parts it leaves out.

The letters of a part may stand anywhere in the text: an answer `e` is also part of `<|im_end|>`. So the conversation is
rendered again with a private-use character before and after each part. Without these marks the text must be the same;
then they show where the template writes the part, whatever its letters are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tunebook.data.conversation import Conversation, split_reasoning
from tunebook.data.special_tokens import Span

Render = Callable[[Conversation], str]
What = Literal["turn", "content", "reasoning", "calls", "tools", "name"]

_TOOLS = -1  # in place of a turn's index
# Plane 16; placeholders of special tokens are in plane 15.
_FIRST_MARK = 0x100000
_MARKS = re.compile("[\U00100000-\U0010fffd]")
# Templates read tags at the edges of a content (Qwen 3: `content.startswith('<tool_response>')`), so marks go inside.
_LEADING_TAG, _TRAILING_TAG = re.compile(r"<[^<>]*>\s*"), re.compile(r"\s*<[^<>]*>$")


@dataclass(frozen=True)
class Missing:
    """What the template does not write of one turn, or of the tools."""

    turn: int  # its index; of tools 0
    what: What  # left out: the whole turn, its content, its reasoning, calls of tools, the tools, or a name


@dataclass(frozen=True)
class Places:
    """Where a text has the turns of a conversation.

    `turns`: from the first to the last character of reasoning, content and calls, by the index of the turn.
    """

    turns: dict[int, Span]
    missing: list[Missing]


@dataclass(frozen=True)
class _Part:
    turn: int
    what: What
    text: str


@dataclass
class _Marker:
    """Puts marks around the parts of a conversation that belong to `turns`."""

    turns: Collection[int]
    parts: list[_Part] = field(default_factory=list)

    def conversation(self, conversation: Conversation) -> Conversation:
        """The conversation with marks."""
        messages = [self._message(turn, message) for turn, message in enumerate(conversation.messages)]
        tools = conversation.tools
        if tools and _TOOLS in self.turns:
            tools = [self._tool(tool) for tool in tools]
        return replace(conversation, messages=messages, tools=tools)

    def _message(self, turn: int, message: dict[str, Any]) -> dict[str, Any]:
        if turn not in self.turns:
            return message
        marked = dict(message)
        if message["content"]:
            marked["content"] = self._content(turn, message["content"], is_answer=message["role"] == "assistant")
        if message.get("reasoning"):
            marked["reasoning"] = self._mark(turn, "reasoning", message["reasoning"])
        if message.get("name") and message["role"] != "tool":  # a tool's name is in the call
            marked["name"] = self._mark(turn, "name", message["name"])
        if "tool_calls" in message:
            marked["tool_calls"] = [
                call | {"function": self._texts(turn, "calls", call["function"])} for call in message["tool_calls"]
            ]
        return marked

    def _content(self, turn: int, content: str, *, is_answer: bool) -> str:
        reasoning, answer = split_reasoning(content) if is_answer else ("", content)
        if not reasoning:
            return self._mark(turn, "content", content)
        answer_start = len(content.rstrip()) - len(answer)
        start = content.index(reasoning)
        end = start + len(reasoning)
        return (
            content[:start]
            + self._mark(turn, "reasoning", reasoning)
            + content[end:answer_start]
            + self._mark(turn, "content", content[answer_start:])
        )

    def _tool(self, tool: dict[str, Any]) -> dict[str, Any]:
        """A tool with marks around its name and descriptions. Names of parameters stay: some templates sort them."""
        function = self._descriptions(tool.get("function", tool))
        function["name"] = self._mark(_TOOLS, "tools", function["name"])
        return tool | {"function": function} if "function" in tool else function

    def _descriptions(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._descriptions(one) for one in value]
        if not isinstance(value, dict):
            return value
        return {
            key: self._mark(_TOOLS, "tools", one)
            if key == "description" and isinstance(one, str)
            else self._descriptions(one)
            for key, one in value.items()
        }

    def _texts(self, turn: int, what: What, value: Any) -> Any:
        if isinstance(value, str):
            return self._mark(turn, what, value)
        if isinstance(value, list):
            return [self._texts(turn, what, one) for one in value]
        if isinstance(value, dict):
            return {key: self._texts(turn, what, one) for key, one in value.items()}
        return value

    def _mark(self, turn: int, what: What, text: str) -> str:
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if tag := _LEADING_TAG.match(text, start, end):
            start = tag.end()
        if text.endswith(">", start, end) and (tag := _TRAILING_TAG.search(text, start, end)):
            end = tag.start()
        if start >= end:  # nothing but a tag
            start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        if start >= end:
            return text
        mark = _FIRST_MARK + 2 * len(self.parts)
        self.parts.append(_Part(turn, what, text[start:end]))
        return f"{text[:start]}{chr(mark)}{text[start:end]}{chr(mark + 1)}{text[end:]}"


def find_places(render: Render, conversation: Conversation, text: str) -> Places:
    """Where `text`, which `render` made of the conversation, has its turns, and what it does not contain of them.

    `render` may raise anything.
    """
    turns = range(_TOOLS, len(conversation.messages))
    found = _find(render, conversation, text, turns)
    if found is not None:
        return found
    # The template changes a part by its letters, or cuts it off: find which turn it is.
    together = Places({}, [])
    for turn in turns:
        found = _find(render, conversation, text, [turn])
        if found is None:
            together.missing.append(Missing(0, "tools") if turn == _TOOLS else Missing(turn, "content"))
        else:
            together.turns.update(found.turns)
            together.missing.extend(found.missing)
    return together


def _find(render: Render, conversation: Conversation, text: str, turns: Collection[int]) -> Places | None:
    """None if the template writes something else when these turns have marks."""
    marker = _Marker(turns)
    marked = marker.conversation(conversation)
    try:
        written = render(marked)
    except Exception:  # templates raise anything, from their own messages to TypeError
        return None
    if _MARKS.sub("", written) != text:
        return None
    places: dict[int, int] = {}  # the first of each: gpt-oss writes the name of a call again in the tool's turn
    for number, mark in enumerate(_MARKS.finditer(written)):
        places.setdefault(ord(mark.group()) - _FIRST_MARK, mark.start() - number)
    spans: dict[int, Span] = {}
    absent: dict[int, set[What]] = {}
    for number, part in enumerate(marker.parts):
        start, end = places.get(2 * number), places.get(2 * number + 1)
        if part.what == "content" and start is None and end is None:
            absent.setdefault(part.turn, set()).add("turn")
        elif start is None or end is None or not _is_written(part, text[start:end]):
            absent.setdefault(part.turn, set()).add(part.what)
        elif part.what != "name":
            first, last = spans.get(part.turn, (start, end))
            spans[part.turn] = min(first, start), max(last, end)
    missing = [one for turn, what in absent.items() for one in _missing(conversation, turn, what)]
    return Places(spans, sorted(missing, key=lambda one: one.turn))


def _missing(conversation: Conversation, turn: int, what: set[What]) -> list[Missing]:
    if turn == _TOOLS:
        return [Missing(0, "tools")]
    if "turn" in what:  # the calls may be written without the text next to them
        has_calls = "tool_calls" in conversation.messages[turn] and "calls" not in what
        return [Missing(turn, "content" if has_calls else "turn")]
    return [Missing(turn, one) for one in sorted(what)]


def _is_written(part: _Part, written: str) -> bool:
    """True for a text that is unchanged, as JSON, or has other white space; calls and tools often have another form."""
    if part.what not in ("content", "reasoning"):
        return True
    in_json = json.dumps(part.text, ensure_ascii=False)[1:-1]
    return written in (part.text, in_json) or written.split() == part.text.split()
