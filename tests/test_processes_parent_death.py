"""Processes that end when the one that started them is gone; with real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import tunebook
from tunebook.processes import stopping_with_parent
from tunebook.train import death

# Starts the command that follows through the module under test, says its process, and waits.
PARENT = """
import subprocess, sys, time
from tunebook.processes import stopping_with_parent
child = subprocess.Popen(stopping_with_parent(sys.argv[1:]))
print(child.pid, flush=True)
time.sleep(60)
"""
# Says when it is there, and writes down that it was asked to stop.
CHILD = """
import pathlib, signal, sys, time
def stop(number, frame):
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit(6)
signal.signal(signal.SIGTERM, stop)
pathlib.Path(sys.argv[1]).write_text("there")
time.sleep(60)
"""


def wait_for(file, text):
    end = time.monotonic() + 30
    while not file.exists() or file.read_text() != text:
        assert time.monotonic() < end, file
        time.sleep(0.02)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's part of it is Linux's")
def test_a_child_is_asked_to_stop_when_its_parent_is_killed(tmp_path):
    says = tmp_path / "says"
    words = [sys.executable, "-c", PARENT, sys.executable, "-c", CHILD, str(says)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        int(parent.stdout.readline())
        wait_for(says, "there")
        parent.kill()
    wait_for(says, "SIGTERM")


def test_the_command_takes_the_place_of_what_begins_it():
    program = "import os, sys; print(os.getpid(), *sys.argv[1:]); sys.exit(7)"
    begun = stopping_with_parent([sys.executable, "-c", program, "a b", "c=1"])
    with subprocess.Popen(begun, stdout=subprocess.PIPE, text=True) as process:
        assert process.communicate()[0] == f"{process.pid} a b c=1\n"
    assert process.returncode == 7


def test_ctrl_c_is_heard_also_where_the_parent_ignores_it():
    """As everything does that a shell puts in the background."""
    program = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        begun = stopping_with_parent([sys.executable, "-c", program])
        assert subprocess.run(begun, capture_output=True, text=True, check=True).stdout == "True\n"
    finally:
        signal.signal(signal.SIGINT, before)


# A rank that takes its time before it listens, and says what it has heard by then.
SLOW_RANK = """
import sys, time
from tunebook.train.signals import StopRequest
print("there", flush=True)
sys.stdin.readline()
request = StopRequest()
with request.listening():
    print(request.name)
"""


def test_ctrl_c_waits_until_a_rank_listens(tmp_path):
    package = tmp_path / "tunebook"  # in the place of the rank's own program, whose libraries take seconds
    (package / "train").mkdir(parents=True)
    (package / "__init__.py").write_text(f"__path__.append({str(Path(tunebook.__file__).parent)!r})")
    (package / "train" / "__init__.py").write_text(f"__path__.append({str(Path(death.__file__).parent)!r})")
    (package / "train" / "__main__.py").write_text(SLOW_RANK)
    begun = stopping_with_parent([sys.executable, "-m", "tunebook.train", "folder"])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(begun, **pipes, text=True, env=environment) as process:
        assert process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate("go on\n", timeout=50) == ("SIGINT\n", "")
    assert process.returncode == 0


def test_it_starts_from_threads_while_torch_is_at_work():
    """What a `preexec_fn` did not survive."""
    import torch

    codes = []

    def start():
        torch.ones(64, 64) @ torch.ones(64, 64)
        codes.append(subprocess.run(stopping_with_parent([sys.executable, "-c", ""]), check=False).returncode)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0] * 8
