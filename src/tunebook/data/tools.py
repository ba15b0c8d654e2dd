"""Tools and calls of tools as documents write them, and the one form that every chat template gets: OpenAI's.

A tool is {"type": "function", "function": {name, description, parameters}}; a call is {"id", "type": "function",
"function": {name, arguments}} with the arguments as an object. Source: OpenAI's chat completions, which transformers'
`apply_chat_template` expects too (JSON schemas of functions). Also read: bare functions, arguments as JSON text, the
ShareGPT texts of Glaive and LLaMA-Factory, and Anthropic's `input` and `input_schema`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tunebook.data.problems import DocumentError, is_empty, type_name

Tool = dict[str, Any]
Call = dict[str, Any]

_BAD = "data-bad-tool"
# Arguments of transformers' rendering that decide what the text is for.
_RENDERING = frozenset(
    {"messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
     "continue_final_message", "return_assistant_tokens_mask"}
)  # fmt: skip


def read_tools(value: object, field: str) -> list[Tool]:
    """The tools of a document: a list, or JSON text of one. Raises: DocumentError naming `field` and the tool."""
    if is_empty(value):
        return []
    tools = _read_list(value, f"'{field}'")
    return [_read_tool(tool, f"tool {number} of '{field}'") for number, tool in enumerate(tools, 1)]


def _read_tool(value: object, place: str) -> Tool:
    tool = _read_object(value, place)
    function = _read_object(tool.get("function", tool), place)
    if tool.get("type", "function") != "function":
        raise DocumentError(f"{place} is of type '{tool['type']}', and templates write functions only", problem_id=_BAD)
    _require_name(function, place)
    written = {key: entry for key, entry in function.items() if entry is not None and key != "type"}
    if "input_schema" in written:
        written["parameters"] = written.pop("input_schema")
    if "parameters" in written:
        _read_object(written["parameters"], f"{place}: its 'parameters'")
    return {"type": "function", "function": written}


def read_calls(value: object, place: str) -> list[Call]:
    """Calls of tools: one or a list, as objects or JSON text. Raises: DocumentError naming `place`."""
    return [_read_call(call, place) for call in _read_list(value, place)]


def _read_call(value: object, place: str) -> Call:
    call = _read_object(value, place)
    function = _read_object(call.get("function") or call, place)
    name = _require_name(function, place)
    given: Any = next(
        (function[key] for key in ("arguments", "parameters", "input") if function.get(key) is not None), {}
    )
    if isinstance(given, str):  # some data sets wrote the JSON text twice
        given = _parse(given.strip() or "{}", f"the arguments of '{name}' in {place}")
    arguments = _read_object(given, f"the arguments of '{name}' in {place}")
    made: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return made if call.get("id") is None else {"id": str(call["id"]), **made}


def read_template_kwargs(value: object) -> dict[str, Any]:
    """`chat_template_kwargs` of a document: an object, or JSON text of one. Raises: DocumentError."""
    given = _read_object(value, "'chat_template_kwargs'", problem_id="data-bad-document")
    if taken := sorted(_RENDERING & given.keys()):
        raise DocumentError(f"'chat_template_kwargs' sets {', '.join(taken)}, which the training sets; remove it")
    return {key: entry for key, entry in given.items() if entry is not None}


def _require_name(function: Mapping[str, Any], place: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DocumentError(f"{place} has no 'name'; its keys are: {', '.join(function) or 'none'}", problem_id=_BAD)
    return name


def _read_list(value: object, place: str) -> list[Any]:
    if isinstance(value, str):
        value = _parse(value, place)
    if isinstance(value, Mapping):  # a single one
        value = [value]
    if not isinstance(value, list) or not value:
        raise DocumentError(f"{place} is {type_name(value)} where a list of objects belongs", problem_id=_BAD)
    return value


def _read_object(value: object, place: str, problem_id: str = _BAD) -> dict[str, Any]:
    if isinstance(value, str):
        value = _parse(value, place)
    if not isinstance(value, dict):
        raise DocumentError(f"{place} is {type_name(value)} where an object belongs", problem_id=problem_id)
    return value


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, strict=False)  # line breaks inside texts are common
    except ValueError as error:
        raise DocumentError(f"{place} is text that is not JSON ({error}): {text[:60]!r}", problem_id=_BAD) from error
