"""Running a launch command: what the ranks see, how signals reach them, what comes back."""

import os
import signal
import sys
import threading
import time

import pytest

from tunebook.config.auto import resolve_auto
from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.launch.local import TORCHRUN, rank_environment, run_and_wait

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)


def config_of(recipe, *overrides):
    return resolve_auto(compose(recipe, list(overrides)).config, NO_GPU).config


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


def test_the_exit_code_comes_back():
    assert run_and_wait([sys.executable, "-c", "raise SystemExit(7)"], {}).exit_code == 7


def test_sigterm_is_passed_on_and_waited_for():
    program = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(6)); time.sleep(20)"
    before = signal.getsignal(signal.SIGTERM)
    timer = threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    end = run_and_wait([sys.executable, "-c", program], {})
    assert (end.exit_code, end.stopped_by) == (6, "SIGTERM")
    assert signal.getsignal(signal.SIGTERM) is before


# Says by its exit code how many requests it has had when it ends: two, or a kill.
COUNTS = """
import signal, sys, time
seen = []
def note(number, frame):
    seen.append(signal.Signals(number).name)
    print(seen, flush=True)
    if seen == EXPECTED:
        sys.exit(6)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, note)
print("listening", flush=True)
time.sleep(20)
"""


def requests(*numbers, after_s=1.0, apart_s=0.4):
    def send():
        time.sleep(after_s)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(apart_s)

    threading.Thread(target=send).start()


@pytest.mark.slow
def test_a_second_request_is_handed_on_as_ctrl_c_which_a_rank_takes_as_now():
    requests(signal.SIGTERM, signal.SIGTERM)
    end = run_and_wait([sys.executable, "-c", COUNTS.replace("EXPECTED", "['SIGTERM', 'SIGINT']")], {})
    assert (end.exit_code, end.stopped_by) == (6, "SIGTERM")


@pytest.mark.slow
def test_a_third_request_kills():
    requests(signal.SIGINT, signal.SIGINT, signal.SIGINT)
    end = run_and_wait([sys.executable, "-c", COUNTS.replace("EXPECTED", "None")], {})
    assert (end.exit_code, end.stopped_by) == (-signal.SIGKILL, "SIGINT")


@pytest.mark.slow
def test_torchrun_is_passed_over_and_its_ranks_are_asked():
    rank = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(20)"
    agent = (  # as torchrun: starts a rank in a session of its own, and would die of the signal itself
        "import subprocess, sys; "
        f"sys.exit(10 + subprocess.run([sys.executable, '-c', {rank!r}], start_new_session=True).returncode)"
    )
    requests(signal.SIGTERM)
    assert run_and_wait([sys.executable, "-c", agent, TORCHRUN], {}).exit_code == 10


def test_several_ranks_share_the_cores():
    two = config_of("quickstart", "hardware=cpu", "hardware.gpus_per_node=2", "parallelism=ddp")
    assert rank_environment(two, {})["OMP_NUM_THREADS"] == str(max(1, os.cpu_count() // 2))
    assert rank_environment(two, {"OMP_NUM_THREADS": "7"})["OMP_NUM_THREADS"] == "7"
    assert "OMP_NUM_THREADS" not in rank_environment(config_of("quickstart"), {})
