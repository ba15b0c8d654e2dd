"""A node's agent on the line with its launcher."""

import socket
from types import SimpleNamespace

import pytest

from tunebook.launch.line import Line
from tunebook.launch.node import Agent, Notice


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
