"""Ctrl-C and SIGTERM while a container trains: the run is saved, 6 comes back, and no container stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

LONG = ["evaluation=none", "training.max_steps=5000", "training.save_every_steps=5000"]
PROJECT = {"COMPOSE_PROJECT_NAME": f"tunebook-stopping-{os.getpid()}"}  # apart from whatever else trains here


@pytest.fixture
def start(checkout, environment, in_checkout, cpu_image, tmp_path):
    """Start a command in a process group of its own, as a terminal does; returns it and how to read its output."""
    started = []

    def begin(*words):
        log = tmp_path / f"log-{len(started)}"
        with log.open("w") as stream:
            process = subprocess.Popen(
                words, cwd=checkout, env=environment | PROJECT | {"GPU": "cpu"}, stdin=subprocess.DEVNULL,
                stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        started.append(process)
        return process, log.read_text

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(300)
    in_checkout("docker", "compose", "down", "--volumes", **PROJECT)


def wait_for(pattern, process, read, timeout_s=900):
    """Wait until the output matches."""
    end = time.monotonic() + timeout_s
    while not re.search(pattern, read(), flags=re.MULTILINE):
        assert process.poll() is None and time.monotonic() < end, read()[-3000:]
        time.sleep(0.1)


def containers(in_checkout):
    """The containers of these tests, running or not; the engine removes one a moment after it has ended."""
    project = f"label=com.docker.compose.project={PROJECT['COMPOSE_PROJECT_NAME']}"
    words = ("docker", "ps", "--all", "--quiet", "--filter", project)
    end = time.monotonic() + 60
    while (left := in_checkout(*words).stdout.split()) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def test_ctrl_c_saves_and_the_same_command_goes_on(start, in_checkout):
    words = ("make", "train", f"ARGS={' '.join(LONG)}")
    process, read = start(*words)
    wait_for(r"^step \d", process, read)
    os.killpg(process.pid, signal.SIGINT)
    process.wait(300)
    assert re.search(r"stopped by SIGINT after step \d+, saved in", read()), read()[-3000:]
    assert "Error 6" in read()  # make's word for it; its own exit code is 2 or the signal
    assert containers(in_checkout) == []
    again, read = start(*words)
    wait_for(r"resuming from .*/checkpoint-\d+", again, read)
    wait_for(r"^step \d", again, read)
    os.kill(again.pid, signal.SIGTERM)  # to make alone, which hands it on
    again.wait(300)
    assert "stopped by SIGTERM" in read()
    assert containers(in_checkout) == []


def test_stopped_before_it_began(start, in_checkout):
    process, read = start("docker/front.sh", "run", "train", "quickstart", *LONG)
    wait_for("in a container, image", process, read)
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(300) != 0, read()[-3000:]
    assert containers(in_checkout) == []
