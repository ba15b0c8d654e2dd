"""Requests to stop: each reaches the container or the build once, its exit code comes back, nothing stays behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import pytest

TRAIN = ("run", "train", "quickstart")
# Stands in for `docker compose run` while the container is at work: ends with 6 once it was asked to stop.
WAITING = """
case "$*" in *--entrypoint*) exit 0 ;; esac
echo running > "$FAKE/running"
for wait in $(seq 200); do
  if [ -f "$FAKE/killed" ]; then sleep 0.3; exit 6; fi
  sleep 0.05
done
"""
# `docker container inspect` meanwhile.
STATE = 'if [ -f "$FAKE/killed" ]; then exit 1; fi; echo running; exit 0'

# The container is not there yet, then it runs.
NOT_YET = """
if [ ! -f "$FAKE/asked" ]; then touch "$FAKE/asked"; exit 1; fi
if [ ! -f "$FAKE/since" ]; then date +%s%3N > "$FAKE/since"; fi
echo running
exit 0
"""


def start_front(machine, *words, **variables):
    """Start the front door as a terminal would: in a process group of its own."""
    return subprocess.Popen(
        ["docker/front.sh", *words], cwd=machine.checkout, env=machine.environment | variables, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for(path):
    """Wait until a file is there."""
    wait_until(path.exists)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_reaches_the_container_once_and_its_exit_code_comes_back(machine, number):
    machine.images("tunebook:cpu")
    machine.act("docker-compose-run", WAITING)
    machine.act("docker-kill", 'touch "$FAKE/killed"; exit 0')
    machine.act("docker-container", STATE)
    front = start_front(machine, *TRAIN, GPU="cpu")
    wait_for(machine.fake / "running")
    os.kill(front.pid, number)  # as make and then `timeout` do, or the terminal
    time.sleep(0.1)
    os.killpg(front.pid, number)
    front.communicate(timeout=30)
    assert front.returncode == 6
    (kill,) = machine.calls("kill")
    assert re.fullmatch(rf"kill --signal {number.name[3:]} tunebook-train-[\d-]+", kill)


def test_signals_that_end_what_hands_them_on_lose_no_request(machine):
    machine.images("tunebook:cpu")
    machine.act("docker-compose-run", WAITING.replace("sleep 0.3", "sleep 2"))  # it ends after the last signal
    machine.act("docker-kill", 'touch "$FAKE/killed"; exit 0')
    machine.act("docker-container", STATE)
    front = start_front(machine, *TRAIN, GPU="cpu")
    wait_for(machine.fake / "running")
    for _ in range(100):  # each to whatever the script has just started, too, before that is in a session of its own
        os.killpg(front.pid, signal.SIGTERM)
        time.sleep(0.003)
    front.communicate(timeout=30)
    assert (front.returncode, len(machine.calls("kill"))) == (6, 1)
    assert machine.calls("rm") == []


def test_a_request_in_the_first_moments_of_a_container_waits_until_it_is_heard(machine):
    """For a quarter of a second after it is said to run it hears nothing here."""
    machine.images("tunebook:cpu")
    machine.act("docker-compose-run", WAITING)
    machine.act("docker-container", NOT_YET)
    machine.act("docker-kill", '[ $(($(date +%s%3N) - $(cat "$FAKE/since"))) -gt 250 ] && touch "$FAKE/killed"; exit 0')
    front = start_front(machine, *TRAIN, GPU="cpu")
    wait_for(machine.fake / "running")
    os.kill(front.pid, signal.SIGTERM)
    front.communicate(timeout=30)
    assert (front.returncode, len(machine.calls("kill"))) == (6, 1)


def test_a_second_request_is_handed_on_too(machine):
    machine.images("tunebook:cpu")
    machine.act("docker-compose-run", WAITING)
    machine.act("docker-container", STATE)
    machine.act("docker-kill", 'if [ -f "$FAKE/again" ]; then touch "$FAKE/killed"; fi')
    front = start_front(machine, *TRAIN, GPU="cpu")
    wait_for(machine.fake / "running")
    os.killpg(front.pid, signal.SIGINT)
    wait_until(lambda: len(machine.calls("kill")) == 1)
    time.sleep(2.1)  # what comes within a second of the clock, so up to two, is the same request
    (machine.fake / "again").touch()
    os.killpg(front.pid, signal.SIGINT)
    front.communicate(timeout=30)
    assert (front.returncode, len(machine.calls("kill"))) == (6, 2)


def test_a_run_whose_terminal_was_closed_is_asked_to_save_and_waited_for(machine):
    machine.images("tunebook:cpu")
    machine.tell("docker-compose-run", err="write /dev/stdout: input/output error\n", code=1)
    machine.tell("docker-container", "[{}]")
    machine.tell("docker-wait", "6\n")
    done = machine.front(*TRAIN, GPU="cpu")
    assert done.returncode == 6
    name = machine.calls("wait")[0].split()[1]
    assert machine.calls("kill") == [f"kill --signal HUP {name}"]
    assert machine.calls("rm") == [f"rm --force {name}"]


def test_before_the_container_runs_there_is_nothing_to_save(machine):
    machine.images("tunebook:cpu")
    machine.act("docker-compose-run", WAITING)
    machine.tell("docker-kill", err="Error response from daemon: container is not running\n", code=1)
    machine.tell("docker-container", "created\n")
    machine.act("docker-rm", 'touch "$FAKE/killed"; exit 0')
    front = start_front(machine, *TRAIN, GPU="cpu")
    wait_for(machine.fake / "running")
    os.kill(front.pid, signal.SIGTERM)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGTERM
    assert "stopped before the container ran" in errors


def test_a_build_can_be_stopped(machine):
    building = "for wait in $(seq 200); do sleep 0.05; done"
    machine.act("docker-compose-build", f'trap "exit 130" TERM; touch "$FAKE/running"; {building}')
    front = start_front(machine, "image", GPU="cpu")
    wait_for(machine.fake / "running")
    os.killpg(front.pid, signal.SIGINT)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGINT
    assert "building was stopped; what is finished is kept" in errors


# What catches the signal and ends with a code, as docker does; the loop ends it where nothing does.
CAUGHT = """
trap "exit 1" INT TERM
touch "$FAKE/running"
for wait in $(seq 200); do sleep 0.05; done
"""


def test_ctrl_c_while_the_sandbox_starts_does_not_start_the_training(machine):
    machine.images("tunebook:cpu")
    machine.act("docker-compose-up", CAUGHT)
    front = start_front(machine, *TRAIN, "evaluation=code", GPU="cpu")
    wait_for(machine.fake / "running")
    os.killpg(front.pid, signal.SIGINT)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGINT
    assert "stopped before the container ran" in errors
    assert "the sandbox could not be started" not in errors
    assert machine.calls("compose run") == []


def test_ctrl_c_while_a_registry_is_asked_does_not_start_a_build(machine):
    (machine.checkout / "docker" / "cpu" / "image.digest").write_text(f"registry:5000/tunebook@sha256:{'a' * 64}\n")
    machine.act("docker-buildx-imagetools", CAUGHT)
    front = start_front(machine, *TRAIN, GPU="cpu")
    wait_for(machine.fake / "running")
    os.killpg(front.pid, signal.SIGINT)  # which `timeout`, in a group of its own, hears only from the script
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGINT
    assert "Building instead" not in errors
    assert (machine.calls("compose build"), machine.calls("compose run")) == ([], [])
    assert list((machine.folder / "tmp").iterdir()) == []


def test_ctrl_c_is_not_taken_for_a_failure_of_what_caught_it(machine):
    machine.images("tunebook:cpu")
    machine.act("docker-compose-version", CAUGHT)
    front = start_front(machine, *TRAIN, GPU="cpu")
    wait_for(machine.fake / "running")
    os.killpg(front.pid, signal.SIGINT)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGINT
    assert "Compose v2, its plugin, is not" not in errors


def test_ctrl_c_after_something_that_could_be_stopped_is_heard_too(machine):
    """Building has traps of its own, which must leave the script's in place."""
    machine.act("docker-image", 'if [ -f "$FAKE/built" ]; then . "$FAKE/caught"; fi')
    (machine.fake / "caught").write_text(CAUGHT.replace("exit 1", "exit 0"))
    machine.act("docker-compose-build", 'touch "$FAKE/built"')
    front = start_front(machine, "image", GPU="cpu")
    wait_for(machine.fake / "running")
    os.killpg(front.pid, signal.SIGINT)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGINT
    assert "is ready after" not in errors
