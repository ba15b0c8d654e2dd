"""The evaluation's side: which backend it takes, and what it does about runners that misbehave."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest

from tunebook.errors import DataError, RequestError
from tunebook.evaluate.sandbox import client
from tunebook.evaluate.sandbox.client import Backend, open_backend, run_programs
from tunebook.evaluate.sandbox.protocol import (
    SOCKET,
    Outcome,
    Program,
    RunnerInfo,
    Status,
    parse,
    receive,
    runner_version,
    send,
)
from tunebook.evaluate.sandbox.runner import listen

INFO = RunnerInfo(version=runner_version(), wall="users", num_workers=2)
RIGHT = Program(id="right", source="def f():\n    return 1", test="assert f() == 1", time_limit_s=20.0)


def sample(id="p", source="x = 1", test="assert x == 1", **more):
    return Program(id=id, source=source, test=test, **more)


@pytest.fixture
def runner(tmp_path):
    """Start a thread that answers requests on a real socket; `answer(connection, program, number)` says how."""
    tmp_path.chmod(0o700)
    stack = []

    def start(answer, info=INFO):
        listening = listen(tmp_path)
        listener = listening.__enter__()
        found = SimpleNamespace(num_jobs=0)

        def serve():
            while True:
                try:
                    connection = listener.accept()[0]
                except OSError:
                    return
                with connection, suppress(OSError):  # of a client that has seen enough
                    request = receive(connection, 1 << 20, 5.0)
                    if request == {}:
                        send(connection, info) if isinstance(info, RunnerInfo) else connection.sendall(info)
                    elif request is not None:
                        found.num_jobs += 1
                        answer(connection, parse(Program, request), found.num_jobs)

        thread = threading.Thread(target=serve)
        thread.start()

        def end():
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            listening.__exit__(None, None, None)

        stack.append(end)
        found.backend = Backend(name="service", folder=tmp_path, info=INFO, confirm_run_unsafe_code=False)
        return found

    yield start
    for end in stack:
        end()


def passing(connection, program, number):
    send(connection, Outcome(id=program.id, status=Status.passed, message=""))


def broken(connection, program, number):
    send(connection, Outcome(id=program.id, status=Status.broken, message="no space"))


def closing(connection, program, number):
    """What a worker does that is killed."""


def test_outcomes_come_in_the_order_of_the_programs_with_their_names(runner):
    def by_source(connection, program, number):
        status = Status.passed if program.source == "odd" else Status.failed
        send(connection, Outcome(id="another", status=status, message=""))

    reported = []
    programs = [sample(id=f"task/{n}", source="odd" if n % 2 else "even") for n in range(50)]
    outcomes = run_programs(programs, runner(by_source).backend, report=reported.append)
    assert [outcome.id for outcome in outcomes] == [f"task/{n}" for n in range(50)]
    assert [outcome.is_passed for outcome in outcomes] == [bool(n % 2) for n in range(50)]
    assert sorted(outcome.id for outcome in reported) == sorted(outcome.id for outcome in outcomes)


def test_no_programs_are_no_outcomes(runner):
    assert run_programs([], runner(passing).backend) == []


@pytest.mark.parametrize(
    ("program", "error", "problem_id", "message"),
    [
        (sample(source=None), DataError, "sample-not-text", r"sample 2 of 2 \(p\) is NoneType, not text"),
        (sample(source=b"x"), DataError, "sample-not-text", "is bytes, not text"),
        (sample(test=" \n"), DataError, "sample-without-test", "has no test, so it would pass whatever it does"),
        (sample(time_limit_s=0), RequestError, "sample-time-limit", "a time limit of 0 s; .* such as 3.0"),
        (sample(time_limit_s=float("inf")), RequestError, "sample-time-limit", "a time limit of inf s"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_runs(runner, program, error, problem_id, message):
    started = runner(passing)
    with pytest.raises(error, match=message) as caught:
        run_programs([sample(), program], started.backend)
    assert caught.value.problem_id == problem_id
    assert started.num_jobs == 0


@pytest.mark.parametrize("content", [b"{\n", b"[]\n", b'{"id": 1}\n', b"x" * (2 << 20)])
def test_a_runner_that_was_taken_over_can_only_end_the_evaluation(runner, content):
    def send_it(connection, program, number):
        connection.sendall(content)

    with pytest.raises(DataError, match=r"is damaged .*evaluate again") as caught:
        run_programs([sample()], runner(send_it).backend)
    assert caught.value.problem_id == "sandbox-damaged"


@pytest.mark.parametrize("fail", [broken, closing])
def test_a_program_that_breaks_the_sandbox_twice_is_counted_as_broken(runner, fail):
    def breaks(connection, program, number):
        (fail if program.source == "bad" else passing)(connection, program, number)

    started = runner(breaks)
    outcomes = run_programs([sample(id="a"), sample(id="b", source="bad"), sample(id="c")], started.backend)
    assert [outcome.status for outcome in outcomes] == [Status.passed, Status.broken, Status.passed]
    assert outcomes[1].message.startswith("no space" if fail is broken else "the worker that judged it was killed")
    assert started.num_jobs == 4


def test_a_program_that_broke_it_once_is_tried_again(runner):
    def at_first(connection, program, number):
        (broken if number == 1 else passing)(connection, program, number)

    [outcome] = run_programs([sample()], runner(at_first).backend)
    assert outcome.is_passed


def test_a_sandbox_that_judges_nothing_is_an_error_and_no_score_of_zero(runner):
    message = r"cannot judge any program: no space; see `docker compose logs sandbox`"
    with pytest.raises(RequestError, match=message) as caught:
        run_programs([sample(id=str(n)) for n in range(20)], runner(broken).backend)
    assert caught.value.problem_id == "sandbox-broken"


@pytest.mark.parametrize("is_there", [True, False])
def test_a_runner_that_dies(tmp_path, monkeypatch, is_there):
    monkeypatch.setattr(client, "RESTART_S", 0.2)
    if is_there:
        (tmp_path / SOCKET).touch()
    backend = Backend(name="service", folder=tmp_path, info=INFO, confirm_run_unsafe_code=False)
    with pytest.raises(RequestError, match=r"ended with 3 programs left .*docker compose up -d") as caught:
        run_programs([sample()] * 3, backend)
    assert caught.value.problem_id == "sandbox-dead"


def test_a_runner_that_is_alive_and_does_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    tmp_path.chmod(0o700)
    backend = Backend(name="service", folder=tmp_path, info=INFO, confirm_run_unsafe_code=False)
    with listen(tmp_path), pytest.raises(RequestError, match=r"is alive, but judged nothing for 0 s") as caught:
        run_programs([sample(time_limit_s=0.1)], backend)
    assert caught.value.problem_id == "sandbox-dead"


@pytest.fixture
def no_bubblewrap(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))


@pytest.mark.parametrize("is_in_environment", [True, False])
def test_the_service_comes_first(runner, monkeypatch, is_in_environment):
    monkeypatch.setattr(client, "_own_runner", lambda *_: pytest.fail("there is a service"))
    folder = runner(passing).backend.folder
    if is_in_environment:
        monkeypatch.setenv("TUNEBOOK_HANDOVER", str(folder))
    with open_backend(handover=None if is_in_environment else folder) as backend:
        assert backend.record() == {
            "backend": "service",
            "wall": "users",
            "runner_version": runner_version(),
            "confirm_run_unsafe_code": False,
        }
        assert backend.info.num_workers == 2


def test_a_path_longer_than_an_address_is_fine(tmp_path):
    folder = tmp_path / ("x" * 200)
    folder.mkdir(mode=0o700)
    with listen(folder), client._connect(folder):
        assert (folder / SOCKET).is_socket()


def test_bubblewrap_comes_second(bubblewrap):
    assert bubblewrap.record()["backend"] == bubblewrap.info.wall == "bubblewrap"
    assert run_programs([RIGHT], bubblewrap)[0].is_passed


def test_with_neither_it_says_why_and_what_to_type(no_bubblewrap, tmp_path):
    with pytest.raises(RequestError) as caught, open_backend(handover=tmp_path / "none"):
        pass
    assert caught.value.problem_id == "sandbox-missing"
    assert "the `sandbox` service does not run: nothing answers in" in caught.value.message
    assert "bubblewrap: bubblewrap is not installed: apt install bubblewrap" in caught.value.message
    assert "docker compose up -d --build sandbox" in caught.value.message
    assert "--confirm_run_unsafe_code" in caught.value.message


def test_only_the_explicit_word_does_without_and_is_recorded(no_bubblewrap, tmp_path):
    with open_backend(handover=tmp_path / "none", confirm_run_unsafe_code=True) as backend:
        assert backend.record()["backend"] == "unsafe"
        assert backend.record()["wall"] == "none"
        assert backend.record()["confirm_run_unsafe_code"] is True
        assert run_programs([RIGHT], backend)[0].is_passed
        wrong = replace(RIGHT, source="import time\ndef f():\n    time.sleep(100)", time_limit_s=0.5)
        assert run_programs([wrong], backend)[0].status == "timed_out"
    assert not backend.folder.exists()


def test_a_dead_service_is_named(no_bubblewrap, tmp_path):
    with socket.socket(socket.AF_UNIX) as left:  # by a runner that was killed
        left.bind(str(tmp_path / SOCKET))
    with pytest.raises(RequestError, match=r"nothing answers in .* \(Connection refused\)"):  # noqa: SIM117
        with open_backend(handover=tmp_path):
            pass


def test_a_service_of_other_sources_is_refused(runner):
    started = runner(passing, replace(INFO, version="f" * 64))
    with pytest.raises(RequestError, match=r"runs other code \(ffffffffffff\).*docker compose up -d --build") as caught:  # noqa: SIM117
        with open_backend(handover=started.backend.folder):
            pass
    assert caught.value.problem_id == "sandbox-version"


@pytest.mark.parametrize(
    "content", [b"{\n", b"[]\n", b"{}\n", b"", b'{"version": "x", "wall": "users", "num_workers": 1000000000}\n']
)
def test_another_answer_than_a_runners_is_refused(runner, content):
    started = runner(passing, content)
    with pytest.raises(RequestError, match=r"what answers in .* is not a runner") as caught:  # noqa: SIM117
        with open_backend(handover=started.backend.folder):
            pass
    assert caught.value.problem_id == "sandbox-damaged"


def test_a_socket_of_another_group_is_refused(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")  # root may connect everywhere

    monkeypatch.setattr(client, "_connect", refuse)
    with pytest.raises(RequestError, match=r"is not open to uid \d+ .*chmod 2770") as caught:  # noqa: SIM117
        with open_backend(handover=tmp_path):
            pass
    assert caught.value.problem_id == "sandbox-handover"


def test_a_runner_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr(client, "find_python", lambda: None)
    with pytest.raises(RequestError, match=r"no Python 3.11 or later here that every user may execute"):  # noqa: SIM117
        with open_backend(handover=tmp_path / "none", confirm_run_unsafe_code=True):
            pass


def test_a_log_that_is_a_link_is_not_read(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "log").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    assert client._end_of(tmp_path / "log") == ""
    started = time.monotonic()
    client._end_of(tmp_path / "pipe")
    assert time.monotonic() - started < 1
