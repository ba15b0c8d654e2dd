"""The turns of a conversation: roles, contents, reasoning, calls of tools, and whether the loss counts each.

Roles are known by the names that data sets use. A turn becomes {role, content, train} and those of `DETAILS` that it
has. `train` is true on the assistant's turns that the loss counts; a turn opts out with `train: false`, `weight: 0` or
another of `problems.LOSS_FLAGS`. A content of typed parts is taken apart; `images.py` reads the images among them.

Tools and calls get OpenAI's form, which transformers' `apply_chat_template` expects: a tool is {"type": "function",
"function": {name, description, parameters}}, a call {"id", "type": "function", "function": {name, arguments}} with the
arguments as an object. Also read: bare functions, arguments as JSON text, the ShareGPT texts of Glaive and
LLaMA-Factory, and Anthropic's `input` and `input_schema`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tunebook.data.problems import LOSS_FLAGS, DocumentError, KeyAccount, is_empty, type_name
from tunebook.errors import did_you_mean

Turn = dict[str, Any]
Tool = dict[str, Any]
Call = dict[str, Any]

# The four roles chat templates know, and the names under which data sets write them.
ROLE_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "tool": ("tool", "observation", "function", "tool_response", "tool_result", "ipython", "environment"),
}
CALL_ROLES = ("function_call", "tool_call", "tool_calls")  # of turns whose text is calls of tools
ROLES = {name: role for role, names in ROLE_NAMES.items() for name in names} | dict.fromkeys(CALL_ROLES, "assistant")

IMAGE = "\ufffc"  # in a content: the place of an image
DETAILS = ("reasoning", "tool_calls", "tool_call_id", "name")  # what else chat templates write of a turn
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CALL_KEYS = ("tool_calls", "function_call")
_TURN_KEYS = (("from", "value"), ("role", "content"))
_READ = {
    keys: frozenset({*keys, *LOSS_FLAGS, *REASONING_KEYS, *_CALL_KEYS, "tool_call_id", "name"}) for keys in _TURN_KEYS
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking", "reasoning_content")
_CALL_PARTS = ("tool_call", "tool_use", "function_call")
_IMAGE_PARTS = ("image", "image_url", "input_image")
IMAGE_PART_KEYS = (*_IMAGE_PARTS, "url", "path", "bytes", "base64")  # the image of a part is under one of them
_MEDIA_PARTS = ("image", "audio", "video", "file", "document")
_PARTS = (*_TEXT_PARTS, *_IMAGE_PARTS, *_REASONING_PARTS, *_CALL_PARTS)
_PART_VALUES = ("text", "value", "content", "thinking", "reasoning")
_BAD_TOOL = "data-bad-tool"


def read_turns(value: object, name: str, account: KeyAccount, *, is_prompt: bool = False) -> list[Turn]:
    """A list of turns as written under `name`; of a prompt none is trained on. Raises: DocumentError."""
    if not isinstance(value, list):
        raise DocumentError(f"'{name}' is {type_name(value)} where a list of turns belongs")
    turns: list[Turn] = []
    tool_names: dict[str, str] = {}  # by the IDs of calls so far; some templates write the name of a result's tool
    for number, turn in enumerate(value, 1):
        read = _read_turn(turn, number, account, is_prompt)
        is_call = str(turn.get("from", turn.get("role"))).lower() in CALL_ROLES
        if is_call and turns and turns[-1]["role"] == "assistant" and turns[-1]["train"] == read["train"]:
            # A text of the assistant and the calls after it are one turn.
            turns[-1]["tool_calls"] = [*turns[-1].get("tool_calls", []), *read["tool_calls"]]
        else:
            turns.append(read)
        tool_names |= {call["id"]: call["function"]["name"] for call in read.get("tool_calls", []) if "id" in call}
        if read["role"] == "tool" and read.get("tool_call_id") in tool_names:
            read.setdefault("name", tool_names[read["tool_call_id"]])
    return turns


def texts_of_turn(turn: Turn) -> list[str]:
    """The texts of a turn: its content, its reasoning, the arguments of its calls, and hashes for its images."""
    arguments = [call["function"]["arguments"] for call in turn.get("tool_calls", ())]
    hashes = [image["sha256"] for image in turn.get("images", ())]
    return [text for text in (turn["content"], turn.get("reasoning"), *texts_in(arguments), *hashes) if text]


def texts_in(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for entry in value.values() if isinstance(value, dict) else value:
            yield from texts_in(entry)


def make_turn(role: str, content: object, name: str) -> Turn:
    """A turn with a known role, whose content is the document's field `name`."""
    return {"role": role, "content": check_text(content, f"'{name}'"), "train": role == "assistant"}


def check_conversation(turns: list[Turn]) -> None:
    """Raises: DocumentError for turns that cannot be trained on."""
    if not turns:
        raise DocumentError("the conversation is empty; it needs a user's and an assistant's turn")
    for number, turn in enumerate(turns[1:], 2):
        if turn["role"] == "system":
            raise DocumentError(f"turn {number} is a system turn; only the first turn may be one")
    if not any(turn["role"] == "assistant" for turn in turns):
        roles = ", ".join(turn["role"] for turn in turns)
        raise DocumentError(f"no assistant turn, so nothing to train on (the turns are: {roles})")
    if not any(turn["train"] for turn in turns):
        raise DocumentError(
            "every assistant turn is marked as not to be trained on (train: false, weight: 0 and the like), so "
            "there is nothing to train on"
        )


def check_text(value: object, what: str) -> str:
    """The value if it is text that is not blank. Raises: DocumentError naming `what`."""
    if not isinstance(value, str):
        raise DocumentError(f"{what} is {type_name(value)} where text belongs")
    if not value.strip():
        raise DocumentError(f"{what} is empty")
    return value


def _read_turn(turn: object, number: int, account: KeyAccount, is_prompt: bool) -> Turn:
    if not isinstance(turn, dict):
        raise DocumentError(f"turn {number} is {type_name(turn)} where an object with a role and text belongs")
    turn = account.without_ignored(turn)
    keys = next((keys for keys in _TURN_KEYS if turn.get(keys[0]) is not None), None)
    if keys is None:
        raise DocumentError(f"turn {number} has no 'role' (or 'from'); its keys are: {', '.join(turn) or 'none'}")
    role_key, content_key = keys
    name = str(turn[role_key])
    role = _read_role(name, number)
    place = f"turn {number} ({role})"
    account.check(turn, _READ[keys], place)
    for key in (*_CALL_KEYS, *REASONING_KEYS):
        if role != "assistant" and not is_empty(turn.get(key)):
            raise DocumentError(f"{place} has '{key}', which is the assistant's alone; remove it")
    calls: list[Call] = []
    for key in _CALL_KEYS:
        if not is_empty(turn.get(key)):
            calls += read_calls(turn[key], f"'{key}' of {place}")
    if content_key not in turn and not calls:
        raise DocumentError(f"{place} has no '{content_key}'; its keys are: {', '.join(turn)}")
    # The same reasoning may stand under several keys.
    reasoning = {check_text(turn[key], f"'{key}' of {place}") for key in REASONING_KEYS if not is_empty(turn.get(key))}
    value, what = turn.get(content_key), f"the {content_key} of {place}"
    text, part_reasoning, part_calls = "", "", []
    images: list[Any] = []
    if name.lower() in CALL_ROLES:
        part_calls = read_calls(value, what)
    elif role == "tool" and (isinstance(value, dict) or _is_list_of_values(value)):  # a result that is not text
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, list):
        text, part_reasoning, part_calls, images = _read_parts(value, role, what)
        if not (text.strip() or part_calls or calls or role == "tool"):
            raise DocumentError(f"{what} has no text")
    elif isinstance(value, str) and (calls or role == "tool"):  # a tool may return nothing
        text = value
    elif value is not None or not calls:  # an answer may be calls alone
        text = check_text(value, what)
    reasoning |= {part_reasoning} if part_reasoning else set()
    if len(reasoning) > 1 or (calls and part_calls):
        raise DocumentError(f"{place} has {'calls' if calls else 'reasoning'} in two places; keep one of them")
    calls = calls or part_calls
    made: Turn = {
        "role": role,
        "content": None if calls and not text.strip() else text,
        "train": _read_train(turn, role, number, is_prompt),
    }
    if IMAGE in text and text.count(IMAGE) != len(images):
        raise DocumentError(f"{what} holds the character U+FFFC, which stands for an image here; remove it")
    details = {"reasoning": "".join(reasoning), "tool_calls": calls, "images": images}
    details |= {key: str(turn[key]) for key in ("tool_call_id", "name") if not is_empty(turn.get(key))}
    return made | {key: entry for key, entry in details.items() if entry}


def _read_role(name: str, number: int) -> str:
    role = ROLES.get(name.lower())
    if role is None:
        known = "; ".join(f"{role}: {', '.join(names)}" for role, names in ROLE_NAMES.items())
        raise DocumentError(
            f"unknown role '{name}' in turn {number}.{did_you_mean(name, ROLES)} Known roles: {known}; calls of tools: "
            f"{', '.join(CALL_ROLES)}",
            problem_id="data-unknown-role",
        )
    return role


def _is_list_of_values(value: object) -> bool:
    """Whether the result of a tool is a list of objects of its own, and not of parts with type and text."""
    objects = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    return any("type" not in entry and "text" not in entry for entry in objects)


def _read_parts(parts: list[Any], role: str, what: str) -> tuple[str, str, list[Call], list[Any]]:
    """The text, the reasoning, the calls and the images of a content in parts.

    An image is what its part says, or None: the next one of the document's own. Raises: DocumentError for sound and the
    like, and for an order that no template writes.
    """
    text, reasoning, calls, images = "", "", [], []
    for number, part in enumerate(parts, 1):
        place = f"part {number} of {what}"
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        if not isinstance(part, dict):
            raise DocumentError(f"{place} is {type_name(part)} where text or an object with 'type' and text belongs")
        kind = str(part.get("type", "text")).lower()
        if kind in _IMAGE_PARTS:
            key = next((key for key in IMAGE_PART_KEYS if part.get(key) is not None), "image")
            images.append({key: part[key]} if key == "base64" else part.get(key))
            text += IMAGE
            continue
        if any(name in kind for name in _MEDIA_PARTS):
            raise DocumentError(
                f"{place} is of type '{kind}': audio, video and files cannot be trained on; remove such documents",
                problem_id="data-media",
            )
        if kind not in _PARTS:
            raise DocumentError(f"{place} is of type '{kind}'; known are {', '.join(_PARTS)}")
        if kind not in _TEXT_PARTS and role != "assistant":
            raise DocumentError(f"{place} is of type '{kind}', which is the assistant's alone")
        if kind in _CALL_PARTS:
            call = next((part[key] for key in ("value", kind) if part.get(key) is not None), part)
            calls += read_calls(call, place)
            continue
        written = next((part[key] for key in _PART_VALUES if part.get(key) is not None), None)
        if written is None and all(key == "type" or is_empty(entry) for key, entry in part.items()):
            written = ""  # Parquet writes an absent text as null
        if not isinstance(written, str):
            raise DocumentError(f"{place} is of type '{kind}' and has no text; its keys are: {', '.join(part)}")
        is_reasoning = kind in _REASONING_PARTS
        if written.strip() and (calls or (is_reasoning and text.strip())):
            raise DocumentError(f"{place} is {kind} too late: chat templates write reasoning, then text, then calls")
        if is_reasoning:
            reasoning += written
        else:
            text += written
    return text, reasoning, calls, images


def _read_train(turn: Mapping[str, Any], role: str, number: int, is_prompt: bool) -> bool:
    """Whether the loss counts this turn: every assistant's outside the prompt, unless a flag says otherwise."""
    flags = {name: turn[name] for name in LOSS_FLAGS if turn.get(name) is not None}
    for name, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DocumentError(f"turn {number} ({role}) has {name}: {value!r}; it can be 0 or 1 (false or true)")
    can_be = role == "assistant" and not is_prompt
    if flags and all(flags.values()) and not can_be:
        where = "turns of the completion" if is_prompt else "assistant turns"
        raise DocumentError(
            f"turn {number} ({role}) asks to be trained on, but only {where} can be; remove '{next(iter(flags))}' "
            "from it, or train on every token of every document: dataset.train_on=everything dataset.ignore_keys="
            f"[{','.join(flags)}]"
        )
    return can_be and all(flags.values())


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
        raise DocumentError(
            f"{place} is of type '{tool['type']}', and templates write functions only", problem_id=_BAD_TOOL
        )
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
    return {key: entry for key, entry in given.items() if entry is not None}


def _require_name(function: Mapping[str, Any], place: str) -> str:
    name = function.get("name")
    if not isinstance(name, str) or not name.strip():
        raise DocumentError(
            f"{place} has no 'name'; its keys are: {', '.join(function) or 'none'}", problem_id=_BAD_TOOL
        )
    return name


def _read_list(value: object, place: str) -> list[Any]:
    if isinstance(value, str):
        value = _parse(value, place)
    if isinstance(value, Mapping):  # a single one
        value = [value]
    if not isinstance(value, list) or not value:
        raise DocumentError(f"{place} is {type_name(value)} where a list of objects belongs", problem_id=_BAD_TOOL)
    return value


def _read_object(value: object, place: str, problem_id: str = _BAD_TOOL) -> dict[str, Any]:
    if isinstance(value, str):
        value = _parse(value, place)
    if not isinstance(value, dict):
        raise DocumentError(f"{place} is {type_name(value)} where an object belongs", problem_id=problem_id)
    return value


def _parse(text: str, place: str) -> Any:
    try:
        return json.loads(text, strict=False)  # line breaks inside texts are common
    except ValueError as error:
        raise DocumentError(
            f"{place} is text that is not JSON ({error}): {text[:60]!r}", problem_id=_BAD_TOOL
        ) from error
