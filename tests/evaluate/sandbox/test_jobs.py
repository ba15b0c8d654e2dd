"""The hand-over folder: written in one step, closed to others, and read with care."""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tunebook.evaluate import sandbox
from tunebook.evaluate.sandbox.jobs import (
    MAX_JOB_BYTES,
    MAX_RESULT_BYTES,
    RUNNER_MODULES,
    Beat,
    Handover,
    Outcome,
    Program,
    Status,
    read_job,
    read_result,
    runner_version,
    write_json,
)

PROGRAM = Program(id="a-1", source="x = '\ud800'", test="assert x", time_limit_s=2.5)
OUTCOME = Outcome(id="a-1", status=Status.timed_out, message="slow", last_lines=["é"], seconds=1.5)


@pytest.fixture
def handover(tmp_path):
    handover = Handover(tmp_path)
    handover.make_folders()
    return handover


def test_a_job_and_a_result_come_back_as_they_were(handover):
    handover.write_job(PROGRAM, expires=12.0)
    handover.write_result(OUTCOME)
    assert read_job(handover.jobs / "a-1.json") == (PROGRAM, 12.0)
    assert read_result(handover.results / "a-1.json") == OUTCOME


def test_a_heartbeat_comes_back(handover):
    assert handover.read_beat() is None
    beat = Beat(time=1.5, version="v", wall="users", num_workers=2)
    handover.write_beat(beat)
    assert handover.read_beat() == beat


def test_files_and_folders_are_open_to_the_group_and_to_nobody_else(handover):
    old = os.umask(0o077)
    try:
        handover.write_job(PROGRAM, expires=0.0)
    finally:
        os.umask(old)
    assert stat.S_IMODE((handover.jobs / "a-1.json").stat().st_mode) == 0o660
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in handover.folder.iterdir()} == {0o2770}


def test_each_job_is_taken_by_one_worker_and_given_back(handover):
    handover.write_job(PROGRAM, expires=0.0)
    claimed = handover.claim_job(3)
    assert claimed == handover.claimed / "3.a-1.json"
    assert handover.claim_job(4) is None
    handover.take_back()
    assert handover.claim_job(4) == handover.claimed / "4.a-1.json"
    handover.give_up_on(4)
    assert read_result(handover.results / "a-1.json").status is Status.broken
    assert list(handover.claimed.iterdir()) == []


def test_half_written_files_are_no_jobs(handover):
    (handover.jobs / ".a-2.json.123-abc").write_text("{")
    assert handover.claim_job(0) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "great"}, "'great' is not a valid Status"),
        ({"status": None}, "`status` is None, not str"),
        ({"seconds": "1"}, "`seconds` is '1', not float"),
        ({"last_lines": [1]}, "`last_lines` holds something that is no text"),
        ({"id": 5}, "`id` is 5, not str"),
    ],
)
def test_a_damaged_result_is_refused(handover, change, message):
    handover.write_result(OUTCOME)
    file = handover.results / "a-1.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        read_result(file)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b"null"])
def test_what_is_no_json_object_is_refused(handover, content):
    (handover.results / "a-1.json").write_bytes(content)
    with pytest.raises(ValueError):
        read_result(handover.results / "a-1.json")


def huge(file):
    with file.open("wb") as stream:
        stream.truncate(MAX_RESULT_BYTES + 1)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (lambda file: file.symlink_to(file.with_name("other.json")), "it is a link"),
        (lambda file: file.symlink_to("/nowhere"), "it is a link"),
        (lambda file: file.symlink_to("/dev/zero"), "it is a link"),
        (os.mkfifo, "it is no regular file"),
        (lambda file: file.mkdir(), "it is no regular file"),
        (huge, "it is larger than 1 MiB"),
        (lambda file: file.write_text("[" * 100_000), "nested too deeply"),
        (lambda file: file.write_text(json.dumps(asdict(OUTCOME)).replace("1.5", "1" + "0" * 400)), "`seconds` is 1"),
    ],
    ids=["link", "dangling", "device", "pipe", "folder", "size", "depth", "number"],
)  # fmt: skip
def test_what_no_runner_writes_is_neither_followed_nor_waited_for_nor_read_whole(handover, place, message):
    write_json(handover.results / "other.json", asdict(OUTCOME))
    file = handover.results / "a-1.json"
    place(file)
    with pytest.raises(ValueError, match=message):
        read_result(file)


def test_a_folder_in_place_of_which_there_is_a_link_is_neither_read_nor_written(handover, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    write_json(elsewhere / "a-1.json", asdict(OUTCOME))
    for folder in (handover.results, handover.jobs):
        folder.rmdir()
        folder.symlink_to(elsewhere)
    with pytest.raises(ValueError, match="it is a link, lies in one"):
        read_result(handover.results / "a-1.json")
    with pytest.raises(NotADirectoryError):
        handover.write_job(PROGRAM, expires=0.0)
    assert [path.name for path in elsewhere.iterdir()] == ["a-1.json"]


def test_a_job_may_be_larger_than_a_result(handover):
    program = replace(PROGRAM, test="assert x\n" * (MAX_RESULT_BYTES // 8))
    handover.write_job(program, expires=1.0)
    assert read_job(handover.jobs / "a-1.json") == (program, 1.0)
    with (handover.jobs / "a-1.json").open("r+b") as stream:
        stream.truncate(MAX_JOB_BYTES + 1)
    with pytest.raises(ValueError, match="it is larger than 64 MiB"):
        read_job(handover.jobs / "a-1.json")


def test_the_folder_itself_may_be_named_by_a_link(handover, tmp_path_factory):
    link = tmp_path_factory.mktemp("named") / "handover"
    link.symlink_to(handover.folder)
    beat = Beat(time=1.5, version="v", wall="users", num_workers=2)
    handover.write_beat(beat)
    assert Handover(link).read_beat() == beat


def test_old_results_that_nobody_fetched_are_swept_away(handover):
    handover.write_result(OUTCOME)
    handover.sweep(older_than_s=60)
    assert len(list(handover.results.iterdir())) == 1
    os.utime(handover.results / "a-1.json", (1, 1))
    handover.sweep(older_than_s=60)
    assert list(handover.results.iterdir()) == []


def test_the_version_covers_every_module_of_the_runners_side():
    ours = {"__init__", "client", "backends"}
    assert {file.stem for file in Path(sandbox.__file__).parent.glob("*.py")} - ours == set(RUNNER_MODULES)
    assert len(runner_version()) == 64
