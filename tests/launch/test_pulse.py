"""Ranks' pulses: what one says of itself, and which rank the launcher names for the wait of the others."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict

import pytest

from tunebook.config.choices import LauncherName
from tunebook.config.schema import LauncherConfig
from tunebook.launch.pulse import Pulse, PulseWatch, interval_s, pulse_file

from ..conftest import wait_for

LAUNCHER = LauncherConfig(name=LauncherName.local, timeout_s=80)
EVERY_S = 10.0  # an eighth of that


def pulse(rank, step=3, **facts):
    usual = {"host": f"node{rank}", "process": 100 + rank, "phase": "first_step", "doing": "backward (a/b.py:7)"}
    return Pulse(rank=rank, step=step, **({"blocked_s": 0.0} | usual | facts))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def watch(folder):
    return PulseWatch(folder, 3, LAUNCHER)


@pytest.fixture
def beat(folder):
    """Write pulses, each as if it were new."""
    count = iter(range(1, 10_000))

    def write(*pulses):
        for one in pulses:
            file = pulse_file(folder, one.rank)
            file.write_text(json.dumps(asdict(one)))
            os.utime(file, (0, next(count)))

    return write


@pytest.fixture
def ended(folder):
    """Write down that a rank has ended, with what it last wrote on standard error."""

    def write(rank, said=""):
        (folder / f"outcome-{rank}.json").write_text("{}")
        (folder / "logs" / f"rank-{rank}.log").write_text(said)

    return write


@pytest.mark.parametrize(("timeout_s", "start_timeout_s", "expected"), [(80, 600, 10), (1800, 600, 15), (4, 600, 1)])
def test_pulses_are_often_enough_for_the_time_out(timeout_s, start_timeout_s, expected):
    launcher = LauncherConfig(name=LauncherName.local, timeout_s=timeout_s, start_timeout_s=start_timeout_s)
    assert interval_s(launcher) == expected


def test_a_rank_that_stands_still_is_named_once_others_have_given_up(watch, beat, ended):
    beat(pulse(0), pulse(1), pulse(2))
    assert watch.look(0.0) is None
    for now in range(10, 90, 10):
        beat(pulse(0), pulse(2))
        assert watch.look(float(now)) is None, "they may still be waiting"
    ended(0)
    beat(pulse(2))
    error = watch.look(90.0)
    assert (error.exit_code, error.problem_id) == (1, "rank-stalled")
    assert error.message == (
        "rank 1 on node1 (process 101) has not run for 90 s: it was stopped (SIGSTOP), or its machine hangs; its last "
        "report was step 3, then in backward (a/b.py:7); the other ranks wait for launcher.timeout_s=80 s"
    )


def test_a_library_whose_own_time_out_does_not_end_a_rank_is_not_waited_for_much_longer(watch, beat):
    beat(pulse(0), pulse(1), pulse(2))
    watch.look(0.0)
    found = []
    for now in range(10, 200, 10):
        beat(pulse(0), pulse(2))
        found.append(watch.look(float(now)))
    first = next(index for index, error in enumerate(found) if error is not None)
    assert 10 * (first + 1) == 110  # 80, and 30 for what the libraries say
    assert "rank 1 on node1 (process 101) has not run for 110 s" in found[first].message


def test_files_of_other_machines_may_be_late(folder, beat, ended):
    watch = PulseWatch(folder, 3, LAUNCHER, is_shared=True)
    beat(pulse(0), pulse(1), pulse(2))
    watch.look(0.0)
    ended(0)
    beat(pulse(2))
    assert watch.cause(90.0) is None
    beat(pulse(2))
    assert "rank 1 on node1" in watch.cause(101.0).message


def test_a_job_that_is_suspended_as_a_whole_is_no_stall(watch, beat):
    beat(pulse(0), pulse(1), pulse(2))
    watch.look(0.0)
    assert watch.look(10_000.0) is None
    beat(pulse(0, 4), pulse(1, 4), pulse(2, 4))
    assert watch.look(10_020.0) is None


def test_a_rank_in_an_uninterruptible_wait_is_named_though_it_has_a_pulse(watch, beat, ended):
    for now in range(0, 60, 10):
        beat(pulse(0), pulse(1, blocked_s=float(now), doing="read (data/files.py:3)"), pulse(2))
        assert watch.look(float(now)) is None
    ended(0)
    error = watch.look(60.0)
    assert "rank 1 on node1 (process 101) has been in an uninterruptible wait (state D): a disk" in error.message
    assert "for 50 s; its last report was step 3, then in read (data/files.py:3)" in error.message


def test_ranks_that_have_ended_stand_still_for_no_fault_of_theirs(watch, beat, ended):
    beat(pulse(0), pulse(1), pulse(2))
    watch.look(0.0)
    ended(1)
    ended(2)
    beat(pulse(0))
    assert watch.look(600.0) is None
    assert watch.cause(700.0) is None


TIMED_OUT = {
    "gloo": "RuntimeError: [unbound_buffer.cc:78] Timed out waiting 80000ms for recv operation to complete",
    "nccl": "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=80000) ran",
}
TORCHRUN = """
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 8554)  (SIGKILL)
[2]:
  rank      : 2 (local_rank: 2)
  exitcode  : -6 (pid: 8554)  (SIGABRT)
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 8553)  (SIGABRT)
"""


@pytest.mark.parametrize("said", TIMED_OUT.values(), ids=list(TIMED_OUT))
def test_a_rank_that_runs_and_does_not_come_is_the_one_that_did_not_give_up(folder, watch, beat, said):
    """As where it waits for a lock, or computes something else: the others are ended by NCCL, and say nothing."""
    for now in range(0, 100, 10):
        beat(pulse(0), pulse(1, doing="acquire (a/lock.py:1)"), pulse(2))
        assert watch.look(float(now)) is None
    (folder / "logs" / "torchrun-0.log").write_text(TORCHRUN)
    (folder / "logs" / "rank-0.log").write_text(said)
    assert watch.cause(100.0).message.startswith(
        "rank 1 on node1 (process 101) runs, but did not reach the operation in which the others waited; its last "
        "report was step 3, then in acquire (a/lock.py:1);"
    )


@pytest.mark.parametrize(
    ("said", "step"), [("RuntimeError: CUDA error", 3), (TIMED_OUT["gloo"], None)], ids=["another error", "they got on"]
)
def test_what_ended_a_run_otherwise_names_nobody(watch, beat, ended, said, step):
    for now in range(0, 100, 10):
        steps = now if step is None else step
        beat(pulse(0, steps), pulse(1, steps), pulse(2, steps))
        assert watch.look(float(now)) is None
    ended(0, said)
    assert watch.cause(100.0) is None


@pytest.mark.parametrize(
    ("step", "phase", "expected"),
    [(7, "first_step", "step 7"), (None, "weights", "the end of its phase 'weights'"), (None, None, "its start")],
)
def test_the_last_that_a_rank_reported(step, phase, expected):
    assert pulse(0, step, phase=phase).reported == expected


WRITER = """
import ctypes, os, pathlib, sys, threading, time
from tunebook.config.choices import LauncherName
from tunebook.config.schema import LauncherConfig
from tunebook.launch.pulse import PulseWriter
from tunebook.record.start_up import StartClock


clock = StartClock()
clock.passed("meet")
launcher = LauncherConfig(name=LauncherName.local, timeout_s=int(sys.argv[2]))
PulseWriter(pathlib.Path(sys.argv[1]), 1, 2, clock, launcher).start()
"""
STEPS = """
def wait():
    sys.stdin.readline()
wait()
clock.step = 4
wait()
"""
# The main thread waits for a child by vfork, which the system shows as it shows a wait for a disk.
BLOCKED = """
if ctypes.CDLL(None).syscall(56, 0x4000 | 17, 0, 0, 0, 0) == 0:
    time.sleep(600)
"""


@pytest.fixture
def start_writer(folder):
    """Start a process that writes pulses; returns it and how to wait for one."""
    started = []

    def begin(program, timeout_s):
        words = [sys.executable, "-c", WRITER + program, str(folder), str(timeout_s)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, process_group=0)
        started.append(process)
        file = pulse_file(folder, 1)

        def read(is_it):
            found = json.loads(file.read_text()) if file.is_file() else None
            return found if found is not None and is_it(found) else None

        return process, lambda is_it: wait_for(lambda: read(is_it))

    yield begin
    for process in started:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_a_rank_says_how_far_it_is_and_what_it_does(start_writer):
    process, wait = start_writer(STEPS, 16)
    found = wait(lambda found: found["doing"].startswith("wait (<string>:"))
    facts = ("rank", "process", "step", "phase", "blocked_s")
    assert [found[fact] for fact in facts] == [1, process.pid, None, "meet", 0.0]
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert wait(lambda found: found["step"] is not None)["step"] == 4


@pytest.mark.skipif(sys.platform != "linux" or os.uname().machine != "x86_64", reason="a system call by its number")
def test_an_uninterruptible_wait_is_seen(start_writer):
    _, wait = start_writer(BLOCKED, 4)
    assert wait(lambda found: found["blocked_s"] >= 1)["phase"] == "meet"
