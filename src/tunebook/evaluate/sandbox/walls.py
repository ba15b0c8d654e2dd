"""What keeps programs in: fresh users (in the sandbox's container), bubblewrap's namespaces, or next to nothing.

A worker has one wall and uses it for one program at a time. Each program and each test gets a seat of its own.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tunebook.evaluate.sandbox import cleaning
from tunebook.evaluate.sandbox.bubblewrap import BubblewrapWall, try_bubblewrap
from tunebook.evaluate.sandbox.limits import Limits
from tunebook.evaluate.sandbox.processes import Seat, end_all_children, has_living_children, kill_below
from tunebook.evaluate.sandbox.users import MAX_WORKERS, SLOT_MODE, UserWall, WallError, find_slots

USERS, BUBBLEWRAP, NONE = "users", "bubblewrap", "none"
WALLS = (USERS, BUBBLEWRAP, NONE)


class Wall(Protocol):
    """What a judge needs of a wall."""

    def seats(self) -> tuple[Seat, Seat]:
        """New seats for a program and for its test."""

    def has_more_processes(self, program: int) -> bool:
        """Whether the program is seen to have started others. Called before anything is ended."""

    def clear(self) -> bool:
        """End all processes and remove all files of the last seats, whose first processes have ended.

        Returns whether there were processes left. Raises: StuckError where something stays.
        """


class NoWall:
    """Limits alone: a program may read and write what its user may. For who confirmed that by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._folders: list[str] = []

    def seats(self) -> tuple[Seat, Seat]:
        """Two new folders."""
        self._folders = [tempfile.mkdtemp(dir=self._folder) for _ in range(2)]
        first, second = (Seat(user=None, folder=folder, makes_folder=False) for folder in self._folders)
        return first, second

    def has_more_processes(self, program: int) -> bool:
        """Not looked for here."""
        return False

    def clear(self) -> bool:
        """Kill what is left, and remove the folders."""
        is_left = has_living_children()
        end_all_children(lambda: kill_below(os.getpid()))
        for folder in self._folders:
            cleaning.remove(folder)
        return is_left


@dataclass(frozen=True, kw_only=True)
class Walls:
    """Every worker's wall: its kind, and the folder that it has for itself."""

    name: str
    folders: list[Path]
    limits: Limits

    def of_worker(self, worker: int) -> Wall:
        """A worker's wall."""
        if self.name == BUBBLEWRAP:
            return BubblewrapWall(self.limits, worker)
        folder = self.folders[worker]
        # Root gives each program a user of its own also where nothing else was asked for.
        return UserWall(folder, worker) if self.name == USERS or os.geteuid() == 0 else NoWall(folder)


def build_walls(name: str, *, slots: Path, scratch: Path, num_workers: int, limits: Limits) -> Walls:
    """The walls of one kind. Raises: WallError where they do not hold here.

    `slots` is where the disks for programs are mounted, `scratch` an empty folder, for walls without such disks.
    """
    if name == USERS:
        if os.geteuid() != 0:
            raise WallError("only root can give each program a user of its own, as the `sandbox` service does")
        return Walls(name=name, folders=find_slots(slots, limits), limits=limits)
    if name == BUBBLEWRAP:
        try_bubblewrap(limits)
    folders = [scratch / str(worker) for worker in range(max(1, min(num_workers, MAX_WORKERS)))]
    scratch.chmod(0o711)
    for folder in folders:
        folder.mkdir()
        folder.chmod(SLOT_MODE)
    return Walls(name=name, folders=folders, limits=limits)


__all__ = ["BUBBLEWRAP", "NONE", "USERS", "WALLS", "Wall", "WallError", "Walls", "build_walls"]
