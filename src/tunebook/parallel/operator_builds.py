"""DeepSpeed's operators are compiled by one process at a time; one that is killed while it compiles holds up no other.

torch compiles an operator in `<extensions>/<operator>/` and keeps others out by a file `lock` in it, which stays when
the process is killed; every later one waits for it, for ever and without a word, and would then load what was never
finished (FileBaton of torch 2.10 to 2.13). Here each process holds an flock of its own in that folder besides, which
the system takes back from one that dies, and writes down who it is. So a `lock` that is there although nobody holds
the flock was left behind:

- by a process of ours on this machine, if that is what was written down: it is taken away as soon as nothing has
  changed in the folder for `QUIET_S` and no process works in there, since the flock went with the Python process that
  was killed, while the ninja and the compilers that it had started write on;
- by another program, which holds no flock, or by ours on another machine, whose file system may keep flocks from each
  other (NFS with `local_lock`): that one may be at work, so it is waited for until nothing has changed in the folder
  for `ABANDONED_AFTER_S`, by the clock of the file system.

What lies beside such a file may be half-written, and is compiled anew. Nobody skips its turn at the compiler, as torch
lets those do that waited: where everything is there that takes a moment, and where it is not it is made. Many ranks
have many such moments, so the time-out is for one turn and not for all that come before.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shlex
import socket
import threading
import time
from contextlib import suppress
from pathlib import Path

import torch.utils.cpp_extension
from torch.utils.file_baton import FileBaton

from tunebook.errors import TunebookError

HOLDER_FILE = "tunebook.lock"  # carries the flock, and says who has it
ABANDONED_AFTER_S = 600.0  # a compiler writes a file at its end: the longest one file has taken, several times over
QUIET_S = 5.0  # compilers run in the folder, and are seen there; this is for the time between two of them
_PROCESSES = Path("/proc")  # where it is not Linux's, nobody is seen
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # the same in all containers of a machine, unlike its name
_POLL_S = 0.2
_SAID_AFTER_S = 5.0
# To see that nothing has to be compiled takes a moment, on a slow disk longer; one that is not there has to be.
_COMPILES_AFTER_S, _MISSING_AFTER_S = 3.0, 1.0
_SAME_MOMENT_S = 30.0  # who begins says so, and makes torch's lock file right after it


def build_operators_in_turn(timeout_s: float) -> None:
    """From now on this process waits for operators that others compile in this way, for `timeout_s` each of them."""
    TurnBaton.timeout_s = timeout_s
    torch.utils.cpp_extension.FileBaton = TurnBaton  # type: ignore[attr-defined]


class TurnBaton(FileBaton):
    """torch's lock file, with an flock of ours around it; whoever asks for it gets it, or an error."""

    timeout_s = 600.0

    def __init__(self, lock_file_path: str, *args: object, **kwargs: object) -> None:
        super().__init__(lock_file_path, *args, **kwargs)
        self._lock = Path(lock_file_path)
        self._operator = self._lock.parent.name
        self._holder: int | None = None  # the descriptor of the file that carries the flock
        self._has_flock = False
        self._left_by_us = False  # by a process of this machine, since nobody else can hold what we hold
        self._begun = self._turn_begun = 0.0  # when this process began to wait, and to wait for the present holder
        self._has_said = False
        self._compilation: _Compilation | None = None

    def try_acquire(self) -> bool:
        """Wait for the turn of this process; always true. Raises: TunebookError when it does not come."""
        self._begin_waiting()
        self._take_flock()
        self._begin_waiting()
        try:
            self._left_by_us = self._was_left_by_us()
            while True:
                self._left_by_us = self._left_by_us and self._lock.exists()  # or it was taken away by hand
                self._write_holder(f"{_machine()} process {os.getpid()} on {socket.gethostname()}")
                if super().try_acquire():
                    self._compilation = _Compilation(self._lock.parent)
                    return True
                self._write_holder("")  # should this process be killed while it waits, that file was not its
                if self._is_left_behind():
                    self._clear()
                else:
                    self._wait(*self._whom_to_wait_for())
        except BaseException:
            self._give_flock_back()
            raise

    def release(self) -> None:
        """Let the next one have its turn."""
        if self._compilation is not None:
            self._compilation.end()
        try:
            with suppress(FileNotFoundError):  # another machine may have taken it for one that was left behind
                super().release()
        finally:
            self._give_flock_back()

    def _begin_waiting(self) -> None:
        self._begun = self._turn_begun = time.monotonic()
        self._has_said = False

    def _take_flock(self) -> None:
        """Wait until no other process of ours is at work in the folder; without flocks torch's file has to do."""
        self._holder = os.open(self._lock.with_name(HOLDER_FILE), os.O_RDWR | os.O_CREAT, 0o666)
        with suppress(OSError):  # another user's: in a folder that several may write to
            os.fchmod(self._holder, 0o666)
        holder = ""
        while True:
            try:
                fcntl.flock(self._holder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._has_flock = True
                return
            except BlockingIOError:
                now = self._who_holds()
                if now not in ("", holder):  # empty for a moment, between two turns
                    holder, self._turn_begun = now, time.monotonic()
                try:
                    self._wait(holder.partition(" ")[2] or "another process", "if it hangs: end that process")
                except TunebookError:
                    os.close(self._holder)
                    raise
            except OSError:
                return

    def _give_flock_back(self) -> None:
        if self._holder is not None:
            self._write_holder("")
            os.close(self._holder)
            self._holder, self._has_flock = None, False

    def _who_holds(self) -> str:
        """The machine, the host and the process that were written down last; empty after an end in order."""
        assert self._holder is not None
        return os.pread(self._holder, 200, 0).decode(errors="replace")

    def _write_holder(self, text: str) -> None:
        """Write down who has the flock; who was killed stays there until what it left behind is taken away."""
        assert self._holder is not None
        if not self._has_flock or self._left_by_us:
            return
        os.ftruncate(self._holder, 0)
        os.pwrite(self._holder, text.encode(), 0)

    def _was_left_by_us(self) -> bool:
        """Whether torch's lock file is of a process of this machine that ended without a word."""
        if not self._has_flock or self._who_holds().partition(" ")[0] != _machine():
            return False
        assert self._holder is not None
        with suppress(FileNotFoundError):  # one that was made later is another program's
            return abs(self._lock.stat().st_mtime - os.fstat(self._holder).st_mtime) < _SAME_MOMENT_S
        return False

    def _is_left_behind(self) -> bool:
        """Whether nobody is at work behind torch's lock file, as far as can be told.

        A process of ours that was killed is no proof: only itself held the flock, and what it had started (ninja, nvcc)
        goes on, and would write into what is compiled anew.
        """
        times = []
        for file in self._lock.parent.iterdir():
            if file.name != HOLDER_FILE:
                with suppress(FileNotFoundError):
                    times.append(file.stat().st_mtime)
        quiet_s = self._file_system_time() - max(times, default=float("inf"))
        if self._left_by_us:
            return quiet_s > QUIET_S and not _processes_in(self._lock.parent)
        return quiet_s > ABANDONED_AFTER_S

    def _file_system_time(self) -> float:
        """By the clock that wrote the times of the files, which may be another machine's."""
        assert self._holder is not None
        before = os.fstat(self._holder)
        os.utime(self._holder)
        now = os.fstat(self._holder).st_mtime
        with suppress(PermissionError):  # another user's
            os.utime(self._holder, ns=(before.st_atime_ns, before.st_mtime_ns))  # says when a turn began
        return now

    def _whom_to_wait_for(self) -> tuple[str, str]:
        """Who is at work behind torch's lock file, and what to do about it if it is not."""
        rm = f"if nothing is: rm {shlex.quote(str(self._lock))}"
        if not self._left_by_us:
            return "another program on this machine, or a machine that shares the folder", rm
        if found := _processes_in(self._lock.parent):
            names = ", ".join(map(str, found))
            return f"what a killed process had started (in that folder: {names})", "if nothing is: end those in there"
        return "what a killed process had started", rm

    def _clear(self) -> None:
        """Take away what was left behind, the lock file last: while it is there no other program begins."""
        for file in self._lock.parent.iterdir():
            if file.is_file() and file.name not in (HOLDER_FILE, self._lock.name):
                file.unlink(missing_ok=True)
        self._lock.unlink(missing_ok=True)
        self._left_by_us = False
        _say(f"{self._lock} was left behind by a process that was killed while it compiled; compiling it anew")

    def _wait(self, who: str, advice: str) -> None:
        """A moment. Raises: TunebookError once that was too long for one turn."""
        if time.monotonic() - self._turn_begun > self.timeout_s:
            raise TunebookError(
                f"waited {self.timeout_s:g} s (launcher.start_timeout_s) for {who} to compile {self._operator}, which "
                f"{self._lock} says is at work; if it is, raise launcher.start_timeout_s, and {advice}",
                problem_id="operator-build-stuck",
            )
        if time.monotonic() - self._begun > _SAID_AFTER_S and not self._has_said:
            self._has_said = True
            # All ranks but one wait for that one, the first time: only whoever's turn it is says so on the terminal.
            say = _say if self._has_flock else _log
            say(f"waiting for {who} to compile {self._operator}, while there is {self._lock}")
        time.sleep(_POLL_S)


class _Compilation:
    """Says on the terminal that an operator is being compiled, which takes minutes in silence, and how long it took.

    torch compiles nothing where the folder holds the operator as it is to be: then nothing is said.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._library = folder, folder / f"{folder.name}.so"
        self._begun = time.monotonic()
        self._has_said = False
        self._timer = threading.Timer(_COMPILES_AFTER_S if self._library.exists() else _MISSING_AFTER_S, self._say_so)
        self._timer.daemon = True
        self._timer.start()

    def end(self) -> None:
        """It is there now, or has failed, which the process itself reports."""
        self._timer.cancel()
        self._timer.join()
        if self._has_said and self._library.exists():
            _say(f"compiled {self._folder.name} in {time.monotonic() - self._begun:.0f} s")

    def _say_so(self) -> None:
        self._has_said = True
        _say(
            f"compiling DeepSpeed's operator {self._folder.name}: takes 1 to 4 minutes on two cores, the first time "
            f"only; it is kept in {self._folder}"
        )


def _processes_in(folder: Path) -> list[int]:
    """The processes of this user whose working directory a folder is, but for this one."""
    found = []
    for process in _PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if (process / "cwd").readlink() == folder.resolve() and int(process.name) != os.getpid():
                found.append(int(process.name))
    return found


def _machine() -> str:
    """What tells this machine from others, whatever a container calls it."""
    with suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return socket.gethostname()


def _say(text: str) -> None:
    """On the terminal, where nothing else is printed meanwhile, and in the run's log."""
    print(text, flush=True)
    _log(text)


def _log(text: str) -> None:
    logging.getLogger("deepspeed").warning(text)  # one of those that go to the run's log
