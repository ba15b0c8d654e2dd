"""One process at a time compiles DeepSpeed's operators, and a process killed meanwhile does not block the others.

torch compiles an operator in `<extensions>/<operator>/` and excludes other processes by a file `lock` there. The file
stays if its process is killed, and every later process waits for it forever without a message (`FileBaton` of torch
2.10 to 2.13: pytorch issue 189245). pytorch pull request 190543 takes a file lock instead. This module becomes
unnecessary with the first release that contains it, and the test of the replaced name fails then. Until then
Tunebook's processes also hold a file lock of the system, which ends with its process, and write their identity into
`lock`. If a process holds the file lock and finds a `lock`, that `lock` was left behind in one of two ways:

- By a killed Tunebook process, if it names this machine. It is removed once nothing has changed in the folder for
  `QUIET_S` and no process works there: ninja and the compilers that the killed process started keep running.
- By another program, which takes no file lock, or by Tunebook on another machine, whose file system may keep file locks
  local (NFS with `local_lock`). Its owner may be at work, so it is removed only after nothing has changed in the folder
  for `ABANDONED_AFTER_S`, by the clock of the file system.

Other files in such a folder may be half-written, so the operator is compiled again. No process skips its turn, as
torch's own waiters do: with a finished operator a turn takes a moment. The time-out applies to each turn separately,
since many ranks have many turns.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from tunebook.errors import TunebookError

FILE_LOCK = "tunebook.lock"
ABANDONED_AFTER_S = 600.0  # a compiler writes a file at its end: several times the longest compilation of a file
QUIET_S = 5.0  # running compilers are detected; this covers the time between two of them
_PROCESSES = Path("/proc")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine, unlike its name
_POLL_S = 0.2
_REPORT_AFTER_S = 5.0
# Detecting that nothing has to be compiled takes a moment, longer on a slow disk. A missing operator must be compiled.
_COMPILES_AFTER_S, _MISSING_AFTER_S = 3.0, 1.0

Blocker = tuple[str, str]  # what this process waits for, and what to do if that hangs


def build_operators_in_turn(timeout_s: float) -> None:
    """Make this process compile operators in turn with others, waiting up to `timeout_s` for each operator."""
    import torch.utils.cpp_extension

    OperatorLock.timeout_s = timeout_s
    torch.utils.cpp_extension.FileBaton = OperatorLock  # type: ignore[attr-defined,assignment]


class OperatorLock:
    """Replaces torch's `FileBaton` around the compilation of one operator."""

    timeout_s = 600.0

    def __init__(self, lock_file_path: str, *_args: object, **_options: object) -> None:
        self._lock = Path(lock_file_path)
        self._folder = self._lock.parent
        self._library = self._folder / f"{self._folder.name}.so"
        # Other users may share the folder. A descriptor of this process is released by whichever thread compiles.
        self._file_lock = FileLock(self._folder / FILE_LOCK, mode=0o666, thread_local=False)
        self._compilation_reported = False

    def try_acquire(self) -> bool:
        """Wait for the turn of this process; always true. Raises: TunebookError if the wait times out."""
        self._wait(self._take_file_lock, _log)  # all ranks but one wait here
        try:
            self._wait(self._make_lock, _report)
        except BaseException:
            self._file_lock.release()
            raise
        self._started = time.monotonic()
        delay_s = _COMPILES_AFTER_S if self._library.exists() else _MISSING_AFTER_S
        self._timer = threading.Timer(delay_s, self._report_compilation)
        self._timer.daemon = True
        self._timer.start()
        return True

    def release(self) -> None:
        """Give the turn to the next process."""
        self._timer.cancel()
        self._timer.join()
        if self._compilation_reported and self._library.exists():  # a failure is reported by the process itself
            _report(f"compiled {self._folder.name} in {time.monotonic() - self._started:.0f} s")
        self._lock.unlink(missing_ok=True)  # another machine may have removed it
        self._file_lock.release()

    def _wait(self, attempt: Callable[[], Blocker | None], report: Callable[[str], None]) -> None:
        """Repeat `attempt` until nothing blocks it. Raises: TunebookError when one blocker takes too long."""
        started = since = time.monotonic()
        last, is_reported = None, False
        while (blocker := attempt()) is not None:
            now = time.monotonic()
            if blocker != last:
                last, since = blocker, now
            who, advice = blocker
            if now - since > self.timeout_s:
                raise TunebookError(
                    f"waited {self.timeout_s:g} s (launcher.start_timeout_s) for {who} to compile {self._folder.name}, "
                    f"which {self._lock} says is at work; if it is, raise launcher.start_timeout_s, and {advice}",
                    problem_id="operator-build-stuck",
                )
            if now - started > _REPORT_AFTER_S and not is_reported:
                is_reported = True
                report(f"waiting for {who} to compile {self._folder.name}, while there is {self._lock}")
            time.sleep(_POLL_S)

    def _take_file_lock(self) -> Blocker | None:
        try:
            self._file_lock.acquire(blocking=False)
        except Timeout:
            return self._holder().partition(" ")[2] or "another process", "if it hangs: end that process"
        except OSError:  # a file system without file locks: torch's `lock` has to do
            pass
        return None

    def _make_lock(self) -> Blocker | None:
        """Create torch's `lock`, replacing one that was left behind."""
        try:
            with self._lock.open("x") as file:
                file.write(f"{_machine()} process {os.getpid()} on {socket.gethostname()}")
            return None
        except FileExistsError:
            pass
        # Without the file lock the process that made `lock` may be alive, whichever program it belongs to.
        is_ours = self._file_lock.is_locked and self._holder().partition(" ")[0] == _machine()
        working = _processes_in(self._folder) if is_ours else []
        if self._quiet_s() > (QUIET_S if is_ours else ABANDONED_AFTER_S) and not working:
            self._clear()
            return self._make_lock()
        remove = f"if nothing is: rm {shlex.quote(str(self._lock))}"
        if not is_ours:
            return "another program on this machine, or a machine that shares the folder", remove
        if working:
            numbers = ", ".join(map(str, working))
            return f"what a killed process had started (in that folder: {numbers})", "if nothing is: end those in there"
        return "what a killed process had started", remove

    def _holder(self) -> str:
        """The machine, process and host that made torch's `lock`; empty if there is none or it is another program's."""
        with suppress(OSError):
            return self._lock.read_text(encoding="utf-8", errors="replace")
        return ""

    def _quiet_s(self) -> float:
        """Seconds since the last change of a file in the folder, by the clock of its file system."""
        times = []
        for file in self._folder.iterdir():
            with suppress(FileNotFoundError):
                if FILE_LOCK not in file.name:  # nor the probes of other processes
                    times.append(file.stat().st_mtime)
        probe = self._folder / f".{FILE_LOCK}.{os.getpid()}"
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink()
        return now - max(times, default=float("inf"))

    def _clear(self) -> None:
        """Remove what was left behind, the `lock` last: no other program starts while it exists."""
        for file in self._folder.iterdir():
            if file.is_file() and file.name not in (FILE_LOCK, self._lock.name):
                file.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)
        _report(f"{self._lock} was left behind by a process that was killed while it compiled; compiling it again")

    def _report_compilation(self) -> None:
        """Report the compilation, which takes minutes without output. Not called for a finished operator."""
        self._compilation_reported = True
        _report(
            f"compiling DeepSpeed's operator {self._folder.name}: takes 1 to 4 minutes on two cores, the first time "
            f"only; it is kept in {self._folder}"
        )


def _processes_in(folder: Path) -> list[int]:
    """The processes of this user with a folder as working directory, except this one."""
    found = []
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").readlink() == folder.resolve() and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def _machine() -> str:
    """An identifier of this machine that is the same in all its containers."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _report(text: str) -> None:
    """Write to the terminal, where nothing else is printed meanwhile, and to the run's log."""
    print(text, flush=True)
    _log(text)


def _log(text: str) -> None:
    logging.getLogger("deepspeed").warning(text)  # this logger writes to the run's log
