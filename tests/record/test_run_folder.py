from __future__ import annotations

import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from tunebook.errors import RequestError
from tunebook.record.run_folder import (
    clear_outcomes,
    create_run_folder,
    find_runs,
    latest_run,
    make_run_folder,
    make_unique,
    read_outcomes,
    resolve_run,
    write_outcome,
)


def make_folder(outputs: Path, recipe: str, second: int = 0) -> Path:
    return make_unique(make_run_folder(outputs / recipe), f"2026-11-21T12-00-{second:02d}Z")


def make_run(outputs: Path, recipe: str, second: int = 0) -> Path:
    folder = make_folder(outputs, recipe, second)
    (folder / "run.yaml").touch()
    return folder


def _create_many(outputs: Path) -> None:
    for _ in range(10):
        create_run_folder(outputs, "quickstart")


def test_processes_that_start_in_the_same_second_never_share_a_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_create_many, args=(tmp_path,)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    folders = [path for path in (tmp_path / "quickstart").iterdir() if not path.is_symlink()]
    assert len(folders) == 40
    newest = create_run_folder(tmp_path, "quickstart")
    shutil.move(tmp_path / "quickstart", tmp_path / "moved")
    assert (tmp_path / "moved" / "latest").readlink() == Path(newest.name)


def test_outputs_that_cannot_be_written_to_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere, so permissions do not tell
    for outputs in (tmp_path / "outputs", tmp_path / "file"):
        with pytest.raises(RequestError) as raised:
            create_run_folder(outputs, "quickstart")
        assert raised.value.problem_id == "outputs-not-writable"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_runs_are_found_oldest_first_and_other_folders_are_not_runs(tmp_path: Path) -> None:
    first, tenth = make_run(tmp_path, "a", 1), None
    for _ in range(10):
        tenth = make_run(tmp_path, "a", 2)
    other = make_run(tmp_path, "b", 3)
    (tmp_path / "a" / "notes").mkdir()
    make_folder(tmp_path, "a", 9)  # empty: it never started
    runs = find_runs(tmp_path)
    assert (runs[0], runs[-2], runs[-1]) == (first, tenth, other)  # -010 after -009, not after -001
    assert len(runs) == 12
    assert latest_run(tmp_path, "a") == tenth
    assert latest_run(tmp_path, "c") is None


def test_a_run_is_named_by_folder_latest_recipe_or_recipe_and_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make_run(tmp_path / "outputs", "a", 1), make_run(tmp_path / "outputs", "a", 2)
    other = make_run(tmp_path / "outputs", "b", 3)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()  # a folder of the same name that is no run does not hide the recipe
    for text, expected in {
        str(old): old, "latest": other, "a": new, "b": other,
        f"a/{old.name}": old, "outputs/a": new, "outputs/a/": new, "a/": new,
    }.items():  # fmt: skip
        assert resolve_run(text, Path("outputs")) == expected, text


def test_path_is_not_read_as_a_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, _ = make_run(tmp_path / "other", "a", 1), make_run(tmp_path / "outputs", "a", 2)
    monkeypatch.chdir(tmp_path)
    for text in ("other/a", "other/a/", "./other/a", str(tmp_path / "other" / "a")):
        assert resolve_run(text, Path("outputs")) == elsewhere, text
    for text in ("nowhere/a", "/nowhere/a", "some-org/a"):
        with pytest.raises(RequestError, match=f"there is no run '{text}'"):
            resolve_run(text, Path("outputs"))


def test_an_unknown_run_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(RequestError) as error:
        resolve_run("latest", tmp_path)
    assert error.value.problem_id == "unknown-run"
    runs = [make_run(tmp_path, "quickstart", second) for second in range(10)]
    newest = f"The newest runs are quickstart/{runs[-1].name}, quickstart/{runs[-2].name}"
    for name, answer in (("quickstrat", "Did you mean 'quickstart'"), ("q*", newest)):  # no pattern
        with pytest.raises(RequestError, match=answer):
            resolve_run(name, tmp_path)
    assert find_runs(tmp_path, "[q]uickstart") == []


@pytest.mark.parametrize(
    ("codes", "expected"),
    [([0, 0], 0), ([0, 1], 1), ([1, 7], 7), ([6, 7], 7), ([6, 1], 6), ([1, 4], 4), ([0, 137], 1), ([0, 2, 1], 2)],
)
def test_most_informative_outcome_is_chosen(tmp_path: Path, codes: list[int], expected: int) -> None:
    for rank, code in enumerate(codes):
        write_outcome(tmp_path, rank, code, reason=f"reason of rank {rank}", step=10 + rank)
    outcome = read_outcomes(tmp_path, world_size=len(codes))
    assert outcome.exit_code == expected
    assert outcome.step == 10 + outcome.rank
    clear_outcomes(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_first_of_two_crashes_counts_and_its_checkpoint_is_relative(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "step-5"
    write_outcome(tmp_path, rank=1, exit_code=1, reason="ZeroDivisionError: a fault", last_checkpoint=checkpoint)
    write_outcome(tmp_path, rank=0, exit_code=1, reason="RuntimeError: connection closed by peer")
    outcome = read_outcomes(tmp_path, world_size=2)
    assert (outcome.reason, outcome.last_checkpoint) == ("ZeroDivisionError: a fault", "checkpoints/step-5")


def test_killed_rank_is_named_with_the_other_outcomes(tmp_path: Path) -> None:
    write_outcome(tmp_path, rank=0, exit_code=0, reason="done", step=5)
    outcome = read_outcomes(tmp_path, world_size=2)
    assert (outcome.exit_code, outcome.rank) == (1, 1)
    write_outcome(tmp_path, rank=0, exit_code=1, reason="RuntimeError: connection closed by peer", step=4)
    outcome = read_outcomes(tmp_path, world_size=2)
    assert outcome.reason.startswith("rank 1 ended without recording a reason: it was killed")
    assert outcome.reason.endswith("Rank 0 says: RuntimeError: connection closed by peer")
    assert outcome.step == 4
