"""Saves in the background of two real ranks: their talk is not training's, and each ends alike on both."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tunebook.checkpoint.verify import verified_record


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two ranks leave."""
    place = tmp_path_factory.mktemp("ranks")
    words = [sys.executable, str(Path(__file__).with_name("saving_ranks.py")), str(place)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return place


@pytest.fixture(scope="module")
def seen(folder: Path) -> list[dict[str, Any]]:
    """What each rank saw."""
    return [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(2)]


def test_ranks_train_on_together_while_a_save_of_theirs_is_pending(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        found = rank["in_the_air"]
        assert (found["is_busy"], found["is_busy_after"]) == (True, False)
        assert found["sum"] == 3
        assert found["before"] == ["_unfinished"]
        assert found["after"] == ["checkpoint-2"]


def test_each_flushes_and_hashes_its_share(seen: list[dict[str, Any]]) -> None:
    first, second = (rank["in_the_air"]["sealed"] for rank in seen)
    assert sorted(first + second) == ["a", "b", "c", "d"]
    assert len(first) == 2


@pytest.mark.parametrize("failing", [0, 1])
def test_what_fails_on_one_rank_is_raised_on_both_and_the_one_before_stays(
    seen: list[dict[str, Any]], failing: int
) -> None:
    for rank in seen:
        found = rank[f"failing_{failing}"]
        assert (found["errno"], found["text"]) == (errno.ENOSPC, f"full on rank {failing}")
        assert found["complete"] == ["checkpoint-2"]


def test_the_next_save_waits_for_the_one_in_the_air_and_the_oldest_goes(seen: list[dict[str, Any]]) -> None:
    for rank in seen:
        assert rank["again"]["between"] == ["_unfinished", "checkpoint-2", "checkpoint-6"]
        assert rank["again"]["complete"] == ["checkpoint-6", "checkpoint-8"]


def test_a_rank_that_an_error_takes_away_leaves_the_save_in_the_air_complete(
    seen: list[dict[str, Any]], folder: Path
) -> None:
    assert [rank["leaving"]["error"] for rank in seen] == ["InterruptedError", "ZeroDivisionError"]
    for rank in seen:
        assert rank["leaving"]["complete"] == ["checkpoint-10", "checkpoint-8"]
    record = verified_record(folder / "checkpoints" / "checkpoint-10")
    assert sorted(record.files) == ["a", "b", "c", "d"]
