"""A node's agent, linked to its launcher."""

import signal
import socket
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest

from tunebook.errors import RequestError, StoppedError, TunebookError
from tunebook.launch import node, rendezvous
from tunebook.launch.node import Agent, take_part
from tunebook.launch.rendezvous import LauncherState, NodeState, host_store, publish, read_node

from ..conftest import wait_for


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(node, "PUBLISH_EVERY_S", 0.02)
    monkeypatch.setattr(node, "POLL_S", 0.02)
    monkeypatch.delenv(rendezvous.TOKEN_VARIABLE, raising=False)


@pytest.fixture
def agent_at():
    """A node's agent, connected to what listens on a port."""
    made = []

    def begin(port):
        state = NodeState(node=0, host="a", address="127.0.0.1", port=1, versions="", code="")
        made.append(Agent(state, ("127.0.0.1", port), 20))
        made[-1].endpoint = "head:29400"
        made[-1].start()
        return made[-1]

    yield begin
    for agent in made:
        agent._is_closed = True


@pytest.fixture
def connected(agent_at):
    """A launcher's store, what it publishes, and a node's agent connected to it."""
    (store, port), launcher = host_store(0, ""), LauncherState()
    publish(store, launcher)
    agent = agent_at(port)
    wait_for(lambda: agent._has_answered)
    return store, launcher, agent


def tell(store, launcher, agent, **values):
    """Let the launcher publish, until the node has read it."""
    for name, value in values.items():
        setattr(launcher, name, value)
    publish(store, launcher)
    wait_for(lambda: all(getattr(agent.launcher, name) == value for name, value in values.items()))


def ranks(polls, *, ignores=()):
    """Ranks that end as a list says, and what they are sent."""
    sent = []
    return SimpleNamespace(
        sent=sent,
        poll=lambda: -9 if "killed" in sent else polls.pop(0) if polls else None,
        send=lambda number: sent.append(number.name),
        kill=lambda: sent.append("killed"),
    )


def gone(agent):
    """What a node reports that has no launcher."""
    agent.answer_within_s = 0.5
    with pytest.raises(TunebookError) as error:
        agent.wait_for_start()
    return error.value


def stranger(answer):
    """Another program that takes one connection, says something and hangs up; None: it says nothing."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve():
        connection, _ = listener.accept()
        if answer is None:
            time.sleep(2)
        with suppress(OSError):
            connection.sendall(answer or b"")
        connection.close()
        listener.close()

    threading.Thread(target=serve, daemon=True).start()
    return listener.getsockname()[1]


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"not": "ours"}\n', None])
def test_another_program_on_the_port_is_not_called_a_launcher(agent_at, answer):
    error = gone(agent_at(stranger(answer)))
    assert error.problem_id == "launcher-out-of-reach"
    assert "what listens at head:29400 " in error.message
    assert "so it is not a launcher, or one that was killed" in error.message
    assert "is launcher.master_port the one that node 0 printed" in error.message


def test_a_launcher_that_ended_before_the_start_reports_why_itself(connected):
    _, _, agent = connected
    agent._is_dead = True
    error = gone(agent)
    assert (error.problem_id, error.message) == (
        "launcher-lost",
        "the launcher on node 0 ended before the start; it reports why",
    )


def test_a_launcher_that_has_answered_may_prepare_for_longer(connected):
    store, launcher, agent = connected
    said = []

    def say(text):
        said.append(text)
        tell(store, launcher, agent, members=[agent.state.id], folder="/runs/1")

    agent.answer_within_s, agent.say = 0.0, say
    assert agent.wait_for_start().folder == "/runs/1"
    assert said == ["head:29400 has answered; waiting for node 0 to prepare, and for the other nodes"]


def test_a_node_that_is_refused_or_asked_to_stop_starts_nothing(connected):
    store, launcher, agent = connected
    agent.stop_requests = [signal.SIGTERM]
    with pytest.raises(StoppedError, match="stopped by SIGTERM before the start"):
        agent.wait_for_start()
    tell(store, launcher, agent, closed="node 1 cannot take part")
    with pytest.raises(RequestError, match="node 1 cannot take part"):
        agent.wait_for_start()
    tell(store, launcher, agent, refused={agent.state.id: "it has no GPU"})
    with pytest.raises(RequestError, match="it has no GPU"):
        agent.wait_for_start()


@pytest.mark.parametrize(
    ("published", "used"), [("10.0.0.7", "10.0.0.7"), ("127.0.0.1", "10.0.0.1")], ids=["address", "loopback"]
)
def test_ranks_meet_at_node_0_which_is_the_launchers_machine_if_it_came_over_loopback(connected, published, used):
    store, launcher, agent = connected
    tell(store, launcher, agent, master_address=published, master_port=4000)
    agent._launcher_at = ("10.0.0.1", 29400)
    environment = {}
    assert agent.add_addresses(environment) == (used, 4000)
    assert environment == {}


def test_ranks_get_each_stop_once_and_are_killed_in_time(connected):
    store, launcher, agent = connected
    tell(store, launcher, agent, members=[agent.state.id], stops=[["SIGUSR1", None], ["SIGTERM", 0.1]])
    started = ranks([])
    assert agent.follow(started) == -9
    assert started.sent == ["SIGUSR1", "SIGTERM", "killed"]


@pytest.mark.parametrize("loss", ["dead", "next-attempt"])
def test_ranks_without_a_launcher_save_and_end(connected, loss):
    store, launcher, agent = connected
    tell(store, launcher, agent, members=[agent.state.id])
    agent._is_dead = loss == "dead"
    if loss != "dead":
        tell(store, launcher, agent, members=[])
    started = ranks([])
    agent.stop_timeout_s = 0.1
    assert agent.follow(started) == -9
    assert started.sent == ["SIGTERM", "killed"]
    assert agent.wait_for_end(-9) == (None if loss == "dead" else 1)


@pytest.mark.parametrize("is_suspended", [True, False])
def test_a_silent_launcher_is_lost_unless_its_machine_still_accepts_connections(connected, is_suspended):
    _, _, agent = connected
    agent._is_closed = True
    agent.join(20)
    agent._seen -= rendezvous.LOST_AFTER_S + 1
    if not is_suspended:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            agent._launcher_at = closed.getsockname()
    assert agent.is_lost is not is_suspended


def test_the_end_is_published_and_the_runs_exit_code_awaited(connected):
    store, launcher, agent = connected
    tell(store, launcher, agent, members=[agent.state.id])
    threading.Timer(0.2, lambda: tell(store, launcher, agent, exit_code=7)).start()
    assert agent.wait_for_end(2, "the folder is not there") == 7
    state = read_node(store, agent.state.id)
    assert (state.exit_code, state.problems) == (2, ["the folder is not there"])


def test_a_node_looks_at_its_machine_before_it_joins(monkeypatch):
    order = []

    def find(*_words, **_options):
        order.append("find")
        raise TunebookError("no answer", problem_id="launcher-out-of-reach")

    monkeypatch.setattr(node, "node_facts", lambda config: order.append("look") or {})
    monkeypatch.setattr(node, "find_launcher", find)
    launcher = SimpleNamespace(start_timeout_s=1, stop_timeout_s=1)
    with pytest.raises(TunebookError, match="no answer"):
        take_part(SimpleNamespace(launcher=launcher), "head:29400", 1, lambda text: None)
    assert order == ["look", "find"]


def test_a_second_request_ends_the_ranks_here_and_waits_for_no_launcher(connected):
    """As where node 0 hangs: it has the requests and does not react."""
    store, launcher, agent = connected
    tell(store, launcher, agent, members=[agent.state.id])
    agent.stop_requests, agent.is_overdue = [signal.SIGINT, signal.SIGINT], lambda: True
    assert agent.follow(ranks([])) == -9
    assert agent.wait_for_end(-9) is None
    wait_for(lambda: read_node(store, agent.state.id).stop_requests == ["SIGINT", "SIGINT"])
