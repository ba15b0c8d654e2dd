"""From what was seen of a program and its test to what is said about it."""

from __future__ import annotations

import errno
import secrets
import signal
from dataclasses import dataclass, field
from typing import Any

from tunebook.evaluate.sandbox.jobs import Outcome, Program, Status
from tunebook.evaluate.sandbox.limits import Limits
from tunebook.evaluate.sandbox.values import decode

NUM_LAST_LINES = 10
DISK_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


class Output:
    """What a child prints: counted, and only its end kept."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._num_bytes = 0
        self._end = b""

    def add(self, part: bytes) -> None:
        """One more piece."""
        self._num_bytes += len(part)
        self._end = (self._end + part)[-self._limits.kept_output_bytes :]

    @property
    def is_too_much(self) -> bool:
        """Whether it is more than a program may print."""
        return self._num_bytes > self._limits.output_bytes

    @property
    def last_lines(self) -> list[str]:
        """Its end as text."""
        return self._end.decode(errors="replace").splitlines()[-NUM_LAST_LINES:]


@dataclass(kw_only=True)
class Seen:
    """What the worker itself saw. All but `verdict` is its own view; that comes from the test's process."""

    program: Program
    limits: Limits
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    verdict: dict[str, Any] | None = None
    is_timed_out: bool = False
    is_out_of_memory: bool = False
    has_left_processes: bool = False
    program_exit: int | None = None  # as `subprocess` says it; None: it was still there
    test_exit: int | None = None
    program_output: Output = field(init=False)
    test_output: Output = field(init=False)

    def __post_init__(self) -> None:
        self.program_output, self.test_output = Output(self.limits), Output(self.limits)

    def take_verdict(self, message: bytes) -> None:
        """The message that the test's process wrote; without the nonce it is no verdict."""
        try:
            verdict = decode(message, _no_objects)
            if secrets.compare_digest(verdict["nonce"], self.nonce) and isinstance(verdict["status"], str):
                self.verdict = verdict
        except Exception:  # whatever is wrong with it, it does not say that the test passed
            return

    def outcome(self, seconds: float) -> Outcome:
        """What became of the program."""
        status, message = self._conclude()
        lines = [printable(line) for line in self.program_output.last_lines + self.test_output.last_lines]
        return Outcome(
            id=self.program.id, status=status, message=printable(message), last_lines=lines[-NUM_LAST_LINES:],
            seconds=round(seconds, 3),
        )  # fmt: skip

    def _conclude(self) -> tuple[Status, str]:
        if self.program_output.is_too_much or self.test_output.is_too_much:
            return Status.output, f"it printed more than {self.limits.output_bytes >> 10} KiB"
        if self.is_out_of_memory:
            return Status.memory, f"it took more than {self.limits.memory_bytes >> 20} MiB of memory"
        if self.is_timed_out:
            return Status.timed_out, f"it was not done after {self.program.time_limit_s:g} s"
        if self.verdict is None:
            return Status.failed, f"its test ended without a verdict ({_how(self.test_exit)})"
        if self.verdict["status"] == "gone":
            return self._early_end()
        if self.verdict["status"] == "passed":
            if self.has_left_processes:
                return Status.left_processes, "its test passed, but it left processes behind"
            return Status.passed, ""
        return _failure(self.verdict)

    def _early_end(self) -> tuple[Status, str]:
        message = f"it ended before its test did ({_how(self.program_exit)})"
        if self.program_exit == -signal.SIGXCPU:
            return Status.timed_out, message
        return Status.crashed if (self.program_exit or 0) < 0 else Status.failed, message


def _no_objects(tag: bytes, content: Any) -> Any:
    raise ValueError("a verdict is plain data")


def _failure(verdict: dict[str, Any]) -> tuple[Status, str]:
    message = str(verdict.get("message"))[:3000]
    if verdict.get("kind") == "MemoryError":
        return Status.memory, message
    if verdict.get("errno") in DISK_ERRORS:
        return Status.disk, message
    return Status.failed, message


def printable(text: str) -> str:
    """A program's text without what would steer the terminal that it is shown on."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "how is not known"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else str(-exit_code)
    by_system = ", by itself or by the system for want of memory" if exit_code == -signal.SIGKILL else ""
    return f"killed by {name}{by_system}"
