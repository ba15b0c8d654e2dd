"""Lock files of operators that were left behind, by processes that are really killed; nothing is compiled."""

from __future__ import annotations

import inspect
import itertools
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from torch.utils import cpp_extension
from torch.utils.file_baton import FileBaton

from tunebook.errors import TunebookError
from tunebook.parallel import operator_builds
from tunebook.parallel.operator_builds import ABANDONED_AFTER_S, HOLDER_FILE, TurnBaton, build_operators_in_turn

BUILDER = """
import sys, time

baton = TurnBaton(sys.argv[1])
assert baton.try_acquire()
print("builds", flush=True)
time.sleep(float(sys.argv[2]))
baton.release()
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
def baton(folder, monkeypatch):
    monkeypatch.setattr(operator_builds, "_POLL_S", 0.01)
    monkeypatch.setattr(operator_builds, "_SAID_AFTER_S", 0.0)
    monkeypatch.setattr(operator_builds, "QUIET_S", 0.1)
    monkeypatch.setattr(TurnBaton, "timeout_s", 0.3)
    return TurnBaton(str(folder / "lock"))


@pytest.fixture
def builder(folder):
    """A process that has its turn, for some seconds or until it is killed."""
    started = []

    def start(seconds=600.0):
        words = [sys.executable, "-c", BUILDER, str(folder / "lock"), str(seconds)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "builds\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_torch_asks_for_its_lock_file_by_the_name_that_is_replaced(monkeypatch):
    source = inspect.getsource(cpp_extension._jit_compile)
    assert "baton = FileBaton(os.path.join(build_directory, 'lock'))" in source
    assert source.index("if baton.try_acquire():") < source.index("baton.release()")
    monkeypatch.setattr(cpp_extension, "FileBaton", FileBaton)
    monkeypatch.setattr(TurnBaton, "timeout_s", 1.0)
    build_operators_in_turn(7)
    assert (cpp_extension.FileBaton, TurnBaton.timeout_s) == (TurnBaton, 7)


def test_a_turn_leaves_nothing_but_a_file_that_names_nobody(baton, folder):
    assert baton.try_acquire()
    assert (folder / "lock").exists()
    assert f"process {os.getpid()} on " in (folder / HOLDER_FILE).read_text()
    baton.release()
    assert sorted(file.name for file in folder.iterdir()) == ["shm.o", HOLDER_FILE]
    assert (folder / HOLDER_FILE).read_text() == ""


def test_what_a_killed_process_left_behind_is_taken_away_soon_and_said(baton, folder, builder, capsys, monkeypatch):
    monkeypatch.setattr(TurnBaton, "timeout_s", WITHIN_S)
    killed = builder()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    assert (folder / "lock").exists()
    assert baton.try_acquire()
    assert not (folder / "shm.o").exists()  # compiled anew
    assert f"{folder / 'lock'} was left behind by a process that was killed" in capsys.readouterr().out
    baton.release()


def test_what_a_killed_process_had_started_is_waited_for_where_it_works(baton, folder, builder, monkeypatch):
    monkeypatch.setattr(TurnBaton, "timeout_s", WITHIN_S)
    killed = builder()
    killed.kill()
    killed.wait()
    note = (folder / HOLDER_FILE).read_text()
    with subprocess.Popen(["sleep", "600"], cwd=folder) as compiler:
        waited_for, real = [], baton._wait

        def wait(who, advice):
            assert (folder / "shm.o").exists()
            assert (folder / HOLDER_FILE).read_text() == note  # should this one be killed too, the next one knows
            waited_for.append(who)
            if str(compiler.pid) in who:
                compiler.kill()
                compiler.wait()
            real(who, advice)

        monkeypatch.setattr(baton, "_wait", wait)
        try:
            assert baton.try_acquire()
        finally:
            compiler.kill()
    assert f"what a killed process had started (in that folder: {compiler.pid})" in waited_for
    assert not (folder / "shm.o").exists()
    baton.release()


def test_a_folder_that_still_changes_is_not_taken_away(baton, folder, builder, monkeypatch):
    killed = builder()
    killed.kill()
    killed.wait()
    monkeypatch.setattr(operator_builds, "QUIET_S", 600.0)
    with pytest.raises(TunebookError, match=rf"for what a killed process had started to compile.*: rm {folder}/lock$"):
        baton.try_acquire()
    monkeypatch.setattr(operator_builds, "QUIET_S", 0.0)
    again = TurnBaton(str(folder / "lock"))  # it still knows whose that was
    assert again.try_acquire()
    again.release()


def test_a_lock_file_that_another_machine_took_away_is_none_to_release(baton, folder):
    assert baton.try_acquire()
    (folder / "lock").unlink()
    baton.release()
    assert (folder / HOLDER_FILE).read_text() == ""


def test_many_turns_one_after_another_are_not_too_long_but_one_is(baton, monkeypatch):
    """By a clock of its own: each of 50 turns takes 0.2 of 0.3 s, the last one does not end."""
    clock = itertools.count(0, 0.1)
    now = [0.0]
    turn = [f"machine process {number} on node" for number in range(50) for _ in range(2)]

    def sleep(_seconds):
        now[0] = next(clock)

    def busy(*_):
        raise BlockingIOError

    monkeypatch.setattr(operator_builds, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    monkeypatch.setattr(operator_builds.fcntl, "flock", busy)
    monkeypatch.setattr(baton, "_who_holds", lambda: turn.pop(0) if len(turn) > 1 else turn[0])
    with pytest.raises(TunebookError, match=r"process 49 on node.*if it hangs: end that process$"):
        baton.try_acquire()
    assert now[0] > 50 * 0.2 - 0.3


def test_who_waits_for_a_process_of_ours_gets_the_turn_after_it(baton, folder, builder, monkeypatch):
    monkeypatch.setattr(TurnBaton, "timeout_s", WITHIN_S)
    process = builder(1.0)
    assert baton.try_acquire()
    assert process.wait(WITHIN_S) == 0
    assert (folder / "shm.o").exists()
    baton.release()


def test_one_that_is_killed_while_others_wait_holds_them_up_no_longer(baton, folder, builder, monkeypatch):
    monkeypatch.setattr(TurnBaton, "timeout_s", WITHIN_S)
    process = builder()
    real = baton._wait
    monkeypatch.setattr(baton, "_wait", lambda *who: (process.kill(), process.wait(), real(*who)))
    assert baton.try_acquire()
    assert not (folder / "shm.o").exists()
    baton.release()


def test_waiting_too_long_for_one_of_ours_names_it_and_the_file(baton, folder, builder):
    process = builder()
    words = (
        rf"waited 0.3 s \(launcher.start_timeout_s\) for process {process.pid} on .*{folder}/lock.*end that process$"
    )
    with pytest.raises(TunebookError, match=words) as caught:
        baton.try_acquire()
    assert caught.value.problem_id == "operator-build-stuck"
    assert f"process {process.pid} on " in (folder / HOLDER_FILE).read_text()  # it still has its turn


def test_another_programs_file_is_waited_for_and_then_named(baton, folder, capsys):
    (folder / "lock").touch()
    with pytest.raises(
        TunebookError, match=r"another program on this machine.*deepspeed_shm_comm.*if nothing is: rm /.*/lock$"
    ):
        baton.try_acquire()
    assert f"while there is {folder / 'lock'}" in capsys.readouterr().out
    assert (folder / "lock").exists()
    assert (folder / HOLDER_FILE).read_text() == ""  # the next of ours must not take it for its own


def test_another_programs_file_counts_as_left_behind_once_nothing_has_changed_for_long(baton, folder):
    lock, product = folder / "lock", folder / "shm.o"
    lock.touch()
    old = time.time() - ABANDONED_AFTER_S - 60
    os.utime(lock, (old, old))
    with pytest.raises(TunebookError):  # it has just compiled something
        baton.try_acquire()
    os.utime(product, (old, old))
    assert baton.try_acquire()
    assert not product.exists()
    baton.release()


@pytest.mark.parametrize("who", ["other-boot process 7 on node2", "{machine} process 7 on here"])
def test_a_file_that_no_process_of_this_machine_can_have_left_is_another_programs(baton, folder, who):
    """Of another machine, whose flock may not reach this one; or made long after the note was written."""
    holder = folder / HOLDER_FILE
    holder.write_text(who.format(machine=operator_builds._machine()))
    if who.startswith("{"):
        os.utime(holder, (time.time() - 100, time.time() - 100))
    (folder / "lock").touch()
    with pytest.raises(TunebookError):
        baton.try_acquire()


def test_without_flocks_the_file_alone_has_to_do(baton, folder, monkeypatch):
    def no_locks(*_):
        raise OSError("no locks available")

    monkeypatch.setattr(operator_builds.fcntl, "flock", no_locks)
    (folder / HOLDER_FILE).write_text("another one's note")
    assert baton.try_acquire()
    baton.release()
    (folder / "lock").touch()
    with pytest.raises(TunebookError, match="another program"):
        baton.try_acquire()
    old = time.time() - ABANDONED_AFTER_S - 60
    for file in folder.iterdir():
        os.utime(file, (old, old))
    assert baton.try_acquire()  # by the clock of the file system, all the same
    baton.release()
    assert (folder / HOLDER_FILE).read_text() == "another one's note"


def wait_for_output(capsys, is_it):
    said, end = "", time.monotonic() + WITHIN_S
    while not is_it(said):
        assert time.monotonic() < end, said
        time.sleep(0.01)
        said += capsys.readouterr().out
    return said


@pytest.mark.parametrize("is_there", [False, True], ids=["first time", "again"])
def test_an_operator_that_takes_its_time_is_named_with_what_it_costs(folder, baton, monkeypatch, capsys, is_there):
    library = folder / "deepspeed_shm_comm.so"
    if is_there:  # of another version of torch or of the compiler
        library.touch()
    monkeypatch.setattr(operator_builds, "_COMPILES_AFTER_S", 0.05)
    monkeypatch.setattr(operator_builds, "_MISSING_AFTER_S", 0.05)
    assert baton.try_acquire()
    said = wait_for_output(capsys, lambda said: "\n" in said)
    assert said == (
        "compiling DeepSpeed's operator deepspeed_shm_comm: takes 1 to 4 minutes on two cores, the first time only; it "
        f"is kept in {folder}\n"
    )
    library.touch()
    baton.release()
    assert re.fullmatch(r"compiled deepspeed_shm_comm in \d+ s\n", capsys.readouterr().out)


def test_nothing_is_said_of_an_operator_that_is_there(folder, baton, monkeypatch, capsys):
    (folder / "deepspeed_shm_comm.so").touch()
    monkeypatch.setattr(operator_builds, "_MISSING_AFTER_S", 0.0)
    assert baton.try_acquire()
    baton.release()
    assert capsys.readouterr().out == ""


def test_a_compilation_that_failed_is_not_called_done(baton, monkeypatch, capsys):
    monkeypatch.setattr(operator_builds, "_MISSING_AFTER_S", 0.0)
    assert baton.try_acquire()
    wait_for_output(capsys, lambda said: "compiling" in said)
    baton.release()
    assert capsys.readouterr().out == ""
