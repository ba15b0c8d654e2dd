"""Running a launch command: what the ranks see, how signals reach them, what comes back."""

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from tunebook import processes as descendants
from tunebook.launch.supervise import TORCHRUN, StopRequests, run_and_wait
from tunebook.train.environment import handed_on, rank_environment

from ..conftest import config_of


@pytest.mark.parametrize(("visible", "expected"), [(None, "0"), ("3,5", "3"), ("GPU-aa,GPU-bb", "GPU-aa")])
def test_one_rank_sees_one_gpu(visible, expected):
    inherited = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    config = config_of("qwen05b_single")
    assert rank_environment(config, inherited)["CUDA_VISIBLE_DEVICES"] == expected


def test_eight_ranks_see_eight_gpus():
    assert rank_environment(config_of("qwen3b_zero2"), {})["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


def test_a_cpu_run_leaves_the_gpus_alone_and_keeps_what_the_user_set():
    environment = rank_environment(config_of("quickstart"), {"OMP_WAIT_POLICY": "ACTIVE", "HOME": "/h"})
    assert "CUDA_VISIBLE_DEVICES" not in environment
    assert (environment["OMP_WAIT_POLICY"], environment["HOME"]) == ("ACTIVE", "/h")


@pytest.mark.parametrize(
    ("inherited", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}, {"PYTORCH_ALLOC_CONF": "backend:cudaMallocAsync"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": ""}, {"PYTORCH_CUDA_ALLOC_CONF": ""}),  # by its old name, and switched off
    ],
)
def test_the_allocators_segments_grow_unless_the_user_says_how(inherited, expected):
    environment = rank_environment(config_of("qwen05b_single"), inherited)
    assert {name: text for name, text in environment.items() if "ALLOC_CONF" in name} == expected
    assert handed_on(environment).items() >= expected.items(), "by whoever starts ranks elsewhere"
    assert "PYTORCH_ALLOC_CONF" not in rank_environment(config_of("quickstart"), {})


def test_what_wandb_is_told_reaches_ranks_elsewhere():
    told = {"WANDB_MODE": "offline", "WANDB_ENTITY": "us", "WANDB_BASE_URL": "https://wandb.example.org"}
    assert handed_on(told | {"WANDB_DIR": "/of/this/machine"}) == told


def test_segments_do_not_grow_in_windows(monkeypatch):
    monkeypatch.setattr("platform.release", lambda: "5.15.167.4-microsoft-standard-WSL2")
    assert "PYTORCH_ALLOC_CONF" not in rank_environment(config_of("qwen05b_single"), {})


def test_the_exit_code_comes_back():
    assert run_and_wait([sys.executable, "-c", "raise SystemExit(7)"], {}).exit_code == 7


# Notes in a file how many requests it has had, and ends when they are the expected ones. It waits for them and has no
# handlers: one that came while another was handled ended it in the middle of that, once in a thousand times wrongly.
COUNTS = """
import pathlib, signal, sys
requests, seen = {signal.SIGINT, signal.SIGTERM}, []
signal.pthread_sigmask(signal.SIG_BLOCK, requests)
pathlib.Path(sys.argv[1]).write_text("0")
while (came := signal.sigtimedwait(requests, 30)) is not None:
    seen.append(signal.Signals(came.si_signo).name)
    pathlib.Path(sys.argv[1]).write_text(str(len(seen)))
    if seen == sys.argv[2].split():
        sys.exit(6)
"""


def program(counter, *expected):
    return [sys.executable, "-c", COUNTS, str(counter), " ".join(expected)]


@pytest.fixture
def request_stops(tmp_path):
    """Send this process requests to stop, each once the child has counted the one before; never after it has ended."""
    is_over = threading.Event()
    counter = tmp_path / "counter"

    def send(numbers):
        for count, number in enumerate(numbers):
            while not (counter.exists() and counter.read_text() == str(count)):
                if is_over.wait(0.02):
                    return
            os.kill(os.getpid(), number)

    def start(*numbers):
        thread = threading.Thread(target=send, args=(numbers,))
        thread.start()
        return counter

    yield start
    is_over.set()


def test_sigterm_is_passed_on_and_waited_for(request_stops):
    before = signal.getsignal(signal.SIGTERM)
    end = run_and_wait(program(request_stops(signal.SIGTERM), "SIGTERM"), {})
    assert (end.exit_code, end.stopped_by) == (6, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_after_a_request_is_handed_on_and_a_rank_takes_it_as_now(request_stops):
    counter = request_stops(signal.SIGTERM, signal.SIGINT)
    end = run_and_wait(program(counter, "SIGTERM", "SIGINT"), {})
    assert (end.exit_code, end.stopped_by) == (6, "SIGTERM")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_request_that_comes_several_times_is_one_and_costs_no_save(number):
    """As the kernel sends it when a parent of several threads is killed, and as a terminal does that is closed."""
    handed_on = []
    requests = StopRequests(handed_on.append)
    first = signal.SIGUSR1 if number is signal.SIGUSR1 else signal.SIGTERM
    with requests.listening():
        for _ in range(3):
            os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGTERM)
        assert handed_on == [first]
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), number)
        assert handed_on == [first, signal.SIGINT]
    assert requests.first == number.name


def test_a_third_request_kills(request_stops):
    counter = request_stops(signal.SIGINT, signal.SIGINT, signal.SIGINT)
    end = run_and_wait(program(counter, "never"), {})
    assert (end.exit_code, end.stopped_by) == (-signal.SIGKILL, "SIGINT")


def test_a_second_request_ends_also_what_cannot_hear_it(request_stops, monkeypatch):
    """A rank that waits for others in a library's code runs no handler."""
    monkeypatch.setattr("tunebook.launch.supervise._SECOND_WITHIN_S", 0.1)
    counter = request_stops(signal.SIGINT, signal.SIGINT)
    end = run_and_wait(program(counter, "never"), {}, stop_timeout_s=600)
    assert (end.exit_code, end.stopped_by) == (-signal.SIGKILL, "SIGINT")


# Leaves a process behind that takes no notice of SIGTERM, and ends once that runs.
LEAVES_BEHIND = """
import pathlib, subprocess, sys, time
rank = "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \\
       "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
subprocess.Popen([sys.executable, "-c", rank, sys.argv[1]], start_new_session=True)
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


def test_a_second_request_waits_for_nothing_that_was_left_behind(tmp_path, monkeypatch):
    """torchrun has ended, and a rank of it takes its time to save."""
    asked = []

    def end_children(*, is_urgent, **_):
        while not is_urgent():
            os.kill(os.getpid(), signal.SIGINT)
            asked.append(signal.SIGINT)
        descendants.end_children(is_urgent=is_urgent, **_)

    monkeypatch.setattr("tunebook.launch.supervise.end_children", end_children)
    end = run_and_wait([sys.executable, "-c", LEAVES_BEHIND, str(tmp_path / "there")], {}, stop_timeout_s=600)
    assert (end.exit_code, end.stopped_by, len(asked)) == (0, "SIGINT", 2)


def test_torchrun_is_passed_over_and_its_ranks_are_asked(request_stops):
    rank = program(request_stops(signal.SIGTERM), "SIGTERM")
    agent = (  # as torchrun: starts a rank in a session of its own, and would die of the signal itself
        f"import subprocess, sys; sys.exit(10 + subprocess.run({rank!r}, start_new_session=True).returncode)"
    )
    assert run_and_wait([sys.executable, "-c", agent, TORCHRUN], {}).exit_code == 16


def test_several_ranks_share_the_cores():
    two = config_of("quickstart", "hardware=cpu", "hardware.gpus_per_node=2", "parallelism=ddp")
    assert rank_environment(two, {})["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))
    assert rank_environment(two, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in rank_environment(config_of("quickstart"), {})


def test_deepspeed_is_told_of_a_cpu_and_ninja_is_found_beside_python():
    environment = rank_environment(config_of("quickstart"), {"PATH": "/usr/bin"})
    assert environment["DS_ACCELERATOR"] == "cpu"
    assert environment["PATH"] == f"{Path(sys.executable).parent}{os.pathsep}/usr/bin"
    assert "DS_ACCELERATOR" not in rank_environment(config_of("qwen3b_zero2"), {})


def test_ranks_elsewhere_hear_where_models_are_and_nothing_of_other_programs():
    ours = {"HF_HOME": "/h", "HF_HUB_CACHE": "/hub", "TUNEBOOK_CACHE": "/c", "NCCL_DEBUG": "INFO"}
    assert handed_on(ours | {"AWS_SECRET": "x", "HOME": "/root"}) == ours


def test_the_first_request_to_ranks_elsewhere_is_a_file(tmp_path):
    stop_file = tmp_path / ".stop"
    waits = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)"
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    end = run_and_wait([sys.executable, "-c", waits, str(stop_file)], os.environ, stop_file=stop_file)
    assert (end.exit_code, end.stopped_by, stop_file.read_text()) == (0, "SIGTERM", "SIGTERM")
