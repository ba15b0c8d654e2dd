"""Containment of programs: a fresh uid for each (in the sandbox container), bubblewrap's namespaces, or only limits.

A worker has one wall and uses it for one trial at a time. Each process of a trial, program or test, gets its own user
and folder. A worker adopts every orphan among its descendants, so that no process escapes it.
"""

from __future__ import annotations

import itertools
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from tunebook.evaluate.sandbox.limits import Limits, kernel_has_filters, program_filter

USERS, BUBBLEWRAP, NONE = "users", "bubblewrap", "none"
WALLS = (USERS, BUBBLEWRAP, NONE)

# Above the uids that systemd and container engines allocate, so that no user of the machine has one of them. The second
# is for user namespaces, which hold at most 65536.
FIRST_UIDS = (1_879_048_192, 20_000)
UIDS_PER_WORKER = 2048
MAX_WORKERS = 16
SLOT_MODE = 0o711  # may be passed through, but neither listed nor written to
MAX_SLOT_BYTES = 2 << 30  # smaller than any machine's own disk
# Folders besides the slots that are world-writable on many systems.
SHARED_FOLDERS = ("/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp", "/run/lock")
# Runs as the program's user, because the runner may not change that user's files. Opens folders, then removes
# everything.
CLEAN = """
find "$@" -mindepth 1 -maxdepth 1 -uid "$(id -u)" -type d -exec chmod -R u+rwx -- {} +
find "$@" -mindepth 1 -maxdepth 1 -uid "$(id -u)" -exec rm -rf -- {} +
"""


class WallError(Exception):
    """Programs cannot be contained here; the message says why and what would help."""


class StuckError(Exception):
    """Processes or files of a program cannot be removed; this worker must not judge another program."""


def fresh_uids(worker: int) -> Iterator[int]:
    """Yield unallocated uids for one worker; each is reused only after all others. Raises: WallError if none exist."""
    needed = UIDS_PER_WORKER * MAX_WORKERS
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        for first in FIRST_UIDS:
            if inside <= first and first + needed <= inside + count:
                uids = range(first + worker * UIDS_PER_WORKER, first + (worker + 1) * UIDS_PER_WORKER)
                start = random.randrange(len(uids))  # a restarted worker begins elsewhere
                return itertools.cycle([*uids[start:], *uids[:start]])
    raise WallError(f"this user namespace has no {needed} uids from {FIRST_UIDS[-1]} on to give to programs")


class Wall:
    """The wall of one worker. As root, every process gets a fresh uid, whatever else contains it."""

    def __init__(self, name: str, limits: Limits, slot: Path, worker: int) -> None:
        self.limits = limits
        self.filter = program_filter() if kernel_has_filters() else None
        self.prefix = bubblewrap_command(limits) if name == BUBBLEWRAP else []
        self._uids = fresh_uids(worker) if os.geteuid() == 0 else itertools.repeat(None)
        self._slot = slot
        readable = [folder for folder in SHARED_FOLDERS if os.access(folder, os.R_OK | os.X_OK)]
        self._shared = [folder for folder in readable if not slot.samefile(folder)]
        self._homes: list[tuple[int | None, str]] = []
        for folder in slot.iterdir():  # left by a worker that was killed
            for user in {path.lstat().st_uid for path in folder.iterdir()}:
                _remove_files(user if os.geteuid() == 0 else None, [str(folder)])
            folder.rmdir()

    def new_home(self) -> tuple[int | None, str]:
        """Return a fresh user (None: the worker's own) and an empty folder whose location no other program may list.

        The worker owns the folder, which is writable for all. So the program can neither remove it nor replace it with
        a link.
        """
        user, folder = next(self._uids), "/"
        if not self.prefix:
            home = self._slot / secrets.token_hex(16)
            home.mkdir()
            home.chmod(0o700 if user is None else 0o1777)
            folder = str(home)
        self._homes.append((user, folder))
        return user, folder

    def has_more_processes(self, program: int) -> bool:
        """Return whether a program has started others in its namespaces. Call it before ending any process.

        It stops the processes that it sees and looks again, because during one look a process can start another and
        end. Without namespaces `clear` finds leftover processes, which are then children of this worker.
        """
        halted: set[int] = set()
        while self.prefix and not (found := set(descendants(program))) <= halted:
            _signal_all(found - halted, signal.SIGSTOP)
            halted |= found
        return len(halted) > 1

    def clear(self) -> bool:
        """End all processes and remove all files of the last trial, whose two children have ended.

        Returns whether there were other processes. Raises: StuckError if something remains.
        """
        homes, self._homes = self._homes, []
        is_left = has_children = reap()[1]
        helper = next(self._uids)
        deadline = time.monotonic() + 10
        while has_children:
            if time.monotonic() > deadline:
                raise StuckError("processes of a program are still there after 10 s of killing them")
            kill_below()
            for user, _ in homes:
                if user is not None and helper is not None:
                    _kill_user(user, helper)
            time.sleep(0.002)
            has_children = reap()[1]
        for user, folder in homes:
            if not self.prefix:
                self._empty(user, folder)
        return is_left and not self.prefix  # bubblewrap's own process may take a moment to end

    def _empty(self, user: int | None, folder: str) -> None:
        folders = [folder] if user is None else [folder, *self._shared]
        owner = os.getuid() if user is None else user
        if any(_owner(path) == owner for name in folders for path in Path(name).iterdir()):
            _remove_files(user, folders)
        try:
            Path(folder).rmdir()
        except OSError as error:
            raise StuckError(f"the files of a program could not be removed from {folder}: {error.strerror}") from error


def _kill_user(user: int, helper: int) -> None:
    """Kill every process of a user at once, so that none can fork meanwhile.

    The killer has a real uid of its own: a program can kill processes of its own uid, but not this one.
    """
    process = os.fork()
    if process == 0:
        try:
            os.setresgid(helper, user, helper)
            os.setresuid(helper, user, helper)  # drops every capability
            os.kill(-1, signal.SIGKILL)  # the kernel spares other users' processes and the caller
        finally:
            os._exit(0)
    os.waitpid(process, 0)


def _owner(path: Path) -> int | None:
    with suppress(OSError):
        return path.lstat().st_uid
    return None


def _remove_files(user: int | None, folders: list[str]) -> None:
    """Remove a user's entries in some folders, at any depth and with any file modes."""
    as_user: dict[str, object] = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    command = ["/bin/sh", "-c", CLEAN, "sh", *folders]
    environment = {"PATH": os.defpath}
    subprocess.run(command, cwd="/", env=environment, stdin=subprocess.DEVNULL, capture_output=True, **as_user)  # type: ignore[call-overload]


def reap() -> tuple[set[int], bool]:
    """Collect children that have ended; return their ids, and whether other children are alive."""
    ended: set[int] = set()
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if process == 0:
            return ended, True
        ended.add(process)


def kill_below(spare: Collection[int] = ()) -> None:
    """Kill all descendants of this process, except the `spare` children and their descendants."""
    _signal_all(descendants(os.getpid(), spare), signal.SIGKILL)


def _signal_all(processes: Iterable[int], number: int) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process, number)


def descendants(ancestor: int, spare: Collection[int] = ()) -> dict[int, int]:
    """Return a process's living descendants with their resident bytes, without `spare` ones and their descendants."""
    children: dict[int, list[tuple[int, int]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):  # noqa: PTH208  # pathlib takes ten times as long
        fields = _stat(f"/proc/{name}")
        if fields and fields[0] == b"Z":
            fields = _thread_left(name)
        if fields and fields[0] not in (b"Z", b"X"):
            resident_bytes = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
            children.setdefault(int(fields[1]), []).append((int(name), resident_bytes))
    found: dict[int, int] = {}
    todo = [ancestor]
    while todo:
        for process, resident_bytes in children.get(todo.pop(), []):
            if process not in spare:
                found[process] = resident_bytes
                todo.append(process)
    return found


def num_tasks_of(user: int) -> int:
    """Count a user's processes and threads, as the kernel's limit does."""
    count = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                count += len(list((folder / "task").iterdir()))
    return count


def bubblewrap_command(limits: Limits) -> list[str]:
    """Return the command that starts a child in its own namespaces. Raises: WallError without bubblewrap."""
    found = shutil.which("bwrap")
    if found is None:
        raise WallError("bubblewrap is not installed: apt install bubblewrap")
    command = [found, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    # The child is the first process of its namespaces. A bubblewrap process there would be within a program's reach.
    command += ["--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    installation = Path(sys.base_prefix).resolve()
    folders = [Path(name) for name in ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")]
    for path in [*folders, *([] if installation.is_relative_to("/usr") else [installation])]:
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(limits.disk_bytes), "--tmpfs", "/work", "--symlink", "work", "/tmp", "--chdir", "/work"]
    # Read-only once everything is in place: bubblewrap's root is a disk without a size limit, like its /dev.
    return [*command, "--remount-ro", "/"]


def _try_bubblewrap(limits: Limits) -> None:
    """Check that bubblewrap works on this kernel before any program is judged. Raises: WallError."""
    user = next(fresh_uids(0)) if os.geteuid() == 0 else None
    command = [*bubblewrap_command(limits), "--", "/usr/bin/env", "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd="/", user=user,
            group=user, extra_groups=None if user is None else [],
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise WallError(f"bubblewrap cannot be started as a fresh uid ({error}); do not run this as root") from error
    if done.returncode != 0:
        raise WallError(
            f"bubblewrap does not work here ({done.stderr.strip()[-300:]}); most often ordinary users may not "
            "make user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )


def prepare_slots(name: str, *, slots: Path, scratch: Path, num_workers: int, limits: Limits) -> list[Path]:
    """Create one folder per worker for a wall. Raises: WallError if the wall does not work here.

    `slots` is the folder where the disks for programs are mounted. `scratch` is an empty folder for walls without such
    disks.
    """
    if name == USERS:
        if os.geteuid() != 0:
            raise WallError("only root can give each program a uid of its own, as the `sandbox` service does")
        return find_slots(slots, limits)
    if name == BUBBLEWRAP:
        _try_bubblewrap(limits)
    scratch.chmod(0o711)
    folders = [scratch / str(worker) for worker in range(max(1, min(num_workers, MAX_WORKERS)))]
    for folder in folders:
        folder.mkdir()
        folder.chmod(SLOT_MODE)
    return folders


def find_slots(folder: Path, limits: Limits) -> list[Path]:
    """Return the folders that programs may fill, one program each: the mounts in `folder`, or `folder` if it has none.

    Raises: WallError for one that is not a separate disk of limited size.
    """
    found = sorted(path for path in folder.iterdir() if path.is_dir() and path.is_mount()) if folder.is_dir() else []
    slots = (found or [folder])[:MAX_WORKERS]
    for slot in slots:
        how = f"--tmpfs {slot}:size={limits.disk_bytes},nr_inodes=4096,mode=711"
        if not slot.is_mount():
            raise WallError(f"{slot} is not a separate disk, so a program could fill the one it is on; mount it: {how}")
        status = os.statvfs(slot)
        if not 0 < status.f_blocks * status.f_frsize <= MAX_SLOT_BYTES:
            raise WallError(f"{slot} has no size that would stop a program from filling it; mount it with one: {how}")
        try:
            slot.chmod(SLOT_MODE)
        except OSError as error:
            raise WallError(f"{slot} belongs to another user ({error.strerror}); mount one of root's: {how}") from error
    return slots


def _stat(folder: str) -> list[bytes]:
    """The fields of a process or thread from its state on; empty if it has just ended."""
    try:
        with open(f"{folder}/stat", "rb", buffering=0) as file:  # noqa: PTH123
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def _thread_left(process: str) -> list[bytes]:
    """The fields of a running thread of a process whose main thread has ended, and which looks like a zombie without
    memory. Empty if there is none."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{process}/task"):  # noqa: PTH208
            fields = _stat(f"/proc/{process}/task/{thread}")
            if fields and fields[0] not in (b"Z", b"X"):
                return fields
    return []
