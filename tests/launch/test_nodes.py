"""The command that starts the nodes: what is said of one that ends early, and who is still answered after a stop."""

import os
import signal
import sys
from pathlib import Path

import pytest

from tunebook.config.compose import compose
from tunebook.hardware.detect import Machine
from tunebook.launch import nodes
from tunebook.launch.nodes import run_on_nodes
from tunebook.launch.roll_call import RollCall
from tunebook.plan.auto.resolve import resolve_auto

NO_GPU = Machine(gpus=[], driver=None, num_cpus=2, host_memory_gib=8.0)
# Asks for a stop, as Ctrl-C does, and calls once it is itself asked to end, as a container does that was slow to start.
CALLS_LATE = """
import json, os, signal, socket, sys
def call(*_):
    line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    hello = {"kind": "hello", "token": "word", "node": 0, "ranks": [0], "host": "a", "address": "127.0.0.1",
             "reached_at": "127.0.0.1", "port": 4000, "versions": "", "code": "", "problems": [], "place": None}
    line.sendall(json.dumps(hello).encode() + b"\\n")
    open(sys.argv[2], "wb").write(line.makefile("rb").readline())
    sys.exit(3)
signal.signal(signal.SIGTERM, call)
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Follow a command that starts two nodes to its end."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(nodes, "_LINGER_S", 0.2)
    roll = RollCall(num_members=2, token="word", names={1: "node2"})
    words = ["launcher=slurm", "launcher.container_image=tunebook:cpu", "launcher.container_runtime=docker"]
    config = resolve_auto(compose("quickstart", words).config, NO_GPU).config

    def begin(*command):
        words = [str(roll.port) if word == "PORT" else word for word in command]
        return run_on_nodes(words, dict(os.environ), roll, config, tmp_path, exit_code_of=lambda: 6)

    yield begin
    roll.close(1)


def test_a_node_that_calls_after_a_stop_before_the_start_is_told_so(follow, tmp_path):
    answer = tmp_path / "answer"
    end = follow(sys.executable, "-c", CALLS_LATE, "PORT", str(answer))
    assert answer.read_text() == '{"kind": "refuse", "message": "stopped by SIGINT before the start"}\n'
    assert (end.stopped_by, end.failure, end.exit_code) == (signal.SIGINT.name, None, 3)


def test_a_command_that_ends_early_is_called_by_its_own_name(follow):
    end = follow("sh", "-c", "exit 5")
    assert end.failure.message == "sh ended (exit code 5), and node 0, node 1 (node2) of 2 nodes have not called in"


def test_one_node_without_the_image_ends_the_wait_for_it(follow, tmp_path):
    """srun waits for the others, and they for it; what an earlier attempt said is not taken for this one's."""
    log = Path(tmp_path / "logs" / "launcher.log")
    log.write_text("srun: error: node1: task 0: Exited with exit code 127\n")
    end = follow("sh", "-c", "echo 'srun: error: node2: task 1: Exited with exit code 125' >&2; exec sleep 600")
    assert end.failure.problem_id == "container-not-started"
    assert "launcher.container_image=tunebook:cpu on node2, and says above why" in end.failure.message
    assert end.failure.exit_code == 2


# A node that calls, is told to go, and then hangs with its line open; it presses Ctrl-C twice.
HANGS = """
import json, os, signal, socket, sys, time
for node in (0, 1):
    line = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    hello = {"kind": "hello", "token": "word", "node": node, "ranks": [node], "host": "a", "address": "127.0.0.1",
             "reached_at": "127.0.0.1", "port": 4000, "versions": "", "code": "", "problems": [], "place": None}
    line.sendall(json.dumps(hello).encode() + b"\\n")
    globals()[f"line_{node}"] = line
line.makefile("rb").readline()
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(2):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
time.sleep(600)
"""


def test_a_second_request_waits_for_no_node_that_hangs(follow, monkeypatch):
    monkeypatch.setattr("tunebook.launch.local._SECOND_WITHIN_S", 0.1)
    monkeypatch.setattr(nodes, "_CUT_OFF_S", 0.2)
    monkeypatch.setattr(nodes, "KILL_AFTER_S", 600)
    end = follow(sys.executable, "-c", HANGS, "PORT")
    assert (end.stopped_by, end.exit_code) == (signal.SIGINT.name, -signal.SIGKILL)
