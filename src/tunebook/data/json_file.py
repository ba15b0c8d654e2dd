"""Read JSON: parse a text as one object, and read a file of one JSON value item by item in bounded memory.

A file of one value has one of three layouts: an array of documents; an object that holds such an array under any key
(`{"data": [...]}`); one document written over several lines.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from tunebook.data.keys import meaning_of
from tunebook.data.problems import DocumentError, DocumentProblems
from tunebook.errors import DataError


class BrokenJsonError(DocumentError):
    """JSON or text after which the start of the next document is unknown."""


class _Decoder(json.JSONDecoder):
    """Python's decoder, and a check for a key twice, of which it keeps the last value and other readers the first."""

    def __init__(self) -> None:
        super().__init__(object_pairs_hook=self._make_object)
        self._repeated: list[str] = []

    def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
        self._repeated = []
        return super().raw_decode(s, idx)

    def check(self) -> None:
        """Raises: DocumentError if an object in the last value has a key twice."""
        if self._repeated:
            raise _repeated_keys(self._repeated)

    def _make_object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs) and not self._repeated:
            names = [name for name, _ in pairs]
            self._repeated = list(dict.fromkeys(name for name in names if names.count(name) > 1))
        return made


_DECODER = _Decoder()


def _repeated_keys(names: list[str]) -> DocumentError:
    listed = "' and '".join(names)
    message = f"the key '{listed}' is twice in one JSON object; keep one value"
    return DocumentError(message, problem_id="data-repeated-key")


def parse_object(text: str) -> dict[str, Any]:
    """One JSON object. Raises: DocumentError naming the column and the problem."""
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        near = error.doc[max(0, error.pos - 15) : error.pos + 15]
        hint = "; JSONL needs each document on one line" if text.strip() in ("{", "[") else ""
        message = f"broken JSON at column {error.pos + 1}: {lower_first(error.msg)}, near {near!r}{hint}"
        raise DocumentError(message, problem_id="data-broken-json") from error
    except (RecursionError, ValueError) as error:
        raise DocumentError(f"JSON that cannot be read: {error}", problem_id="data-broken-json") from error
    _DECODER.check()
    return check_object(value, might_escape="\\u" in text)


def continues_on_the_next_line(line: str) -> bool:
    """Whether a line is the beginning of a JSON value that is written over several lines."""
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        # A string cannot continue on the next line: this line was cut off.
        return error.pos >= len(line.rstrip()) and not error.msg.startswith("Unterminated string")
    except (RecursionError, ValueError):
        return False
    return False


def check_object(value: object, *, might_escape: bool) -> dict[str, Any]:
    """The value if it is a JSON object of encodable text. Raises: DocumentError."""
    if not isinstance(value, dict):
        hint = " (a JSON array of documents belongs in a file named .json)" if isinstance(value, list) else ""
        raise DocumentError(f"{type_name(value)} where an object {{...}} belongs{hint}", problem_id="data-broken-json")
    if might_escape:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start : error.end]
            raise DocumentError(
                f"{half!r} is half of a surrogate pair, which is no character; write both halves or the character",
                problem_id="data-not-utf8",
            ) from error
    return value


def type_name(value: object) -> str:
    """The JSON type of a value, in words; tables also have types that JSON has not."""
    if value is None:
        return "null"
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    name = names.get(type(value))
    return f"a JSON {name}" if name is not None else f"of the type {type(value).__name__}, which JSON does not have,"


def lower_first(text: str) -> str:
    """The text with a small first letter, to follow a colon."""
    return text[:1].lower() + text[1:]


Record = tuple[int, dict[str, Any]]  # a document's number in its file, from 1, and its keys

_CHUNK_BYTES = 1 << 20
_LONGEST_TOKEN = 16  # characters: an error this close to the end of what was read may be an item cut in two
_SPACE = " \t\r\n"


def read_array(stream: IO[bytes], problems: DocumentProblems) -> Iterator[Record]:
    """The objects of a JSON array with their numbers, from 1.

    Items that are no objects are added to `problems`. Reading ends at broken JSON, after which the start of the next
    item is unknown.
    """
    problems.unit = "item"
    text = _Text(stream)
    try:
        text.skip("[")
        yield from _items(text, problems)
        if text.next_character():
            raise text.error("extra text after the closing ]", 0)
    except DocumentError as error:
        problems.add_last(text.item, error, f" (line {text.line})")


def holds_array(value: dict[str, Any], known_keys: frozenset[str]) -> bool:
    """Whether an object is no document (it has none of `known_keys`) and holds an array of objects."""
    return (
        bool(known_keys)
        and known_keys.isdisjoint(value)
        and any(isinstance(item, list) and item and isinstance(item[0], dict) for item in value.values())
    )


def read_object(
    stream: IO[bytes], problems: DocumentProblems, known_keys: frozenset[str], field: str | None = None
) -> Iterator[Record]:
    """The documents of a file that is one JSON object: the array of objects under `field`, or under any key.

    An object with one of `known_keys`, the keys of documents, is a document itself, unless `field` is named. Raises:
    DataError for arrays of objects under several keys: one of them may be meant for testing.
    """
    problems.unit = "item"
    text = _Text(stream)
    pairs: dict[str, Any] = {}  # all but the array
    array_key: str | None = None
    try:
        text.skip("{")
        while text.next_character() not in ("}", ""):
            key = text.take_key()
            if key in pairs or key == array_key:
                raise _repeated_keys([key])
            may_hold = key == field if field is not None else bool(known_keys) and known_keys.isdisjoint({*pairs, key})
            if text.next_character() == "[" and may_hold:
                text.skip("[")
                if text.next_character() != "{":
                    pairs[key] = _values(text)
                elif array_key is None:
                    array_key = key
                    yield from _items(text, problems)
                else:
                    raise _several_arrays(problems.location, array_key, key)
            else:
                pairs[key] = text.take_value()
            text.skip_separator("}")
        text.skip("}")
        if text.next_character():
            raise text.error("a second JSON value after the first; write one per line, as with `jq -c . FILE`", 0)
        if array_key is None:
            text.item = 1
            yield 1, check_object(pairs, might_escape=True)
        else:
            _account_for(pairs, array_key, problems, known_keys if field is None else frozenset())
    except DocumentError as error:
        problems.add_last(text.item, error, f" (line {text.line})")


def _items(text: _Text, problems: DocumentProblems) -> Iterator[Record]:
    """The objects of an array after its opening bracket. Raises: DocumentError for broken JSON."""
    while text.next_character() not in ("]", ""):
        text.item += 1
        place = f" (line {text.line})"
        try:
            yield text.item, check_object(text.take_value(), might_escape=True)
        except BrokenJsonError:
            raise
        except DocumentError as error:
            problems.add(text.item, error, place)
        text.skip_separator("]")
    text.skip("]")


def _values(text: _Text) -> list[object]:
    """The values of an array after its opening bracket."""
    values = []
    while text.next_character() not in ("]", ""):
        values.append(text.take_value())
        text.skip_separator("]")
    text.skip("]")
    return values


def _several_arrays(location: str, first: str, second: str) -> DataError:
    return DataError(
        f"{location} is one JSON object with documents under '{first}' and under '{second}', and one of them may be "
        f"meant for testing; write those to train on into a file of their own: jq -c '.{first}[]' FILE > train.jsonl",
        problem_id="data-several-arrays",
    )


def _account_for(pairs: dict[str, Any], array_key: str, problems: DocumentProblems, known_keys: frozenset[str]) -> None:
    """Note the other keys of the file. Raises: DocumentError for a document's own key, or a key that matters."""
    both = sorted(known_keys & pairs.keys())
    if both:
        raise DocumentError(
            f"the file is one JSON object with documents under '{array_key}' and a document's own key '{both[0]}'; "
            "write the documents alone into a file of their own"
        )
    for key, value in pairs.items():
        if (meaning := meaning_of(key, value)) is not None:
            raise DocumentError(
                f"the file is one JSON object with documents under '{array_key}' and, for all of them, '{key}', which "
                f"is not supported there: {meaning}. Write it into each document, or write the documents alone into a "
                f"file: jq -c '.{array_key}[]' FILE > train.jsonl",
                problem_id="data-key-not-supported",
            )
    others = f"; keys of the file not read: {', '.join(pairs)}" if pairs else ""
    problems.notes.append(f"its documents are the array under '{array_key}'{others}")


class _Text:
    """The decoded text of a stream from a position on, read in chunks; counts lines."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._buffer = ""
        self._position = 0
        self._num_bytes = 0
        self._at_end = False
        self.line = 1
        self.item = 0  # the number of the current item, from 1

    def next_character(self) -> str:
        """The next character that is no white space, or an empty string at the end."""
        while True:
            while self._position < len(self._buffer):
                character = self._buffer[self._position]
                if character not in _SPACE:
                    return character
                self._advance(self._position + 1)
            if not self._read_more(_CHUNK_BYTES):
                return ""

    def skip(self, expected: str) -> None:
        """Skip one character. Raises: DocumentError if another one is there."""
        found = self.next_character()
        if found != expected:
            raise self.error(f"expecting {expected!r}, found {found!r}", 0)
        self._advance(self._position + 1)

    def skip_separator(self, closing: str) -> None:
        """Skip the comma between two items; leaves the closing bracket."""
        following = self.next_character()
        if following == closing:
            return
        if not following:
            raise self.error(f"it ends without the closing {closing}", 0)
        self.skip(",")
        if self.next_character() == closing:
            raise self.error(f"a comma before the closing {closing}", 0)

    def take_key(self) -> str:
        """The key of an object's next value, with the colon."""
        key = self.take_value()
        if not isinstance(key, str):
            raise self.error(f"a key is a text in double quotes, not {key!r}", 0)
        self.skip(":")
        return key

    def take_value(self) -> object:
        """The next JSON value. Raises: BrokenJsonError; DocumentError for a key twice in it, after skipping it."""
        chunk_bytes = _CHUNK_BYTES
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._position)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - _LONGEST_TOKEN
                offset = error.pos - self._position
                # Doubling keeps the repeated parsing of one huge item linear in its size.
                chunk_bytes *= 2
                if is_cut and self._read_more(chunk_bytes):
                    continue
                raise self.error(lower_first(error.msg), offset) from error
            except (RecursionError, ValueError) as error:
                raise self.error(str(error), 0) from error
            if end == len(self._buffer) and self._read_more(chunk_bytes):
                continue  # a number may continue
            self._advance(end)
            _DECODER.check()
            return value

    def error(self, message: str, offset: int) -> BrokenJsonError:
        """A problem `offset` characters from here, with the text around it; moves there."""
        position = self._position + offset
        near = self._buffer[max(0, position - 15) : position + 15]
        self._advance(position)
        return BrokenJsonError(f"broken JSON: {message}, near {near!r}", problem_id="data-broken-json")

    def _advance(self, position: int) -> None:
        self.line += self._buffer.count("\n", self._position, position)
        self._position = position

    def _read_more(self, num_bytes: int) -> bool:
        if self._at_end:
            return False
        data = self._stream.read(num_bytes)
        self._at_end = not data
        try:
            decoded = self._decoder.decode(data, final=self._at_end)
        except UnicodeDecodeError as error:
            offset = self._num_bytes + len(data) - len(error.object) + error.start
            raise BrokenJsonError(
                f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset} in the file; convert it, such "
                "as with `iconv -f LATIN1 -t UTF-8`",
                problem_id="data-not-utf8",
            ) from error
        self._num_bytes += len(data)
        self._buffer = self._buffer[self._position :] + decoded
        self._position = 0
        return bool(decoded) or self._read_more(num_bytes)
