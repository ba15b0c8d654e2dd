"""One run at a time in a folder, and a lock that is free once its holders are gone."""

import os
import subprocess
import sys

import pytest

from tunebook.errors import RequestError
from tunebook.launch.lock import LOCK_FILE, is_worked_in, working_in


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    with working_in(tmp_path):
        assert is_worked_in(tmp_path)
        with pytest.raises(RequestError, match=r"a run is at work in .*; wait for it") as caught, working_in(tmp_path):
            pass
    assert caught.value.problem_id == "run-is-running"
    assert not is_worked_in(tmp_path)
    with working_in(tmp_path):
        pass


def test_a_rank_that_outlives_its_launcher_keeps_the_lock(tmp_path):
    with working_in(tmp_path) as lock:
        rank = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    assert is_worked_in(tmp_path)
    rank.communicate(b"\n")
    assert not is_worked_in(tmp_path)


def test_a_folder_that_never_had_a_lock_may_be_in_use(tmp_path):
    assert is_worked_in(tmp_path)


def test_without_locks_runs_start_but_none_is_taken_over(tmp_path, monkeypatch):
    def no_locks(descriptor, kind):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("tunebook.launch.lock.fcntl.flock", no_locks)
    with working_in(tmp_path) as lock:
        os.fstat(lock)
    assert (tmp_path / LOCK_FILE).exists()
    assert is_worked_in(tmp_path)
