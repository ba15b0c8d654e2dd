"""bubblewrap's namespaces as a wall: for machines without the `sandbox` service."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tunebook.evaluate.sandbox.limits import Limits
from tunebook.evaluate.sandbox.processes import Seat, end_all_children, halt_below, kill_below
from tunebook.evaluate.sandbox.users import FreshUsers, WallError


class BubblewrapWall:
    """Each child runs in namespaces of its own, which show it a read-only system and an empty folder."""

    def __init__(self, limits: Limits, worker: int) -> None:
        self._prefix = tuple(bubblewrap_command(limits))
        # As root, bubblewrap is started as a user that never was: root's processes are not counted by any limit.
        self._users = FreshUsers(worker) if os.geteuid() == 0 else None

    def seats(self) -> tuple[Seat, Seat]:
        """Two new sets of namespaces."""
        return self._seat(), self._seat()

    def _seat(self) -> Seat:
        user = self._users.take() if self._users else None
        return Seat(user=user, folder="/", makes_folder=False, prefix=self._prefix)

    def has_more_processes(self, program: int) -> bool:
        """Whether the program started others."""
        return len(halt_below(program)) > 1

    def clear(self) -> bool:
        """With the first process of its namespaces everything in them ended, and its files are gone."""
        end_all_children(lambda: kill_below(os.getpid()))
        return False


def bubblewrap_command(limits: Limits) -> list[str]:
    """What a child is started by. Raises: WallError where there is no bubblewrap."""
    found = shutil.which("bwrap")
    if found is None:
        raise WallError("bubblewrap is not installed: apt install bubblewrap")
    words = [found, "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    # The child is the first process of its namespaces: one of bubblewrap's own would be in a program's reach.
    words += ["--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    for name in ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache"):
        path = Path(name)
        if path.is_symlink():
            words += ["--symlink", str(path.readlink()), name]
        elif path.exists():
            words += ["--ro-bind", name, name]
    installation = str(Path(sys.base_prefix).resolve())
    if not installation.startswith("/usr/") and installation != "/usr":
        words += ["--ro-bind", installation, installation]
    words += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    words += ["--size", str(limits.disk_bytes), "--tmpfs", "/work", "--symlink", "work", "/tmp", "--chdir", "/work"]
    # Closed once everything is in place: bubblewrap's root is a disk without a size, as its /dev is.
    return [*words, "--remount-ro", "/"]


def try_bubblewrap(limits: Limits) -> None:
    """Refuse a bubblewrap that the kernel does not let work, before any program is judged. Raises: WallError."""
    user = FreshUsers(0).take() if os.geteuid() == 0 else None
    command = [*bubblewrap_command(limits), "--", "/usr/bin/env", "true"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, cwd="/", user=user,
            group=user, extra_groups=None if user is None else [],
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError) as error:
        raise WallError(
            f"bubblewrap cannot be started as a user of its own ({error}); do not run this as root"
        ) from error
    if done.returncode != 0:
        raise WallError(
            f"bubblewrap does not work here ({done.stderr.strip()[-300:]}); most often ordinary users may not "
            "make user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
            "kernel.apparmor_restrict_unprivileged_userns=0"
        )
