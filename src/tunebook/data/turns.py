"""The turns of a conversation: roles by the names data sets use, checked and brought to {role, content, train}.

`train` is true on the assistant's turns that the loss counts; a turn opts out with `train: false`, `weight: 0` or
another of `keys.LOSS_FLAGS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.data.json_objects import type_name
from tunebook.data.keys import INVERSE_FLAG, LOSS_FLAGS, KeyAccount
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
_READ = {keys: frozenset({*keys, *LOSS_FLAGS}) for keys in _TURN_KEYS}


def read_turns(value: object, field: str, account: KeyAccount, *, is_prompt: bool = False) -> list[Turn]:
    """A list of turns as written under `field`; of a prompt none is trained on. Raises: DocumentError."""
    if not isinstance(value, list):
        raise DocumentError(f"'{field}' is a JSON {type_name(value)} where a list of turns belongs")
    return [_read_turn(turn, number, account, is_prompt) for number, turn in enumerate(value, 1)]


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
        raise DocumentError(
            "every assistant turn is marked as not to be trained on (train: false, weight: 0 and the like), so nothing "
            "to train on"
        )
    return turns


def check_text(value: object, what: str) -> str:
    """The value if it is text that is not blank. Raises: DocumentError naming `what`."""
    if not isinstance(value, str):
        hint = " (only plain text can be trained on, no tool calls and no images)" if what.startswith("the ") else ""
        raise DocumentError(f"{what} is {_article(type_name(value))} where text belongs{hint}")
    if not value.strip():
        raise DocumentError(f"{what} is empty")
    return value


def _read_turn(turn: object, number: int, account: KeyAccount, is_prompt: bool) -> Turn:
    if not isinstance(turn, dict):
        raise DocumentError(
            f"turn {number} is {_article(type_name(turn))} where an object with a role and text belongs"
        )
    turn = account.without_ignored(turn)
    keys = next((keys for keys in _TURN_KEYS if turn.get(keys[0]) is not None), None)
    if keys is None:
        raise DocumentError(f"turn {number} has no 'role' (or 'from'); its keys are: {_keys(turn)}")
    role_key, content_key = keys
    role = _read_role(turn[role_key], number)
    account.check_turn(turn, _READ[keys], f"turn {number} ({role})")
    if content_key not in turn:
        raise DocumentError(f"turn {number} ({role}) has no '{content_key}'; its keys are: {_keys(turn)}")
    content = check_text(turn[content_key], f"the {content_key} of turn {number} ({role})")
    return {"role": role, "content": content, "train": _read_train(turn, role, number, is_prompt)}


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
            f"turn {number} ({role}) asks to be trained on, but only {where} can be; take '{next(iter(flags))}' away "
            "from it (dataset.train_on=everything trains on every token)"
        )
    return True


def _keys(turn: Mapping[str, Any]) -> str:
    return ", ".join(turn) or "none"


def _article(kind: str) -> str:
    return kind if kind == "null" else f"a JSON {kind}"
