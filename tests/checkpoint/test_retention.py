"""Free space for a checkpoint, and which old ones are deleted."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tunebook.checkpoint.save import clean_up, remove_checkpoint, remove_old

MakeCheckpoint = Callable[..., Path]


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


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
    assert sorted(names(tmp_path)) == sorted(f"checkpoint-{step}" for step in kept)


def test_only_complete_checkpoints_are_deleted(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-1").mkdir()  # of another program
    remove_old(tmp_path / "checkpoints", newest=6, keep=1, best=2)
    clean_up(tmp_path / "checkpoints")
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-6"]


def test_nothing_is_deleted_for_one_that_is_not_complete(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-6" / "complete.json").unlink()
    remove_old(tmp_path / "checkpoints", newest=6, keep=1, best=None)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]


def test_a_deletion_that_is_interrupted_leaves_no_checkpoint(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*args: object, **settings: object) -> None:
        raise KeyboardInterrupt

    checkpoint = make_checkpoint(tmp_path, 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", killed)
        remove_checkpoint(checkpoint)
    assert names(tmp_path) == ["_unfinished"]
    clean_up(tmp_path / "checkpoints")
    assert names(tmp_path) == []


def test_what_interrupted_saves_leave_is_cleared(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, 2)
    (make_checkpoint(tmp_path, 4) / "complete.json").rename(
        tmp_path / "checkpoints" / "checkpoint-4" / ".complete.json"
    )
    (tmp_path / "checkpoints" / "_unfinished" / "checkpoint-6").mkdir(parents=True)
    foreign = tmp_path / "checkpoints" / "checkpoint-8"
    foreign.mkdir()
    clean_up(tmp_path / "checkpoints")
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-8"]
    clean_up(tmp_path / "nothing")
