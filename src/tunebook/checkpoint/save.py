"""Complete a checkpoint that the trainer has written: flush and hash every file, name the folder, write its record.

The trainer writes to `checkpoints/_unfinished/checkpoint-12`. Once all ranks have written, each flushes and hashes its
share of the files; then the first rank names the folder and writes `complete.json` last. A run that is killed at any
moment has this checkpoint or the one before, never half of one.

Training waits while the trainer writes; a thread of each rank may do the rest while training continues. The written
files are a copy that no step changes. At most one save is pending: the next one waits for it.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Thread

from tunebook.checkpoint.collectives import Group, on_every_rank, on_first_rank, rank_and_size, share_of
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
    named_as_checkpoints,
    read_record,
    step_of,
)
from tunebook.checkpoint.verify import complete_checkpoints
from tunebook.files import atomic_write_json, flush_folder, sha256_file
from tunebook.hardware.disk import FREE_SPACE, require_space

_PACKAGES = ("tunebook", "torch", "transformers", "trl", "accelerate", "peft", "deepspeed")


class Background(Thread):
    """Work on files in a thread, during which Python continues. It holds no tensors."""

    def __init__(self, work: Callable[[], None]) -> None:
        # A daemon: a process that has to end at once does not wait for a disk.
        super().__init__(name="checkpoint", daemon=True)
        self._work = work
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        """What the thread does."""
        try:
            self._work()
        except BaseException as error:
            self._error = error

    def wait(self) -> BaseException | None:
        """Wait for the work and return its error. Ctrl-C ends the wait."""
        self.join()
        return self._error


class CheckpointSaver:
    """Saves the checkpoints of one run. `keep` is how many of the newest stay, in addition to the best.

    In the background the threads use `group`. `begin`, `finish`, `settle` and `has` are collectives: every rank calls
    them, in its main thread.
    """

    def __init__(
        self, run: Path, identity: Identity, *, keep: int, in_background: bool = False, group: Group = None
    ) -> None:
        self.folder = run / CHECKPOINTS_FOLDER
        self.identity = identity
        self.keep = keep
        self.in_background = in_background
        self._group = group
        self._thread: Background | None = None
        self._pending: int | None = None  # the step whose checkpoint is written and not known to be complete
        self._began = 0.0

    @property
    def unfinished(self) -> Path:
        """The folder in which the trainer makes the folder of a step."""
        return self.folder / UNFINISHED_FOLDER

    @property
    def is_pending(self) -> bool:
        """Whether there is a save to settle; the same on every rank."""
        return self._pending is not None

    @property
    def is_busy(self) -> bool:
        """Whether this rank still works on a save."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, step: int) -> None:
        """Settle the save before, make the folder, and require as much free space as the checkpoint before takes.

        Raises: the error of the save before, DoesNotFitError, OSError.
        """
        self.settle()
        self._began = time.perf_counter()
        on_first_rank(lambda: self._clear(step))

    def finish(self, step: int, best_step: int | None) -> None:
        """Complete the checkpoint after every rank has written its part, and delete older ones.

        In the background this only begins, and `settle` waits for it and raises. Raises: OSError, on every rank; the
        checkpoint does not exist then.
        """
        on_every_rank(lambda: None)  # all have written
        if self.in_background:
            self._thread = Background(lambda: self._complete(step, best_step))
            self._pending = step
        else:
            self._complete(step, best_step)

    def settle(self) -> None:
        """Wait until the pending save is complete, if there is one. Raises: its error, on every rank."""
        if self._pending is None:
            return
        error = self._wait()
        self._pending = None
        on_every_rank(lambda: _raise(error))  # also if the collectives failed on some ranks only

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Settle the pending save at the end of the block, also if one rank raises an error in it.

        Only an immediate end, as by a second Ctrl-C, does not wait. Raises: as `settle`.
        """
        try:
            yield
        except Exception:
            self._wait()
            raise
        self.settle()

    def abandon(self, step: int) -> None:
        """Remove an unfinished checkpoint: on a full disk its space is needed for the records.

        No collective: a rank that failed calls it, and the others may not know. Not to be called after `finish`, after
        which only the first rank removes a failed checkpoint, since it may be naming the folder.
        """
        shutil.rmtree(checkpoint_path(self.unfinished, step), ignore_errors=True)
        with suppress(OSError):
            self.unfinished.rmdir()

    def _wait(self) -> BaseException | None:
        """Wait for the thread, if there is one, and return its error."""
        if self._thread is None:
            return None
        error = self._thread.wait()
        self._thread = None
        return error

    def _complete(self, step: int, best_step: int | None) -> None:
        """Complete a written checkpoint, on every rank; a background save does this in its thread."""
        try:
            files = seal_files(checkpoint_path(self.unfinished, step), self._group)
            on_first_rank(lambda: self._publish(step, files), self._group)
        except BaseException:
            if rank_and_size()[0] == 0:
                self.abandon(step)
            raise
        on_first_rank(lambda: remove_old(self.folder, newest=step, keep=self.keep, best=best_step), self._group)

    def _clear(self, step: int) -> None:
        clean_up(self.folder)
        self.unfinished.mkdir(parents=True, exist_ok=True)
        if complete := complete_checkpoints(self.folder):
            advice = f"{FREE_SPACE}. The last good checkpoint is {complete[0]}"
            require_space(self.folder, read_record(complete[0]).num_bytes, f"the checkpoint of step {step}", advice)

    def _publish(self, step: int, files: dict[str, FileEntry]) -> None:
        """Name a checkpoint whose files are flushed, then write its record. For the first rank."""
        unfinished, final = checkpoint_path(self.unfinished, step), checkpoint_path(self.folder, step)
        _flush_folders(unfinished)
        versions: dict[str, str] = {}
        for name in _PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        record = CheckpointRecord(
            step=step,
            saved=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._began, 3),
            versions=versions,
            identity=self.identity,
            files=files,
        )
        # This file distinguishes a folder without a record yet from one that never had any.
        atomic_write_json(unfinished / PENDING_FILE, asdict(record))
        if final.exists():  # damaged, or of an attempt that the run went back behind
            final.rename(self.unfinished / f"replaced-{final.name}-{secrets.token_hex(4)}")
        unfinished.rename(final)
        flush_folder(self.folder)
        (final / PENDING_FILE).rename(final / RECORD_FILE)
        flush_folder(final)
        clean_up(self.folder)


def remove_old(checkpoints: Path, *, newest: int, keep: int, best: int | None) -> None:
    """Delete all complete checkpoints but the newest `keep` and the best, once the checkpoint `newest` is complete.

    Those of later steps are of an attempt that the run went back behind, and are deleted, too. A checkpoint that cannot
    be deleted stays: the run continues. Folders without a record are not Tunebook's and stay.
    """
    by_step = {step_of(path) or 0: path for path in complete_checkpoints(checkpoints)}
    if newest not in by_step:  # never the last complete one
        return
    past = [step for step in sorted(by_step, reverse=True) if step <= newest]
    kept = {newest, best, *past[: max(1, keep)]}
    for step, path in by_step.items():
        if step not in kept or step > newest:
            remove_checkpoint(path)


def remove_checkpoint(checkpoint: Path) -> None:
    """Delete one checkpoint: rename it, then delete its files, so that no half is left. After an OSError it stays."""
    aside = checkpoint.parent / UNFINISHED_FOLDER / f"removed-{checkpoint.name}-{secrets.token_hex(4)}"
    with suppress(OSError):
        aside.parent.mkdir(exist_ok=True)
        checkpoint.rename(aside)
        shutil.rmtree(aside, ignore_errors=True)
        aside.parent.rmdir()


def clean_up(checkpoints: Path) -> None:
    """Remove what an interrupted save or deletion has left behind. For one process at a time."""
    shutil.rmtree(checkpoints / UNFINISHED_FOLDER, ignore_errors=True)
    for checkpoint in named_as_checkpoints(checkpoints):
        if (checkpoint / PENDING_FILE).is_file() and not (checkpoint / RECORD_FILE).exists():
            remove_checkpoint(checkpoint)


def seal_files(folder: Path, group: Group = None) -> dict[str, FileEntry]:
    """Flush and hash every file of a folder that all ranks see, each rank its share. A collective.

    Returns the entries by path in the folder. Raises: OSError, on every rank.
    """
    sizes = on_first_rank(lambda: list_files(folder), group)
    own_share = share_of(sizes, *rank_and_size())
    shares = on_every_rank(lambda: {name: _seal(folder / name) for name in own_share}, group)
    return dict(sorted((name, entry) for share in shares for name, entry in share.items()))


def publish_folder(unfinished: Path, final: Path) -> None:
    """Name a folder whose files are flushed, replacing one of that name. For one process. Raises: OSError.

    After a kill at any moment the folder of that name is complete, or there is none.
    """
    _flush_folders(unfinished)
    aside = final.with_name(f".{final.name}.replaced-{secrets.token_hex(4)}")
    if final.exists():
        final.rename(aside)
    unfinished.rename(final)
    flush_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _flush_folders(top: Path) -> None:
    """Flush the file names of a folder and its subfolders."""
    for folder, _, _ in os.walk(top, topdown=False):
        flush_folder(Path(folder))


def _seal(file: Path) -> FileEntry:
    """Flush a file to the disk and hash it. Raises: OSError."""
    with file.open("rb") as stream:
        os.fsync(stream.fileno())
    return FileEntry(size=file.stat().st_size, sha256=sha256_file(file))


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error
