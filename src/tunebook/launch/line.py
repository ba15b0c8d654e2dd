"""A TCP connection that carries one JSON object per line, and notices when the other end is gone.

The system closes the connections of a process that dies, so that is seen at once. A machine that loses power or its
cable says nothing: it is probed when silent, and given up `DEAD_AFTER_S` later.
"""

from __future__ import annotations

import json
import select
import socket
import sys
from typing import Any

Message = dict[str, Any]  # its kind under "kind"

DEAD_AFTER_S = 30
_PROBE_AFTER_S, _PROBE_EVERY_S, _NUM_PROBES = 10, 5, 4  # 10 + 4 x 5 = 30
_SEND_TIMEOUT_S = 10.0
_LONGEST_LINE = 1 << 20  # a stranger on the port must not fill the memory


class Line:
    """One end of a connection; `is_closed` once the other end is gone, of whatever cause."""

    def __init__(self, connection: socket.socket) -> None:
        self.is_closed = False
        self._connection = connection
        self._received = b""
        connection.settimeout(_SEND_TIMEOUT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if sys.platform == "linux":
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, DEAD_AFTER_S * 1000)

    @property
    def own_address(self) -> str:
        """This machine's address on the way to the other end."""
        return plain_address(self._connection.getsockname()[0])

    def fileno(self) -> int:
        """For `select`."""
        return self._connection.fileno()

    def send(self, kind: str, **values: Any) -> None:
        """Send a message; nothing happens where the other end is gone."""
        try:
            self._connection.sendall(json.dumps({"kind": kind, **values}).encode() + b"\n")
        except OSError:
            self.is_closed = True

    def receive(self, timeout_s: float) -> list[Message]:
        """The messages that have come, waiting at most `timeout_s` for the first."""
        if self.is_closed or not select.select([self], [], [], timeout_s)[0]:
            return []
        try:
            more = self._connection.recv(65536)
        except OSError:
            more = b""
        self._received += more
        *lines, self._received = self._received.split(b"\n")
        self.is_closed = not more or len(self._received) > _LONGEST_LINE
        return [message for line in lines if (message := _read(line)) is not None]

    def close(self) -> None:
        """Hang up."""
        self.is_closed = True
        self._connection.close()


def plain_address(address: str) -> str:
    """An IPv4 address as such, also where it came over an IPv6 socket."""
    return address.removeprefix("::ffff:")


def is_loopback(address: str) -> bool:
    """Whether an address means this machine only."""
    return address.startswith("127.") or address == "::1"


def _read(line: bytes) -> Message | None:
    """A message, or None for what is none: anybody may call a port."""
    try:
        message = json.loads(line)
    except ValueError:
        return None
    return message if isinstance(message, dict) and isinstance(message.get("kind"), str) else None
