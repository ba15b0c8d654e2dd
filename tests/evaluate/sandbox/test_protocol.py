"""Messages between the evaluation and the runner: read with care, whatever the other side sends."""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tunebook.evaluate import sandbox
from tunebook.evaluate.sandbox.protocol import (
    MAX_ANSWER_BYTES,
    MAX_REQUEST_BYTES,
    RUNNER_MODULES,
    Outcome,
    Program,
    RunnerInfo,
    Status,
    parse,
    receive,
    runner_version,
    send,
)

PROGRAM = Program(id="a-1", source="x = '\ud800'", test="assert x", time_limit_s=2.5)
OUTCOME = Outcome(id="a-1", status=Status.timed_out, message="slow", last_lines=["é"], seconds=1.5)
INFO = RunnerInfo(version="v", wall="users", num_workers=2)


@pytest.fixture
def ends():
    left, right = socket.socketpair()
    with left, right:
        yield left, right


@pytest.mark.parametrize(
    "message",
    [PROGRAM, replace(PROGRAM, time_limit_s=2), replace(PROGRAM, test="assert x\n" * 1_000_000), OUTCOME, INFO],
)
def test_a_message_arrives_unchanged(ends, message):
    sender = threading.Thread(target=send, args=(ends[0], message))
    sender.start()
    assert parse(type(message), receive(ends[1], MAX_REQUEST_BYTES, 10.0)) == message
    sender.join()


def test_none_is_the_empty_request(ends):
    send(ends[0], None)
    assert receive(ends[1], 10, 1.0) == {}


def test_a_closed_connection_is_no_message(ends):
    ends[0].sendall(b'{"half":')
    ends[0].close()
    assert receive(ends[1], 10, 1.0) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n", "Expecting value"),
        (b"{\n", "Expecting property name"),
        (b"[]\n", "not a JSON object"),
        (b"\xff\xfe\n", "utf-16|surrogates|decode"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b"x" * (MAX_ANSWER_BYTES + 2), "larger than 1 MiB"),
    ],
    ids=["empty", "syntax", "list", "bytes", "depth", "size"],
)
def test_what_is_no_message_is_refused(ends, content, message):
    sender = threading.Thread(target=ends[0].sendall, args=(content,))
    sender.start()
    with pytest.raises(ValueError, match=message):
        receive(ends[1], MAX_ANSWER_BYTES, 10.0)
    sender.join()


def test_a_message_that_drips_is_not_waited_for(ends):
    def drip():
        for _ in range(50):
            ends[0].sendall(b" ")
            time.sleep(0.02)

    sender = threading.Thread(target=drip)
    sender.start()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        receive(ends[1], MAX_ANSWER_BYTES, 0.2)
    assert time.monotonic() - started < 0.9
    sender.join()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "great"}, "'great' is not a valid Status"),
        ({"status": None}, "`status` is None, not Status"),
        ({"seconds": "1"}, "`seconds` is '1', not float"),
        ({"seconds": True}, "`seconds` is True, not float"),
        ({"last_lines": [1]}, "`last_lines` holds something that is not text"),
        ({"id": 5}, "`id` is 5, not str"),
        ({"more": 5}, "its keys are"),
    ],
)
def test_wrong_fields_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        parse(Outcome, json.loads(json.dumps(asdict(OUTCOME))) | change)


def test_the_version_covers_every_module_of_the_runner():
    files = {file.stem for file in Path(sandbox.__file__).parent.glob("*.py")}
    assert files - {"__init__", "client"} == set(RUNNER_MODULES)
    assert len(runner_version()) == 64
