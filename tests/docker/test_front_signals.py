"""Requests to stop: each reaches the container once, its exit code comes back, nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

TRAIN = ("run", "train", "quickstart")
# `docker compose run` while the container runs: it ends with 6 after a request to stop.
WAITING = """
trap "exit 143" TERM
echo running > "$FAKE/running"
for wait in $(seq 200); do
  if [ -f "$FAKE/killed" ]; then sleep 0.5; exit 6; fi
  sleep 0.05
done
"""
KILLED = 'touch "$FAKE/killed"; exit 0'


@pytest.fixture
def train(machine):
    """Start a training in a container; `kill` is what `docker kill` does."""

    def start(kill=KILLED):
        machine.image("tunebook:cpu")
        machine.act("docker-compose-run", WAITING)
        machine.act("docker-kill", kill)
        return machine.start(*TRAIN, GPU="cpu", until="running")

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_request_to_stop_reaches_the_container_once_and_its_exit_code_comes_back(machine, train, number):
    front = train()
    os.killpg(front.pid, number)
    front.communicate(timeout=30)
    assert front.returncode == 6
    (kill,) = machine.calls("kill")
    assert re.fullmatch(rf"kill --signal {number.name[3:]} tunebook-train-[\d-]+", kill)


def test_signals_that_end_the_forwarding_program_lose_no_request(machine, train):
    front = train()
    for _ in range(50):  # also to a program that the script has just started and that has no session of its own yet
        os.killpg(front.pid, signal.SIGTERM)
        time.sleep(0.003)
    front.communicate(timeout=30)
    assert front.returncode == 6
