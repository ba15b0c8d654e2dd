"""Which backend is taken, and what is said where there is none that can be."""

from __future__ import annotations

import os
import time
from dataclasses import asdict, replace

import pytest

from tunebook.errors import RequestError
from tunebook.evaluate.sandbox import backends
from tunebook.evaluate.sandbox.backends import open_backend
from tunebook.evaluate.sandbox.client import run_programs
from tunebook.evaluate.sandbox.jobs import RUNNER_FILE, Beat, Handover, Program, runner_version, write_json

BEAT = Beat(time=0.0, version=runner_version(), wall="users", num_workers=3)
RIGHT = Program(id="right", source="def f():\n    return 1", test="assert f() == 1", time_limit_s=20.0)


@pytest.fixture
def handover(tmp_path):
    handover = Handover(tmp_path)
    handover.make_folders()
    handover.write_beat(replace(BEAT, time=time.time()))
    return handover


@pytest.fixture
def no_bubblewrap(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("empty")))


def test_the_service_comes_first(handover, monkeypatch):
    monkeypatch.setattr(backends, "_start_runner", lambda *_: pytest.fail("there is a service"))
    with open_backend(handover=handover.folder) as backend:
        assert backend.record() == {
            "backend": "service",
            "wall": "users",
            "runner_version": runner_version(),
            "confirm_run_unsafe_code": False,
        }
        assert backend.beat.num_workers == 3


def test_its_folder_can_be_named_in_the_environment(handover, monkeypatch):
    monkeypatch.setenv("TUNEBOOK_HANDOVER", str(handover.folder))
    with open_backend() as backend:
        assert backend.handover.folder == handover.folder


def test_bubblewrap_comes_second(bubblewrap):
    assert bubblewrap.record()["backend"] == bubblewrap.beat.wall == "bubblewrap"
    assert run_programs([RIGHT], bubblewrap)[0].is_passed


def test_with_neither_it_says_why_and_what_to_type(no_bubblewrap, tmp_path):
    with pytest.raises(RequestError) as caught, open_backend(handover=tmp_path / "none"):
        pass
    assert caught.value.problem_id == "sandbox-missing"
    assert "there is no heartbeat in" in caught.value.message
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
    assert not backend.handover.folder.exists()


def test_its_own_runner_ends_with_it(bubblewrap):
    with open_backend(handover=backends.SERVICE_HANDOVER / "none") as backend:
        before = backend.handover.read_beat()
        assert before is not None
    assert not backend.handover.folder.exists()


def test_a_dead_service_is_named(no_bubblewrap, handover):
    handover.write_beat(replace(BEAT, time=time.time() - 100))
    with pytest.raises(RequestError, match="was last alive 100 s ago"), open_backend(handover=handover.folder):
        pass


def test_a_service_of_other_sources_is_refused(handover):
    handover.write_beat(Beat(time=time.time(), version="f" * 64, wall="users", num_workers=1))
    with pytest.raises(RequestError, match=r"runs other code \(ffffffffffff\).*docker compose up -d --build") as caught:  # noqa: SIM117
        with open_backend(handover=handover.folder):
            pass
    assert caught.value.problem_id == "sandbox-version"


@pytest.mark.parametrize("content", ["{", "[]", "{}", None])
def test_a_damaged_heartbeat_is_refused(handover, content):
    file = handover.folder / RUNNER_FILE
    if content is None:
        write_json(file, asdict(BEAT) | {"num_workers": "two"})
    else:
        file.write_text(content)
    with pytest.raises(RequestError, match="does not hold what a runner writes") as caught:  # noqa: SIM117
        with open_backend(handover=handover.folder):
            pass
    assert caught.value.problem_id == "sandbox-damaged"


def test_a_folder_that_is_not_writable_is_refused(handover, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(RequestError, match=r"jobs is not writable for uid \d+ .*chmod 2770") as caught:  # noqa: SIM117
        with open_backend(handover=handover.folder):
            pass
    assert caught.value.problem_id == "sandbox-handover"


def test_a_runner_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr(backends, "find_python", lambda: None)
    with pytest.raises(RequestError, match=r"no Python of 3.11 or newer that every user may execute"):  # noqa: SIM117
        with open_backend(handover=tmp_path / "none", confirm_run_unsafe_code=True):
            pass
