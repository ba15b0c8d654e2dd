"""One JSON text becomes one object, or a problem that says at which column and what is wrong."""

from __future__ import annotations

import json
from typing import Any

from tunebook.data.problems import DocumentError


class RepeatedKeyError(ValueError):
    """An object has one key twice: Python would keep the last value, other readers the first."""


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = dict.fromkeys(name for name in names if names.count(name) > 1)
        listed = " and ".join(f"'{name}'" for name in repeated)
        raise RepeatedKeyError(f"the key {listed} stands twice in one JSON object; keep one value")
    return made


DECODER = json.JSONDecoder(object_pairs_hook=_object_of_unique_keys)


def parse_object(text: str) -> dict[str, Any]:
    """One JSON object. Raises: DocumentError saying at which column and what is wrong."""
    try:
        value = DECODER.decode(text)
    except json.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 15) : error.pos + 15]
        hint = "; JSONL needs each document whole on one line" if text.strip() in ("{", "[") else ""
        message = f"broken JSON at column {error.pos + 1}: {lower_first(error.msg)}, near {near!r}{hint}"
        raise DocumentError(message, problem_id="data-broken-json") from error
    except RepeatedKeyError as error:
        raise DocumentError(str(error), problem_id="data-repeated-key") from error
    except (RecursionError, ValueError) as error:
        raise DocumentError(f"JSON that cannot be read: {error}", problem_id="data-broken-json") from error
    return check_object(value, might_escape="\\u" in text)


def continues_on_the_next_line(line: str) -> bool:
    """Whether a line is the beginning of a JSON value that is written over several lines."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        # A string cannot go on in the next line, so an open one is a line that was cut off.
        return error.pos >= len(line.rstrip()) and not error.msg.startswith("Unterminated string")
    except (RecursionError, ValueError):
        return False
    return False


def check_object(value: object, *, might_escape: bool) -> dict[str, Any]:
    """The value if it is a JSON object of encodable text. Raises: DocumentError."""
    if not isinstance(value, dict):
        hint = " (a JSON array of documents belongs in a file named .json)" if isinstance(value, list) else ""
        raise DocumentError(
            f"a JSON {type_name(value)} where an object {{...}} belongs{hint}", problem_id="data-broken-json"
        )
    if might_escape:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end]
            raise DocumentError(
                f"{half!r} is half of a surrogate pair, which is no character; write the whole pair or the character",
                problem_id="data-not-utf8",
            ) from error
    return value


def type_name(value: object) -> str:
    """A Python value's type in JSON's words."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def lower_first(text: str) -> str:
    """The text with a small first letter, to go on after a colon."""
    return text[:1].lower() + text[1:]
