"""Which sandbox is used, what is refused without one, and what happens if it fails."""

from __future__ import annotations

import json
import shutil
import socket
import tempfile
import threading
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
        return answer if isinstance(answer, bytes) else json.dumps(answer).encode() + b"\n"

    return Sandbox(name="service", num_programs=1, ask=ask)


@pytest.fixture(autouse=True)
def no_wait(monkeypatch):
    monkeypatch.setattr(start, "RETRY_AFTER_S", 0.0)


@pytest.fixture
def service(monkeypatch):
    """A socket that gives one answer to everybody; returns a function that sets it."""
    folder = Path(tempfile.mkdtemp(prefix="tunebook-test-", dir="/tmp"))  # an address holds 107 bytes
    monkeypatch.setenv(HANDOVER_VARIABLE, str(folder))
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / SOCKET))
    answer = [b""]

    def serve():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection, connection.makefile("rb") as request:
                assert request.read().endswith(b"\n")
                connection.sendall(answer[0])

    def answers(verdict):
        answer[0] = verdict if isinstance(verdict, bytes) else json.dumps(verdict).encode() + b"\n"
        listener.listen()
        threading.Thread(target=serve, daemon=True).start()

    yield answers
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    shutil.rmtree(folder)


def test_the_service_comes_first(service):
    service(VERDICT)
    assert open_sandbox().name == "service"


def test_bubblewrap_comes_second(bubblewrap, service):
    assert open_sandbox().name == "bubblewrap"  # nobody listens to the socket


def test_without_both_nothing_is_executed(monkeypatch):
    monkeypatch.setenv(HANDOVER_VARIABLE, "/nonexistent")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(RequestError) as caught:
        open_sandbox()
    assert caught.value.problem_id == "sandbox-missing"
    assert "docker compose up -d --build sandbox" in caught.value.message
    assert "apt install bubblewrap" in caught.value.message


def test_a_bubblewrap_that_does_not_work_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv(HANDOVER_VARIABLE, "/nonexistent")
    broken = tmp_path / "bwrap"
    broken.write_text("#!/bin/sh\necho no permission >&2\nexit 1\n")
    for path in (tmp_path, broken, *tmp_path.parents[:-2]):
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(RequestError, match="no permission") as caught:
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
    with pytest.raises(RequestError, match="gone") as caught:
        list(run_programs([PROGRAM] * 20, answering(OSError("gone"))))
    assert caught.value.problem_id == "sandbox-broken"


def test_a_program_without_a_test_is_refused_before_anything_runs():
    with pytest.raises(DataError) as caught:
        list(run_programs([PROGRAM, replace(PROGRAM, test=" \n")], answering(AssertionError("it was executed"))))
    assert caught.value.problem_id == "sample-without-test"
