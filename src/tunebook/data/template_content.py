"""Find which parts of a conversation a chat template does not write.

A part is written if the text holds it as often as the parts of the conversation do. White space may differ, and text
may be escaped as in JSON. A part that the template's own text holds too, such as `user`, is taken as written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from tunebook.data.conversation import Conversation, split_reasoning
from tunebook.data.turns import texts_in

What = Literal["content", "reasoning", "calls", "tools"]


@dataclass(frozen=True)
class Part:
    """A text of one turn, or of the tools."""

    turn: int  # its index; of tools 0
    what: What
    text: str


def find_missing(conversation: Conversation, text: str) -> list[Part]:
    """The parts of a conversation that `text` does not hold; of equal parts, those of earlier answers first."""
    parts = [part for part in _parts(conversation) if part.text.strip()]
    texts = {part: _squeezed(part.text) for part in parts}
    written, missing = _squeezed(text), []
    answers = [number for number, turn in enumerate(conversation.messages) if turn["role"] == "assistant"]
    # The longest first: a missing part may hold shorter ones.
    for part in sorted(parts, key=lambda part: (-len(texts[part]), part.turn not in answers[:-1])):
        expected = sum(texts[other].count(texts[part]) for other in parts if other not in missing)
        escaped = _squeezed(json.dumps(part.text.strip(), ensure_ascii=False)[1:-1])
        found = written.count(texts[part]) + (written.count(escaped) if escaped != texts[part] else 0)
        if found < expected:
            missing.append(part)
    return sorted(missing, key=lambda part: part.turn)


def _parts(conversation: Conversation) -> Iterator[Part]:
    for tool in conversation.tools or ():
        function = tool.get("function", tool)
        yield Part(0, "tools", function["name"])
        yield from (Part(0, "tools", text) for text in _descriptions(function))
    for number, turn in enumerate(conversation.messages):
        content, reasoning = turn["content"] or "", turn.get("reasoning") or ""
        if turn["role"] == "assistant" and not reasoning:
            reasoning, content = split_reasoning(content)
        yield Part(number, "reasoning", reasoning)
        yield Part(number, "content", content)
        for call in turn.get("tool_calls", ()):
            yield Part(number, "calls", call["function"]["name"])
            yield from (Part(number, "calls", text) for text in texts_in(call["function"]["arguments"]))


def _descriptions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("description"), str):
            yield value["description"]
        for one in value.values():
            yield from _descriptions(one)


def _squeezed(text: str) -> str:
    return " ".join(text.split())
