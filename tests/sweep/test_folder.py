from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.errors import RequestError
from tunebook.hardware.disk import disk_full
from tunebook.sweep.folder import Request, SweepFolder, create, newest_with, working_on
from tunebook.sweep.trial_process import TrialEnd, begin_trial, write_trial_end
from tunebook.sweep.trials import Trial

REQUEST = Request(recipe="quickstart", overrides=["training.seed=0,1"], config_sha256="ab", search=None)
TRIAL = Trial(number=3, overrides=("training.seed=0",), swept={"training.seed": "0"})


def test_the_newest_sweep_of_the_same_request_is_found(tmp_path: Path) -> None:
    assert newest_with(REQUEST, tmp_path, "quickstart") is None
    folders = [create(REQUEST, tmp_path, "quickstart") for _ in range(3)]
    create(replace(REQUEST, overrides=["training.seed=0,2"]), tmp_path, "quickstart")
    assert len({folder.path for folder in folders}) == 3
    assert newest_with(REQUEST, tmp_path, "quickstart") == folders[-1]


def test_the_order_of_the_words_makes_no_other_sweep_unless_it_orders_the_trials(tmp_path: Path) -> None:
    words = ["hardware=cpu", "training.seed=0,1", "optimizer.learning_rate=1e-4,3e-4", "training.max_steps=1"]
    folder = create(replace(REQUEST, overrides=words), tmp_path, "quickstart")

    def found(*numbers: int) -> SweepFolder | None:
        return newest_with(replace(REQUEST, overrides=[words[number] for number in numbers]), tmp_path, "quickstart")

    assert found(1, 3, 2, 0) == folder
    assert found(0, 2, 1, 3) is None  # the trials have other numbers
    words += ["training.max_steps=2"]
    folder = create(replace(REQUEST, overrides=words), tmp_path, "quickstart")
    assert found(3, 4, 0, 1, 2) == folder
    assert found(4, 3, 0, 1, 2) is None  # the last word of a key wins


def test_a_record_whose_words_are_none_is_passed_over(tmp_path: Path) -> None:
    folder = create(REQUEST, tmp_path, "quickstart")
    create(replace(REQUEST, overrides=["no word"]), tmp_path, "quickstart")
    assert newest_with(REQUEST, tmp_path, "quickstart") == folder


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, recipe=None),
        replace(REQUEST, overrides=["training.seed=1,0"]),
        replace(REQUEST, config_sha256="cd"),
        replace(REQUEST, search={"seed": 0}),
        replace(REQUEST, gpus_per_trial=2),
    ],
)
def test_another_request_is_another_sweep(tmp_path: Path, other: Request) -> None:
    create(REQUEST, tmp_path, "quickstart")
    assert newest_with(other, tmp_path, "quickstart") is None


def test_a_damaged_record_of_another_sweep_stops_nobody(tmp_path: Path) -> None:
    folder = create(REQUEST, tmp_path, "quickstart")
    (create(REQUEST, tmp_path, "quickstart").path / "sweep.json").write_text("{")
    assert newest_with(REQUEST, tmp_path, "quickstart") == folder


def test_two_processes_do_not_work_on_one_sweep(tmp_path: Path) -> None:
    folder = create(REQUEST, tmp_path, "quickstart")
    with (
        working_on(folder),
        pytest.raises(RequestError, match=r"this sweep is at work in .*training.resume=never") as raised,
        working_on(folder),
    ):
        pass
    assert raised.value.problem_id == "sweep-is-running"
    with working_on(folder):
        pass


@pytest.mark.parametrize(
    ("end", "is_done"),
    [
        *(((code, False), True) for code in (0, 7)),
        # A full disk (3) has room again, a file that was away (2) is back: what refused a trial may be put right.
        *(((code, False), False) for code in (1, 2, 3, 4, 5, 6)),
        ((6, True), True),
    ],
)
def test_what_finished_or_would_end_in_the_same_loss_again_is_done(
    tmp_path: Path, end: tuple[int, bool], is_done: bool
) -> None:
    folder = SweepFolder(path=tmp_path)
    assert not folder.is_done(TRIAL)
    record = TrialEnd(exit_code=end[0], seconds=1.0, was_interrupted=False, was_pruned=end[1])
    write_trial_end(record, folder.end_file(TRIAL))
    assert folder.is_done(TRIAL) is is_done
    assert begin_trial(folder.end_file(TRIAL)) == 1.0
    assert folder.end_of(TRIAL) is None
    assert begin_trial(folder.end_file(TRIAL)) == 0.0


@pytest.mark.parametrize(
    ("exit_code", "reason", "is_full"),
    [
        (3, disk_full(Path("/runs/1")).message, True),
        (3, "this run needs 90.1 GiB of GPU memory and there are 80", False),
        (1, disk_full(Path("/runs/1")).message, False),
        (3, None, False),
    ],
)
def test_a_trial_that_filled_the_disk_is_told_from_others(
    tmp_path: Path, exit_code: int, reason: str | None, is_full: bool
) -> None:
    folder = SweepFolder(path=tmp_path)
    assert not folder.has_filled_disk(TRIAL)
    folder.run_folder(TRIAL).mkdir()
    status = {"state": "failed", "exit_code": exit_code, "reason": reason, "seconds": 1.0}
    (folder.run_folder(TRIAL) / "manifest.json").write_text(json.dumps({"format": 1, "status": status}))
    assert folder.has_filled_disk(TRIAL) is is_full


def test_a_trial_that_outlived_its_sweep_is_read_from_its_run(tmp_path: Path) -> None:
    folder = SweepFolder(path=tmp_path)
    run_folder = folder.run_folder(TRIAL)
    run_folder.mkdir()
    manifest = run_folder / "manifest.json"
    status = {"state": "running", "exit_code": None, "seconds": None}
    manifest.write_text(json.dumps({"format": 1, "status": status}))
    assert folder.end_of(TRIAL) is None
    manifest.write_text(json.dumps({"format": 1, "status": {"state": "finished", "exit_code": 0, "seconds": 8.0}}))
    assert folder.end_of(TRIAL) == TrialEnd(exit_code=0, seconds=8.0, was_interrupted=False)
    assert folder.end_file(TRIAL).is_file()
    begin_trial(folder.end_file(TRIAL))
    manifest.write_text(json.dumps({"format": 1, "status": {"state": "stopped", "exit_code": 6, "seconds": 8.0}}))
    assert folder.end_of(TRIAL) == TrialEnd(exit_code=6, seconds=8.0, was_interrupted=True)
    assert not folder.is_done(TRIAL)
    begin_trial(folder.end_file(TRIAL))
    turns = {
        "status": {"state": "finished", "exit_code": 0, "seconds": 8.0},
        "earlier_attempts": [{"seconds": 30.0}, {"seconds": None}],  # the second was killed
    }
    manifest.write_text(json.dumps({"format": 1} | turns))
    assert folder.end_of(TRIAL) == TrialEnd(exit_code=0, seconds=38.0, was_interrupted=False)


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A folder in which the test may not write; root is somebody else until it ends."""
    tmp_path.chmod(0o500)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    yield tmp_path
    os.seteuid(user)


def test_an_unwritable_folder_is_named(closed: Path) -> None:
    with pytest.raises(RequestError, match=r"no sweep folder can be made in .*: Permission denied"):
        create(REQUEST, closed, "quickstart")


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "quickstart").write_text("")
    with pytest.raises(RequestError, match=r"no sweep folder can be made in .*quickstart: File exists"):
        create(REQUEST, tmp_path, "quickstart")
