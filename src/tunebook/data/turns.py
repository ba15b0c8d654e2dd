"""The turns of a conversation: roles, contents, reasoning, calls of tools, and whether the loss counts each.

Roles are known by the names that data sets use. A turn becomes {role, content, train, details}: `train` is true on the
assistant's turns that the loss counts; a turn opts out with `train: false`, `weight: 0` or another of
`keys.LOSS_FLAGS`. `details` is JSON text of what else chat templates write (`DETAILS`), or None. A content of typed
parts is taken apart: its texts become the content, its reasoning and calls details.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunebook.data.keys import INVERSE_FLAG, LOSS_FLAGS, KeyAccount, is_empty
from tunebook.data.problems import DocumentError, type_name
from tunebook.data.tools import Call, read_calls
from tunebook.errors import did_you_mean

Turn = dict[str, Any]

# The four roles chat templates know, and the names under which data sets write them.
ROLE_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "tool": ("tool", "observation", "function", "tool_response", "tool_result", "ipython", "environment"),
}
ROLES = {name: role for role, names in ROLE_NAMES.items() for name in names}
CALL_ROLES = ("function_call", "tool_call", "tool_calls")  # of turns whose text is calls of tools

DETAILS = ("reasoning", "tool_calls", "tool_call_id", "name")  # the keys of `details`
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_CALL_KEYS = ("tool_calls", "function_call")
_TURN_KEYS = (("from", "value"), ("role", "content"))
_READ = {
    keys: frozenset({*keys, *LOSS_FLAGS, *REASONING_KEYS, *_CALL_KEYS, "tool_call_id", "name"}) for keys in _TURN_KEYS
}
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_PARTS = ("reasoning", "thinking", "reasoning_content")
_CALL_PARTS = ("tool_call", "tool_use", "function_call")
_MEDIA_PARTS = ("image", "audio", "video", "file", "document")
_PARTS = (*_TEXT_PARTS, *_REASONING_PARTS, *_CALL_PARTS)
_PART_VALUES = ("text", "value", "content", "thinking", "reasoning")


@dataclass(kw_only=True)
class _Content:
    """What the parts of one turn's content hold."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)


def read_turns(value: object, name: str, account: KeyAccount, *, is_prompt: bool = False) -> list[Turn]:
    """A list of turns as written under `name`; of a prompt none is trained on. Raises: DocumentError."""
    if not isinstance(value, list):
        raise DocumentError(f"'{name}' is {type_name(value)} where a list of turns belongs")
    turns: list[Turn] = []
    ids: dict[str, str] = {}  # of calls so far: the names of their tools
    for number, turn in enumerate(value, 1):
        read = _read_turn(turn, number, account, is_prompt)
        is_call = str(turn.get("from", turn.get("role"))).lower() in CALL_ROLES
        if is_call and turns and turns[-1]["role"] == "assistant" and turns[-1]["train"] == read["train"]:
            # What the assistant says and what it calls is one turn.
            turns[-1]["tool_calls"] = [*turns[-1].get("tool_calls", []), *read["tool_calls"]]
        else:
            turns.append(read)
        ids |= {call["id"]: call["function"]["name"] for call in read.get("tool_calls", []) if "id" in call}
        if read["role"] == "tool":
            _name_result(read, ids, number)
    for turn in turns:
        details = {key: turn.pop(key) for key in DETAILS if key in turn}
        turn["details"] = json.dumps(details, ensure_ascii=False) if details else None
    return turns


def texts_of_turn(turn: Turn) -> list[str]:
    """The texts of a corpus row's turn: its content, its reasoning, and the arguments of its calls."""
    details = json.loads(turn["details"]) if turn.get("details") else {}
    arguments = [call["function"]["arguments"] for call in details.get("tool_calls", ())]
    return [text for text in (turn["content"], details.get("reasoning"), *_texts_in(arguments)) if text]


def _texts_in(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for one in values for text in _texts_in(one)]


def make_turn(role: str, content: object, name: str) -> Turn:
    """A turn with a known role, whose content is the document's field `name`."""
    return {"role": role, "content": check_text(content, f"'{name}'"), "train": role == "assistant", "details": None}


def check_conversation(turns: list[Turn]) -> list[Turn]:
    """The turns, if they can be trained on. Raises: DocumentError."""
    if not turns:
        raise DocumentError("the conversation is empty; it needs a user's and an assistant's turn")
    for number, turn in enumerate(turns, 1):
        if turn["role"] == "system" and number > 1:
            second = ", and it is the second one" if turns[0]["role"] == "system" else ""
            raise DocumentError(f"turn {number} is a system turn{second}; only the first turn may be one")
    assistant = [turn for turn in turns if turn["role"] == "assistant"]
    if not assistant:
        roles = ", ".join(turn["role"] for turn in turns)
        raise DocumentError(f"no assistant turn, so nothing to train on (the turns are: {roles})")
    if not any(turn["train"] for turn in assistant):
        raise DocumentError(
            "every assistant turn is marked as not to be trained on (train: false, weight: 0 and the like), so "
            "there is nothing to train on"
        )
    return turns


def check_text(value: object, what: str) -> str:
    """The value if it is text that is not blank. Raises: DocumentError naming `what`."""
    if not isinstance(value, str):
        raise DocumentError(f"{what} is {type_name(value)} where text belongs")
    if not value.strip():
        raise DocumentError(f"{what} is empty")
    return value


def _read_turn(turn: object, number: int, account: KeyAccount, is_prompt: bool) -> Turn:
    """One turn with its details as keys of their own."""
    if not isinstance(turn, dict):
        raise DocumentError(f"turn {number} is {type_name(turn)} where an object with a role and text belongs")
    turn = account.without_ignored(turn)
    keys = next((keys for keys in _TURN_KEYS if turn.get(keys[0]) is not None), None)
    if keys is None:
        raise DocumentError(f"turn {number} has no 'role' (or 'from'); its keys are: {_keys(turn)}")
    role_key, content_key = keys
    role = _read_role(turn[role_key], number)
    place = f"turn {number} ({role})"
    account.check(turn, _READ[keys], place)
    calls = _read_calls(turn, role, place)
    if content_key not in turn and not calls:
        raise DocumentError(f"{place} has no '{content_key}'; its keys are: {_keys(turn)}")
    content = turn.get(content_key)
    if isinstance(turn[role_key], str) and turn[role_key].lower() in CALL_ROLES:
        read = _Content(calls=read_calls(content, f"the {content_key} of turn {number} ({turn[role_key]})"))
    else:
        read = _read_content(content, role, f"the {content_key} of {place}", has_calls=bool(calls))
    read.calls = _one_of(calls, read.calls, f"{place} has calls of tools in two places; keep one of them")
    reasoning = _one_of(
        _read_reasoning(turn, role, place), read.reasoning, f"{place} has reasoning in two places; keep one of them"
    )
    made: Turn = {
        "role": role,
        "content": read.text if read.text.strip() or not read.calls else None,
        "train": _read_train(turn, role, number, is_prompt),
    }
    given = {"reasoning": reasoning, "tool_calls": read.calls, **_read_names(turn, place)}
    return made | {key: entry for key, entry in given.items() if entry}


def _one_of(first: Any, second: Any, message: str) -> Any:
    if first and second:
        raise DocumentError(message)
    return first or second


def _read_role(name: object, number: int) -> str:
    if not isinstance(name, str):
        raise DocumentError(f"the role of turn {number} is {type_name(name)} where a name belongs")
    role = "assistant" if name.lower() in CALL_ROLES else ROLES.get(name.lower())
    if role is None:
        known = "; ".join(f"{role}: {', '.join(names)}" for role, names in ROLE_NAMES.items())
        raise DocumentError(
            f"unknown role '{name}' in turn {number}.{did_you_mean(name, [*ROLES, *CALL_ROLES])} Known roles: {known}; "
            f"calls of tools: {', '.join(CALL_ROLES)}",
            problem_id="data-unknown-role",
        )
    return role


def _read_calls(turn: Mapping[str, Any], role: str, place: str) -> list[Call]:
    calls: list[Call] = []
    for key in _CALL_KEYS:
        if not is_empty(turn.get(key)):
            if role != "assistant":
                raise DocumentError(f"{place} has '{key}', but only the assistant calls tools; remove it")
            calls = _one_of(
                calls, read_calls(turn[key], f"'{key}' of {place}"), f"{place} has tool_calls and function_call"
            )
    return calls


def _read_reasoning(turn: Mapping[str, Any], role: str, place: str) -> str:
    """The reasoning of a turn; the same text under several keys is one."""
    texts = []
    for key in REASONING_KEYS:
        if not is_empty(turn.get(key)):
            if role != "assistant":
                raise DocumentError(f"{place} has '{key}', but only the assistant reasons; remove it")
            texts.append(check_text(turn[key], f"'{key}' of {place}"))
    if len(set(texts)) > 1:
        raise DocumentError(f"{place} has different reasoning under several keys; keep one")
    return texts[0] if texts else ""


def _read_names(turn: Mapping[str, Any], place: str) -> dict[str, str]:
    names = {}
    for key in ("tool_call_id", "name"):
        if not is_empty(turn.get(key)):
            if not isinstance(turn[key], str | int):
                raise DocumentError(f"'{key}' of {place} is {type_name(turn[key])} where text belongs")
            names[key] = str(turn[key])
    return names


def _read_content(value: object, role: str, what: str, *, has_calls: bool) -> _Content:
    """A content as text or parts. It may be absent if there are calls, and a tool may return an empty text."""
    if value is None and has_calls:
        return _Content()
    if role == "tool" and (isinstance(value, dict) or _is_list_of_values(value)):  # a result that is not text
        return _Content(text=json.dumps(value, ensure_ascii=False))
    if isinstance(value, list):
        read = _Content()
        for number, part in enumerate(value, 1):
            _read_part(part, role, f"part {number} of {what}", read)
        if not (read.text.strip() or read.calls or has_calls or role == "tool"):
            raise DocumentError(f"{what} has no text")
        return read
    if isinstance(value, str) and not value.strip() and (has_calls or role == "tool"):
        return _Content(text=value)
    return _Content(text=check_text(value, what))


def _is_list_of_values(value: object) -> bool:
    """Whether the result of a tool is a list of objects of its own, and not of parts with type and text."""
    objects = [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
    return any("type" not in one and "text" not in one for one in objects)


def _read_part(part: object, role: str, place: str, read: _Content) -> None:
    """Add one part of a content. Raises: DocumentError for images and the like, and an order no template writes."""
    if isinstance(part, str):
        part = {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("type", "text"), str):
        raise DocumentError(f"{place} is {type_name(part)} where text or an object with 'type' and text belongs")
    kind = part.get("type", "text").lower()
    media = next((name for name in _MEDIA_PARTS if name in kind), None)
    if media is not None:
        raise DocumentError(
            f"{place} is of type '{part['type']}': images, audio, video and files cannot be trained on; remove such "
            "documents",
            problem_id="data-media",
        )
    if kind in _CALL_PARTS:
        if role != "assistant":
            raise DocumentError(f"{place} is of type '{kind}', but only the assistant calls tools")
        call = next((part[key] for key in ("value", kind) if part.get(key) is not None), part)
        read.calls += read_calls(call, place)
        return
    if kind not in (*_TEXT_PARTS, *_REASONING_PARTS):
        raise DocumentError(f"{place} is of type '{kind}'; known are {', '.join(_PARTS)}")
    text = next((part[key] for key in _PART_VALUES if part.get(key) is not None), None)
    if text is None:
        if any(key != "type" and not is_empty(entry) for key, entry in part.items()):
            raise DocumentError(f"{place} is of type '{kind}' and has no text; its keys are: {_keys(part)}")
        text = ""
    if not isinstance(text, str):
        raise DocumentError(f"{place} is {type_name(text)} where text belongs")
    if kind in _REASONING_PARTS and role != "assistant":
        raise DocumentError(f"{place} is of type '{kind}', but only the assistant reasons")
    if text.strip() and (read.calls or (kind in _REASONING_PARTS and read.text.strip())):
        raise DocumentError(f"{place} is {kind} too late: chat templates write reasoning, then text, then calls")
    if kind in _REASONING_PARTS:
        read.reasoning += text
    else:
        read.text += text


def _name_result(turn: Turn, ids: Mapping[str, str], number: int) -> None:
    """Name the tool of a result, which some templates write. Raises: DocumentError for an ID that no call has."""
    call_id = turn.get("tool_call_id", "")
    if call_id in ids:
        turn.setdefault("name", ids[call_id])
    elif call_id and ids:
        raise DocumentError(
            f"turn {number} (tool) answers tool_call_id '{call_id}', and no call before it has that 'id' (they are: "
            f"{', '.join(ids)})",
            problem_id="data-bad-tool",
        )


def _read_train(turn: Mapping[str, Any], role: str, number: int, is_prompt: bool) -> bool:
    """Whether the loss counts this turn: every assistant's outside the prompt, unless a flag says otherwise."""
    flags = {name: turn[name] for name in LOSS_FLAGS if turn.get(name) is not None}
    if not flags:
        return role == "assistant" and not is_prompt
    for name, value in flags.items():
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise DocumentError(f"turn {number} ({role}) has {name}: {value!r}; it can be 0 or 1 (false or true)")
    is_wanted = {bool(value) is not (name == INVERSE_FLAG) for name, value in flags.items()}
    if len(is_wanted) > 1:
        written = " and ".join(f"{name}: {value}" for name, value in flags.items())
        raise DocumentError(f"turn {number} ({role}) has {written}, which contradict each other; keep one")
    if is_wanted == {False}:
        return False
    if role != "assistant" or is_prompt:
        where = "turns of the completion" if is_prompt else "assistant turns"
        raise DocumentError(
            f"turn {number} ({role}) asks to be trained on, but only {where} can be; remove '{next(iter(flags))}' "
            "from it (dataset.train_on=everything trains on every token)"
        )
    return True


def _keys(turn: Mapping[str, Any]) -> str:
    return ", ".join(turn) or "none"
