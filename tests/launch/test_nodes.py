"""Nodes of a run over a real store: which may join, which are missing, what the others get."""

import json
import signal
import socket
import sys
import time
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from tunebook.errors import RequestError, TunebookError
from tunebook.launch import node, nodes, rendezvous
from tunebook.launch.node import Agent
from tunebook.launch.nodes import NodeGroup, open_to_nodes
from tunebook.launch.rendezvous import NodeState
from tunebook.processes import free_port

from ..conftest import config_of, wait_for

FOLDER = Path("/runs/1")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(node, "PUBLISH_EVERY_S", 0.02)
    monkeypatch.setattr(nodes, "POLL_S", 0.02)
    monkeypatch.setattr(nodes, "_REPLACED_AFTER_S", 0.2)
    monkeypatch.setattr(rendezvous, "LOST_AFTER_S", 1.5)


@pytest.fixture
def opened(monkeypatch):
    def make(num_nodes=2, *, launcher="local", ranks=1, names=(), begins=True, **settings):
        config = config_of(
            "quickstart",
            *["hardware=cpu", "parallelism=ddp", f"launcher={launcher}", f"hardware.num_nodes={num_nodes}"],
            *[f"hardware.gpus_per_node={ranks}", f"launcher.master_port={free_port()}"],
        )
        for name, value in ({"start_timeout_s": 60, "stop_timeout_s": 60} | settings).items():
            setattr(config.launcher, name, value)
        monkeypatch.setattr(nodes, "node_names", lambda: list(names))
        group = NodeGroup(config)
        monkeypatch.setenv(rendezvous.TOKEN_VARIABLE, group.token)
        group.has_begun = begins
        if begins:
            group.begin(FOLDER)
        return group

    return make


@pytest.fixture
def join():
    """Join as a node; all leave after the test."""
    made = []

    def begin(group, node, **facts):
        usual = {
            "node": node, "host": f"host{node}", "address": "127.0.0.1", "port": 4000 + node, "versions": "torch 1",
            "code": "c0de", "machine": str(node),
        }  # fmt: skip
        agent = Agent(NodeState(**(usual | facts)), ("127.0.0.1", group.port), 20)
        made.append(agent)
        agent.start()
        wait_for(lambda: agent.state.id and agent.state.beat > 1)
        end = time.monotonic() + 1
        while not (refused(agent) or agent.state.id in ids(group)) and time.monotonic() < end:
            poll(group)
        poll(group)
        return agent

    yield begin
    for agent in made:
        agent.close()


def ids(group):
    """The processes that take part."""
    return [state.id for state in group.members.values()]


def poll(group):
    """Let the launcher read, unless it still prepares, and the nodes what it publishes."""
    if group.has_begun:
        for _ in range(3):
            group.poll(0.02)
    time.sleep(0.05)


def poll_until(group, condition):
    wait_for(lambda: condition() or poll(group))


def kill(agent):
    """As when a node's process is killed: it publishes nothing any more."""

    def end(timeout):
        raise OSError("killed")

    agent._changed.wait = end
    agent.publish()
    agent.join(20)


def starts(agent):
    return agent.is_member


def ended(agent, exit_code):
    agent.state.exit_code = exit_code
    agent.publish()


def refused(agent):
    return agent.refused


def test_all_are_told_to_start_together_and_where_to_meet(opened, join):
    group, went = opened(), []
    group.on_start = lambda: went.append(True)
    first = join(group, 0)
    assert not starts(first)
    assert group.missing() == "node 1 of 2 nodes has not joined"
    second = join(group, 1, address="10.0.0.2")
    assert starts(first) and starts(second)
    go = second.launcher
    assert (go.folder, go.master_address, go.master_port) == ("/runs/1", "127.0.0.1", 4000)
    assert went == [True]
    assert group.hosts == {0: "host0", 1: "host1"}


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"node": 2}, r"node 2 \(host1\) joined, and the run has 2: numbers go from 0 to 1; set launcher.node_rank"),
        ({"node": -1}, r"node -1 \(host1\) joined, and the run has 2: numbers go from 0 to 1"),
        ({"node": 0}, r"node 0 \(host1\) joined, and so did host0 with that number"),
        (
            {"versions": "torch 2"},
            r"node 1 \(host1\) has different software than node 0 \(host0\): torch 2 instead of torch 1",
        ),
        (
            {"code": "0ther" * 4},
            r"node 1 \(host1\) has different Tunebook code than node 0 \(host0\), .* hash 0ther0ther0t instead of "
            r"c0de; bring every node to the same commit",
        ),
        (
            {"weights": "b" * 64},
            r"node 1 \(host1\) has different weights of the base model in model\.path than node 0 \(host0\): .* is "
            r"bbbbbbbbbbbb instead of aaaaaaaaaaaa; copy the folder again",
        ),
        ({"problems": ["hardware.generation: hopper"]}, r"node 1 \(host1\) cannot take part: hardware.generation"),
        ({"config_sha256": "b"}, r"node 1 \(host1\) was started for another run: type the same command on every node"),
        (
            {"config_sha256": "b", "node": 7, "problems": ["other hardware"]},
            r"node 7 \(host1\) was started for another run: type the same command on every node",
        ),
    ],
)
def test_a_node_that_does_not_fit_sends_all_home(opened, facts, message, join):
    group = opened()
    group._config_sha256 = "a"
    first = join(group, 0, weights="a" * 64)
    second = join(group, **({"node": 1, "host": "host1"} | facts))
    with pytest.raises(RequestError, match=message):
        raise group.failure
    assert group.failure.problem_id == "node-refused"
    assert refused(first) and refused(second)
    assert group.is_over
    assert group.has_unread_end()
    first.close()
    second.close()
    assert not group.has_unread_end()


@pytest.mark.parametrize("is_second_lost", [False, True])
def test_nodes_that_come_while_the_run_is_at_work_are_refused_and_end_nothing(opened, join, is_second_lost):
    group = opened(3)
    group._config_sha256 = "a"
    first, second, third = (join(group, node) for node in range(3))
    assert starts(first) and starts(third)
    if is_second_lost:  # while the others save, its place is not taken by another
        second.close()
        poll(group)
        assert [name for name, _ in first.launcher.stops] == ["SIGTERM"]
    failure = group.failure
    for facts, message in (
        ({"config_sha256": "b"}, "node 1 (host9) was started for another run: type the same command on every node"),
        ({"config_sha256": "a"}, "node 1 (host9) joined, and the run has already started with all its nodes"),
        ({"node": 5}, "node 5 (host9) joined, and the run has 3"),
        ({"versions": "torch 2"}, "node 1 (host9) joined, and the run has already started"),
    ):
        assert refused(join(group, **({"node": 1, "host": "host9"} | facts))).startswith(message)
    assert group.failure is failure
    assert (failure is not None, group.is_over, group.stopped_by) == (is_second_lost, False, None)


def test_a_node_of_another_run_ends_no_run_that_waits_for_others(opened, join):
    group = opened(3)
    group._config_sha256 = "a"
    first = join(group, 0)
    second = join(group, 1, config_sha256="a")
    stray = join(group, 1, host="host9", config_sha256="b")
    assert refused(stray).startswith("node 1 (host9) was started for another run")
    assert (group.failure, group.is_over) == (None, False)
    third = join(group, 2)
    assert all(starts(agent) for agent in (first, second, third))


def test_a_node_that_comes_after_the_run_was_given_up_gets_the_reason(opened, join):
    group = opened()
    join(group, 0, problems=["no GPU"])
    assert refused(join(group, 1)) == "node 0 (host0) cannot take part: no GPU"
    assert group.is_over


def test_a_node_is_answered_while_the_launcher_prepares_and_may_be_corrected(opened, join):
    group = opened(begins=False)
    group._config_sha256 = "a"
    wrong = join(group, 1, config_sha256="b")
    assert refused(wrong).startswith("node 1 (host1) was started for another run: type the same command on every node")
    wrong.close()
    wrong = join(group, 1, problems=["no GPU"])
    assert refused(wrong) == "node 1 (host1) cannot take part: no GPU"
    second = join(group, 1, config_sha256="a")
    assert refused(second) is None
    group.begin(FOLDER)
    group.has_begun = True
    first = join(group, 0)
    assert starts(first) and starts(second)


def test_a_node_that_was_refused_early_and_did_not_come_again_ends_the_run_as_it_begins(opened, join):
    group = opened(3, begins=False)
    join(group, 1, problems=["no GPU"])
    join(group, 2, problems=["no disk"])
    join(group, 2)
    group.begin(FOLDER)
    group.poll(0)
    assert (group.failure.message, group.failure.problem_id) == (
        "node 1 (host1) cannot take part: no GPU",
        "node-refused",
    )


@pytest.mark.parametrize("facts", [{"weights": "a" * 64}, {"weights": None}], ids=["same", "not-looked"])
def test_a_node_with_the_same_weights_or_that_has_not_looked_takes_part(opened, join, facts):
    group = opened()
    first, second = join(group, 0, weights="a" * 64), join(group, 1, **facts)
    assert starts(first) and starts(second)


@pytest.mark.parametrize("token", ["guess", "own"], ids=["another-run", "no-node"])
def test_a_stranger_changes_nothing(opened, join, monkeypatch, token):
    group = opened(launcher="slurm", num_nodes=1)
    if token == "guess":
        monkeypatch.setenv(rendezvous.TOKEN_VARIABLE, token)
    with socket.create_connection(("127.0.0.1", group.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        store, node_id = rendezvous.join_store("127.0.0.1", group.port)
        usual = NodeState(node=0, host="a", address="b", port=1, versions="", code="", id=node_id)
        for junk in ("{", "[]", '{"node": 0}', json.dumps(asdict(usual) | {"stop_requests": None})):
            store.set(node_id, junk)
            poll(group)
        assert (group.failure, group.is_over, group.is_running) == (None, False, False)
    monkeypatch.setenv(rendezvous.TOKEN_VARIABLE, group.token)
    assert starts(join(group, 0))


def test_a_missing_node_is_named_when_the_time_is_up(opened, join):
    group = opened(3, launcher="slurm", start_timeout_s=0.1, names=["gpu05", "gpu06", "gpu07"])
    join(group, 0)
    poll_until(group, lambda: group.is_over)
    assert group.failure.message == (
        "node 1 (gpu06), node 2 (gpu07) of 3 nodes have not joined within 0.1 s (launcher.start_timeout_s)"
    )
    assert (group.failure.exit_code, group.is_over) == (1, True)


@pytest.mark.parametrize("leave", [Agent.close, kill], ids=["left", "killed"])
def test_a_node_that_came_too_early_and_left_may_come_again(opened, join, leave):
    group = opened()
    leave(join(group, 0))
    poll(group)
    first, second = join(group, 0), join(group, 1)
    assert starts(first) and starts(second)


@pytest.mark.parametrize("lose", [Agent.close, kill], ids=["left", "silent"])
def test_when_one_is_lost_the_others_get_time_to_save(opened, join, lose):
    group = opened(stop_timeout_s=40, ranks=3)
    first, second = join(group, 0), join(group, 1)
    lose(second)
    poll_until(group, lambda: group.failure)
    assert first.launcher.stops == [["SIGTERM", 40]]
    assert (
        group.failure.message
        == "node 1 (host1) was lost with ranks 3 to 5: its launcher was killed, or the machine failed"
    )
    assert group.lost_ranks == [3, 4, 5]
    assert not group.is_over
    ended(first, 0)
    poll(group)
    assert group.is_over


def test_a_job_that_is_suspended_as_a_whole_loses_no_node(opened, join):
    group = opened()
    join(group, 0)
    join(group, 1)
    group._read_at -= 3600
    poll(group)
    assert group.failure is None


def test_when_ranks_of_one_fail_the_others_are_ended_soon(opened, join):
    group = opened()
    first, second = join(group, 0), join(group, 1)
    ended(second, -9)
    poll(group)
    assert first.launcher.stops == [["SIGTERM", 30]]
    assert (group.failed.rank, group.failed.exit_code) == (1, -9)
    ended(first, 1)
    poll(group)
    assert group.is_over
    assert group.failure is None  # the ranks say why
    group.end(7)
    assert group.has_unread_end()
    wait_for(lambda: second.launcher.exit_code == 7)
    first.close()
    second.close()
    assert not group.has_unread_end()


def test_a_request_of_one_node_reaches_all(opened, join):
    group = opened()
    first, second = join(group, 0), join(group, 1)
    second.state.stop_requests.append("SIGINT")
    second.publish()
    poll(group)
    assert first.launcher.stops == second.launcher.stops == [["SIGINT", None]]
    assert group.stopped_by == "SIGINT"


@pytest.mark.parametrize(
    ("gone_in_s", "stop_timeout_s", "kill_after_s", "when"),
    [(20.4, 60, 20.4, " in 20 s"), (90, 60, 60, " in 90 s"), (None, 60, 60, "")],
    ids=["sooner", "later", "unknown"],
)
def test_before_a_machine_is_taken_away_all_get_time_to_save(
    opened, join, gone_in_s, stop_timeout_s, kill_after_s, when
):
    group = opened(3, launcher="ray", stop_timeout_s=stop_timeout_s)
    agents = [join(group, 0), join(group, 1, host="b"), join(group, 2, host="b")]
    agents[0].state.notice = {"ranks": [1, 2], "gone_in_s": gone_in_s}
    agents[0].publish()
    poll(group)
    assert agents[1].launcher.stops == [["SIGTERM", kill_after_s]]
    assert (group.stopped_by, group.notice) == ("SIGTERM", f"b will be preempted{when}, with ranks 1, 2")
    for agent in agents:
        ended(agent, 6)
    poll(group)
    assert group.is_over  # and does not wait for others in their place


@pytest.mark.parametrize("ends", [False, True], ids=["before-the-end", "after-the-end"])
def test_a_node_that_comes_after_a_stop_before_the_start_is_sent_home_and_changes_nothing(opened, join, ends):
    """A container that was slow to start would wait for `launcher.start_timeout_s` otherwise."""
    group = opened()
    first = join(group, 0)
    group.stop(signal.SIGINT)
    poll(group)
    assert group.is_over
    if ends:
        group.end(6)
    assert refused(first) == refused(join(group, 1)) == "stopped by SIGINT before the start"
    assert (group.failure, group.is_running) == (None, False)


def test_a_node_that_comes_after_the_end_of_a_run_is_sent_home(opened, join):
    group = opened(1, launcher="ray")
    first = join(group, 0)
    ended(first, 0)
    poll(group)
    group.end(0)
    wait_for(lambda: first.launcher.exit_code == 0)
    first.close()
    assert refused(join(group, 0)) == "the run has ended"
    assert group.failure is None


def test_containers_with_other_code_than_the_launchers_are_refused(opened, join):
    """All of them alike, so that comparing them with each other shows nothing."""
    group = opened()
    group._code = "1auncher" * 8
    assert refused(join(group, 0, code="0ther" * 4)) == group.failure.message
    assert group.failure.message == (
        "node 0 (host0) has different Tunebook code in its container than the launcher: its files have the hash "
        "0ther0ther0t instead of 1auncher1aun; update the image of every node (make image, or make pull), or run "
        "the code in it: TUNEBOOK_USE_IMAGE_SOURCES=1"
    )
    assert group.failure.exit_code == 2
    group = opened(1)
    group._code = "c0de"
    assert starts(join(group, 0))


def attempt_that_fails(group, join, ends):
    """Rank 1 ends in some way, and rank 0 after it."""
    first, second = join(group, 0), join(group, 1)
    ends(second)
    poll_until(group, lambda: group.failure or group.failed)
    ended(first, 1)
    poll(group)
    assert not group.is_over  # others may come in their place
    wait_for(lambda: not starts(first))
    first.close()  # as a worker does that is told so


def test_lost_workers_may_be_replaced(opened, join):
    group, went = opened(launcher="ray"), []
    group.on_start = lambda: went.append(True)
    attempt_that_fails(group, join, kill)
    again = [join(group, 0), join(group, 1)]
    assert went == [True, True]
    for agent in again:
        ended(agent, 0)
    poll(group)
    assert group.is_over
    assert (group.failure, group.lost_ranks) == (None, [])


def test_a_worker_in_the_place_of_another_says_that_it_was_lost(opened, join):
    group = opened(launcher="ray")
    first, second = join(group, 0), join(group, 1)
    kill(second)
    again = [join(group, 1)]
    assert group.lost_ranks == [1]
    ended(first, 1)
    poll(group)
    first.close()
    again.append(join(group, 0))
    assert all(starts(agent) for agent in again)


@pytest.mark.parametrize(
    ("ends", "reported"),
    [
        (kill, r"after rank 1 \(host1\) was lost"),
        (lambda agent: ended(agent, -9), r"after rank 1 on host1 had failed: it was killed by SIGKILL"),
    ],
    ids=["lost", "killed"],
)
def test_lost_workers_that_are_not_replaced_are_named_when_the_time_is_up(opened, join, ends, reported):
    group = opened(launcher="ray", start_timeout_s=3)
    attempt_that_fails(group, join, ends)
    join(group, 0)  # comes again, alone
    poll_until(group, lambda: group.is_over)
    with pytest.raises(TunebookError, match=r"rank 1 of 2 ranks has not joined within 3 s \(.*\) " + reported):
        raise group.failure


def test_what_ended_the_last_attempt_is_reported_where_no_other_follows(opened, join):
    group = opened(launcher="ray")
    attempt_that_fails(group, join, kill)
    group.end(1)
    assert group.is_over
    assert group.failure.message == "rank 1 (host1) was lost: its launcher was killed, or the machine failed"
    assert group.lost_ranks == [1]


def test_a_stop_while_lost_workers_are_awaited_is_a_stop_and_no_failure(opened, join):
    group = opened(launcher="ray")
    attempt_that_fails(group, join, kill)
    assert group.failure is not None
    group.stop(signal.SIGINT)
    poll(group)
    assert (group.is_over, group.stopped_by, group.failure) == (True, "SIGINT", None)


def test_workers_on_other_machines_than_planned_are_refused(opened, join):
    group = opened(launcher="ray")
    join(group, 0, machine="a")
    join(group, 1, machine="a")
    with pytest.raises(RequestError, match=r"the ranks were placed on 1 machine, and hardware.num_nodes=2 was planned"):
        raise group.failure


def test_a_port_in_use_names_another(opened, monkeypatch):
    group = opened()
    with pytest.raises(RequestError, match=f"launcher.master_port={group.port}: .* Try launcher.master_port="):
        opened(master_port=group.port)

    def refuse(*_words, **_options):
        raise RuntimeError("EADDRINUSE")

    monkeypatch.setattr(rendezvous, "open_store", refuse)
    with pytest.raises(RequestError, match=r"Try launcher\.master_port=65534 on every node"):
        rendezvous.host_store(65535, "")


@pytest.mark.parametrize(("known", "is_warned"), [("", True), ("head", False)])
def test_a_name_that_only_the_other_nodes_know_is_warned_of_and_printed(monkeypatch, known, is_warned):
    def find(name, *_rest, **_more):
        if name != known:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", find)
    words = ["hardware.num_nodes=2", "launcher.master_address=head", f"launcher.master_port={free_port()}"]
    config = config_of("quickstart", *words)
    out = StringIO()
    open_to_nodes(config, Console(file=out, width=200))
    lines = out.getvalue().splitlines()
    assert lines[0] == "on node 1, type the same with: launcher.node_rank=1 launcher.master_address=head"
    assert ("warning: launcher.master_address: node 0 cannot resolve head itself" in "".join(lines[1:])) is is_warned


NODE = """
import os, signal, sys, time
from tunebook.launch.node import Agent
from tunebook.launch.rendezvous import NodeState

def join(node):
    state = NodeState(node=node, host="a", address="127.0.0.1", port=4000, versions="", code="")
    agent = Agent(state, ("127.0.0.1", int(sys.argv[1])), 20)
    agent.start()
    return agent
"""
# Asks for a stop, as Ctrl-C does, and joins once it is itself asked to end, as a container does that was slow to start.
JOINS_LATE = f"""{NODE}
def late(*_):
    agent = join(0)
    while not agent.refused:
        time.sleep(0.05)
    open(sys.argv[2], "w").write(agent.refused)
    agent.close()
    sys.exit(3)
signal.signal(signal.SIGTERM, late)
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""
# Two nodes that join, are told to start, and then hang; they press Ctrl-C twice.
HANGS = f"""{NODE}
signal.signal(signal.SIGTERM, signal.SIG_IGN)
agents = [join(0), join(1)]
while not agents[0].is_member:
    time.sleep(0.05)
for _ in range(2):
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(0.5)
time.sleep(600)
"""


@pytest.fixture
def follow(tmp_path, monkeypatch):
    """Follow a command that starts two nodes to its end."""
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(nodes, "_LINGER_S", 3)
    monkeypatch.setattr(nodes, "node_names", lambda: ["node1", "node2"])
    monkeypatch.setattr(nodes, "required_code", lambda config: None)
    words = ["launcher=slurm", "launcher.container_image=tunebook:cpu", "launcher.container_runtime=docker"]
    group = NodeGroup(config_of("quickstart", *words, "hardware.num_nodes=2"))

    def begin(*command):
        words = [str(group.port) if word == "PORT" else word for word in command]
        return group.run(words, tmp_path, exit_code_of=lambda: 6)

    return begin


def test_a_node_that_joins_after_a_stop_before_the_start_is_told_so(follow, tmp_path):
    answer = tmp_path / "answer"
    end = follow(sys.executable, "-c", JOINS_LATE, "PORT", str(answer))
    assert answer.read_text() == "stopped by SIGINT before the start"
    assert (end.stopped_by, end.failure, end.exit_code) == (signal.SIGINT.name, None, 3)


def test_a_command_that_ends_early_is_called_by_its_own_name(follow):
    end = follow("sh", "-c", "exit 5")
    assert (
        end.failure.message == "sh ended (exit code 5), and node 0 (node1), node 1 (node2) of 2 nodes have not joined"
    )


def test_one_node_without_the_image_ends_the_wait_for_it(follow, tmp_path, monkeypatch):
    """srun waits for the others, and they for it; what an earlier attempt printed is not taken for this one's."""
    monkeypatch.setattr(nodes, "_LINGER_S", 0.2)
    log = Path(tmp_path / "logs" / "launcher.log")
    log.write_text("srun: error: node1: task 0: Exited with exit code 127\n")
    end = follow("sh", "-c", "echo 'srun: error: node2: task 1: Exited with exit code 125' >&2; exec sleep 600")
    assert end.failure.problem_id == "container-not-started"
    assert "launcher.container_image=tunebook:cpu on node2 (exit code 125)" in end.failure.message
    assert end.failure.exit_code == 2


def test_a_second_request_waits_for_no_node_that_hangs(follow, monkeypatch):
    monkeypatch.setattr("tunebook.launch.supervise._SECOND_WITHIN_S", 0.1)
    monkeypatch.setattr(nodes, "_CUT_OFF_S", 0.2)
    monkeypatch.setattr(nodes, "KILL_AFTER_S", 600)
    end = follow(sys.executable, "-c", HANGS, "PORT")
    assert (end.stopped_by, end.exit_code) == (signal.SIGINT.name, -signal.SIGKILL)
