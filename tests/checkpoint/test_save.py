"""What the trainer has written becomes a checkpoint in one step; interrupted anywhere, the one before is the newest."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tunebook.checkpoint import save
from tunebook.checkpoint.record import FileEntry, Identity
from tunebook.checkpoint.save import CheckpointSaver, publish_folder, seal_files
from tunebook.checkpoint.verify import newest_checkpoint, verified_record
from tunebook.errors import DoesNotFitError, TunebookError

FILES = {"model.safetensors": b"weights", "global_step4/optim.pt": b"state", "latest": b"global_step4"}


@pytest.fixture(params=[False, True], ids=["waiting", "in-background"])
def saver(request: pytest.FixtureRequest, tmp_path: Path, identity: Identity) -> CheckpointSaver:
    return CheckpointSaver(tmp_path, identity, keep=2, in_background=request.param)


def write(saver: CheckpointSaver, step: int) -> None:
    """What the trainer does."""
    for name, content in FILES.items():
        file = saver.unfinished / f"checkpoint-{step}" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content + str(step).encode())


def save_step(saver: CheckpointSaver, step: int, best: int | None = None) -> Path:
    saver.begin(step)
    write(saver, step)
    finish(saver, step, best)
    return saver.folder / f"checkpoint-{step}"


def finish(saver: CheckpointSaver, step: int, best: int | None = None) -> None:
    saver.finish(step, best)
    saver.settle()


def failing(number: int) -> Callable[..., Any]:
    def fail(*args: object, **settings: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def names(saver: CheckpointSaver) -> list[str]:
    return sorted(path.name for path in saver.folder.iterdir())


def test_a_saved_checkpoint_is_verified_and_says_what_it_belongs_to(
    saver: CheckpointSaver, tmp_path: Path, identity: Identity
) -> None:
    checkpoint = save_step(saver, 4)
    assert checkpoint == tmp_path / "checkpoints" / "checkpoint-4" == newest_checkpoint(tmp_path)
    record = verified_record(checkpoint)
    assert sorted(record.files) == sorted(FILES)
    assert record.identity == identity
    assert record.versions["torch"]
    assert record.seconds > 0
    assert names(saver) == ["checkpoint-4"]


def test_all_is_flushed_before_the_folder_gets_its_name(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: set[int] = set()
    missing: list[str] = []
    fsync, rename = os.fsync, os.rename

    def note(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def look(source: Path, target: Path) -> None:
        if Path(target).name == "checkpoint-4":
            inside = [Path(source), *Path(source).rglob("*")]
            missing.extend(path.name for path in inside if path.stat().st_ino not in flushed)
            assert len(inside) == 6  # three files, their two folders, the record to be
            flushed.clear()
        rename(source, target)

    monkeypatch.setattr(os, "fsync", note)
    monkeypatch.setattr(os, "rename", look)
    checkpoint = save_step(saver, 4)
    assert missing == []
    assert {checkpoint.stat().st_ino, checkpoint.parent.stat().st_ino} <= flushed


def test_the_newest_two_and_the_best_stay(saver: CheckpointSaver) -> None:
    for step in (2, 4, 6, 8):
        save_step(saver, step, best=2)
    assert names(saver) == ["checkpoint-2", "checkpoint-6", "checkpoint-8"]


def test_later_ones_that_the_run_went_back_behind_go_with_the_next_save(saver: CheckpointSaver, tmp_path: Path) -> None:
    for step in (4, 5, 9):
        save_step(saver, step)
    assert names(saver) == ["checkpoint-5", "checkpoint-9"]
    again = CheckpointSaver(tmp_path, saver.identity, keep=2)
    save_step(again, 6)
    assert names(again) == ["checkpoint-5", "checkpoint-6"]


class Power:
    """Lets a number of calls to the file system pass; then, as after SIGKILL, none has an effect."""

    calls = ("rename", "fsync", "replace", "open", "mkdir", "rmdir")

    def __init__(self, last_call: int, patch: pytest.MonkeyPatch) -> None:
        self.last_call, self.done = last_call, 0
        for name in self.calls:
            patch.setattr(os, name, self._counted(getattr(os, name)))

    def _counted(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **settings: Any) -> Any:
            self.done += 1
            if self.done > self.last_call:
                raise KeyboardInterrupt
            return original(*args, **settings)

        return call


@pytest.mark.usefixtures("saves_when_waited_for")
def test_the_one_in_the_air_is_not_there_until_it_is_waited_for(tmp_path: Path, identity: Identity) -> None:
    saver = CheckpointSaver(tmp_path, identity, keep=1, in_background=True)
    save_step(saver, 2)
    saver.begin(4)
    write(saver, 4)
    saver.finish(4, None)
    assert saver.is_pending
    assert saver.is_busy
    assert names(saver) == ["_unfinished", "checkpoint-2"]  # the one before goes last of all
    saver.settle()
    assert not saver.is_pending
    assert names(saver) == ["checkpoint-4"]


@pytest.mark.usefixtures("saves_when_waited_for")
def test_the_next_save_clears_its_place_after_the_one_in_the_air(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointSaver(tmp_path, identity, keep=2, in_background=True)
    there: list[list[str]] = []
    clear = saver._clear

    def look(step: int) -> None:
        there.append(names(saver) if saver.folder.exists() else [])
        clear(step)

    monkeypatch.setattr(saver, "_clear", look)
    for step in (2, 4, 6):
        saver.begin(step)
        write(saver, step)
        saver.finish(step, None)
    assert there == [[], ["checkpoint-2"], ["checkpoint-2", "checkpoint-4"]]
    saver.settle()
    assert names(saver) == ["checkpoint-4", "checkpoint-6"]


@pytest.mark.usefixtures("saves_when_waited_for")
def test_what_fails_in_the_air_is_raised_by_who_waits_first_and_once(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointSaver(tmp_path, identity, keep=2, in_background=True)
    save_step(saver, 2)
    saver.begin(4)
    write(saver, 4)
    with monkeypatch.context() as patch:
        patch.setattr(save, "_seal", failing(errno.ENOSPC))
        saver.finish(4, None)
        with pytest.raises(OSError, match="No space left"):
            saver.begin(6)
    assert names(saver) == ["checkpoint-2"]
    save_step(saver, 6)
    assert names(saver) == ["checkpoint-2", "checkpoint-6"]


@pytest.mark.usefixtures("saves_when_waited_for")
def test_an_error_of_the_training_waits_for_the_save_in_the_air_and_tells_of_its_failure(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    saver = CheckpointSaver(tmp_path, identity, keep=2, in_background=True)
    for step in (2, 4):
        if step == 4:
            monkeypatch.setattr(save, "_seal", failing(errno.EIO))
        with pytest.raises(ZeroDivisionError) as raised, saver.settled():
            saver.begin(step)
            write(saver, step)
            saver.finish(step, None)
            raise ZeroDivisionError
        assert names(saver) == ["checkpoint-2"]
        saver._pending = None  # a run ends with it
    (note,) = raised.value.__notes__
    assert note == "The checkpoint of step 4 was not completed either: [Errno 5] Input/output error"


@pytest.mark.usefixtures("saves_when_waited_for")
def test_a_second_ctrl_c_waits_for_nothing(tmp_path: Path, identity: Identity) -> None:
    saver = CheckpointSaver(tmp_path, identity, keep=2, in_background=True)
    with pytest.raises(KeyboardInterrupt), saver.settled():
        saver.begin(2)
        write(saver, 2)
        saver.finish(2, None)
        raise KeyboardInterrupt
    assert saver.is_busy
    assert names(saver) == ["_unfinished"]
    saver.settle()  # lets its thread end


def test_what_is_to_be_done_with_a_complete_one_is_done_once(saver: CheckpointSaver, tmp_path: Path) -> None:
    complete: list[tuple[Path, Path | None]] = []
    saver.when_complete = lambda checkpoint: complete.append((checkpoint, newest_checkpoint(tmp_path)))
    first, second = save_step(saver, 2), save_step(saver, 4)
    saver.settle()
    assert complete == [(first, first), (second, second)]


def test_stopped_at_any_call_the_one_before_or_this_one_is_whole(
    saver: CheckpointSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(saver, 2)
    shutil.copytree(tmp_path / "checkpoints", tmp_path / "before")
    newest: list[str] = []
    for last_call in itertools.count(1):
        saver.begin(4)
        write(saver, 4)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            power = Power(last_call, patch)
            finish(saver, 4)
        found = newest_checkpoint(tmp_path)
        assert found is not None
        assert verified_record(found).files
        newest.append(found.name)
        if power.done <= last_call:
            break
        shutil.rmtree(tmp_path / "checkpoints")
        shutil.copytree(tmp_path / "before", tmp_path / "checkpoints")
    assert newest == sorted(newest)  # once it is there, it stays
    assert newest[0] == "checkpoint-2"
    assert newest[-1] == "checkpoint-4"
    assert newest.count("checkpoint-2") > 10


def test_an_interrupted_save_is_in_nobodys_way(saver: CheckpointSaver, tmp_path: Path) -> None:
    save_step(saver, 2)
    saver.begin(4)
    write(saver, 4)
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoints" / "checkpoint-2"
    again = CheckpointSaver(tmp_path, saver.identity, keep=2)
    save_step(again, 3)
    assert names(again) == ["checkpoint-2", "checkpoint-3"]


def test_a_damaged_one_of_the_same_step_is_replaced(saver: CheckpointSaver) -> None:
    (save_step(saver, 2) / "latest").unlink()
    assert verified_record(save_step(saver, 2)).step == 2
    assert names(saver) == ["checkpoint-2"]


def test_a_disk_without_room_is_refused_before_anything_is_written(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(total=2**40, free=10 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    last = save_step(saver, 2)
    disk.free = 0
    with pytest.raises(DoesNotFitError, match=f"has 0 bytes free and .* The last good checkpoint is {last}"):
        saver.begin(4)


def test_the_checkpoint_before_says_how_much_room_the_next_takes(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = verified_record(save_step(saver, 2)).num_bytes
    needed: list[int] = []
    monkeypatch.setattr(save, "require_space", lambda folder, num_bytes, *_: needed.append(num_bytes))
    saver.begin(4)
    assert needed == [size]


def test_a_disk_that_fills_up_leaves_the_last_one(
    saver: CheckpointSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(saver, 2)
    monkeypatch.setattr(save, "atomic_write_json", failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        save_step(saver, 4)
    assert names(saver) == ["checkpoint-2"]
    assert not saver.is_pending


def test_a_folder_that_cannot_be_written_to_is_named(
    saver: CheckpointSaver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "mkdir", failing(errno.EROFS))
    with pytest.raises(TunebookError, match=r"the checkpoint of step 4 cannot be written to .*: Read-only file system"):
        saver.begin(4)


def test_nothing_written_is_no_checkpoint(saver: CheckpointSaver) -> None:
    saver.begin(4)
    (saver.unfinished / "checkpoint-4").mkdir()
    with pytest.raises(TunebookError, match="nothing was written"):
        finish(saver, 4)
    assert names(saver) == []
    saver.begin(4)
    (saver.unfinished / "checkpoint-4").mkdir()
    (saver.unfinished / "checkpoint-4" / "link").symlink_to("/etc/hostname")
    with pytest.raises(TunebookError, match="link in it is a link or no regular file"):
        finish(saver, 4)


def test_a_read_only_folder_is_named_and_what_is_in_it_stays(
    tmp_path: Path, identity: Identity, small_disk: Callable[[Path, int], Any]
) -> None:
    disk = small_disk(tmp_path / "run", 2**20)
    saver = CheckpointSaver(disk.folder, identity, keep=2)
    checkpoint = save_step(saver, 4)
    disk.set_read_only(True)
    with pytest.raises(
        TunebookError, match=r"of step 8 cannot be written to .*: Read-only file system.*outputs="
    ) as raised:
        saver.begin(8)
    assert raised.value.problem_id == "checkpoint-not-written"
    assert newest_checkpoint(disk.folder) == checkpoint
    assert verified_record(checkpoint).step == 4
    disk.set_read_only(False)
    assert save_step(saver, 8) == newest_checkpoint(disk.folder)
    assert names(saver) == ["checkpoint-4", "checkpoint-8"]


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A model that was written, but not flushed."""
    folder = tmp_path / ".model.unfinished"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"new")
    (folder / "sub" / "config.json").write_bytes(b"{}")
    return folder


def test_every_file_and_folder_is_flushed_before_a_folder_gets_its_name(
    unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_fsync(descriptor: int) -> None:
        events.append(os.path.relpath(Path(f"/proc/self/fd/{descriptor}").readlink(), tmp_path))
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        events.append(f"{path.name} -> {target.name}")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(Path, "rename", note_rename)
    files = seal_files(unfinished)
    assert files == {
        "model.safetensors": FileEntry(size=3, sha256=hashlib.sha256(b"new").hexdigest()),
        "sub/config.json": FileEntry(size=2, sha256=hashlib.sha256(b"{}").hexdigest()),
    }
    publish_folder(unfinished, tmp_path / "model")
    files_flushed, folders_flushed, rest = events[:2], events[2:4], events[4:]
    assert sorted(files_flushed) == [".model.unfinished/model.safetensors", ".model.unfinished/sub/config.json"]
    assert folders_flushed == [".model.unfinished/sub", ".model.unfinished"]
    assert rest == [".model.unfinished -> model", "."]


def test_a_folder_of_that_name_is_replaced_whole(unfinished: Path, tmp_path: Path) -> None:
    before = tmp_path / "model"
    before.mkdir()
    (before / "old.safetensors").write_bytes(b"old")
    publish_folder(unfinished, before)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert sorted(path.name for path in before.iterdir()) == ["model.safetensors", "sub"]


def test_what_cannot_be_flushed_gets_no_name(unfinished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", failing(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        seal_files(unfinished)
    assert not (tmp_path / "model").exists()
