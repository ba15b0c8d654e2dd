"""Reading a JSON array of documents item by item, without holding the whole file."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import IO, Any

from tunebook.data.json_objects import check_object, lower_first
from tunebook.data.problems import DocumentError, DocumentProblems

_CHUNK_BYTES = 1 << 20
_LONGEST_TOKEN = 16  # characters: an error this close to the end of what was read may be an item cut in two
_SPACE = " \t\r\n"


def read_array(stream: IO[bytes], problems: DocumentProblems) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSON array with their numbers, from 1.

    Items that are no objects are added to `problems` and the reading goes on; after broken JSON it cannot, since
    nothing tells where the next item starts.
    """
    problems.unit = "item"
    text = _Text(stream)
    number = 0
    try:
        text.skip("[")
        while text.next_character() not in ("]", ""):
            number += 1
            line = text.line
            value = text.take_value()
            try:
                yield number, check_object(value, might_escape=True)
            except DocumentError as error:
                problems.add(number, error, f" (line {line})")
            text.skip_separator()
        text.skip("]")
        if text.next_character():
            raise text.error("extra text after the closing ]", 0)
    except DocumentError as error:
        problems.add(number, error, f" (line {text.line})")


class _Text:
    """The decoded text of a stream from one position on, read further when needed; counts lines."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._json = json.JSONDecoder()
        self._buffer = ""
        self._position = 0
        self._num_bytes = 0
        self._at_end = False
        self.line = 1

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
        """Go past one character. Raises: DocumentError when another one is there."""
        found = self.next_character()
        if found != expected:
            raise self.error(f"expecting {expected!r}, found {found!r}", 0)
        self._advance(self._position + 1)

    def skip_separator(self) -> None:
        """Go past the comma between two items; leaves the closing bracket."""
        following = self.next_character()
        if following == "]":
            return
        if not following:
            raise self.error("it ends without the closing ]", 0)
        self.skip(",")
        if self.next_character() == "]":
            raise self.error("a comma before the closing ]", 0)

    def take_value(self) -> object:
        """The next JSON value. Raises: DocumentError where it is broken."""
        chunk_bytes = _CHUNK_BYTES
        while True:
            try:
                value, end = self._json.raw_decode(self._buffer, self._position)
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
                continue  # a number may go on
            self._advance(end)
            return value

    def error(self, message: str, offset: int) -> DocumentError:
        """A problem `offset` characters from here, with the text around it; moves there."""
        position = self._position + offset
        near = self._buffer[max(0, position - 15) : position + 15]
        self._advance(position)
        return DocumentError(f"broken JSON: {message}, near {near!r}", problem_id="data-broken-json")

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
            raise DocumentError(
                f"not UTF-8: byte 0x{error.object[error.start]:02x} at offset {offset} in the file; convert it, such "
                "as with `iconv -f LATIN1 -t UTF-8`",
                problem_id="data-not-utf8",
            ) from error
        self._num_bytes += len(data)
        self._buffer = self._buffer[self._position :] + decoded
        self._position = 0
        return bool(decoded) or self._read_more(num_bytes)
