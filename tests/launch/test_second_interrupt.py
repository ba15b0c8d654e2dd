"""A second Ctrl-C ends a command in every state, with real processes and signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from ..conftest import wait_for

APART_S = 0.5  # two requests, and not one that came twice
# Starts a process of its own, says its number, and is then in the state that follows.
PROGRAM = """
import ctypes, os, signal, subprocess, sys, time
from tunebook import processes
from tunebook.launch import second_interrupt
second_interrupt._HANDLED_WITHIN_S, processes._SAME_WITHIN_S = 0.2, 0.3
with second_interrupt.watching_interrupts():
    child = subprocess.Popen(["sleep", "600"])
    {state}
"""
# A lock that is held: as in a library's code, no signal handler of Python's runs here.
IN_C_CODE = """
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(lock)
    print(child.pid, flush=True)
    libc.pthread_mutex_lock(lock)
"""
HANDLED = """
    signal.signal(signal.SIGINT, lambda *_: print("handled", flush=True))
    print(child.pid, flush=True)
    while True:
        time.sleep(600)
"""


def send(running, number):
    """Send a signal and wait until it is delivered, since a second pending one would be lost."""
    os.kill(running.pid, number)
    status = Path(f"/proc/{running.pid}/status")
    pending = re.compile(r"^(?:SigPnd|ShdPnd):\s*0*[1-9a-f]", re.MULTILINE)
    while running.poll() is None and pending.search(status.read_text()):
        time.sleep(0.01)


def is_at_work(process):
    with suppress(OSError):  # it is gone, rather than dead and not yet buried
        return state_of(process) != "Z"
    return False


def state_of(process):
    """The state of the main thread: R for running, S for waiting, Z for dead."""
    return Path(f"/proc/{process}/task/{process}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def start():
    """Start the program in a state, in its own process group; returns it and its child process."""
    started = []

    def begin(state):
        program = PROGRAM.format(state=state)
        running = subprocess.Popen(
            [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, process_group=0, text=True
        )
        started.append(running)
        child = int(running.stdout.readline())
        while state_of(running.pid) == "R":  # from its print to where it waits
            time.sleep(0.01)
        return running, child

    yield begin
    for running in started:
        with suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()


@pytest.mark.parametrize(("state", "said"), [(IN_C_CODE, ""), (HANDLED, "handled")])
def test_the_second_ctrl_c_ends_the_command_and_what_it_started(start, state, said):
    running, child = start(state)
    send(running, signal.SIGINT)
    if said:
        assert running.stdout.readline().strip() == said
    time.sleep(APART_S)
    assert running.poll() is None, "the first is left to whoever handles it"
    send(running, signal.SIGINT)
    assert running.wait(30) == 6
    assert "interrupted twice: ended at once" in running.stderr.read()
    wait_for(lambda: not is_at_work(child))


def test_sigterm_counts_once_and_ctrl_c_after_it_is_the_second(start):
    """The kernel sends SIGTERM for each thread of a dying parent."""
    running, _ = start(
        """
    signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
"""
        + HANDLED
    )
    for _ in range(2):
        send(running, signal.SIGTERM)
        assert running.stdout.readline() == "asked\n"
    time.sleep(APART_S)
    send(running, signal.SIGINT)
    assert running.wait(30) == 6


def test_one_ctrl_c_in_a_terminal_is_one_also_with_forked_workers(start):
    running, _ = start(
        """
    signal.signal(signal.SIGINT, lambda *_: None)
    workers = []
    for _ in range(3):
        worker = os.fork()
        if worker == 0:
            while True:
                signal.pause()
        workers.append(worker)
    print(child.pid, flush=True)
    time.sleep(1)  # five times as long as a second request would get
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    child.kill()
    print("went on", flush=True)
"""
    )
    os.killpg(running.pid, signal.SIGINT)
    assert running.stdout.readline() == "went on\n"
    assert running.wait(30) == 0


def test_handled_ctrl_c_is_forgotten(start):
    running, _ = start(
        """
    signal.signal(signal.SIGINT, lambda *_: second_interrupt.forget_interrupts())
    print(child.pid, flush=True)
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.5)
    child.kill()
    print("went on", flush=True)
"""
    )
    assert running.stdout.readline() == "went on\n"
    assert running.wait(30) == 0
