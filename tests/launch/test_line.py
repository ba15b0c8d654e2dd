"""Messages over a real connection, and noticing that the other end is gone."""

import socket
import time

import pytest

from tunebook.launch.line import Line, is_loopback, plain_address


@pytest.fixture
def ends():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = Line(socket.create_connection(listener.getsockname()))
        other = Line(listener.accept()[0])
    yield one, other
    one.close()
    other.close()


def test_messages_arrive_in_order_and_whole(ends):
    one, other = ends
    one.send("hello", node=1, text="ä\n" * 1000)
    one.send("bye")
    found = []
    while len(found) < 2:
        found += other.receive(5)
    assert [message["kind"] for message in found] == ["hello", "bye"]
    assert found[0] == {"kind": "hello", "node": 1, "text": "ä\n" * 1000}


def test_nothing_to_read_takes_no_longer_than_asked(ends):
    started = time.monotonic()
    assert ends[0].receive(0.05) == []
    assert time.monotonic() - started < 1
    assert not ends[0].is_closed


def test_what_is_no_message_is_passed_over(ends):
    one, other = ends
    one._connection.sendall(b'GET / HTTP/1.1\r\n[1]\n{"kind": 3}\n{"kind": "asked"}\n')
    assert other.receive(5) == [{"kind": "asked"}]


def test_the_last_words_of_an_end_that_is_gone_are_heard(ends):
    one, other = ends
    one.send("ended", exit_code=0)
    one.close()
    found = []
    while not other.is_closed:
        found += other.receive(5)
    assert found == [{"kind": "ended", "exit_code": 0}]
    other.send("stop")  # nobody hears it, and nothing happens
    assert other.receive(1) == []


def test_a_line_without_an_end_does_not_fill_the_memory(ends):
    one, other = ends
    one._connection.settimeout(0.05)
    with pytest.raises(OSError):  # the other end has hung up, or reads no more
        for _ in range(1000):
            one._connection.sendall(b"x" * 65536)
            other.receive(0)
    assert other.is_closed


def test_addresses():
    assert plain_address("::ffff:10.0.0.1") == "10.0.0.1"
    assert [is_loopback(address) for address in ("127.0.1.1", "::1", "10.0.0.1")] == [True, True, False]
