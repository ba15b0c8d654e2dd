"""Judge one program: start it and its test in two processes, watch both, and report the result.

The two processes share only one pipe in each direction. The verdict comes from the test's process through its own pipe,
with a nonce that the program never sees. Everything else is observed by the worker.
"""

from __future__ import annotations

import errno
import functools
import json
import marshal
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tunebook.evaluate.sandbox.limits import bind_process
from tunebook.evaluate.sandbox.protocol import Outcome, Program, Status
from tunebook.evaluate.sandbox.walls import Wall, descendants, num_tasks_of

# The children get their code through stdin: they need no access to its folder, and it is compiled only once.
BOOTSTRAP = """
import marshal
with open(0, "rb", closefd=False) as file:
    code, settings = marshal.load(file)
if settings["num_processes"]:
    import resource
    resource.setrlimit(resource.RLIMIT_NPROC, (settings["num_processes"],) * 2)
names = {"__name__": "child"}
exec(code, names)
names["main"](settings)
"""
TICK_S = 0.1  # how often memory and output are checked
MAX_VERDICT_BYTES = 64 << 10
GONE_AFTER_S = 0.5  # how long a process that closed its pipes may take to end
SHELL_SIGNAL = 128  # 128 + n: ended by signal n
NUM_LAST_LINES = 10
MAX_MESSAGE = 3000
DISK_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def judge(program: Program, wall: Wall) -> Outcome:
    """Judge one program and return its outcome.

    Raises: OSError or SubprocessError if a process cannot be started, StuckError if something cannot be removed.
    """
    started = time.monotonic()
    trial = _Trial(program, wall)
    try:
        trial.start()
        trial.watch()
    finally:
        trial.end()
    status, message = trial.conclude()
    return Outcome(
        id=program.id, status=status, message=printable(message),
        last_lines=[printable(line) for line in trial.printed[-NUM_LAST_LINES:]],
        seconds=round(time.monotonic() - started, 3),
    )  # fmt: skip


@functools.cache
def _child_code() -> Any:
    source = Path(__file__).with_name("child.py").read_bytes()
    return compile(source, "<child>", "exec", dont_inherit=True)


class _Trial:
    """One running program: its two processes, their pipes, and the worker's observations."""

    def __init__(self, program: Program, wall: Wall) -> None:
        self.printed: list[str] = []  # the last lines of program and test
        self._program = program
        self._wall = wall
        self._nonce = secrets.token_hex(16)
        self._open: set[int] = set()  # file descriptors
        self._verdict_pipe = self._pipe()
        # Program and test print into files. Unlike pipes, files need no reader meanwhile.
        self._outputs = (self._file(), self._file())
        self._solution: subprocess.Popen[bytes] | None = None
        self._checker: subprocess.Popen[bytes] | None = None
        self._solution_exit: int | None = None  # as in `subprocess`; None: still running
        self._checker_exit: int | None = None
        self._verdict: dict[str, Any] | None = None
        self._exceeded: tuple[Status, str] | None = None  # the limit that was exceeded
        self._has_left_processes = False

    def _pipe(self) -> tuple[int, int]:
        """Create a pipe and return its read and write ends. A child inherits only the ends passed to it."""
        ends = os.pipe()
        self._open |= set(ends)
        return ends

    def _file(self, content: bytes = b"") -> int:
        """Return a descriptor of an unnamed file, positioned at its start."""
        descriptor = os.memfd_create("file", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)  # no other user opens or executes it through /proc
        self._open.add(descriptor)
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _close(self, descriptors: set[int]) -> None:
        self._open -= descriptors
        for descriptor in descriptors:
            os.close(descriptor)

    def start(self) -> None:
        """Start both processes."""
        calls, answers = self._pipe(), self._pipe()
        self._checker = self._start_child(
            "checker", (answers[0], calls[1], self._verdict_pipe[1]), self._outputs[1],
            test=self._program.test, nonce=self._nonce,
        )  # fmt: skip
        self._solution = self._start_child(
            "solution", (calls[0], answers[1]), self._outputs[0], source=self._program.source
        )
        # Closed here, so that a pipe ends with its last process. `calls` stays open: the program must keep waiting
        # after its test ended, because the search for leftover processes starts at the program.
        self._close(self._open - {calls[1], *self._outputs, self._verdict_pipe[0]})

    def _start_child(self, role: str, pipes: tuple[int, ...], output: int, **settings: str) -> subprocess.Popen[bytes]:
        """Start one process as a fresh user in its own folder, with nothing of the runner's environment."""
        limits, wall = self._wall.limits, self._wall
        user, folder = wall.new_home()
        command = [str(Path(sys.executable).resolve()), "-I", "-S", "-u", "-B", "-X", "utf8", "-c", BOOTSTRAP]
        descriptors, filter, num_processes = pipes, wall.filter, limits.num_processes
        content = {"role": role, "pipes": pipes, "num_processes": num_processes if wall.prefix else 0, **settings}
        if wall.prefix:
            # bubblewrap makes calls that the filter refuses, and a user namespace with its own process count. So the
            # filter and the process limit are set inside it.
            seccomp = []
            if filter is not None:
                descriptors = (*pipes, self._file(filter))
                seccomp = ["--seccomp", str(descriptors[-1])]
            command = [*wall.prefix, *seccomp, "--", *command]
            filter, num_processes = None, 0
        elif user is None:
            num_processes += num_tasks_of(os.getuid())
        home = "/work" if wall.prefix else folder
        bind = functools.partial(
            bind_process, limits, self._program.time_limit_s, num_processes=num_processes, filter=filter
        )
        return subprocess.Popen(
            command, pass_fds=descriptors,
            stdin=self._file(marshal.dumps((_child_code(), content))), stdout=output, stderr=output,
            cwd=folder, env={"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8"},
            user=user, group=user, extra_groups=None if user is None else [],
            start_new_session=True, umask=0o077, preexec_fn=bind,
        )  # fmt: skip

    def watch(self) -> None:
        """Wait for a verdict, or for a reason to end the trial without one."""
        deadline = time.monotonic() + self._program.time_limit_s
        line = b""
        while self._exceeded is None and not line.endswith(b"\n") and len(line) <= MAX_VERDICT_BYTES:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._exceeded = Status.timed_out, f"it was not done after {self._program.time_limit_s:g} s"
            elif not select.select([self._verdict_pipe[0]], [], [], min(TICK_S, left_s))[0]:
                self._check_memory()
                self._check_output()
            elif part := os.read(self._verdict_pipe[0], MAX_VERDICT_BYTES):
                line += part
            else:
                break
        with suppress(Exception):  # any invalid line: without the nonce it is no verdict
            verdict = json.loads(line)
            if secrets.compare_digest(verdict["nonce"], self._nonce) and isinstance(verdict["status"], str):
                self._verdict = verdict

    def _check_memory(self) -> None:
        limit_bytes = self._wall.limits.memory_bytes
        if sum(descendants(os.getpid()).values()) > limit_bytes:
            self._exceeded = Status.memory, f"it used more than {limit_bytes >> 20} MiB of memory"

    def _check_output(self) -> None:
        limits = self._wall.limits
        self.printed = []
        for output in self._outputs:
            size = os.fstat(output).st_size
            if size > limits.output_bytes:
                self._exceeded = Status.output, f"it printed more than {limits.output_bytes >> 10} KiB"
            kept = min(size, limits.kept_output_bytes)
            self.printed += os.pread(output, kept, size - kept).decode(errors="replace").splitlines()[-NUM_LAST_LINES:]

    def end(self) -> None:
        """End both processes and everything they left; record the exit codes of those that ended by themselves."""
        verdict, wall = self._verdict, self._wall
        try:
            if self._solution is not None:
                self._has_left_processes = verdict is not None and wall.has_more_processes(self._solution.pid)
                is_gone = verdict is not None and verdict["status"] == "gone"
                self._solution_exit = _end(self._solution, waits=is_gone)
            if self._checker is not None:
                self._checker_exit = _end(self._checker, waits=verdict is None and self._exceeded is None)
            self._has_left_processes |= wall.clear()
            self._check_output()
        finally:
            self._close(set(self._open))

    def conclude(self) -> tuple[Status, str]:
        """The status of the program and the reason."""
        verdict = self._verdict
        if self._exceeded is not None:
            return self._exceeded
        if verdict is None:
            return Status.failed, f"its test ended without a verdict ({_how(self._checker_exit)})"
        if verdict["status"] == "gone":
            message = f"it ended before its test did ({_how(self._solution_exit)})"
            if self._solution_exit == -signal.SIGXCPU:
                return Status.timed_out, message
            return Status.crashed if (self._solution_exit or 0) < 0 else Status.failed, message
        if verdict["status"] == "passed":
            if self._has_left_processes:
                return Status.left_processes, "its test passed, but it left processes behind"
            return Status.passed, ""
        message = str(verdict.get("message"))[:MAX_MESSAGE]
        if verdict.get("kind") == "MemoryError":
            return Status.memory, message
        return Status.disk if verdict.get("errno") in DISK_ERRORS else Status.failed, message


def _end(process: subprocess.Popen[bytes], *, waits: bool) -> int | None:
    """Make sure that a child has ended; return its exit code if it ended by itself.

    bubblewrap reports a signal as shells do. The returned code is the child's own.
    """
    try:
        exit_code = process.wait(GONE_AFTER_S) if waits else process.poll()
    except subprocess.TimeoutExpired:
        exit_code = None
    if exit_code is None:
        process.kill()
        process.wait()
        return None
    return exit_code if exit_code <= SHELL_SIGNAL else SHELL_SIGNAL - exit_code


def printable(text: str) -> str:
    """Escape control characters in a program's text, because they could control the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else f"\\x{ord(char):02x}" for char in text)


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "the reason is unknown"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else str(-exit_code)
    by_kernel = ", by itself or by the kernel because memory ran out" if exit_code == -signal.SIGKILL else ""
    return f"killed by {name}{by_kernel}"
