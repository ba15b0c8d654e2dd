"""Users that never were, for programs to run as, and the wall that they make."""

from __future__ import annotations

import os
import random
import secrets
from contextlib import suppress
from pathlib import Path

from tunebook.evaluate.sandbox import cleaning
from tunebook.evaluate.sandbox.limits import Limits
from tunebook.evaluate.sandbox.processes import Seat, end_all_children, has_living_children

# Above what systemd and container engines give out, so that no user of the machine has one of them; the second is for
# user namespaces, which hold 65536 at most.
FIRST_UIDS = (1_879_048_192, 20_000)
UIDS_PER_WORKER = 2048
MAX_WORKERS = 16
SLOT_MODE = 0o711  # to be passed through, but neither listed nor written to
MAX_SLOT_BYTES = 2 << 30  # no machine's own disk is that small


class WallError(Exception):
    """Programs cannot be kept in here; the message says why and what would help."""


class FreshUsers:
    """Uids of one worker, each used again only after all others. Raises: WallError where there are none to use."""

    def __init__(self, worker: int) -> None:
        self._first = _first_uid() + worker * UIDS_PER_WORKER
        self._taken = random.randrange(UIDS_PER_WORKER)  # a worker that was started again begins elsewhere

    def take(self) -> int:
        """The next one."""
        self._taken += 1
        return self._first + self._taken % UIDS_PER_WORKER


def _first_uid() -> int:
    needed = UIDS_PER_WORKER * MAX_WORKERS
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        for first in FIRST_UIDS:
            if inside <= first and first + needed <= inside + count:
                return first
    raise WallError(f"this user namespace has no {needed} uids from {FIRST_UIDS[-1]} on to give to programs")


class UserWall:
    """Each child runs as a user that never was, in a folder that it makes itself and that is removed afterwards."""

    def __init__(self, slot: Path, worker: int) -> None:
        self._slot = slot
        self._room = slot
        self._fresh = FreshUsers(worker)
        self._users: tuple[int, ...] = ()
        shared = cleaning.writable_by_all(cleaning.SHARED_FOLDERS)
        self._shared = [folder for folder in shared if not slot.samefile(folder)]
        for room in list(slot.iterdir()):  # left by a worker that was killed
            for left in list(room.iterdir()):
                cleaning.clear_as(left.lstat().st_uid, self._fresh.take(), [str(left)])
            room.rmdir()

    def seats(self) -> tuple[Seat, Seat]:
        """Two new users, and a room for their folders that no neighbour finds: the slot shows nobody what is in it."""
        self._users = (self._fresh.take(), self._fresh.take())
        self._room = self._slot / secrets.token_hex(16)
        self._room.mkdir()
        self._room.chmod(0o1777)
        first, second = (Seat(user=user, folder=f"{self._room}/{user}", makes_folder=True) for user in self._users)
        return first, second

    def has_more_processes(self, program: int) -> bool:
        """Not looked for here: `clear` asks the kernel, which is quicker once the first processes have ended."""
        return False

    def clear(self) -> bool:
        """Kill by user, then remove what the users own in their room and wherever else anybody may write."""
        is_left = has_living_children()
        if is_left:
            helper = self._fresh.take()
            end_all_children(lambda: _kill_all(self._users, helper))
        for user in self._users:
            with suppress(OSError):
                (self._room / str(user)).rmdir()  # empty, nearly always
            paths = cleaning.owned_by(user, [str(self._room), *self._shared])
            if paths:
                cleaning.clear_as(user, self._fresh.take(), paths)
        self._room.rmdir()
        return is_left


def _kill_all(users: tuple[int, ...], helper: int) -> None:
    for user in users:
        cleaning.kill_user(user, helper)


def find_slots(folder: Path, limits: Limits) -> list[Path]:
    """The folders that programs may fill, one at a time each: those in `folder`, or itself where it holds none.

    Raises: WallError for one that is not closed off by a disk of its own.
    """
    found = sorted(path for path in folder.iterdir() if path.is_dir() and path.is_mount()) if folder.is_dir() else []
    slots = (found or [folder])[:MAX_WORKERS]
    for slot in slots:
        how = f"--tmpfs {slot}:size={limits.disk_bytes},nr_inodes=4096,mode=711"
        if not slot.is_mount():
            raise WallError(f"{slot} is no disk of its own, so a program could fill the one it is on; mount it: {how}")
        status = os.statvfs(slot)
        if not 0 < status.f_blocks * status.f_frsize <= MAX_SLOT_BYTES:
            raise WallError(f"{slot} has no size that would stop a program from filling it; mount it with one: {how}")
        try:
            slot.chmod(SLOT_MODE)
        except OSError as error:
            raise WallError(
                f"{slot} belongs to somebody else ({error.strerror}); mount one of root's: {how}"
            ) from error
    return slots
