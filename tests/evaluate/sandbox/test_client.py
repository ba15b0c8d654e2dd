"""The evaluation's side against runners that do what they should not; the files are real, the runner is the test."""

from __future__ import annotations

import os
import threading
import time

import pytest

from tunebook.errors import DataError, RequestError
from tunebook.evaluate.sandbox import client
from tunebook.evaluate.sandbox.backends import Backend
from tunebook.evaluate.sandbox.client import run_programs
from tunebook.evaluate.sandbox.jobs import (
    Beat,
    Handover,
    Outcome,
    Program,
    Status,
    read_job,
    runner_version,
)


def sample(id="p", source="x = 1", test="assert x == 1", **more):
    return Program(id=id, source=source, test=test, **more)


class FakeRunner:
    """Answers jobs by a function, in a thread."""

    def __init__(self, folder, answer):
        self.handover = Handover(folder)
        self.handover.make_folders()
        self.answer = answer
        self.num_jobs = 0
        self.most_waiting = 0
        self.is_stopped = False
        self.beat = Beat(time=time.time(), version=runner_version(), wall="users", num_workers=2)
        self.handover.write_beat(self.beat)
        self.thread = threading.Thread(target=self.serve)
        self.thread.start()

    def serve(self):
        while not self.is_stopped:
            self.most_waiting = max(self.most_waiting, len(list(self.handover.jobs.glob("*.json"))))
            job = self.handover.claim_job(0)
            if job is None:
                time.sleep(0.005)
                continue
            self.num_jobs += 1
            self.answer(self.handover, read_job(job)[0], self.num_jobs)
            job.unlink()

    @property
    def backend(self):
        return Backend(name="service", handover=self.handover, beat=self.beat, confirm_run_unsafe_code=False)


@pytest.fixture
def runner(tmp_path):
    made = []

    def make(answer):
        made.append(FakeRunner(tmp_path, answer))
        return made[-1].backend

    make.made = made
    yield make
    for fake in made:
        fake.is_stopped = True
        fake.thread.join()


def passing(handover, program, number):
    handover.write_result(Outcome(id=program.id, status=Status.passed, message=""))


def broken(handover, program, number):
    handover.write_result(Outcome(id=program.id, status=Status.broken, message="no room"))


def test_outcomes_come_in_the_order_of_the_programs_with_their_names(runner):
    def by_name(handover, program, number):
        status = Status.passed if program.source == "odd" else Status.failed
        handover.write_result(Outcome(id=program.id, status=status, message=""))

    reported = []
    programs = [sample(id=f"task/{n}", source="odd" if n % 2 else "even") for n in range(50)]
    backend = runner(by_name)
    outcomes = run_programs(programs, backend, report=reported.append)
    assert [outcome.id for outcome in outcomes] == [f"task/{n}" for n in range(50)]
    assert [outcome.is_passed for outcome in outcomes] == [bool(n % 2) for n in range(50)]
    assert sorted(outcome.id for outcome in reported) == sorted(outcome.id for outcome in outcomes)
    assert runner.made[0].most_waiting <= 12 + 1  # never all at once; one may have its result and still be there
    left = [backend.handover.jobs, backend.handover.results, backend.handover.claimed]
    assert [path for folder in left for path in folder.iterdir()] == []


def test_no_programs_are_no_outcomes(runner):
    assert run_programs([], runner(passing)) == []


@pytest.mark.parametrize(
    ("program", "error", "problem_id", "message"),
    [
        (sample(source=None), DataError, "sample-not-text", r"sample 2 of 2 \(p\) is NoneType, not text"),
        (sample(source=b"x"), DataError, "sample-not-text", "is bytes, not text"),
        (sample(test=" \n"), DataError, "sample-without-test", "has no test, and would pass whatever it does"),
        (sample(time_limit_s=0), RequestError, "sample-time-limit", "a time limit of 0 s; .* such as 3.0"),
        (sample(time_limit_s=float("inf")), RequestError, "sample-time-limit", "a time limit of inf s"),
    ],
)
def test_what_cannot_be_judged_is_refused_before_anything_runs(runner, program, error, problem_id, message):
    backend = runner(passing)
    with pytest.raises(error, match=message) as caught:
        run_programs([sample(), program], backend)
    assert caught.value.problem_id == problem_id
    assert runner.made[0].num_jobs == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "Expecting property name"), ('{"id": 1}', "not str"), ("[]", "it is no JSON object")],
)
def test_a_damaged_result(runner, content, message):
    def damage(handover, program, number):
        (handover.results / "half").write_text(content)
        (handover.results / "half").rename(handover.results / f"{program.id}.json")

    with pytest.raises(DataError, match=f"is damaged .*{message}.*evaluate again") as caught:
        run_programs([sample()], runner(damage))
    assert caught.value.problem_id == "sandbox-damaged"


def test_a_runner_that_was_taken_over_can_only_end_the_evaluation(runner):
    """It neither hangs nor reads what it should not; test_jobs.py has what else could lie there."""
    backend = runner(lambda handover, program, number: os.mkfifo(handover.results / f"{program.id}.json"))
    with pytest.raises(DataError, match=r"is damaged .*it is no regular file") as caught:
        run_programs([sample()], backend)
    assert caught.value.problem_id == "sandbox-damaged"


def test_a_heartbeat_that_is_none_is_damage_too(runner):
    def spoil(handover, program, number):
        (handover.folder / "link").symlink_to("/etc/hostname")
        (handover.folder / "link").rename(handover.folder / "runner.json")

    with pytest.raises(DataError, match=r"runner\.json is damaged \(it is a link"):
        run_programs([sample()], runner(spoil))


def test_a_result_about_another_program(runner):
    def mix_up(handover, program, number):
        handover.write_result(Outcome(id="other", status=Status.passed, message=""))
        (handover.results / "other.json").rename(handover.results / f"{program.id}.json")

    with pytest.raises(DataError, match="it is about other"):
        run_programs([sample()], runner(mix_up))


def test_a_program_that_breaks_the_sandbox_twice_is_counted_as_that(runner):
    def breaks(handover, program, number):
        (broken if program.source == "bad" else passing)(handover, program, number)

    programs = [sample(id="a"), sample(id="b", source="bad"), sample(id="c")]
    outcomes = run_programs(programs, runner(breaks))
    assert [outcome.status for outcome in outcomes] == [Status.passed, Status.broken, Status.passed]
    assert runner.made[0].num_jobs == 4


def test_a_program_that_broke_it_once_is_tried_again(runner):
    def at_first(handover, program, number):
        (broken if number == 1 else passing)(handover, program, number)

    [outcome] = run_programs([sample()], runner(at_first))
    assert outcome.is_passed


def test_a_sandbox_that_judges_nothing_is_an_error_and_no_score_of_zero(runner):
    with pytest.raises(
        RequestError, match=r"cannot judge any program: no room; see `docker compose logs sandbox`"
    ) as caught:
        run_programs([sample(id=str(n)) for n in range(20)], runner(broken))
    assert caught.value.problem_id == "sandbox-broken"


def test_a_runner_that_dies(runner, monkeypatch):
    backend = runner(lambda *_: None)
    monkeypatch.setattr(client, "is_alive", lambda beat: False)
    with pytest.raises(RequestError, match=r"ended with 3 programs at hand; .*docker compose up -d") as caught:
        run_programs([sample()] * 3, backend)
    assert caught.value.problem_id == "sandbox-dead"
    assert list(backend.handover.jobs.iterdir()) == []


def test_a_runner_that_is_alive_and_does_nothing(runner, monkeypatch):
    monkeypatch.setattr(client, "PATIENCE_S", 0.2)
    with pytest.raises(RequestError, match=r"is alive, but judged nothing for 0 s") as caught:
        run_programs([sample(time_limit_s=0.1)], runner(lambda *_: None))
    assert caught.value.problem_id == "sandbox-dead"


def test_a_hand_over_folder_that_is_gone(runner):
    backend = runner(passing)
    (fake,) = runner.made
    fake.is_stopped = True
    fake.thread.join()  # it looks into the folder all the time
    backend.handover.jobs.rmdir()
    with pytest.raises(RequestError, match=r"cannot be handed over in .*jobs: No such file") as caught:
        run_programs([sample()], backend)
    assert caught.value.problem_id == "sandbox-handover"
