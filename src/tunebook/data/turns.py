"""The turns of a conversation: roles by the names data sets use, checked and brought to {role, content, train}.

`train` is true on the assistant's turns that the loss counts; a turn opts out with `train: false` or `weight: 0`.
"""

from __future__ import annotations

from typing import Any

from tunebook.data.json_objects import type_name
from tunebook.data.problems import DocumentError
from tunebook.errors import did_you_mean

Turn = dict[str, Any]

# The four roles chat templates know, and the names under which data sets write them.
ROLE_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bing", "bard", "model"),
    "tool": ("tool", "observation", "function"),
}
ROLES = {name: role for role, names in ROLE_NAMES.items() for name in names}

_TURN_KEYS = (("from", "value"), ("role", "content"))


def read_turns(value: object, field: str) -> list[Turn]:
    """A list of turns as written under `field`. Raises: DocumentError for what is not a turn."""
    if not isinstance(value, list):
        raise DocumentError(f"'{field}' is a JSON {type_name(value)} where a list of turns belongs")
    return [_read_turn(turn, number) for number, turn in enumerate(value, 1)]


def make_turn(role: str, content: object, field: str) -> Turn:
    """A turn whose role is known and whose content is the document's `field`."""
    return {"role": role, "content": check_text(content, f"'{field}'"), "train": role == "assistant"}


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
        raise DocumentError("every assistant turn has train: false or weight: 0, so nothing to train on")
    return turns


def check_text(value: object, what: str) -> str:
    """The value if it is text that is not blank. Raises: DocumentError naming `what`."""
    if not isinstance(value, str):
        hint = " (only plain text can be trained on, no tool calls and no images)" if what.startswith("the ") else ""
        raise DocumentError(f"{what} is {_article(type_name(value))} where text belongs{hint}")
    if not value.strip():
        raise DocumentError(f"{what} is empty")
    return value


def _read_turn(turn: object, number: int) -> Turn:
    if not isinstance(turn, dict):
        raise DocumentError(
            f"turn {number} is {_article(type_name(turn))} where an object with a role and text belongs"
        )
    keys = next((keys for keys in _TURN_KEYS if turn.get(keys[0]) is not None), None)
    if keys is None:
        raise DocumentError(f"turn {number} has no 'role' (or 'from'); its keys are: {_keys(turn)}")
    role_key, content_key = keys
    role = _read_role(turn[role_key], number)
    if content_key not in turn:
        raise DocumentError(f"turn {number} ({role}) has no '{content_key}'; its keys are: {_keys(turn)}")
    content = check_text(turn[content_key], f"the {content_key} of turn {number} ({role})")
    return {"role": role, "content": content, "train": _read_train(turn, role, number)}


def _read_role(name: object, number: int) -> str:
    if not isinstance(name, str):
        raise DocumentError(f"the role of turn {number} is {_article(type_name(name))} where a name belongs")
    role = ROLES.get(name.lower())
    if role is None:
        known = "; ".join(f"{role}: {', '.join(names)}" for role, names in ROLE_NAMES.items())
        raise DocumentError(
            f"unknown role '{name}' in turn {number}.{did_you_mean(name, ROLES)} Known roles: {known}",
            problem_id="data-unknown-role",
        )
    return role


def _read_train(turn: Turn, role: str, number: int) -> bool:
    """Whether the loss counts this turn: every assistant's, unless `train` or `weight` says otherwise."""
    if "train" not in turn and "weight" not in turn:
        return role == "assistant"
    said = {key: turn[key] for key in ("train", "weight") if turn.get(key) is not None}
    for key, value in said.items():
        if value not in (0, 1) or not isinstance(value, (bool, int, float)):
            raise DocumentError(f"turn {number} ({role}) has {key}: {value!r}; it can be 0 or 1 (false or true)")
    if len({bool(value) for value in said.values()}) > 1:
        raise DocumentError(f"turn {number} ({role}) has train: {turn['train']} and weight: {turn['weight']}; keep one")
    if role == "assistant":
        return all(said.values())
    if any(said.values()):
        raise DocumentError(
            f"turn {number} ({role}) asks to be trained on, but only assistant turns can be; "
            f"take '{next(iter(said))}' away from it (dataset.train_on=everything trains on every token)"
        )
    return False


def _keys(turn: Turn) -> str:
    return ", ".join(turn) or "none"


def _article(kind: str) -> str:
    return kind if kind == "null" else f"a JSON {kind}"
