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

from tunebook.data.keys import is_empty
from tunebook.data.problems import DocumentError, type_name

Tool = dict[str, Any]
Call = dict[str, Any]

_BAD = "data-bad-tool"
_CALL_KEYS = frozenset({"id", "type", "function", "name", "arguments", "parameters", "input", "index"})
# Arguments of transformers' rendering that decide what the text is for.
_RENDERING = frozenset(
    {"messages", "conversations", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
     "continue_final_message", "return_assistant_tokens_mask"}
)  # fmt: skip
_FORM = '{"name": ..., "arguments": {...}}'


def read_tools(value: object, field: str) -> list[Tool]:
    """The tools of a document: a list, or JSON text of one. Raises: DocumentError naming `field` and the tool."""
    if isinstance(value, str):
        value = [] if is_empty(value) else _parse(value, f"'{field}'")
    if isinstance(value, Mapping):  # a single one
        value = [value]
    if not isinstance(value, list):
        raise DocumentError(
            f"'{field}' is {type_name(value)} where a list of tools belongs, each with a name, a description "
            "and parameters",
            problem_id=_BAD,
        )
    tools = [_read_tool(tool, f"tool {number} of '{field}'") for number, tool in enumerate(value, 1)]
    names = [tool["function"]["name"] for tool in tools]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise DocumentError(f"'{field}' holds several tools named {', '.join(repeated)}; keep one", problem_id=_BAD)
    return tools


def _read_tool(value: object, place: str) -> Tool:
    if isinstance(value, str):
        value = _parse(value, place)
    if not isinstance(value, Mapping):
        raise DocumentError(f"{place} is {type_name(value)} where an object belongs", problem_id=_BAD)
    function = value.get("function", value)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"].strip():
        raise DocumentError(f"{place} has no 'name'; its keys are: {', '.join(value) or 'none'}", problem_id=_BAD)
    if value.get("type") not in (None, "function"):
        raise DocumentError(
            f"{place} is of type '{value['type']}'; chat templates write tools of type 'function' only", problem_id=_BAD
        )
    written = {key: entry for key, entry in function.items() if entry is not None and key != "type"}
    if "input_schema" in written and "parameters" not in written:
        written["parameters"] = written.pop("input_schema")
    if not isinstance(written.get("parameters", {}), Mapping):
        raise DocumentError(f"{place}: its 'parameters' must be an object, a JSON schema", problem_id=_BAD)
    return {"type": "function", "function": written}


def read_calls(value: object, place: str) -> list[Call]:
    """Calls of tools: one or a list, as objects or JSON text. Raises: DocumentError naming `place`."""
    if isinstance(value, str):
        value = _parse(value, place)
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise DocumentError(f"{place} is {type_name(value)} where a call of a tool belongs: {_FORM}", problem_id=_BAD)
    if not value:
        raise DocumentError(f"{place} holds no call of a tool: {_FORM}", problem_id=_BAD)
    several = len(value) > 1
    return [_read_call(call, f"call {n} of {place}" if several else place) for n, call in enumerate(value, 1)]


def _read_call(value: object, place: str) -> Call:
    if not isinstance(value, Mapping):
        raise DocumentError(f"{place} is {type_name(value)} where {_FORM} belongs", problem_id=_BAD)
    unknown = [key for key, entry in value.items() if key not in _CALL_KEYS and entry is not None]
    if unknown:
        raise DocumentError(
            f"{place} has the key '{unknown[0]}', which is not of a call: {_FORM}, with 'id' and 'type' at most",
            problem_id=_BAD,
        )
    if value.get("type") not in (None, "function", "tool_use", "tool_call"):
        raise DocumentError(
            f"{place} is of type '{value['type']}'; chat templates write calls of functions only", problem_id=_BAD
        )
    function = value["function"] if isinstance(value.get("function"), Mapping) else value
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DocumentError(f"{place} has no 'name' of the tool; a call is {_FORM}", problem_id=_BAD)
    given = [key for key in ("arguments", "parameters", "input") if function.get(key) is not None]
    if len(given) > 1:
        raise DocumentError(f"{place} has {' and '.join(given)}; keep 'arguments'", problem_id=_BAD)
    arguments = _read_arguments(function[given[0]] if given else {}, f"the arguments of '{name}' in {place}")
    call: Call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return call if value.get("id") is None else {"id": str(value["id"]), **call}


def _read_arguments(value: object, place: str) -> dict[str, Any]:
    """Arguments by name. Some data sets wrote the JSON text twice."""
    for _ in range(2):
        if isinstance(value, str):
            value = {} if not value.strip() else _parse(value, place)
    if not isinstance(value, dict):
        raise DocumentError(
            f"{place} are {type_name(value)} where an object of names and values belongs", problem_id=_BAD
        )
    return value


def read_template_kwargs(value: object) -> dict[str, Any]:
    """`chat_template_kwargs` of a document: an object, or JSON text of one. Raises: DocumentError."""
    value = _parse(value, "'chat_template_kwargs'") if isinstance(value, str) else value
    if not isinstance(value, Mapping):
        raise DocumentError(
            f"'chat_template_kwargs' is {type_name(value)} where an object belongs, such as "
            '{"enable_thinking": false}'
        )
    check_template_kwargs(value)
    return {key: entry for key, entry in value.items() if entry is not None}


def check_template_kwargs(value: Mapping[str, Any]) -> None:
    """Raises: DocumentError for a name that is not a variable of templates."""
    taken = sorted(_RENDERING & value.keys())
    if taken:
        raise DocumentError(f"'chat_template_kwargs' sets {', '.join(taken)}, which the training sets; remove it")


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, strict=False)  # line breaks inside texts are common
    except ValueError as error:
        start = text if len(text) <= 60 else f"{text[:60]}..."
        raise DocumentError(f"{place} is text that is not JSON ({error}): {start!r}", problem_id=_BAD) from error
