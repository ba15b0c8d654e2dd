"""What the trainer has written becomes a checkpoint in one step; interrupted anywhere, the one before is the newest."""

from __future__ import annotations

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

from tunebook.checkpoint.record import FileEntry, Identity
from tunebook.checkpoint.save import CheckpointSaver, clean_up, publish_folder, remove_old, seal_files
from tunebook.checkpoint.verify import newest_checkpoint, verified_record
from tunebook.errors import DoesNotFitError

MakeCheckpoint = Callable[..., Path]
FILES = {"model.safetensors": b"weights", "global_step4/optim.pt": b"state", "latest": b"global_step4"}


@pytest.fixture
def saver(tmp_path: Path, identity: Identity) -> CheckpointSaver:
    return CheckpointSaver(tmp_path, identity, keep=2)


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


def names_in(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def names(saver: CheckpointSaver) -> list[str]:
    return names_in(saver.folder.parent)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_saved_checkpoint_is_verified_and_says_what_it_belongs_to(
    tmp_path: Path, identity: Identity, in_background: bool
) -> None:
    saver = CheckpointSaver(tmp_path, identity, keep=2, in_background=in_background)
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


def test_the_next_save_needs_the_space_of_the_one_before(
    saver: CheckpointSaver, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SimpleNamespace(total=2**40, free=2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    disk.free = verified_record(save_step(saver, 2)).num_bytes
    saver.begin(4)
    disk.free -= 1
    with pytest.raises(DoesNotFitError):
        saver.begin(4)


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """A model that was written, but not flushed."""
    folder = tmp_path / ".model.unfinished"
    (folder / "sub").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"new")
    (folder / "sub" / "config.json").write_bytes(b"{}")
    return folder


def test_a_folder_is_hashed_and_replaces_one_of_that_name(unfinished: Path, tmp_path: Path) -> None:
    before = tmp_path / "model"
    before.mkdir()
    (before / "old.safetensors").write_bytes(b"old")
    assert seal_files(unfinished) == {
        "model.safetensors": FileEntry(size=3, sha256=hashlib.sha256(b"new").hexdigest()),
        "sub/config.json": FileEntry(size=2, sha256=hashlib.sha256(b"{}").hexdigest()),
    }
    publish_folder(unfinished, before)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert sorted(path.name for path in before.iterdir()) == ["model.safetensors", "sub"]


@pytest.mark.parametrize(
    ("complete", "newest", "keep", "best", "kept"),
    [
        ([2, 4, 6], 6, 2, None, [4, 6]),
        ([2, 4, 6, 8], 8, 2, 2, [2, 6, 8]),  # the newest two, and the best
        ([8, 10, 11, 12], 11, 2, None, [10, 11]),  # the run went back before 12
        ([8, 10, 12], 10, 0, 12, [10]),
    ],
)
def test_the_newest_and_the_best_stay(
    make_checkpoint: MakeCheckpoint,
    tmp_path: Path,
    complete: list[int],
    newest: int,
    keep: int,
    best: int | None,
    kept: list[int],
) -> None:
    for step in complete:
        make_checkpoint(tmp_path, step)
    remove_old(tmp_path / "checkpoints", newest=newest, keep=keep, best=best)
    assert sorted(names_in(tmp_path)) == sorted(f"checkpoint-{step}" for step in kept)


def test_only_complete_checkpoints_are_deleted(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-1").mkdir()  # of another program
    remove_old(tmp_path / "checkpoints", newest=6, keep=1, best=2)
    clean_up(tmp_path / "checkpoints")
    assert names_in(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-6"]


def test_nothing_is_deleted_for_one_that_is_not_complete(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-6" / "complete.json").unlink()
    remove_old(tmp_path / "checkpoints", newest=6, keep=1, best=None)
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_what_interrupted_saves_leave_is_cleared(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    (make_checkpoint(tmp_path, 4) / "complete.json").rename(
        tmp_path / "checkpoints" / "checkpoint-4" / ".complete.json"
    )
    (tmp_path / "checkpoints" / "_unfinished" / "checkpoint-6").mkdir(parents=True)
    foreign = tmp_path / "checkpoints" / "checkpoint-8"
    foreign.mkdir()
    clean_up(tmp_path / "checkpoints")
    assert names_in(tmp_path) == ["checkpoint-2", "checkpoint-8"]
    clean_up(tmp_path / "nothing")
