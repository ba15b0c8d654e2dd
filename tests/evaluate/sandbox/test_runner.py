"""The runner itself, with the rights of the service: what it refuses, and that it survives its workers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import tunebook
from tunebook.evaluate.sandbox import runner
from tunebook.evaluate.sandbox.client import Backend, _connect, _read_outcome, run_programs
from tunebook.evaluate.sandbox.protocol import RUNNER_MODULES, SOCKET, Program, Status, send
from tunebook.evaluate.sandbox.runner import HandoverError, listen, main, serve
from tunebook.evaluate.sandbox.walls import descendants

RIGHT = Program(id="right", source="def f():\n    return 1", test="assert f() == 1", time_limit_s=20.0)
SLOW = replace(RIGHT, id="slow", source="import time\ndef f():\n    time.sleep(100)", time_limit_s=60.0)


def wait_until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_hand_over_folder_that_is_open_to_all_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(HandoverError, match=f"is open to every user, .*chmod o= {tmp_path}"), listen(tmp_path):
        pass


def test_a_hand_over_folder_that_is_not_there_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["--handover", str(tmp_path / "none"), "--wall", "none"]) == 2
    assert "cannot be used by uid" in capsys.readouterr().err
    assert main(["--handover", str(tmp_path), "--slots", str(tmp_path / "none")]) == 2
    printed = capsys.readouterr().err
    assert "is not a separate disk" in printed or "only root can" in printed


def test_a_second_runner_of_a_folder_is_refused_and_one_after_a_crash_is_not(tmp_path):
    tmp_path.chmod(0o700)
    with listen(tmp_path):
        with pytest.raises(HandoverError, match="is served by another runner already"), listen(tmp_path):
            pass
        assert stat.S_IMODE((tmp_path / SOCKET).stat().st_mode) == 0o660
    assert not (tmp_path / SOCKET).exists()
    (tmp_path / SOCKET).touch()  # what a killed runner leaves
    with listen(tmp_path):
        assert (tmp_path / SOCKET).is_socket()


def test_it_has_three_rights_and_a_worker_for_each_slot(users, service):
    assert users.info.num_workers == 2
    for process in [service.process.pid, *descendants(service.process.pid)]:
        [rights] = re.findall(r"CapEff:\t(\w+)", Path(f"/proc/{process}/status").read_text())
        assert int(rights, 16) == 0b11100000  # KILL, SETGID, SETUID


def begin(backend: Backend, program: Program, slots: Path) -> socket.socket:
    """Send a program and wait until it is executed."""
    connection = _connect(backend.folder)
    send(connection, program)
    wait_until(lambda: any(slots.glob("*/*")))
    return connection


def test_a_worker_that_is_killed_is_replaced_and_its_program_judged_again(make_service):
    service = make_service()
    backend = service.start()
    connection = begin(backend, SLOW, service.slots)
    below = descendants(service.process.pid)
    workers = [process for process in below if Path(f"/proc/{process}").stat().st_uid == 0]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    with connection:
        outcome = _read_outcome(connection)
    assert outcome.status is Status.broken
    assert "memory ran out" in outcome.message
    assert run_programs([RIGHT], backend)[0].is_passed
    assert [path for slot in service.slots.iterdir() for path in slot.iterdir()] == []
    assert service.stop() == 0
    assert not (service.handover / SOCKET).exists()


def test_stopping_it_ends_programs_and_an_evaluation_survives_a_restart(make_service):
    service = make_service()
    backend = service.start()
    slow = replace(SLOW, source=SLOW.source.replace("100", "3"), test="assert f() is None")
    with ThreadPoolExecutor(1) as pool:
        outcomes = pool.submit(run_programs, [slow, RIGHT], backend)
        wait_until(lambda: any(service.slots.glob("*/*")))
        everybody = [service.process.pid, *descendants(service.process.pid)]
        assert service.stop() == 0
        wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in everybody))
        service.start()
        assert [outcome.is_passed for outcome in outcomes.result()] == [True, True]
    service.stop()


def test_the_programs_of_an_evaluation_that_is_gone_are_not_executed(users, service, monkeypatch):
    judged = []
    monkeypatch.setattr(runner, "judge", lambda *_: judged.append(1))
    left, right = socket.socketpair()
    with right:
        send(left, SLOW)
        left.close()
        serve(right, None, users.info)
    assert not judged


def test_a_request_that_is_none_gets_an_answer(users):
    with _connect(users.folder) as connection:
        connection.sendall(b'{"program": 5}\n')
        outcome = _read_outcome(connection)
    assert outcome.status is Status.broken
    assert "the request cannot be read: its keys are ['program'], not" in outcome.message


def test_it_starts_from_copies_of_its_modules_without_any_package(tmp_path):
    """As in the sandbox's image, which holds nothing but these and Python's standard library."""
    top = Path(tunebook.__file__).parent
    package = Path("evaluate", "sandbox")
    (tmp_path / "tunebook" / package).mkdir(parents=True)
    for file in (
        "__init__.py",
        "evaluate/__init__.py",
        *(f"{package}/{name}.py" for name in ("__init__", *RUNNER_MODULES)),
    ):
        shutil.copy(top / file, tmp_path / "tunebook" / file)
    words = [sys.executable, "-S", "-B", "-W", "error", "-m", "tunebook.evaluate.sandbox.runner", "--help"]
    done = subprocess.run(words, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--handover" in done.stdout
