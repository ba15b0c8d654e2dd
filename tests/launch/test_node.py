"""A node's agent on the line with its launcher."""

import signal
import socket
from types import SimpleNamespace

import pytest

from tunebook.errors import TunebookError
from tunebook.launch import node
from tunebook.launch.line import Line
from tunebook.launch.node import Agent, Notice, take_part


@pytest.fixture
def lines():
    """The two ends of a line: the agent's and the launcher's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = Line(socket.create_connection(server.getsockname()))
        launcher = Line(server.accept()[0])
    yield own, launcher
    own.close()
    launcher.close()


def test_a_notice_is_told_to_the_launcher_once(lines):
    own, launcher = lines
    agent = Agent(line=own, stop_timeout_s=20)
    agent.notices.append(Notice(ranks=(1, 2), gone_in_s=4.5))
    polls = [None, None, 0]
    assert agent.follow(SimpleNamespace(poll=lambda: polls.pop(0))) == 0
    assert launcher.receive(20) == [{"kind": "notice", "ranks": [1, 2], "gone_in_s": 4.5}]


def hung_up(own):
    agent = Agent(line=own, stop_timeout_s=20, meet="head:29400")
    with pytest.raises(TunebookError) as error:
        agent.wait_for_go()
    return error.value


def test_a_launcher_that_ended_said_so(lines):
    own, launcher = lines
    launcher.send("end", exit_code=1)
    launcher.close()
    error = hung_up(own)
    assert (error.problem_id, error.message) == (
        "launcher-lost",
        "the launcher on node 0 ended before the start; it says why",
    )


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", b'{"not": "ours"}\n'])
def test_another_program_on_the_port_is_not_called_a_launcher(lines, said):
    own, stranger = lines
    stranger._connection.sendall(said)
    stranger.close()
    error = hung_up(own)
    assert error.problem_id == "launcher-out-of-reach"
    assert "what listens at head:29400 hung up without an answer" in error.message
    assert "is launcher.master_port the one that node 0 printed" in error.message


def test_what_takes_the_call_and_stays_silent_is_no_launcher(lines):
    own, _silent = lines
    agent = Agent(line=own, stop_timeout_s=20, meet="head:29400", answer_within_s=0.05)
    with pytest.raises(TunebookError, match=r"what listens at head:29400 took the call and said nothing for 0.05 s,"):
        agent.wait_for_go()


def test_a_launcher_that_has_answered_may_prepare_for_longer(lines):
    own, launcher = lines
    said = []

    def say(text):
        said.append(text)
        launcher.send("go", folder="/runs/1")

    launcher.send("welcome")
    agent = Agent(line=own, stop_timeout_s=20, meet="head:29400", answer_within_s=0.0, say=say)
    assert agent.wait_for_go() == {"kind": "go", "folder": "/runs/1"}
    assert said == ["head:29400 has answered; waiting for node 0 to prepare, and for the other nodes"]


def test_a_node_looks_at_its_machine_before_it_calls(monkeypatch):
    """Drivers that wake up take longer than a launcher waits for the words of who has called."""
    order = []

    def call(*_words, **_options):
        order.append("call")
        raise TunebookError("no answer", problem_id="launcher-out-of-reach")

    monkeypatch.setattr(node, "node_facts", lambda config: order.append("look"))
    monkeypatch.setattr(node, "call_launcher", call)
    launcher = SimpleNamespace(start_timeout_s=1, stop_timeout_s=1)
    with pytest.raises(TunebookError, match="no answer"):
        take_part(SimpleNamespace(launcher=launcher), "head:29400", 1, lambda text: None)
    assert order == ["look", "call"]


def test_a_second_request_ends_the_ranks_here_and_waits_for_no_launcher(lines):
    """As where node 0 hangs: it has been told, and says nothing."""
    own, launcher = lines
    ended = []
    ranks = SimpleNamespace(poll=lambda: -9 if ended else None, kill=lambda: ended.append("killed"), send=None)
    agent = Agent(line=own, stop_timeout_s=600, asked=[signal.SIGINT, signal.SIGINT], is_overdue=lambda: True)
    assert agent.follow(ranks) == -9
    assert agent.wait_for_end(-9) is None
    assert [message["kind"] for message in launcher.receive(20)] == ["asked", "asked", "ended"]
