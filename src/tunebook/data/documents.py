"""The contents of one document: the turns of a conversation, or tokens with labels or masks.

Roles are known by the names that data sets use; turns become {role, content, train}. `train` is true on the assistant's
turns that the loss counts; a turn opts out with `train: false`, `weight: 0` or another of `keys.LOSS_FLAGS`. Tokens are
read as TRL reads them, without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tunebook.data.corpus import IGNORED_LABEL, Row
from tunebook.data.json_file import type_name
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
    """A turn with a known role, whose content is the document's `field`."""
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
            "every assistant turn is marked as not to be trained on (train: false, weight: 0 and the like), so "
            "there is nothing to train on"
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
            f"turn {number} ({role}) asks to be trained on, but only {where} can be; remove '{next(iter(flags))}' "
            "from it (dataset.train_on=everything trains on every token)"
        )
    return True


def _keys(turn: Mapping[str, Any]) -> str:
    return ", ".join(turn) or "none"


def _article(kind: str) -> str:
    return kind if kind == "null" else f"a JSON {kind}"


Record = Mapping[str, Any]

LOSS_MASKS = ("completion_mask", "assistant_masks", "loss_mask")  # of tokens; 0: the loss does not count it
TOKEN_KEYS = ("labels", *LOSS_MASKS, "attention_mask", "seq_lengths", "position_ids", "token_type_ids")
_LARGEST_TOKEN_ID = 2**31 - 1  # token ids are stored in 32 bits


def token_row(record: Record, vocab_size: int | None) -> Row:
    """A document of tokens. Labels are those of the same position, as in transformers; without labels or masks the loss
    counts every token.

    As in TRL the loss counts a token if all its masks are 1. Tokens with `attention_mask` 0 are padding and left out.
    """
    input_ids = _integers(record["input_ids"], "input_ids")
    limit = _LARGEST_TOKEN_ID if vocab_size is None else vocab_size - 1
    _check_range(input_ids, "input_ids", 0, limit)
    kept = _without_padding(record, len(input_ids))
    _refuse_packed(record, kept, len(input_ids))
    labels = _masked(record, input_ids)
    if record.get("labels") is not None:
        labels = _given_labels(record, masked=labels)
        _check_range([label for label in labels if label != IGNORED_LABEL], "labels", 0, limit)
    input_ids, labels = input_ids[kept], labels[kept]
    # Nothing predicts the first label, so it alone trains nothing.
    if all(label == IGNORED_LABEL for label in labels[1:]):
        raise DocumentError("labels or masks leave no token after the first to train on")
    return {"input_ids": input_ids, "labels": labels}


def _masked(record: Record, input_ids: list[int]) -> list[int]:
    """Every token as its own label, except those that a mask leaves out."""
    masks = [_mask(record, name, len(input_ids)) for name in LOSS_MASKS if record.get(name) is not None]
    if not masks:
        return list(input_ids)
    return [token_id if all(bits) else IGNORED_LABEL for token_id, *bits in zip(input_ids, *masks, strict=True)]


def _given_labels(record: Record, *, masked: list[int]) -> list[int]:
    """The document's own labels. Raises: DocumentError if a mask contradicts them."""
    labels = _integers(record["labels"], "labels")
    _check_length(labels, "labels", len(masked))
    for position, (label, by_masks) in enumerate(zip(labels, masked, strict=True)):
        if label != IGNORED_LABEL and by_masks == IGNORED_LABEL:
            names = " and ".join(f"'{name}'" for name in LOSS_MASKS if record.get(name) is not None)
            raise DocumentError(
                f"'labels' trains on position {position} (label {label}), which {names} leaves out; keep one of them"
            )
    return labels


def _without_padding(record: Record, num_tokens: int) -> slice:
    """The positions between the padding. Raises: DocumentError for an attention mask with a gap inside."""
    if record.get("attention_mask") is None:
        return slice(0, num_tokens)
    mask = _mask(record, "attention_mask", num_tokens)
    if 1 not in mask:
        raise DocumentError("'attention_mask' is 0 everywhere, so nothing to train on")
    start, stop = mask.index(1), num_tokens - mask[::-1].index(1)
    if 0 in mask[start:stop]:
        raise DocumentError(
            f"'attention_mask' is 0 at position {start + mask[start:stop].index(0)}, between tokens that are attended "
            "to; only padding before and after a document can be left out"
        )
    return slice(start, stop)


def _refuse_packed(record: Record, kept: slice, num_tokens: int) -> None:
    """Refuse rows that hold several documents: they would become one document whose parts attend to each other."""
    is_packed = record.get("seq_lengths") not in (None, [kept.stop - kept.start], [num_tokens])
    if record.get("position_ids") is not None:
        positions = _integers(record["position_ids"], "position_ids")
        _check_length(positions, "position_ids", num_tokens)
        positions = positions[kept]
        is_packed = is_packed or positions != list(range(positions[0], positions[0] + len(positions)))
    if is_packed:
        raise DocumentError(
            "'seq_lengths' or 'position_ids' say that several documents are packed into this row; write each as a "
            "document of its own, Tunebook packs them (packing.mode)"
        )
    kinds = record.get("token_type_ids")
    if isinstance(kinds, list) and any(kinds):
        raise DocumentError("'token_type_ids' is not 0 everywhere, which causal language models do not read")


def _mask(record: Record, name: str, num_tokens: int) -> list[int]:
    value = record[name]
    if not isinstance(value, list) or not all(isinstance(bit, int) and bit in (0, 1) for bit in value):
        raise DocumentError(f"'{name}' must be a list of 0 and 1")
    _check_length(value, name, num_tokens)
    return value


def _check_length(values: list[int], field: str, num_tokens: int) -> None:
    if len(values) != num_tokens:
        raise DocumentError(f"'{field}' has {len(values)} entries and 'input_ids' {num_tokens}; they must be as many")


def _integers(value: object, field: str) -> list[int]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int}:
        raise DocumentError(f"'{field}' must be a list of whole numbers")
    if not value:
        raise DocumentError(f"'{field}' is empty")
    return value


def _check_range(token_ids: list[int], field: str, smallest: int, largest: int) -> None:
    outside = next((token_id for token_id in token_ids if not smallest <= token_id <= largest), None)
    if outside is not None:
        raise DocumentError(
            f"'{field}' holds {outside}, but the vocabulary goes from {smallest} to {largest}; "
            "were these tokens made by another tokenizer?"
        )
