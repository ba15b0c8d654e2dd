"""The runner itself, with the rights of the service: what it refuses, and that it survives its workers."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

import tunebook
from tunebook.evaluate.sandbox.client import run_programs
from tunebook.evaluate.sandbox.jobs import RUNNER_MODULES, Handover, Program, Status, read_result
from tunebook.evaluate.sandbox.runner import HandoverError, main, serving
from tunebook.evaluate.sandbox.walls import descendants
from tunebook.files import atomic_write_text

RIGHT = Program(id="right", source="def f():\n    return 1", test="assert f() == 1", time_limit_s=20.0)
SLOW = replace(RIGHT, id="slow", source="import time\ndef f():\n    time.sleep(100)", time_limit_s=60.0)


def wait_until(condition, timeout_s=20.0):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_hand_over_folder_that_is_open_to_all_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(HandoverError, match=f"is open to every user, .*chmod o= {tmp_path}"), serving(tmp_path):
        pass


def test_a_hand_over_folder_that_is_not_there_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert main(["--handover", str(tmp_path / "none"), "--wall", "none"]) == 2
    assert "cannot be used by uid" in capsys.readouterr().err
    assert main(["--handover", str(tmp_path), "--slots", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "is no disk of its own" in said or "only root can" in said


def test_a_second_runner_of_a_folder_is_refused(tmp_path):
    tmp_path.chmod(0o700)
    with serving(tmp_path) as handover:
        handover.write_job(RIGHT, expires=0.0)
        with pytest.raises(HandoverError, match="is served by another runner already"), serving(tmp_path):
            pass
        assert handover.claim_job(0) is not None
    with serving(tmp_path) as handover:  # what the first was at is there again
        assert handover.claim_job(0) is not None


def test_it_has_three_rights_and_a_worker_for_each_slot(users, service):
    assert users.beat.num_workers == 2
    for process in [service.process.pid, *descendants(service.process.pid)]:
        [rights] = re.findall(r"CapEff:\t(\w+)", Path(f"/proc/{process}/status").read_text())
        assert int(rights, 16) == 0b11100000  # KILL, SETGID, SETUID


def test_a_worker_that_is_killed_is_replaced_and_its_program_judged_again(make_service):
    service = make_service()
    backend = service.start()
    handover: Handover = backend.handover
    handover.write_job(SLOW, expires=time.time() + 60)
    wait_until(lambda: any(handover.claimed.iterdir()))
    [claimed] = handover.claimed.iterdir()
    wait_until(lambda: any(service.slots.glob("*/*")))
    below = descendants(service.process.pid)
    workers = [process for process in below if Path(f"/proc/{process}").stat().st_uid == 0]
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    wait_until(lambda: (handover.results / "slow.json").exists())
    outcome = read_result(handover.results / "slow.json")
    assert outcome.status is Status.broken
    assert "want of memory" in outcome.message
    assert not claimed.exists()
    assert run_programs([RIGHT], backend)[0].is_passed
    assert [path for slot in service.slots.iterdir() for path in slot.iterdir()] == []
    assert service.stop() == 0
    assert not (service.handover / "runner.json").exists()


def test_stopping_it_ends_programs_and_offers_their_jobs_again(make_service):
    service = make_service()
    handover = service.start().handover
    handover.write_job(SLOW, expires=time.time() + 60)
    wait_until(lambda: any(handover.claimed.iterdir()))
    everybody = [service.process.pid, *descendants(service.process.pid)]
    assert service.stop() == 0
    wait_until(lambda: not any(Path(f"/proc/{process}").exists() for process in everybody))
    backend = service.start()
    wait_until(lambda: any(handover.claimed.iterdir()))
    assert run_programs([RIGHT], backend)[0].is_passed
    service.stop()


def test_jobs_that_nobody_waits_for_any_more_are_dropped(users):
    users.handover.write_job(SLOW, expires=time.time() - 1)
    wait_until(lambda: not any(users.handover.jobs.iterdir()) and not any(users.handover.claimed.iterdir()))
    assert not any(users.handover.results.iterdir())


def test_a_job_that_is_none_gets_an_answer(users):
    atomic_write_text(users.handover.jobs / "odd.json", '{"program": 5}')
    wait_until(lambda: (users.handover.results / "odd.json").exists())
    outcome = read_result(users.handover.results / "odd.json")
    assert outcome.status is Status.broken
    assert "the job cannot be read: `program` is 5, not dict" in outcome.message
    (users.handover.results / "odd.json").unlink()


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
