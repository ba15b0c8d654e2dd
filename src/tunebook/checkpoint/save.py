"""Completes what the trainer has written: every file flushed and hashed, then the folder named, then its record.

The trainer writes to `checkpoints/_unfinished/checkpoint-12`. Once all ranks have written, they flush and hash the
files, each its share; the first rank gives the folder its name and writes `complete.json` last of all. Killed at any
moment, a run has the checkpoint before or this one, never half of one.

Training stands still while the trainer writes; all that follows may be done by a thread of each rank while it goes on.
What has been written is a copy on the host that no step changes: it lies in the system's cache of files until it is
flushed. So a save takes up to its own size of host memory, which is the system's and not the process', but counts
against a container's limit; where less is free the system makes the trainer's writes wait for the disk. On NFS closing
a file flushes it, so there the trainer waits for that. One save at most is in the air: the next one waits for it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread

from tunebook.checkpoint.newest import complete_checkpoints
from tunebook.checkpoint.record import (
    CHECKPOINTS_FOLDER,
    PENDING_FILE,
    RECORD_FILE,
    UNFINISHED_FOLDER,
    CheckpointRecord,
    FileEntry,
    Identity,
    checkpoint_path,
    list_files,
    read_record,
)
from tunebook.checkpoint.retention import clean_up, remove_old
from tunebook.checkpoint.room import require_room, require_writable
from tunebook.checkpoint.together import Group, on_every_rank, on_first_rank, rank_and_size, share_of
from tunebook.checkpoint.verify import why_not_complete
from tunebook.errors import TunebookError
from tunebook.files import atomic_write_json, flush_folder, sha256_file
from tunebook.hardware.disk import is_disk_full


class Stall:
    """How long training has stood still for a save, from when this is made; read by the thread that completes it."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._before_s = 0.0
        self._since: float | None = self._began  # None while training goes on

    @property
    def age_s(self) -> float:
        """Since the save began."""
        return time.perf_counter() - self._began

    @property
    def seconds(self) -> float:
        """That training has stood still, up to now."""
        since = self._since
        return self._before_s + (time.perf_counter() - since if since is not None else 0.0)

    def stop(self) -> None:
        """Training goes on. To be called before the thread is started that reads."""
        self._before_s, self._since = self.seconds, None

    def go_on(self) -> None:
        """Training stands still again, for good."""
        self._since = time.perf_counter()


class Background:
    """A thread for work that reads and writes files, which lets Python go on meanwhile. It holds no tensors."""

    def __init__(self) -> None:
        self._thread: Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether what was started has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Start some work; what was started before has been waited for."""
        assert self._thread is None
        # A daemon: a process that is told to end at once does not wait for a disk.
        self._thread = Thread(target=self._do, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> BaseException | None:
        """Wait until the work has ended, if there is any; the error that it ended with. Ctrl-C breaks the wait off."""
        if self._thread is None:
            return None
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        return error

    def _do(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error


_PACKAGES = ("tunebook", "torch", "transformers", "trl", "accelerate", "peft", "deepspeed")


class CheckpointSaver:
    """Saves the checkpoints of one run. `keep` is how many of the newest stay, beside the best.

    `resumed_step` is to be set to the step that the run has gone on from; `when_complete`, if at all, to what is to be
    done on every rank with a checkpoint once it is complete. In the background, `group` is for the threads' talk.
    `begin`, `finish`, `settle` and `has` are collectives: every rank calls them, in its main thread.
    """

    def __init__(
        self, run: Path, identity: Identity, *, keep: int, in_background: bool = False, group: Group = None
    ) -> None:
        self.folder = run / CHECKPOINTS_FOLDER
        self.identity = identity
        self.keep = keep
        self.resumed_step = 0
        self.when_complete: Callable[[Path], None] | None = None
        self._saved: set[int] = set()
        self._thread = Background() if in_background else None
        self._group = group
        self._in_the_air: int | None = None  # the step whose checkpoint is written, but not known to be complete
        self._stall = Stall()

    @property
    def unfinished(self) -> Path:
        """The folder in which the trainer makes the folder of a step."""
        return self.folder / UNFINISHED_FOLDER

    @property
    def is_in_the_air(self) -> bool:
        """Whether there is a save to be settled, done or not; the same on every rank."""
        return self._in_the_air is not None

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still at work on a save."""
        return self._thread is not None and self._thread.is_busy

    def begin(self, step: int, estimated_bytes: int) -> None:
        """Settle the save before, clear the place and see that there is room.

        As much room as the checkpoint before took, or as was estimated. Raises: what the save before ended with;
        DoesNotFitError, TunebookError where nothing can be written.
        """
        stall = Stall()
        self._settle()
        self._stall = stall
        on_first_rank(lambda: self._clear(step, estimated_bytes))

    def finish(self, step: int, best_step: int | None) -> None:
        """Complete the checkpoint that every rank has written its part of, and let older ones go; or begin to.

        In the background it is complete once it is settled. Raises: OSError, TunebookError, on every rank; the
        checkpoint is not there then. In the background `settle` does.
        """
        on_every_rank(lambda: None)  # all have written
        if self._thread is not None:
            self._stall.stop()
            self._thread.start(lambda: self._complete(step, best_step))
            self._in_the_air = step
        else:
            self._complete(step, best_step)
            self._in_the_air = step
            self._settle()

    def settle(self) -> None:
        """Wait for the save that is in the air, if any: it is complete then. Raises: what it ended with, on every rank.

        Until then training stands still for it.
        """
        if self.is_busy:
            self._stall.go_on()
        self._settle()

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Let nobody leave what is done in here while a save is in the air, not even by an error that one rank has.

        Only what is to end at once, as by a second Ctrl-C, does. Raises: as `settle`.
        """
        try:
            yield
        except Exception as error:
            failure = self._thread.wait() if self._thread is not None else None
            if failure is not None:
                error.add_note(f"The checkpoint of step {self._in_the_air} was not completed either: {failure}")
            raise
        self.settle()

    def has(self, step: int) -> bool:
        """Whether the checkpoint of a step is in the run's own folder. Raises: as `settle`."""
        self.settle()
        return on_first_rank(lambda: why_not_complete(checkpoint_path(self.folder, step)) is None)

    def abandon(self, step: int) -> None:
        """Remove what could not be finished: where the disk is full its room is needed for the records.

        No collective: it is called by a rank that failed, and the others may not know of it. Not once `finish` was
        called: what fails then is removed by the first rank alone, which may be giving the folder its name.
        """
        shutil.rmtree(checkpoint_path(self.unfinished, step), ignore_errors=True)
        with suppress(OSError):
            self.unfinished.rmdir()

    def _settle(self) -> None:
        if self._in_the_air is None:
            return
        error = self._thread.wait() if self._thread is not None else None
        step, self._in_the_air = self._in_the_air, None
        on_every_rank(lambda: _raise(error))  # also where the talk failed for some of them alone
        if self.when_complete is not None:
            self.when_complete(checkpoint_path(self.folder, step))

    def _complete(self, step: int, best_step: int | None) -> None:
        """What follows the writing, on every rank: in the background in its thread."""
        try:
            self._seal_and_publish(step)
        except BaseException:
            if rank_and_size()[0] == 0:
                self.abandon(step)
            raise
        on_first_rank(
            lambda: remove_old(self.folder, newest=step, keep=self.keep, best=best_step, trusts=self._is_trusted),
            self._group,
        )

    def _seal_and_publish(self, step: int) -> None:
        files = seal_files(checkpoint_path(self.unfinished, step), self._group)
        on_first_rank(lambda: self._publish(step, files), self._group)
        self._saved.add(step)

    def _is_trusted(self, step: int) -> bool:
        """One that is later than where the run went back to, and was not saved since, was found to be damaged."""
        return step <= self.resumed_step or step in self._saved

    def _clear(self, step: int, estimated_bytes: int) -> None:
        try:
            clean_up(self.folder)
            self.unfinished.mkdir(parents=True, exist_ok=True)
            require_writable(self.unfinished)
            complete = complete_checkpoints(self.folder)
            needed = read_record(complete[0]).num_bytes if complete else estimated_bytes
            require_room(self.folder, step, needed, last=complete[0] if complete else None)
        except OSError as error:
            if is_disk_full(error):
                raise
            raise TunebookError(
                f"the checkpoint of step {step} cannot be written to {self.folder}: {error.strerror}; make the folder "
                "writable, or write elsewhere: outputs=/a/folder/of/yours",
                problem_id="checkpoint-not-written",
            ) from error

    def _publish(self, step: int, files: dict[str, FileEntry]) -> None:
        """Give a checkpoint whose files are on the disk its name, then its record. For the first rank."""
        unfinished, final = checkpoint_path(self.unfinished, step), checkpoint_path(self.folder, step)
        _flush_folders(unfinished)
        # A folder that is named but has no record yet is told apart, by this file, from one that never had any.
        atomic_write_json(unfinished / PENDING_FILE, self._record(step, files).to_json())
        if final.exists():
            self._make_way(final)
        unfinished.rename(final)
        flush_folder(self.folder)
        (final / PENDING_FILE).rename(final / RECORD_FILE)
        flush_folder(final)
        clean_up(self.folder)

    def _make_way(self, final: Path) -> None:
        """One of ours was found damaged, or the run had not gone back before it. Another program's is not deleted."""
        is_ours = (final / RECORD_FILE).exists()
        name = f"{'replaced' if is_ours else 'kept'}-{final.name}-{secrets.token_hex(4)}"
        final.rename((self.unfinished if is_ours else self.folder) / name)

    def _record(self, step: int, files: dict[str, FileEntry]) -> CheckpointRecord:
        return CheckpointRecord(
            step=step,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(self._stall.age_s, 3),
            stall_seconds=round(self._stall.seconds, 3),
            versions=_versions(),
            identity=self.identity,
            files=files,
        )


def seal_files(folder: Path, group: Group = None) -> dict[str, FileEntry]:
    """Flush and hash every file of a folder that all ranks see and share out; by its path in it. A collective.

    Raises: OSError, TunebookError, on every rank.
    """
    sizes = on_first_rank(lambda: _files_to_record(folder), group)
    mine = share_of(sizes, *rank_and_size())
    shares = on_every_rank(lambda: {name: _seal(folder / name) for name in mine}, group)
    return dict(sorted((name, entry) for share in shares for name, entry in share.items()))


def publish_folder(unfinished: Path, final: Path) -> None:
    """Give a folder whose files are sealed its name, in place of one that has it. For one process. Raises: OSError.

    Killed at any moment, the folder of that name is whole, or there is none.
    """
    _flush_folders(unfinished)
    aside = final.with_name(f".{final.name}.replaced-{secrets.token_hex(4)}")
    if final.exists():
        final.rename(aside)
    unfinished.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _flush_folders(top: Path) -> None:
    """A folder and those below it: the names of their files."""
    for folder, _, _ in os.walk(top, topdown=False):
        flush_folder(Path(folder))


def _files_to_record(unfinished: Path) -> dict[str, int]:
    """The files that a record will list. Raises: TunebookError for a checkpoint that no loader could be given."""
    found = list_files(unfinished)
    if found.others or not found.sizes:
        what = f"{found.others[0]} in it is no regular file" if found.others else "nothing was written"
        raise TunebookError(
            f"what was saved in {unfinished} cannot be completed: {what}; the checkpoint before is still the newest",
            problem_id="checkpoint-not-written",
        )
    return found.sizes


def _seal(file: Path) -> FileEntry:
    """Flush a file to the disk, and tell what is in it. Raises: OSError."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return FileEntry(size=file.stat().st_size, sha256=sha256_file(file))


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
