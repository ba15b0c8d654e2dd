"""A conversation in the form that chat templates read: turns with content, reasoning and calls, tools, and variables.

Templates read the same things under different names. Reasoning is `reasoning_content` (Qwen 3, GLM), `thinking`
(gpt-oss) or `<think>` in the content (DeepSeek-R1, Qwen 2.5); arguments are an object, or JSON text (DeepSeek).
`TemplateForm` tells from the template's text and by trying which it takes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tunebook.config.choices import Reasoning
from tunebook.data.corpus import Row
from tunebook.data.turns import IMAGE, REASONING_KEYS, texts_in

Messages = Sequence[dict[str, Any]]
Map = Callable[[str], str]

_NO_TEXT = ("role", "train", "images")
# The marks at the end and the beginning of reasoning in a content.
REASONING_ENDS = re.compile(r"</think(?:ing)?>|</reasoning>|\[/THINK\]|<\|end_of_thought\|>")
REASONING_BEGINS = re.compile(r"<think(?:ing)?>|<reasoning>|\[THINK\]|<\|begin_of_thought\|>")


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages have role and content, and as needed train, reasoning, tool_calls, tool_call_id and name."""

    messages: Messages
    tools: list[dict[str, Any]] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(row: Row) -> Conversation:
        """The conversation of a corpus row, whose columns are JSON text."""
        tools, kwargs = row["tools"], row["template_kwargs"]
        return Conversation(
            messages=json.loads(row["messages"]),
            tools=json.loads(tools) if tools else None,
            template_kwargs=json.loads(kwargs) if kwargs else {},
        )

    def contents(self) -> list[str]:
        """What it has besides plain turns and images."""
        answers = [turn for turn in self.messages if turn["role"] == "assistant"]
        has = {
            "with tools": bool(self.tools),
            "with calls of tools": any("tool_calls" in turn for turn in answers),
            "with reasoning": any("reasoning" in turn or split_reasoning(turn["content"] or "")[0] for turn in answers),
        }
        return [name for name, is_present in has.items() if is_present]

    def images(self) -> list[dict[str, Any]]:
        """The images of all turns, in order."""
        return [image for turn in self.messages for image in turn.get("images", ())]

    def only(self, turn: int) -> Conversation:
        """One turn alone."""
        return replace(self, messages=[self.messages[turn]], tools=None)

    def until(self, turn: int) -> Conversation:
        """The turns before `turn`."""
        return replace(self, messages=self.messages[:turn])

    def with_reasoning(self, policy: Reasoning) -> Conversation:
        """Without the reasoning that is not wanted, under a key or in a content."""
        if policy is Reasoning.keep:
            return self
        last_question = max((i for i, turn in enumerate(self.messages) if turn["role"] == "user"), default=0)
        first_kept = len(self.messages) if policy is Reasoning.drop else last_question
        dropped = [_without_reasoning(turn) for turn in self.messages[:first_kept]]
        return replace(self, messages=[*dropped, *self.messages[first_kept:]])

    def mapped(self, change: Map) -> Conversation:
        """With every text of turns and tools changed, also the names of arguments and parameters; roles stay."""
        messages = []
        for turn in self.messages:
            texts = {key: _mapped(value, change) for key, value in turn.items() if key not in _NO_TEXT}
            messages.append(turn | texts)
        return replace(self, messages=messages, tools=_mapped(self.tools, change))


class TemplateForm:
    """How one chat template wants messages. `render`: messages and tools -> text; it may raise anything."""

    def __init__(self, template: str, render: Callable[[Messages, list[dict[str, Any]]], str]) -> None:
        self.reasoning_key = next((key for key in REASONING_KEYS if _reads(template, key)), None)
        self.parses_reasoning = "</think>" in template  # out of contents
        self._no_content: str | None = ""  # what a turn of calls alone has as content
        self._has_text_arguments = False  # of calls: JSON text
        self._has_parts = False  # contents are lists of one part of text, as models of images have them
        self._try_parts(render)
        if "tool_calls" in template:
            self._try_calls(render)

    def _try_parts(self, render: Callable[[Messages, list[dict[str, Any]]], str]) -> None:
        """Find whether the template writes parts only; if it writes neither, rendering tells why."""
        messages = [{"role": "user", "content": "zqquestion"}, {"role": "assistant", "content": "zqanswer"}]
        for self._has_parts in (False, True):
            try:
                text = render(self.messages(messages), [])
            except Exception:  # templates raise anything, from their own messages to TypeError
                continue
            if "zqquestion" in text and "zqanswer" in text and "'text'" not in text:
                return
        self._has_parts = False

    def _try_calls(self, render: Callable[[Messages, list[dict[str, Any]]], str]) -> None:
        """Find the form of calls that the template writes; without one they are found missing in its text."""
        function = {"name": "zqtool", "description": "about", "parameters": {"type": "object", "properties": {}}}
        call = {"name": "zqtool", "arguments": {"argument": "zqvalue"}}
        messages: Messages = [
            {"role": "user", "content": "question"},
            {
                "role": "assistant",
                "content": None,
                # An ID as Mistral's templates ask for: nine letters and digits.
                "tool_calls": [{"id": "zq0000000", "type": "function", "function": call}],
            },
        ]
        for self._has_text_arguments, self._no_content in ((False, None), (False, ""), (True, None), (True, "")):
            try:
                text = render(self.messages(messages), [{"type": "function", "function": function}])
            except Exception:  # templates raise anything, from their own messages to TypeError
                continue
            # Python's own forms of an object and of nothing are not what models were trained on.
            if "zqvalue" in text and "{'argument'" not in text and "None" not in text:
                return
        self._has_text_arguments, self._no_content = False, ""

    def messages(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages as the template reads them."""
        return [self._message(message) for message in messages]

    def _message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        content = message["content"]
        made: dict[str, Any] = {"role": message["role"], "content": self._no_content if content is None else content}
        for key in ("name", "tool_call_id"):
            if key in message:
                made[key] = message[key]
        if "tool_calls" in message:
            calls = message["tool_calls"]
            made["tool_calls"] = [_with_text_arguments(call) for call in calls] if self._has_text_arguments else calls
        if message["role"] == "assistant":
            self._place_reasoning(made, message.get("reasoning"))
        if "images" in message:
            made["content"] = list(_parts_of(made["content"]))
        elif self._has_parts and made["content"] is not None:
            made["content"] = [{"type": "text", "text": made["content"]}]
        return made

    def _place_reasoning(self, made: dict[str, Any], reasoning: str | None) -> None:
        """Put reasoning where the template reads it: under its key, or into the content."""
        content = made["content"]
        if not reasoning and self.reasoning_key is not None and not self.parses_reasoning and content:
            reasoning, content = split_reasoning(content)
        if not reasoning:
            return
        if self.reasoning_key is not None:
            made |= {self.reasoning_key: reasoning, "content": content}
        else:
            made["content"] = f"<think>\n{reasoning.strip()}\n</think>\n\n{content or ''}"


def _parts_of(content: str) -> Iterator[dict[str, str]]:
    """A content with images in parts; a template writes each image as the model's placeholder."""
    for number, text in enumerate(content.split(IMAGE)):
        if number:
            yield {"type": "image"}
        if text:
            yield {"type": "text", "text": text}


def split_reasoning(content: str) -> tuple[str, str]:
    """The reasoning at the beginning of a content, without its marks, and the answer after it.

    The beginning's mark may be missing: templates write it as part of the prompt.
    """
    ends = list(REASONING_ENDS.finditer(content))
    if not ends:
        return "", content
    written, answer = content[: ends[-1].start()], content[ends[-1].end() :].strip()
    begins = REASONING_BEGINS.search(written)
    is_of_answer = begins is not None and written[: begins.start()].strip()  # marks that the answer itself holds
    is_stray = begins is None and not answer  # a mark at the end of an answer, which is not all reasoning
    if is_of_answer or is_stray:
        return "", content
    return REASONING_BEGINS.sub("", written, count=1).strip(), answer


def _reads(template: str, key: str) -> bool:
    """Whether a template reads a key of messages: `message.key`, `message['key']`, `'key' in message`, `get('key')`."""
    return bool(re.search(rf"\.{key}\b|[\[(]\s*['\"]{key}['\"]|['\"]{key}['\"]\s+in\b", template))


def _without_reasoning(turn: dict[str, Any]) -> dict[str, Any]:
    if turn["role"] != "assistant":
        return turn
    kept = {key: value for key, value in turn.items() if key != "reasoning"}
    return kept | {"content": split_reasoning(kept["content"])[1]} if kept["content"] else kept


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return call | {"function": call["function"] | {"arguments": arguments}}


def _mapped(value: Any, change: Map) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    if isinstance(value, dict):
        return {change(key): _mapped(entry, change) for key, entry in value.items()}
    return value


@dataclass(frozen=True)
class Part:
    """A text of one turn, or of the tools."""

    turn: int  # its index; of tools 0
    what: Literal["content", "reasoning", "calls", "tools"]
    text: str


def find_missing(conversation: Conversation, text: str) -> list[Part]:
    """The parts of a conversation that `text` does not hold; of equal parts, those of earlier answers first.

    A part is written if the text holds it as often as the parts of the conversation do. White space may differ, and
    text may be escaped as in JSON. A part that the template's own text holds too, such as `user`, counts as written.
    """
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
        pieces = content.split(IMAGE) if "images" in turn else [content]
        yield from (Part(number, "content", piece) for piece in pieces)
        for call in turn.get("tool_calls", ()):
            yield Part(number, "calls", call["function"]["name"])
            yield from (Part(number, "calls", text) for text in texts_in(call["function"]["arguments"]))


def _descriptions(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("description"), str):
            yield value["description"]
        for entry in value.values():
            yield from _descriptions(entry)


def _squeezed(text: str) -> str:
    return " ".join(text.split())
