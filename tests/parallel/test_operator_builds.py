"""Lock files of operators that were left behind, by processes that are really killed; nothing is compiled."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import subprocess
import sys
import time
from types import SimpleNamespace

import filelock
import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from tunebook.errors import TunebookError
from tunebook.parallel import operator_builds
from tunebook.parallel.operator_builds import ABANDONED_AFTER_S, FILE_LOCK, OperatorLock, build_operators_in_turn

BUILDER = """
import sys, time
from tunebook.parallel.operator_builds import OperatorLock

lock = OperatorLock(sys.argv[1])
assert lock.try_acquire()
print("builds", flush=True)
time.sleep(float(sys.argv[2]))
lock.release()
"""
WITHIN_S = 60.0  # of a machine that does other work


@pytest.fixture
def folder(tmp_path):
    """An operator's folder with something half-written."""
    place = tmp_path / "deepspeed_shm_comm"
    place.mkdir()
    (place / "shm.o").write_text("half")
    return place


@pytest.fixture
def lock(folder, monkeypatch):
    monkeypatch.setattr(operator_builds, "_POLL_S", 0.01)
    monkeypatch.setattr(operator_builds, "_REPORT_AFTER_S", 0.0)
    monkeypatch.setattr(operator_builds, "QUIET_S", 0.1)
    monkeypatch.setattr(OperatorLock, "timeout_s", 0.3)
    return OperatorLock(str(folder / "lock"))


@pytest.fixture
def builder(folder):
    """A process that has its turn, for some seconds or until it is killed."""
    started = []

    def start(seconds=600.0):
        arguments = [sys.executable, "-c", BUILDER, str(folder / "lock"), str(seconds)]
        process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "builds\n"
        return process

    yield start
    for process in started:
        kill(process)
        process.stdout.close()


def kill(process):
    process.kill()
    process.wait()


def during_the_wait(lock, monkeypatch, action):
    """Call `action(who)` before each wait of the lock."""
    real = lock._wait

    def wait(attempt, report):
        def observed():
            blocker = attempt()
            if blocker is not None:
                action(blocker[0])
            return blocker

        real(observed, report)

    monkeypatch.setattr(lock, "_wait", wait)


def test_torch_asks_for_its_lock_file_by_the_name_that_is_replaced(monkeypatch):
    source = inspect.getsource(cpp_extension._jit_compile)
    assert "baton = FileBaton(os.path.join(build_directory, 'lock'))" in source
    assert source.index("if baton.try_acquire():") < source.index("baton.release()")
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton)
    monkeypatch.setattr(OperatorLock, "timeout_s", 1.0)
    build_operators_in_turn(7)
    assert (cpp_extension.FileBaton, OperatorLock.timeout_s) == (OperatorLock, 7)


def test_a_turn_leaves_only_the_file_of_the_file_lock(lock, folder):
    assert lock.try_acquire()
    assert f"process {os.getpid()} on " in (folder / "lock").read_text()
    lock.release()
    assert sorted(file.name for file in folder.iterdir()) == ["shm.o", FILE_LOCK]


def test_what_a_killed_process_left_behind_is_removed_soon_and_reported(lock, folder, builder, capsys, monkeypatch):
    monkeypatch.setattr(OperatorLock, "timeout_s", WITHIN_S)
    kill(builder())
    assert (folder / "lock").exists()
    assert lock.try_acquire()
    assert not (folder / "shm.o").exists()  # compiled again
    assert f"{folder / 'lock'} was left behind by a process that was killed" in capsys.readouterr().out
    lock.release()


def test_what_a_killed_process_had_started_is_waited_for_where_it_works(lock, folder, builder, monkeypatch):
    monkeypatch.setattr(OperatorLock, "timeout_s", WITHIN_S)
    kill(builder())
    with subprocess.Popen(["sleep", "600"], cwd=folder) as compiler:
        waited_for = []

        def watch(who):
            assert (folder / "shm.o").exists()
            waited_for.append(who)
            if str(compiler.pid) in who:
                kill(compiler)

        during_the_wait(lock, monkeypatch, watch)
        try:
            assert lock.try_acquire()
        finally:
            compiler.kill()
    assert f"what a killed process had started (in that folder: {compiler.pid})" in waited_for
    assert not (folder / "shm.o").exists()
    lock.release()


def test_a_folder_that_still_changes_is_not_cleared(lock, folder, builder, monkeypatch):
    kill(builder())
    monkeypatch.setattr(operator_builds, "QUIET_S", 600.0)
    with pytest.raises(TunebookError, match=rf"for what a killed process had started to compile.*: rm {folder}/lock$"):
        lock.try_acquire()
    monkeypatch.setattr(operator_builds, "QUIET_S", 0.0)
    again = OperatorLock(str(folder / "lock"))  # the file still says whose it was
    assert again.try_acquire()
    again.release()


def test_a_lock_file_that_another_machine_removed_is_no_error(lock, folder):
    assert lock.try_acquire()
    (folder / "lock").unlink()
    lock.release()


def test_many_turns_one_after_another_are_not_too_long_but_one_is(lock, monkeypatch):
    """By a clock of its own: each of 50 turns takes 0.2 of 0.3 s, the last one does not end."""
    clock = itertools.count(0, 0.1)
    now = [0.0]
    turn = [f"machine process {number} on node" for number in range(50) for _ in range(2)]

    def sleep(_seconds):
        now[0] = next(clock)

    def busy(**_):
        raise filelock.Timeout("busy")

    monkeypatch.setattr(operator_builds, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(lock._file_lock, "acquire", busy)
    monkeypatch.setattr(lock, "_holder", lambda: turn.pop(0) if len(turn) > 1 else turn[0])
    with pytest.raises(TunebookError, match=r"process 49 on node.*if it hangs: end that process$"):
        lock.try_acquire()
    assert now[0] > 50 * 0.2 - 0.3


@pytest.mark.parametrize("is_killed", [False, True], ids=["ends", "is killed"])
def test_the_turn_after_another_process(lock, folder, builder, monkeypatch, is_killed):
    monkeypatch.setattr(OperatorLock, "timeout_s", WITHIN_S)
    process = builder(600.0 if is_killed else 1.0)
    if is_killed:
        during_the_wait(lock, monkeypatch, lambda _who: kill(process))
    assert lock.try_acquire()
    assert process.wait(WITHIN_S) == (-9 if is_killed else 0)
    assert (folder / "shm.o").exists() is not is_killed
    lock.release()


def test_waiting_too_long_for_one_of_ours_names_it_and_the_file(lock, folder, builder):
    process = builder()
    said = rf"waited 0.3 s \(launcher.start_timeout_s\) for process {process.pid} on .*{folder}/lock.*end that process$"
    with pytest.raises(TunebookError, match=said) as caught:
        lock.try_acquire()
    assert caught.value.problem_id == "operator-build-stuck"
    assert f"process {process.pid} on " in (folder / "lock").read_text()  # it still has its turn


OTHER_PROGRAM = r"another program on this machine.*deepspeed_shm_comm.*if nothing is: rm /.*/lock$"


@pytest.mark.parametrize("content", ["", "other-boot process 7 on node2"], ids=["torch", "another machine"])
def test_another_programs_file_is_waited_for_and_then_named(lock, folder, capsys, content):
    """Of another machine, too: its file locks may not reach this one."""
    (folder / "lock").write_text(content)
    with pytest.raises(TunebookError, match=OTHER_PROGRAM):
        lock.try_acquire()
    assert f"while there is {folder / 'lock'}" in capsys.readouterr().out
    assert (folder / "lock").read_text() == content


def age(*files):
    old = time.time() - ABANDONED_AFTER_S - 60
    for file in files:
        os.utime(file, (old, old))


def test_another_programs_file_counts_as_left_behind_once_nothing_has_changed_for_long(lock, folder):
    (folder / "lock").touch()
    age(folder / "lock")
    with pytest.raises(TunebookError):  # it has just compiled something
        lock.try_acquire()
    age(folder / "shm.o")
    assert lock.try_acquire()
    assert not (folder / "shm.o").exists()
    lock.release()


@pytest.mark.parametrize("content", ["", "{machine} process 7 on here"])
def test_without_file_locks_torchs_file_alone_has_to_do(lock, folder, monkeypatch, content):
    def no_locks(**_):
        raise OSError("no locks available")

    monkeypatch.setattr(lock._file_lock, "acquire", no_locks)
    assert lock.try_acquire()
    lock.release()
    (folder / "lock").write_text(content.format(machine=operator_builds._machine()))
    with pytest.raises(TunebookError, match="another program"):
        lock.try_acquire()
    age(*folder.iterdir())
    assert lock.try_acquire()
    lock.release()


def wait_for_output(capsys, is_it):
    output, end = "", time.monotonic() + WITHIN_S
    while not is_it(output):
        assert time.monotonic() < end, output
        time.sleep(0.01)
        output += capsys.readouterr().out
    return output


@pytest.mark.parametrize("is_there", [False, True], ids=["first time", "again"])
def test_a_compilation_is_reported_with_what_it_costs(folder, lock, monkeypatch, capsys, is_there):
    library = folder / "deepspeed_shm_comm.so"
    if is_there:  # of another version of torch or of the compiler
        library.touch()
    monkeypatch.setattr(operator_builds, "_COMPILES_AFTER_S", 0.05)
    monkeypatch.setattr(operator_builds, "_MISSING_AFTER_S", 0.05)
    assert lock.try_acquire()
    assert wait_for_output(capsys, lambda output: "\n" in output) == (
        "compiling DeepSpeed's operator deepspeed_shm_comm: takes 1 to 4 minutes on two cores, the first time only; it "
        f"is kept in {folder}\n"
    )
    library.touch()
    lock.release()
    assert re.fullmatch(r"compiled deepspeed_shm_comm in \d+ s\n", capsys.readouterr().out)


def test_nothing_is_reported_of_an_operator_that_is_there(folder, lock, monkeypatch, capsys):
    (folder / "deepspeed_shm_comm.so").touch()
    monkeypatch.setattr(operator_builds, "_MISSING_AFTER_S", 0.0)
    assert lock.try_acquire()
    lock.release()
    assert capsys.readouterr().out == ""


def test_a_compilation_that_failed_is_not_reported_as_done(lock, monkeypatch, capsys):
    monkeypatch.setattr(operator_builds, "_MISSING_AFTER_S", 0.0)
    assert lock.try_acquire()
    wait_for_output(capsys, lambda output: "compiling" in output)
    lock.release()
    assert capsys.readouterr().out == ""
