"""Judge one program: start it and its test in two processes, watch both, and report what became of them.

All that the two have in common is a pipe in either direction. The verdict comes from the test's process through a pipe
of its own, with a nonce that the program never sees; everything else is the worker's own observation.
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

from tunebook.evaluate.sandbox.jobs import Outcome, Program, Status
from tunebook.evaluate.sandbox.limits import bind_process
from tunebook.evaluate.sandbox.walls import Wall, descendants

CHILD = Path(__file__).with_name("child.py")
# The children get their code through stdin: they need not see the folder that it is in, and it is compiled once.
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
TICK_S = 0.1  # how often memory and output are looked at
MAX_VERDICT_BYTES = 64 << 10
GONE_AFTER_S = 0.5  # how long a process that closed its pipes may take to end
SHELL_SIGNAL = 128  # 128 + n: ended by signal n
NUM_LAST_LINES = 10
MAX_MESSAGE = 3000
DISK_ERRORS = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT}


def judge(program: Program, wall: Wall) -> Outcome:
    """What becomes of one program.

    Raises: OSError, SubprocessError where a process cannot be started, StuckError where something stays.
    """
    started = time.monotonic()
    trial = _Trial(program, wall)
    try:
        trial.start()
        trial.watch()
    finally:
        trial.end()
    return trial.outcome(time.monotonic() - started)


@functools.cache
def _child_code() -> Any:
    return compile(CHILD.read_bytes(), "<child>", "exec", dont_inherit=True)


class _Trial:
    """One program at work: its two processes, the pipes between them and to the worker, and what is seen of them."""

    def __init__(self, program: Program, wall: Wall) -> None:
        self._program = program
        self._wall = wall
        self._limits = wall.limits
        self._nonce = secrets.token_hex(16)
        self._open: set[int] = set()  # descriptors
        self._verdict_pipe = self._pipe()
        # What the program and its test print. In files, which nobody has to read meanwhile, unlike pipes.
        self._outputs = (self._file(), self._file())
        self._printed: list[str] = []  # the last lines
        self._solution: subprocess.Popen[bytes] | None = None
        self._checker: subprocess.Popen[bytes] | None = None
        self._solution_exit: int | None = None  # as `subprocess` has it; None: it was still there
        self._checker_exit: int | None = None
        self._verdict: dict[str, Any] | None = None
        self._is_verdict_over = self._is_timed_out = self._is_out_of_memory = self._is_too_much = False
        self._has_left_processes = False

    def _pipe(self) -> tuple[int, int]:
        """A new pipe: its end to read from and the one to write to. A child gets those that it is given."""
        ends = os.pipe()
        self._open |= set(ends)
        return ends

    def _file(self, content: bytes = b"") -> int:
        """A descriptor of a file without a name, with some content to read."""
        descriptor = os.memfd_create("file", os.MFD_CLOEXEC)
        os.fchmod(descriptor, 0o600)  # nobody else opens or executes it through /proc
        self._open.add(descriptor)
        with open(descriptor, "wb", closefd=False) as stream:
            stream.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        return descriptor

    def _close(self, *descriptors: int) -> None:
        for descriptor in descriptors:
            self._open.discard(descriptor)
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
        # Closed here, so that a pipe ends with its last process. But `calls` stays open: the program is to wait for
        # more when its test has ended, because what it left behind is looked for below it.
        self._close(*self._open - {calls[1], *self._outputs, self._verdict_pipe[0]})

    def _start_child(self, role: str, pipes: tuple[int, ...], output: int, **settings: str) -> subprocess.Popen[bytes]:
        """Start one process as a fresh user in a folder of its own, with nothing of the runner's environment."""
        limits, wall, home = self._limits, self._wall, self._wall.new_home()
        command = [str(Path(sys.executable).resolve()), "-I", "-S", "-u", "-B", "-X", "utf8", "-c", BOOTSTRAP]
        descriptors, filter, num_processes = pipes, wall.filter, limits.num_processes
        content = {"role": role, "pipes": pipes, "num_processes": num_processes if wall.prefix else 0, **settings}
        if wall.prefix:
            # bubblewrap makes the calls that are refused, and a user namespace in which processes count anew.
            sets_filter = []
            if filter is not None:
                descriptors = (*pipes, self._file(filter))
                sets_filter = ["--seccomp", str(descriptors[-1])]
            command = [*wall.prefix, *sets_filter, "--", *command]
            filter, num_processes = None, 0
        elif home.user is None:
            num_processes += _num_tasks_of(os.getuid())
        folder = "/work" if wall.prefix else home.folder
        bind = functools.partial(
            bind_process, limits, self._program.time_limit_s, num_processes=num_processes, filter=filter
        )
        return subprocess.Popen(
            command, pass_fds=descriptors,
            stdin=self._file(marshal.dumps((_child_code(), content))), stdout=output, stderr=output,
            cwd=home.folder, env={"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            user=home.user, group=home.user, extra_groups=None if home.user is None else [],
            start_new_session=True, umask=0o077, preexec_fn=bind,
        )  # fmt: skip

    def watch(self) -> None:
        """Wait until there is a verdict, or a reason to end the trial without one."""
        deadline = time.monotonic() + self._program.time_limit_s
        next_look = time.monotonic() + TICK_S
        verdict = b""
        while not (self._is_verdict_over or self._is_out_of_memory or self._is_too_much or self._is_timed_out):
            now = time.monotonic()
            self._is_timed_out = now >= deadline
            if now >= next_look:
                next_look = now + TICK_S
                used_bytes = sum(descendants(os.getpid()).values())
                self._is_out_of_memory = used_bytes > self._limits.memory_bytes
                self._look_at_outputs()
            if select.select([self._verdict_pipe[0]], [], [], max(0, min(deadline, next_look) - now))[0]:
                part = os.read(self._verdict_pipe[0], MAX_VERDICT_BYTES)
                verdict += part
                self._is_verdict_over = not part or part.endswith(b"\n") or len(verdict) > MAX_VERDICT_BYTES
        self._take_verdict(verdict)

    def _look_at_outputs(self) -> None:
        self._printed = []
        for output in self._outputs:
            size = os.fstat(output).st_size
            self._is_too_much |= size > self._limits.output_bytes
            kept = min(size, self._limits.kept_output_bytes)
            self._printed += os.pread(output, kept, size - kept).decode(errors="replace").splitlines()[-NUM_LAST_LINES:]

    def _take_verdict(self, line: bytes) -> None:
        """Take what the test's process wrote; without the nonce it is no verdict."""
        with suppress(Exception):  # whatever is wrong with it, it does not say that the test passed
            verdict = json.loads(line)
            if secrets.compare_digest(verdict["nonce"], self._nonce) and isinstance(verdict["status"], str):
                self._verdict = verdict

    def end(self) -> None:
        """End both processes and all that is left, and note how those ended that were gone before."""
        verdict, wall = self._verdict, self._wall
        if self._solution is not None:
            self._has_left_processes = verdict is not None and wall.has_more_processes(self._solution.pid)
            is_gone = verdict is not None and verdict["status"] == "gone"
            self._solution_exit = _end(self._solution, waits=is_gone)
        if self._checker is not None:
            self._checker_exit = _end(self._checker, waits=verdict is None and self._is_verdict_over)
        try:
            self._has_left_processes |= wall.clear()
            self._look_at_outputs()
        finally:
            self._close(*self._open)

    def outcome(self, seconds: float) -> Outcome:
        """What became of the program."""
        status, message = self._conclude()
        last_lines = [printable(line) for line in self._printed[-NUM_LAST_LINES:]]
        return Outcome(
            id=self._program.id, status=status, message=printable(message), last_lines=last_lines,
            seconds=round(seconds, 3),
        )  # fmt: skip

    def _conclude(self) -> tuple[Status, str]:
        limits, verdict = self._limits, self._verdict
        if self._is_too_much:
            return Status.output, f"it printed more than {limits.output_bytes >> 10} KiB"
        if self._is_out_of_memory:
            return Status.memory, f"it took more than {limits.memory_bytes >> 20} MiB of memory"
        if self._is_timed_out:
            return Status.timed_out, f"it was not done after {self._program.time_limit_s:g} s"
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
    """Make sure that a child has ended; returns how, if it was not by this.

    What bubblewrap says of a signal, as shells do, is said as of the child itself.
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


def _num_tasks_of(user: int) -> int:
    """How many processes and threads a user has, which is what the kernel's limit counts."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                count += len(list((folder / "task").iterdir()))
    return count


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
