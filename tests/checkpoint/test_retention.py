"""Free space for a checkpoint, and which old ones are deleted."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tunebook.checkpoint.retention import (
    clean_up,
    estimate_bytes,
    remove_checkpoint,
    remove_old,
    steps_to_remove,
)

MakeCheckpoint = Callable[..., Path]


@pytest.mark.parametrize(
    ("complete", "newest", "keep", "best", "distrusted", "removed"),
    [
        ([2], 2, 2, None, [], []),
        ([2, 4, 6], 6, 2, None, [], [2]),
        ([2, 4, 6, 8], 8, 1, None, [], [2, 4, 6]),
        ([2, 4, 6, 8], 8, 2, 2, [], [4]),  # the newest two, and the best
        ([2, 4, 6], 6, 1, 6, [], [2, 4]),
        ([8, 10, 12, 11], 11, 2, None, [12], [8, 12]),  # the run went back before 12
        ([8, 10, 12], 12, 2, None, [10], [10]),
        ([8, 10, 12], 12, 1, 10, [10], [8, 10]),  # the best was damaged
        ([4, 6], 4, 1, None, [4, 6], [6]),
    ],
)
def test_the_newest_and_the_best_stay(
    complete: list[int], newest: int, keep: int, best: int | None, distrusted: list[int], removed: list[int]
) -> None:
    assert steps_to_remove(complete, newest=newest, keep=keep, best=best, distrusted=distrusted) == removed


def test_whatever_there_is_the_newest_stays() -> None:
    steps = (1, 2, 3, 4)
    for count in range(1, 5):
        for complete in itertools.combinations(steps, count):
            for newest, keep, best in itertools.product(complete, range(4), (None, *steps)):
                for distrusted in ((), (1, 3), steps):
                    removed = steps_to_remove(complete, newest=newest, keep=keep, best=best, distrusted=distrusted)
                    assert newest not in removed
                    assert best not in removed or best in distrusted


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def test_only_complete_checkpoints_are_deleted(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-1").mkdir()  # of another program
    remove_old(tmp_path / "checkpoints", newest=6, keep=1, best=2, trusts=lambda step: True)
    clean_up(tmp_path / "checkpoints")
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-6"]


def test_nothing_is_deleted_for_one_that_is_not_complete(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    for step in (2, 4, 6):
        make_checkpoint(tmp_path, step)
    (tmp_path / "checkpoints" / "checkpoint-6" / "complete.json").unlink()
    remove_old(tmp_path / "checkpoints", newest=6, keep=1, best=None, trusts=lambda step: True)
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


@pytest.fixture
def model() -> torch.nn.Module:
    """Sixty numbers in fp32, ten of them frozen and in bf16."""
    layer = torch.nn.Linear(10, 5)  # 55
    layer.extra = torch.nn.Parameter(torch.zeros(5))
    layer.frozen = torch.nn.Parameter(torch.zeros(10, dtype=torch.bfloat16), requires_grad=False)
    return layer


@pytest.mark.parametrize(("is_adapter", "expected"), [(False, 60 * 4 + 10 * 2), (True, 60 * 4)])
def test_the_least_that_a_first_checkpoint_takes(model: torch.nn.Module, is_adapter: bool, expected: int) -> None:
    if is_adapter:
        model.peft_config = {}  # of an adapter only what is trained
    assert estimate_bytes(model) == expected
    for parameter in model.parameters():
        parameter.ds_numel = 2 * parameter.numel()  # a rank of ZeRO-3 holds a part only
    assert estimate_bytes(model) == 2 * expected
