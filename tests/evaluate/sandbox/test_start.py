"""Which sandbox is used, what is refused without one, and what happens if it fails."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tunebook.errors import DataError, RequestError
from tunebook.evaluate.sandbox import start
from tunebook.evaluate.sandbox.run import SOCKET, version
from tunebook.evaluate.sandbox.start import HANDOVER_VARIABLE, Program, Sandbox, Status, open_sandbox, run_programs

PROGRAM = Program(id="a", source="x = 1", test="assert x")
VERDICT = {"status": "passed", "message": "", "last_lines": [], "seconds": 0.1, "version": version()}


def answering(*answers: dict | bytes | Exception) -> Sandbox:
    """A sandbox that gives these answers, the last one again and again."""
    left = list(answers)

    def ask(line: bytes, wait_s: float) -> bytes:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, Exception):
            raise answer
        return line_of(answer)

    return Sandbox(name="service", num_programs=1, ask=ask)


def line_of(answer: dict | bytes) -> bytes:
    return answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(start, "RETRY_AFTER_S", 0.0)


@pytest.fixture
def service(monkeypatch):
    """A socket that gives one answer to everybody once this is called with it."""
    folder = Path(tempfile.mkdtemp(prefix="tunebook-test-", dir="/tmp"))  # an address holds 107 bytes
    monkeypatch.setenv(HANDOVER_VARIABLE, str(folder))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / SOCKET))

    def serve(answer):
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, connection.makefile("rb") as request:
                    assert request.read().endswith(b"\n")
                    connection.sendall(line_of(answer))

    def start_serving(answer):
        listener.listen()
        threading.Thread(target=serve, args=(answer,), daemon=True).start()

    yield start_serving
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    shutil.rmtree(folder)


def test_the_service_comes_first_and_bubblewrap_second(bubblewrap, service):
    assert open_sandbox().name == "bubblewrap"  # nobody listens to the socket
    service(VERDICT)
    assert open_sandbox().name == "service"


@pytest.mark.parametrize("is_broken", [False, True], ids=["missing", "broken"])
def test_without_both_nothing_is_executed(monkeypatch, tmp_path, is_broken):
    monkeypatch.setenv(HANDOVER_VARIABLE, "/nonexistent")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin" if is_broken else "/nonexistent")
    bwrap = tmp_path / "bwrap"
    bwrap.write_text("#!/bin/sh\nexit 1\n")
    for path in (tmp_path, bwrap, *tmp_path.parents[:-2]):  # `nobody` starts it
        path.chmod(0o755)
    with pytest.raises(RequestError) as caught:
        open_sandbox()
    assert caught.value.problem_id == "sandbox-missing"


@pytest.mark.parametrize("answer", [VERDICT | {"version": "0" * 64}, b"?\n", b"{}\n", VERDICT | {"status": "?"}])
def test_a_service_of_other_code_is_refused(service, answer):
    service(answer)
    with pytest.raises(RequestError) as caught:
        open_sandbox()
    assert caught.value.problem_id == "sandbox-version"


@pytest.mark.parametrize("failure", [b"", b"{", OSError("gone"), VERDICT | {"status": "broken", "message": "gone"}])
def test_a_program_for_which_the_sandbox_failed_is_tried_again(failure):
    [outcome] = run_programs([PROGRAM], answering(failure, VERDICT))
    assert outcome.status is Status.passed


def test_a_program_that_breaks_the_sandbox_twice_changes_no_other_verdict():
    programs = [replace(PROGRAM, id=id) for id in "abc"]
    outcomes = list(run_programs(programs, answering(VERDICT, OSError("gone"), OSError("gone"), VERDICT)))
    assert [outcome.status for outcome in outcomes] == [Status.passed, Status.broken, Status.passed]


def test_a_sandbox_that_judges_nothing_is_an_error_and_no_score_of_zero():
    with pytest.raises(RequestError) as caught:
        list(run_programs([PROGRAM] * 20, answering(OSError("gone"))))
    assert caught.value.problem_id == "sandbox-broken"


def test_a_program_without_a_test_is_refused_before_anything_runs():
    with pytest.raises(DataError) as caught:
        list(run_programs([PROGRAM, replace(PROGRAM, test=" \n")], answering(AssertionError("it was executed"))))
    assert caught.value.problem_id == "sample-without-test"
