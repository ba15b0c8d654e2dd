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
    assert (tmp_path / "quickstart" / "latest").resolve() in [folder.resolve() for folder in folders]


def test_latest_is_a_relative_link_to_the_newest(tmp_path: Path) -> None:
    create_run_folder(tmp_path / "outputs", "quickstart")
    newest = create_run_folder(tmp_path / "outputs", "quickstart")
    shutil.move(tmp_path / "outputs", tmp_path / "moved")
    link = tmp_path / "moved" / "quickstart" / "latest"
    assert link.readlink() == Path(newest.name)
    assert link.resolve() == tmp_path / "moved" / "quickstart" / newest.name


def test_outputs_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "outputs").touch()
    with pytest.raises(RequestError, match=r"outputs is a file") as raised:
        create_run_folder(tmp_path / "outputs", "quickstart")
    assert raised.value.problem_id == "outputs-not-writable"


def test_outputs_that_cannot_be_written_to_is_refused_and_nothing_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere, so permissions do not tell
    with pytest.raises(RequestError, match="may not write in it"):
        create_run_folder(tmp_path / "outputs", "quickstart")
    assert not list(tmp_path.iterdir())


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


def test_a_recipes_name_is_no_pattern(tmp_path: Path) -> None:
    make_run(tmp_path, "a1")
    with pytest.raises(RequestError, match=r"there is no run 'a\*'"):
        resolve_run("a*", tmp_path)
    assert find_runs(tmp_path, "[a]1") == []


def test_an_unknown_run_lists_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"tunebook train quickstart") as error:
        resolve_run("latest", tmp_path)
    assert error.value.problem_id == "unknown-run"
    runs = [make_run(tmp_path, "quickstart", second) for second in range(10)]
    with pytest.raises(RequestError, match=r"no run 'quickstrat'\. Did you mean 'quickstart'\?") as error:
        resolve_run("quickstrat", tmp_path)
    assert f"quickstart/{runs[-1].name}, quickstart/{runs[-2].name}" in error.value.message


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


def test_a_rank_that_left_no_outcome_counts_as_unexpected(tmp_path: Path) -> None:
    write_outcome(tmp_path, 0, 0, reason="done", step=5)
    outcome = read_outcomes(tmp_path, world_size=2)
    assert (outcome.exit_code, outcome.rank) == (1, 1)
    assert "rank 1 ended without recording a reason" in outcome.reason


def test_an_unknown_code_keeps_its_number_in_the_reason(tmp_path: Path) -> None:
    write_outcome(tmp_path, 0, 137, reason="killed", step=5)
    assert read_outcomes(tmp_path, world_size=1).reason == "exit code 137: killed"


def test_checkpoints_in_the_folder_are_recorded_relative_to_it_and_outcomes_can_be_cleared(tmp_path: Path) -> None:
    write_outcome(tmp_path, 0, 6, "asked to stop", step=5, last_checkpoint=tmp_path / "checkpoints" / "step-5")
    assert read_outcomes(tmp_path, world_size=1).last_checkpoint == "checkpoints/step-5"
    clear_outcomes(tmp_path)
    assert not list(tmp_path.iterdir())


def test_first_of_two_crashes_counts(tmp_path: Path) -> None:
    write_outcome(tmp_path, rank=1, exit_code=1, reason="ZeroDivisionError: a fault")
    write_outcome(tmp_path, rank=0, exit_code=1, reason="RuntimeError: connection closed by peer")
    assert read_outcomes(tmp_path, world_size=2).reason == "ZeroDivisionError: a fault"


def test_killed_rank_is_named_with_the_other_outcomes(tmp_path: Path) -> None:
    write_outcome(tmp_path, rank=0, exit_code=1, reason="RuntimeError: connection closed by peer", step=4)
    outcome = read_outcomes(tmp_path, world_size=2)
    assert outcome.reason.startswith("rank 1 ended without recording a reason: it was killed")
    assert outcome.reason.endswith("Rank 0 says: RuntimeError: connection closed by peer")
    assert outcome.step == 4
