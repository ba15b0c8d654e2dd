"""Start a child bound to its limits, and see what is left of it and of everything that it started.

A worker has one thread and is the parent of every orphan below it, so that what a program leaves behind is found by
asking the kernel for children.
"""

# Plain calls instead of pathlib: relative to descriptors, in forked children, and for every program.
# ruff: noqa: PTH102, PTH116, PTH123, PTH208

from __future__ import annotations

import fcntl
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass

from tunebook.evaluate.sandbox import limits
from tunebook.evaluate.sandbox.limits import Limits

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MAX_DESCRIPTORS = 1 << 20  # closing them all is one call to the kernel
MOST_EXPENDABLE = b"1000"  # of /proc/PID/oom_score_adj: for want of memory the system ends programs, not the runner


class StartError(Exception):
    """A child could not be started, through no fault of a program's."""


class StuckError(Exception):
    """Processes that do not go away."""


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where one child sits: as which user, in which folder, behind which command."""

    user: int | None  # None: as the worker's own
    folder: str  # its own, the working directory
    makes_folder: bool  # the child makes it once it is that user: nobody could give it away without CAP_CHOWN
    prefix: tuple[str, ...] = ()  # a command that walls the child in, and filters its calls itself


def start(
    command: list[str], seat: Seat, descriptors: Mapping[int, int], limit: Limits, time_limit_s: float,
    filter: bytes | None,
) -> int:  # fmt: skip
    """Start a child in a session of its own and return its process id.

    `descriptors` are what it gets open: number there -> number here. Raises: StartError with what went wrong.
    """
    parent = os.getpid()
    failed_read, failed_write = os.pipe()
    process = os.fork()
    if process == 0:
        try:
            # Out of the way of the numbers that they get.
            moved = {number: fcntl.fcntl(here, fcntl.F_DUPFD_CLOEXEC, 100) for number, here in descriptors.items()}
            failed_write = fcntl.fcntl(failed_write, fcntl.F_DUPFD_CLOEXEC, 100)
            for number, here in moved.items():
                os.dup2(here, number)
            failed_write = os.dup2(failed_write, max(moved) + 1, inheritable=False)
            os.closerange(failed_write + 1, MAX_DESCRIPTORS)
            _become(seat, limit, time_limit_s, parent)
            if filter is not None and not seat.prefix:
                limits.filter_calls(filter)
            os.execve(command[0], command, environment(seat))
        except BaseException as error:
            os.write(failed_write, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(126)
    os.close(failed_write)
    with os.fdopen(failed_read, "rb") as stream:
        failure = stream.read().decode()  # empty once the child is what it should be
    if failure:
        os.waitpid(process, 0)
        raise StartError(f"{command[0]} could not be started: {failure}")
    return process


def environment(seat: Seat) -> dict[str, str]:
    """All that a child gets of an environment: nothing of the runner's."""
    folder = "/work" if seat.prefix else seat.folder
    return {"PATH": "/usr/bin:/bin", "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"}


def _become(seat: Seat, limit: Limits, time_limit_s: float, parent: int) -> None:
    """Turn the forked child into what it is to be, while it is still trusted."""
    os.setsid()
    with suppress(OSError), open("/proc/self/oom_score_adj", "wb", buffering=0) as score:
        score.write(MOST_EXPENDABLE)
    if seat.user is not None:
        os.setgroups([])
        os.setresgid(seat.user, seat.user, seat.user)
        os.setresuid(seat.user, seat.user, seat.user)  # this takes all capabilities away
    limits.give_up_privileges()
    limits.die_with_parent()
    if os.getppid() != parent:
        os._exit(126)
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # what is ignored here would be ignored there
    os.umask(0o077)
    if seat.makes_folder:
        os.mkdir(seat.folder, 0o700)
    os.chdir(seat.folder)
    limits.bind(limit, time_limit_s)
    if not seat.prefix:  # inside a wall with a user namespace of its own they are counted anew: `judge.BOOTSTRAP`
        others = num_tasks_of(os.getuid()) if seat.user is None else 0
        limits.limit_processes(limit.num_processes + others)


def in_child(action: Callable[[], None]) -> int:
    """Fork, do something there, and return the child's process id; it ends with 0 if the action came to its end."""
    process = os.fork()
    if process == 0:
        code = 1
        try:
            action()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return process


def ended(process: int) -> int | None:
    """How a child ended, as `subprocess` says it (-9: killed by signal 9), or None while it runs."""
    found, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def kill_and_wait(process: int) -> int:
    """End a child whose end was not collected yet; returns how it ended."""
    with suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def has_living_children() -> bool:
    """Whether this process has a child that is alive; those that have ended are collected."""
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False
        if process == 0:
            return True


def end_all_children(kill: Callable[[], None], timeout_s: float = 10.0) -> None:
    """Kill until no child is left. Raises: StuckError where that takes too long."""
    end = time.monotonic() + timeout_s
    while has_living_children():
        if time.monotonic() > end:
            raise StuckError(f"processes of a program are still there after {timeout_s:g} s of killing them")
        kill()
        time.sleep(0.002)


def kill_below(ancestor: int, spare: Collection[int] = ()) -> None:
    """Kill everything below a process, but for some of its children and what is below those."""
    for process in halt_below(ancestor, spare):
        _send(process, signal.SIGKILL)


def halt_below(ancestor: int, spare: Collection[int] = ()) -> set[int]:
    """Halt everything below a process, so that none can start another meanwhile; returns what there was.

    Looked at again until there is nothing new: one look takes long enough for a process to start another and end.
    """
    halted: set[int] = set()
    while not (found := set(descendants(ancestor, spare))) <= halted:
        for process in found - halted:
            _send(process, signal.SIGSTOP)
        halted |= found
    return halted


def _send(process: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(process, number)


def num_tasks_of(user: int) -> int:
    """How many processes and threads a user has, which is what the kernel's limit counts."""
    count = 0
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
    return count


def descendants(ancestor: int, spare: Collection[int] = ()) -> dict[int, int]:
    """The living processes below one, but for some and what is below those, with their resident memory in bytes."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
            except OSError:  # it has just ended
                continue
            if fields[0] not in (b"Z", b"X"):
                children.setdefault(int(fields[1]), []).append((int(name), int(fields[21]) * PAGE_BYTES))
    found: dict[int, int] = {}
    todo = [ancestor]
    while todo:
        for process, resident_bytes in children.get(todo.pop(), []):
            if process not in spare:
                found[process] = resident_bytes
                todo.append(process)
    return found
