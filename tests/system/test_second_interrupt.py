"""Ctrl-C twice ends a run whose ranks or evaluation hang in a library's code, where no handler of Python's runs."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

# What each state has hang: a rank before it meets the other, or the evaluation's own process. It says so by a file, and
# then waits for a lock in C code that it holds itself.
HANG = """
import ctypes, os, pathlib, sys

def hang(*_, **__):
    libc, lock = ctypes.CDLL(None), ctypes.create_string_buffer(256)
    libc.pthread_mutex_lock(lock)
    pathlib.Path(os.environ["HANGING"]).write_text(str(os.getpid()))
    libc.pthread_mutex_lock(lock)

state, module = os.environ["HANG_IN"], sys.orig_argv[2:3]
if state == "rendezvous" and os.environ.get("RANK") == "1":
    import tunebook.train.spread
    tunebook.train.spread.join_ranks = hang
elif state == "evaluation" and module == ["tunebook.evaluate"]:
    import tunebook.evaluate.worker
    tunebook.evaluate.worker.main = hang
"""
APART_S = 2.5  # two requests: those within two seconds are one
STATES = {
    "rendezvous": ["evaluation=none", "parallelism=ddp", "hardware=cpu", "hardware.gpus_per_node=2"],
    "evaluation": ["evaluation.before=true"],
}


@pytest.mark.parametrize("state", STATES)
def test_the_second_ctrl_c_ends_the_command(start, tmp_path, state):
    (tmp_path / "sitecustomize.py").write_text(HANG)  # Python imports it by itself
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    hanging = tmp_path / "hanging"
    words = ["tunebook", "train", "quickstart", "training.max_steps=2", f"outputs={tmp_path}", *STATES[state]]
    running = start(words, PYTHONPATH=path, HANG_IN=state, HANGING=str(hanging))
    running.wait_for(lambda: hanging.exists() and hanging.read_text())
    process = Path("/proc") / hanging.read_text()
    running.interrupt()
    time.sleep(APART_S)
    assert running.process.poll() is None, running.output
    running.interrupt()
    ended = running.wait(60)
    assert ended.exit_code == 6, ended.output
    assert "Traceback" not in ended.output
    end = time.monotonic() + 10  # on a busy machine, the kernel takes a moment to let go of its memory
    while process.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert not process.exists()
