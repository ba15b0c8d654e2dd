"""Ask another program something and never wait for it longer than said, whatever state it is in.

A GPU that fell off the bus leaves `nvidia-smi` in a state in which not even SIGKILL ends it. So the answer goes to a
file, which needs nobody at the other end, and a program that was killed is not waited for.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

_LONGEST_ANSWER = 1 << 20  # bytes
_DYING_S = 2.0  # how long a killed program is given to go, so that it leaves no zombie


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a program wrote, and why that is no answer, if it is none."""

    text: str
    errors: str = ""
    problem: str | None = None  # such as: no answer within 20 s
    is_late: bool = False  # it was ended because it took too long

    @property
    def last_words(self) -> str:
        """The last line that it wrote, of its errors if there are any: most often the reason of a failure."""
        lines = [line.strip() for line in (self.errors.strip() or self.text.strip()).splitlines() if line.strip()]
        return lines[-1][:300] if lines else ""


def ask(command: Sequence[str], *, timeout_s: float, environment: Mapping[str, str] | None = None) -> Answer:
    """Run a program to its end, or for so long. Never raises for what the program does."""
    with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=errors,
                env=dict(environment) if environment is not None else None,
                start_new_session=True,
            )
        except OSError as error:
            return Answer(text="", problem=f"it cannot be started: {error.strerror or error}")
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            _kill(process)
            problem = f"no answer within {timeout_s:g} s"
            return Answer(text=_read(said), errors=_read(errors), problem=problem, is_late=True)
        except BaseException:  # Ctrl-C
            _kill(process)
            raise
        return Answer(text=_read(said), errors=_read(errors), problem=_ending(code))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a program and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_DYING_S)


def _read(stream: IO[bytes]) -> str:
    stream.seek(0)
    return stream.read(_LONGEST_ANSWER).decode(errors="replace")


def _ending(code: int) -> str | None:
    if code == 0:
        return None
    return f"it was killed by signal {-code}" if code < 0 else f"it ended with exit code {code}"
