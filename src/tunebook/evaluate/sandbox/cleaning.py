"""Remove what a program leaves: its processes and its files, however it hid them.

A helper does it as the program's own user, since the runner may neither look into that user's folders nor change them.
Its *real* uid is another, which nobody else has: the program could kill a process of its own uid, but not this one.
"""

# Plain calls instead of pathlib: relative to descriptors, in forked children, and for every program.
# ruff: noqa: PTH101, PTH106, PTH108, PTH116, PTH208

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterable
from contextlib import suppress

from tunebook.evaluate.sandbox.processes import StuckError, in_child

# Where anybody may write on many systems, besides the slots.
SHARED_FOLDERS = ("/dev/shm", "/dev/mqueue", "/tmp", "/var/tmp", "/run/lock", "/run/shm")


def become(user: int, helper: int) -> None:
    """Act as a program's user in a process that this user cannot touch. Drops every capability."""
    if min(user, helper) < 1000:
        raise ValueError(f"uid {min(user, helper)} is no program's")
    os.setgroups([])
    os.setresgid(helper, user, helper)
    os.setresuid(helper, user, helper)


def kill_user(user: int, helper: int) -> None:
    """Kill every process of a user at once, so that none can fork away meanwhile."""

    def kill() -> None:
        become(user, helper)
        with suppress(ProcessLookupError):
            os.kill(-1, signal.SIGKILL)  # as this user: the kernel leaves out everybody else's

    os.waitpid(in_child(kill), 0)


def clear_as(user: int, helper: int, paths: Iterable[str]) -> None:
    """Remove files and folders of a user. Raises: StuckError if something stays."""

    def clear() -> None:
        become(user, helper)
        for path in paths:
            remove(path)

    if os.waitpid(in_child(clear), 0)[1] != 0:
        raise StuckError(f"the files of a program could not be removed: {', '.join(paths)}")


def owned_by(user: int, folders: Iterable[str]) -> list[str]:
    """What a user owns directly in some folders."""
    found = []
    for folder in folders:
        with suppress(OSError), os.scandir(folder) as entries:
            found += [entry.path for entry in entries if _owner(entry) == user]
    return found


def _owner(entry: os.DirEntry[str]) -> int | None:
    try:
        return entry.stat(follow_symlinks=False).st_uid
    except OSError:
        return None


def writable_by_all(folders: Iterable[str]) -> list[str]:
    """Those of some folders that exist, are on a disk that can be written to, and are open to everybody."""
    found: dict[tuple[int, int], str] = {}
    for folder in folders:
        with suppress(OSError):
            status = os.stat(folder)
            if status.st_mode & stat.S_IWOTH and not os.statvfs(folder).f_flag & os.ST_RDONLY:
                found.setdefault((status.st_dev, status.st_ino), folder)
    return list(found.values())


def remove(path: str) -> None:
    """Remove a file or a whole folder of this process's user, whatever its modes, and however deep it is.

    A folder is flattened: what lies in one of its folders is moved up next to it, so that no path gets long and nothing
    recurses. No link is followed.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        os.unlink(path)
        return
    os.chmod(path, 0o700)
    top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        moved = 0
        while names := os.listdir(top):
            for name in names:
                if not stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                    os.unlink(name, dir_fd=top)
                else:
                    moved = _flatten(top, name, moved)
    finally:
        os.close(top)
    os.rmdir(path)


def _flatten(top: int, name: str, moved: int) -> int:
    """Move what is in a folder below `top` up to `top`, and remove the folder; returns a counter for the new names."""
    os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
    try:
        for inner in os.listdir(folder):
            if not stat.S_ISDIR(os.stat(inner, dir_fd=folder, follow_symlinks=False).st_mode):
                os.unlink(inner, dir_fd=folder)
                continue
            os.chmod(inner, 0o700, dir_fd=folder)
            moved += 1
            while _exists(top, f"moved-{moved}"):
                moved += 1
            os.rename(inner, f"moved-{moved}", src_dir_fd=folder, dst_dir_fd=top)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
    return moved


def _exists(folder: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True
