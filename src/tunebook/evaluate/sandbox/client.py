"""Hand programs over to a runner, wait, and collect what became of each."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from tunebook.errors import DataError, RequestError
from tunebook.evaluate.sandbox.backends import Backend, is_alive
from tunebook.evaluate.sandbox.jobs import RUNNER_FILE, Handover, Outcome, Program, Status, read_result

POLL_S = 0.005
PATIENCE_S = 60.0  # beyond a program's own time limit; others may be served before it
ENOUGH_BROKEN = 3  # so many at the start, and nothing else, mean that the sandbox does not work at all


def run_programs(
    programs: Sequence[Program], backend: Backend, *, report: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """What becomes of each program, in their order; `report` is told of each as soon as it is known.

    Raises: DataError for samples that are not text and for damaged results, RequestError for a runner that dies.
    """
    check_programs(programs)
    outcomes: dict[int, Outcome] = {}
    for number, outcome in _Session(programs, backend).run():
        outcomes[number] = outcome
        report(outcome)
    return [outcomes[number] for number in range(len(programs))]


def check_programs(programs: Sequence[Program]) -> None:
    """Refuse what cannot be judged before anything is executed. Raises: DataError, RequestError."""
    for number, program in enumerate(programs, 1):
        what = f"sample {number} of {len(programs)} ({program.id})"
        if not isinstance(program.source, str):
            raise DataError(
                f"{what} is {type(program.source).__name__}, not text, so it is no program; generate it again, or "
                'count it as wrong by handing "" over',
                problem_id="sample-not-text",
            )
        if not isinstance(program.test, str) or not program.test.strip():
            raise DataError(
                f"{what} has no test, and would pass whatever it does; name the test in the task's file",
                problem_id="sample-without-test",
            )
        if not 0 < program.time_limit_s < math.inf:
            raise RequestError(
                f"{what} has a time limit of {program.time_limit_s} s; it must be above 0 and finite, such as 3.0",
                problem_id="sample-time-limit",
            )


class _Session:
    """One evaluation's programs at a runner."""

    def __init__(self, programs: Sequence[Program], backend: Backend) -> None:
        self._programs = programs
        self._backend = backend
        self._handover: Handover = backend.handover
        self._name = secrets.token_hex(8)  # others may use the same runner
        self._waiting: dict[int, Path] = {}  # number -> the file that its result comes in
        self._tried_twice: set[int] = set()
        self._num_broken = 0
        self._num_judged = 0

    def run(self) -> Iterator[tuple[int, Outcome]]:
        """Each program's number with its outcome, as they come."""
        todo = iter(range(len(self._programs)))
        most_waiting = 4 * self._backend.beat.num_workers + 4  # each look of a worker reads the names of all
        last_change = time.monotonic()
        try:
            while True:
                for number in todo:
                    self._hand_over(number)
                    if len(self._waiting) >= most_waiting:
                        break
                if not self._waiting:
                    return
                done = list(self._collect())
                yield from done
                if done:
                    last_change = time.monotonic()
                else:
                    self._check(last_change)
                    time.sleep(POLL_S)
        finally:
            for number, result in self._waiting.items():
                for left in (self._handover.jobs / f"{self._id(number)}.json", result):
                    with suppress(OSError):  # such as a folder of that name, which was reported
                        left.unlink()

    def _id(self, number: int) -> str:
        return f"{self._name}-{number:07d}"

    def _hand_over(self, number: int) -> None:
        id = self._id(number)
        program = self._programs[number]
        expires = time.time() + 10 * (PATIENCE_S + program.time_limit_s)
        try:
            self._handover.write_job(replace(program, id=id), expires=expires)
        except OSError as error:
            raise RequestError(
                f"programs cannot be handed over in {self._handover.jobs}: {error.strerror}; give this user the "
                "folder, or its disk some room",
                problem_id="sandbox-handover",
            ) from error
        self._waiting[number] = self._handover.results / f"{id}.json"

    def _collect(self) -> Iterator[tuple[int, Outcome]]:
        """The results that are there."""
        for number, file in list(self._waiting.items()):
            try:
                outcome = read_result(file)
                if outcome.id != self._id(number):
                    raise ValueError(f"it is about {outcome.id}")
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise _damaged(file, error) from error
            file.unlink(missing_ok=True)
            del self._waiting[number]
            if self._is_final(number, outcome):
                yield number, replace(outcome, id=self._programs[number].id)

    def _is_final(self, number: int, outcome: Outcome) -> bool:
        """Whether this outcome counts. Where the sandbox itself failed, the program is tried once more."""
        if outcome.status is not Status.broken:
            self._num_judged += 1
            return True
        if number not in self._tried_twice:
            self._tried_twice.add(number)
            self._hand_over(number)
            return False
        self._num_broken += 1
        if not self._num_judged and self._num_broken >= min(ENOUGH_BROKEN, len(self._programs)):
            raise RequestError(
                f"the sandbox ({self._backend.name}) cannot judge any program: {outcome.message}; "
                f"{self._backend.how_to_see_why()}",
                problem_id="sandbox-broken",
            )
        return True

    def _check(self, last_change: float) -> None:
        """Give up on a runner that is dead or judges nothing. Raises: RequestError, DataError."""
        try:
            beat = self._handover.read_beat()
        except ValueError as error:
            raise _damaged(self._handover.folder / RUNNER_FILE, error) from error
        if beat is None or not is_alive(beat):
            raise RequestError(
                f"the sandbox ({self._backend.name}) ended with {len(self._waiting)} programs at hand; "
                f"{self._backend.how_to_see_why()}",
                problem_id="sandbox-dead",
            )
        patience_s = PATIENCE_S + max(self._programs[number].time_limit_s for number in self._waiting)
        if time.monotonic() - last_change > patience_s:
            raise RequestError(
                f"the sandbox ({self._backend.name}) is alive, but judged nothing for {patience_s:.0f} s; "
                f"{self._backend.how_to_see_why()}",
                problem_id="sandbox-dead",
            )


def _damaged(file: Path, error: ValueError) -> DataError:
    return DataError(
        f"{file} is damaged ({error}); the runner writes it in one step, so something else changed it: see that "
        "nothing else writes there, and evaluate again",
        problem_id="sandbox-damaged",
    )
