"""The line between a program and its test: requests and replies in turn, which may nest in both directions.

A test calls a function of the program (a request); the program may call a function that it was given (a request back)
before it replies. Part of both children.
"""

from __future__ import annotations

import os

from tunebook.evaluate.sandbox.values import SIZE, decode, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Protocol

    class Side(Protocol):
        """What is at one end of the line."""

        def give(self, value: object) -> tuple[bytes, Any]:
            """A tag and content for an object that is no plain data."""

        def take(self, tag: bytes, content: Any) -> Any:
            """What they stand for."""

        def serve(self, *request: Any) -> Any:
            """What is replied to a request."""

        def describe(self, error: BaseException) -> dict[str, Any]:
            """An exception as the other side can raise it again."""


MAX_MESSAGE_BYTES = 64 << 20
REQUEST, REPLY, ERROR = "request", "reply", "error"


class ClosedError(BaseException):
    """The other side is gone. Not an Exception, which a test may expect and catch."""


class RemoteError(Exception):
    """The other side replied with a description of an exception."""

    def __init__(self, description: dict[str, Any]) -> None:
        super().__init__()
        self.description = description


class Channel:
    """Sends and receives messages over a pair of pipes, and serves requests while it waits for a reply."""

    def __init__(self, read_from: int, write_to: int, side: Side) -> None:
        self._read_from = read_from
        self._write_to = write_to
        self._side = side
        self.is_closed = False

    def ask(self, *request: Any) -> Any:
        """Send a request and return what is replied. Raises: RemoteError, ClosedError."""
        self._send(self._encoded(REQUEST, request))
        while True:
            kind, content = self._receive()
            if kind == REPLY:
                return content
            if kind == ERROR:
                raise RemoteError(content)
            self._answer(content)

    def serve_forever(self) -> None:
        """Answer requests until the other side is gone."""
        try:
            while True:
                self._answer(self._receive()[1])
        except ClosedError:
            return

    def _answer(self, request: Any) -> None:
        try:
            message = self._encoded(REPLY, self._side.serve(*request))
        except ClosedError:
            raise
        except BaseException as error:
            message = self._encoded(ERROR, self._side.describe(error))
        self._send(message)

    def _encoded(self, kind: str, content: Any) -> bytes:
        message = encode((kind, content), self._side.give)
        if len(message) > MAX_MESSAGE_BYTES:
            raise ValueError(f"a value of {len(message) >> 20} MiB is too large to be handed over")
        return message

    def _send(self, message: bytes) -> None:
        rest = memoryview(SIZE.pack(len(message)) + message)
        while rest:
            try:
                rest = rest[os.write(self._write_to, rest) :]
            except BrokenPipeError:
                self._close()

    def _receive(self) -> tuple[str, Any]:
        size = SIZE.unpack(self._read(SIZE.size))[0]
        if size > MAX_MESSAGE_BYTES:
            raise ValueError("a message is too large")
        kind, content = decode(self._read(size), self._side.take)
        return kind, content

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            part = os.read(self._read_from, min(size, 1 << 20))
            if not part:
                self._close()
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def _close(self) -> None:
        self.is_closed = True
        raise ClosedError
