"""Messages between evaluation and runner: one connection per program, one line of JSON each way.

The socket lies in the handover folder, which only the evaluation's group may enter. An empty request asks the runner to
describe itself. The client does not trust the answers: a runner that a program took over could send anything.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

SOCKET = "runner.sock"  # in the handover folder
MAX_REQUEST_BYTES = 64 << 20  # tests with many cases take a few MiB
MAX_ANSWER_BYTES = 1 << 20  # an outcome keeps less than 0.1 MiB of messages and output
# Modules of the runner. The sandbox image must hold the same ones as the checkout.
RUNNER_MODULES = ("protocol", "child", "limits", "walls", "judge", "runner")


class Status(StrEnum):
    """Result of one program. Only `passed` counts; `broken` means that the sandbox itself failed."""

    passed = "passed"
    failed = "failed"  # a wrong answer, an exception, or an exit before the test ended
    timed_out = "timed_out"
    memory = "memory"
    disk = "disk"
    output = "output"
    crashed = "crashed"  # ended by a signal that it caused
    left_processes = "left_processes"  # passed its test, but left processes in the background
    broken = "broken"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One sample: the program, and the test that runs with the program's names."""

    id: str
    source: str
    test: str
    time_limit_s: float = 3.0  # as in the harness' own code_eval


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one program, and the reason for it."""

    id: str
    status: Status
    message: str
    last_lines: list[str] = field(default_factory=list)  # printed by the program
    seconds: float = 0.0

    @property
    def is_passed(self) -> bool:
        """Whether the program counts as right."""
        return self.status is Status.passed


@dataclass(frozen=True, kw_only=True)
class RunnerInfo:
    """A runner's description of itself."""

    version: str
    wall: str
    num_workers: int


@functools.cache
def runner_version() -> str:
    """Return a hash of the runner's sources. The evaluation refuses a runner with other sources."""
    digest = hashlib.sha256()
    for name in RUNNER_MODULES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return digest.hexdigest()


@contextmanager
def socket_address(folder: Path) -> Iterator[str]:
    """Yield the address of a folder's socket. The path itself may exceed the 107 bytes that an address holds."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{SOCKET}"
    finally:
        os.close(descriptor)


def send(connection: socket.socket, message: Program | Outcome | RunnerInfo | None) -> None:
    """Send a message; None is the empty request. Raises: OSError."""
    fields = asdict(message) if message is not None else {}
    connection.sendall(json.dumps(fields).encode("ascii") + b"\n")  # ASCII: programs may hold lone surrogates


def receive(connection: socket.socket, max_bytes: int, timeout_s: float) -> dict[str, Any] | None:
    """Receive one message; None if the other side closed the connection. Raises: ValueError if invalid, OSError."""
    content = bytearray()
    end = time.monotonic() + timeout_s
    while not content.endswith(b"\n"):
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(1 << 20)
        if not part:
            return None
        content += part
        if len(content) > max_bytes:
            raise ValueError(f"it is larger than {max_bytes >> 20} MiB")
    try:
        value = json.loads(content)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is {value!r:.40}, not a JSON object")
    return value


def parse(kind: type[Any], message: dict[str, Any]) -> Any:
    """Convert a message to one of the dataclasses above. Raises: ValueError for missing, unknown or mistyped fields."""
    types: dict[str, Any] = {"str": str, "float": (int, float), "int": int, "Status": str, "list[str]": list}
    known = kind.__dataclass_fields__
    if message.keys() != known.keys():
        raise ValueError(f"its keys are {sorted(message)!r:.200}, not {sorted(known)}")
    for name, value in message.items():
        if not isinstance(value, types[known[name].type]) or isinstance(value, bool):
            raise ValueError(f"`{name}` is {value!r:.40}, not {known[name].type}")
    if not all(isinstance(line, str) for line in message.get("last_lines", [])):
        raise ValueError("`last_lines` holds something that is not text")
    return kind(**message | ({"status": Status(message["status"])} if "status" in message else {}))
