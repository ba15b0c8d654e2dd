"""One program at work: its two processes, the pipes between them and to the worker, and what is seen of them."""

from __future__ import annotations

import os
import selectors
import time
from contextlib import suppress
from types import TracebackType

from tunebook.evaluate.sandbox import processes
from tunebook.evaluate.sandbox.verdict import Seen

TICK_S = 0.1  # how often memory is looked at
MAX_VERDICT_BYTES = 64 << 10
GONE_AFTER_S = 0.5  # how long a process that closed its pipes may take to end
SHELL_SIGNAL = 128  # 128 + n: ended by signal n
PIPE_BYTES = 64 << 10


class Trial:
    """Holds descriptors and children; both are gone when it is left."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self.program: int | None = None  # process ids
        self.test: int | None = None
        self._open: set[int] = set()
        self.calls, self.answers = self.pipe(), self.pipe()
        self.program_says, self.test_says, self.verdict = self.pipe(), self.pipe(), self.pipe()
        self._verdict_text = b""
        self._is_verdict_over = False

    def __enter__(self) -> Trial:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._close(*self._open)

    def pipe(self) -> tuple[int, int]:
        """A new pipe: its end to read from and the one to write to. No child gets an end that it is not given."""
        ends = os.pipe()
        self._open |= set(ends)
        return ends

    def text(self, content: bytes) -> int:
        """A descriptor to read some bytes from, with no file behind it."""
        descriptor = os.memfd_create("text", os.MFD_CLOEXEC)
        self._open.add(descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def nothing(self) -> int:
        """A descriptor with nothing to read."""
        descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._open.add(descriptor)
        return descriptor

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self._open.discard(descriptor)
            os.close(descriptor)

    def watch(self) -> None:
        """Look on until there is a verdict, or a reason to end it without one."""
        here = {self.program_says[0], self.test_says[0], self.verdict[0]}
        # The others are closed, so that a pipe ends when its last process does; but the program is to stay and wait for
        # more calls when its test has ended: what it left behind is looked for below it.
        self._close(*(self._open - here - {self.calls[1]}))
        deadline = time.monotonic() + self._seen.program.time_limit_s
        next_look = time.monotonic() + TICK_S
        with selectors.DefaultSelector() as selector:
            for end in here:
                selector.register(end, selectors.EVENT_READ)
            while not self._is_over():
                now = time.monotonic()
                if now >= deadline:
                    self._seen.is_timed_out = True
                    return
                if now >= next_look:
                    next_look = now + TICK_S
                    self._look_at_memory()
                for key, _ in selector.select(min(deadline, next_look) - now):
                    if not self._read(key.fd):
                        selector.unregister(key.fd)

    def _is_over(self) -> bool:
        seen = self._seen
        is_too_much = seen.program_output.is_too_much or seen.test_output.is_too_much
        return self._is_verdict_over or seen.is_out_of_memory or is_too_much

    def _read(self, end: int) -> bool:
        """Take what a pipe holds; returns whether there may be more."""
        part = os.read(end, PIPE_BYTES)
        if end == self.program_says[0]:
            self._seen.program_output.add(part)
        elif end == self.test_says[0]:
            self._seen.test_output.add(part)
        else:
            self._verdict_text += part
            size = int.from_bytes(self._verdict_text[:4], "big") + 4
            is_whole = len(self._verdict_text) >= max(size, 5)
            if is_whole:
                self._seen.take_verdict(self._verdict_text[4:size])
            self._is_verdict_over = is_whole or not part or len(self._verdict_text) > MAX_VERDICT_BYTES
        return bool(part)

    def _look_at_memory(self) -> None:
        total = sum(processes.descendants(os.getpid()).values())
        self._seen.is_out_of_memory = total > self._seen.limits.memory_bytes

    def end_children(self) -> None:
        """End both processes, and note how those ended that were gone before."""
        verdict = self._seen.verdict
        is_program_gone = verdict is not None and verdict["status"] == "gone"
        is_test_gone = verdict is None and self._is_verdict_over
        if self.program is not None:
            self._seen.program_exit = _end(self.program, waits=is_program_gone)
        if self.test is not None:
            self._seen.test_exit = _end(self.test, waits=is_test_gone)
        self.program = self.test = None

    def drain(self) -> None:
        """Take what the pipes still hold, once nobody is left to write into them."""
        for end in (self.program_says[0], self.test_says[0]):
            with suppress(BlockingIOError):
                os.set_blocking(end, False)
                while self._read(end) and not self._seen.program_output.is_too_much:
                    pass


def _end(child: int, *, waits: bool) -> int | None:
    """Make sure that a child has ended; returns how, if it was not by this.

    What a command that walls the child in says of a signal, as shells do, is said as of the child itself.
    """
    end = time.monotonic() + (GONE_AFTER_S if waits else 0)
    while (exit_code := processes.ended(child)) is None:
        if time.monotonic() >= end:
            processes.kill_and_wait(child)
            return None
        time.sleep(0.001)
    return exit_code if exit_code <= SHELL_SIGNAL else SHELL_SIGNAL - exit_code
