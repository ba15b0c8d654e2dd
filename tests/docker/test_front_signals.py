"""Requests to stop: each reaches the container or the build once, its exit code comes back, nothing is left behind."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

TRAIN = ("run", "train", "quickstart")
# `docker compose run` while the container runs: it ends with 6 after a request to stop.
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
# The container does not exist yet, then it runs.
NOT_YET = """
if [ ! -f "$FAKE/asked" ]; then touch "$FAKE/asked"; exit 1; fi
if [ ! -f "$FAKE/since" ]; then date +%s%3N > "$FAKE/since"; fi
echo running
exit 0
"""
# Catches the signal and ends with a code, as docker does.
CAUGHT = """
trap "exit 1" INT TERM
touch "$FAKE/running"
for wait in $(seq 200); do sleep 0.05; done
"""


@pytest.fixture
def train(machine):
    """Start a training in a container, with what its `docker` commands do."""

    def start(run=WAITING, inspect=STATE, kill='touch "$FAKE/killed"; exit 0'):
        machine.image("tunebook:cpu")
        for command, script in (("compose-run", run), ("container", inspect), ("kill", kill)):
            machine.act(f"docker-{command}", script)
        return machine.start(*TRAIN, GPU="cpu", until="running")

    return start


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_request_to_stop_reaches_the_container_once_and_its_exit_code_comes_back(machine, train, number):
    front = train()
    os.kill(front.pid, number)  # as make does, and then `timeout` or the terminal
    time.sleep(0.1)
    os.killpg(front.pid, number)
    front.communicate(timeout=30)
    assert front.returncode == 6
    (kill,) = machine.calls("kill")
    assert re.fullmatch(rf"kill --signal {number.name[3:]} tunebook-train-[\d-]+", kill)


def test_signals_that_end_the_forwarding_program_lose_no_request(machine, train):
    front = train(run=WAITING.replace("sleep 0.3", "sleep 2"))  # it ends after the last signal
    for _ in range(100):  # also to a program that the script has just started and that has no session of its own yet
        os.killpg(front.pid, signal.SIGTERM)
        time.sleep(0.003)
    front.communicate(timeout=30)
    assert (front.returncode, len(machine.calls("kill"))) == (6, 1)
    assert machine.calls("rm") == []


def test_a_request_in_the_first_moments_of_a_container_is_not_lost(machine, train):
    """This one gets no signal in the first quarter of a second after Docker reports it as running."""
    gets_it = '[ $(($(date +%s%3N) - $(cat "$FAKE/since"))) -gt 250 ]'
    front = train(inspect=NOT_YET, kill=f'{gets_it} && touch "$FAKE/killed"; exit 0')
    os.kill(front.pid, signal.SIGTERM)
    front.communicate(timeout=30)
    assert (front.returncode, len(machine.calls("kill"))) == (6, 1)


def test_a_second_request_is_forwarded(machine, train):
    front = train(kill='if [ -f "$FAKE/again" ]; then touch "$FAKE/killed"; fi')
    os.killpg(front.pid, signal.SIGINT)
    machine.wait_until(lambda: len(machine.calls("kill")) == 1)
    time.sleep(2.1)  # a signal within a second of the clock, so up to two, is the same request
    (machine.fake / "again").touch()
    os.killpg(front.pid, signal.SIGINT)
    front.communicate(timeout=30)
    assert (front.returncode, len(machine.calls("kill"))) == (6, 2)


def test_before_the_container_runs_there_is_nothing_to_save(machine, train):
    machine.act("docker-rm", 'touch "$FAKE/killed"; exit 0')
    front = train(inspect="echo created; exit 0", kill="exit 1")
    os.kill(front.pid, signal.SIGTERM)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGTERM
    assert "stopped before the container ran" in errors


def test_a_run_whose_terminal_was_closed_is_asked_to_save_and_waited_for(machine):
    machine.image("tunebook:cpu")
    machine.tell("docker-compose-run", err="write /dev/stdout: input/output error\n", code=1)
    machine.tell("docker-container", "[{}]")
    machine.tell("docker-wait", "6\n")
    done = machine.front(*TRAIN, GPU="cpu")
    assert done.returncode == 6
    name = machine.calls("wait")[0].split()[1]
    assert machine.calls("kill") == [f"kill --signal HUP {name}"]
    assert machine.calls("rm") == [f"rm --force {name}"]


@pytest.mark.parametrize(
    ("words", "docker", "printed", "not_printed"),
    [
        (["image"], "compose-build", "the build was stopped; what is finished is kept", "failed"),
        ([*TRAIN, "evaluation=code"], "compose-up", "stopped before the container ran", "could not be started"),
        (TRAIN, "buildx-imagetools", "", "Building instead"),
        (TRAIN, "compose-version", "", "or newer is needed"),
    ],
    ids=["a build", "the sandbox starts", "a registry is asked", "the version is asked"],
)
def test_ctrl_c_is_not_taken_for_a_failure_of_the_program_that_caught_it(machine, words, docker, printed, not_printed):
    if docker == "buildx-imagetools":
        machine.digest(f"registry:5000/tunebook@sha256:{'a' * 64}")
    else:
        machine.image("tunebook:cpu")
    machine.act(f"docker-{docker}", CAUGHT)
    front = machine.start(*words, GPU="cpu", until="running")
    os.killpg(front.pid, signal.SIGINT)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGINT
    assert printed in errors
    assert not_printed not in errors
    assert machine.calls("compose run") == []
    assert len(machine.calls("compose build")) == (docker == "compose-build")
    assert list((machine.folder / "tmp").iterdir()) == []


def test_ctrl_c_after_a_build_is_not_lost(machine):
    """A build sets traps of its own, and must leave the script's in place."""
    machine.act("docker-image", 'if [ -f "$FAKE/built" ]; then . "$FAKE/caught"; fi')
    (machine.fake / "caught").write_text(CAUGHT.replace("exit 1", "exit 0"))
    machine.act("docker-compose-build", 'touch "$FAKE/built"')
    front = machine.start("image", GPU="cpu", until="running")
    os.killpg(front.pid, signal.SIGINT)
    _, errors = front.communicate(timeout=30)
    assert front.returncode == 128 + signal.SIGINT
    assert "is ready after" not in errors
