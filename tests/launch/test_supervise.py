"""Running a launch command: what the ranks see, how stop requests reach them, what comes back."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from tunebook.config.choices import Generation
from tunebook.launch.supervise import StopRequests, run_and_wait
from tunebook.train.environment import handed_on, rank_environment

from ..conftest import wait_for

APART_S = 0.3  # two requests, and not one that came twice


@pytest.mark.parametrize(("visible", "expected"), [(None, "0"), ("3,5", "3"), ("GPU-aa,GPU-bb", "GPU-aa")])
def test_one_rank_sees_one_gpu(small, visible, expected):
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert rank_environment(small(), inherited)["CUDA_VISIBLE_DEVICES"] == expected


def test_a_cpu_run_leaves_the_gpus_alone_and_keeps_what_the_user_set(small):
    cpu = small(generation=Generation.cpu)
    environment = rank_environment(cpu, {"OMP_WAIT_POLICY": "ACTIVE", "PATH": "/usr/bin"})
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert (environment["OMP_WAIT_POLICY"], environment["DS_ACCELERATOR"]) == ("ACTIVE", "cpu")
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"


def test_several_ranks_share_the_cores(small):
    two = small(gpus=2, generation=Generation.cpu)
    assert rank_environment(two, {})["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))
    assert rank_environment(two, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in rank_environment(small(generation=Generation.cpu), {})


def test_ranks_elsewhere_get_the_settings_and_nothing_of_other_programs():
    ours = {"HF_HOME": "/h", "TUNEBOOK_CACHE": "/c", "NCCL_DEBUG": "INFO", "WANDB_MODE": "offline"}
    assert handed_on(ours | {"AWS_SECRET": "x", "HOME": "/root", "WANDB_DIR": "/of/this/machine"}) == ours


def test_the_exit_code_comes_back():
    assert run_and_wait([sys.executable, "-c", "raise SystemExit(7)"], {}).exit_code == 7


# Says that it runs, and ends with 6 when it is asked to stop: by SIGTERM or by a file, if one is named.
POLITE = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(6))
pathlib.Path(sys.argv[1]).touch()
while len(sys.argv) < 3 or not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.02)
"""
# Starts a child that heeds nothing, and heeds nothing itself.
STUBBORN = """
import pathlib, signal, subprocess, sys, time
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
child.wait()
"""


@pytest.fixture
def request_stops(tmp_path, monkeypatch):
    """Send this process signals once its command runs."""
    monkeypatch.setattr("tunebook.launch.supervise._SAME_WITHIN_S", APART_S / 2)
    running, is_over = tmp_path / "running", threading.Event()

    def send(numbers):
        while not running.exists() and not is_over.wait(0.02):
            pass
        for number in numbers:
            os.kill(os.getpid(), number)
            is_over.wait(APART_S)

    def begin(*numbers):
        threading.Thread(target=send, args=(numbers,)).start()
        return running

    yield begin
    is_over.set()


def test_the_first_request_is_passed_on_as_sigterm_and_waited_for(request_stops):
    before = signal.getsignal(signal.SIGINT)
    end = run_and_wait([sys.executable, "-c", POLITE, str(request_stops(signal.SIGINT))], {})
    assert (end.exit_code, end.stopped_by) == (6, "SIGINT")
    assert signal.getsignal(signal.SIGINT) is before


def test_the_first_request_to_ranks_is_a_file(request_stops, tmp_path):
    stop_file = tmp_path / ".stop"
    words = [sys.executable, "-c", POLITE, str(request_stops(signal.SIGUSR1)), str(stop_file)]
    end = run_and_wait(words, os.environ, stop_file=stop_file)
    assert (end.exit_code, end.stopped_by, stop_file.read_text()) == (0, "SIGUSR1", "SIGUSR1")


def test_a_second_ctrl_c_kills_the_command_and_what_it_started(request_stops):
    running = request_stops(signal.SIGTERM, signal.SIGINT)
    end = run_and_wait([sys.executable, "-c", STUBBORN, str(running)], {}, stop_timeout_s=600)
    assert (end.exit_code, end.stopped_by) == (-signal.SIGKILL, "SIGTERM")
    child = Path("/proc") / running.read_text() / "stat"
    wait_for(lambda: not child.exists() or child.read_text().rpartition(")")[2].split()[0] == "Z")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGUSR1])
def test_a_request_that_comes_several_times_is_one_and_costs_no_save(number, monkeypatch):
    requests = StopRequests()
    with requests.listening():
        for _ in range(3):
            os.kill(os.getpid(), number)
        assert (requests.first, requests.is_urgent) == (number.name, False)
        monkeypatch.setattr("tunebook.launch.supervise._SAME_WITHIN_S", 0.0)
        if number is not signal.SIGINT:
            os.kill(os.getpid(), number)
            assert not requests.is_urgent
        os.kill(os.getpid(), signal.SIGINT)
        assert (requests.first, requests.is_urgent) == (number.name, True)


# As a torchrun that is killed: its rank runs on, and saves when it is asked to.
LEAVES_BEHIND = """
import pathlib, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], start_new_session=True)
while not pathlib.Path(sys.argv[2]).exists():
    time.sleep(0.02)
"""
SAVES = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(0.5)
    pathlib.Path(sys.argv[2]).touch()
    sys.exit()
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1]).touch()
time.sleep(600)
"""


def test_a_rank_that_was_left_behind_may_save(tmp_path):
    saved = tmp_path / "saved"
    run_and_wait([sys.executable, "-c", LEAVES_BEHIND, SAVES, str(tmp_path / "there"), str(saved)], {})
    assert saved.exists()


@pytest.mark.parametrize("is_stopped_twice", [False, True])
def test_one_that_does_not_end_is_killed_in_time(request_stops, tmp_path, is_stopped_twice):
    there = request_stops(signal.SIGTERM, signal.SIGINT) if is_stopped_twice else tmp_path / "there"
    begun = time.monotonic()
    words = [sys.executable, "-c", LEAVES_BEHIND, STUBBORN, str(there)]
    run_and_wait(words, {}, stop_timeout_s=600 if is_stopped_twice else 0.3)
    assert time.monotonic() - begun < 60
