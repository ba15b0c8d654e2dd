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
from tunebook.evaluate.sandbox.jobs import RUNNER_FILE, Outcome, Program, Status, read_result

POLL_S = 0.005
PATIENCE_S = 60.0  # beyond a program's own time limit; others may be served before it
ENOUGH_BROKEN = 3  # so many at the start, and nothing else, mean that the sandbox does not work at all


def run_programs(
    programs: Sequence[Program], backend: Backend, *, report: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """What becomes of each program, in their order; `report` is called with each as soon as it is known.

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
                    self._check_runner(last_change)
                    time.sleep(POLL_S)
        finally:
            for result in self._waiting.values():
                for left in (self._backend.handover.jobs / result.name, result):
                    with suppress(OSError):  # such as a folder of that name, which was reported
                        left.unlink()

    def _hand_over(self, number: int) -> None:
        handover, program = self._backend.handover, self._programs[number]
        id = f"{self._name}-{number:07d}"
        expires = time.time() + 10 * (PATIENCE_S + program.time_limit_s)
        try:
            handover.write_job(replace(program, id=id), expires=expires)
        except OSError as error:
            raise RequestError(
                f"programs cannot be handed over in {handover.jobs}: {error.strerror}; give this user the folder, or "
                "free space on its disk",
                problem_id="sandbox-handover",
            ) from error
        self._waiting[number] = handover.results / f"{id}.json"

    def _collect(self) -> Iterator[tuple[int, Outcome]]:
        """The results that are there. Where the sandbox itself failed, the program is tried once more."""
        for number, file in list(self._waiting.items()):
            try:
                outcome = read_result(file)
                if outcome.id != file.stem:
                    raise ValueError(f"it is about {outcome.id}")
            except FileNotFoundError:
                continue
            except ValueError as error:
                raise _damaged(file, error) from error
            file.unlink(missing_ok=True)
            del self._waiting[number]
            if outcome.status is Status.broken and number not in self._tried_twice:
                self._tried_twice.add(number)
                self._hand_over(number)
                continue
            self._count(outcome)
            yield number, replace(outcome, id=self._programs[number].id)

    def _count(self, outcome: Outcome) -> None:
        """Give up on a runner that fails for the first programs. Raises: RequestError."""
        is_broken = outcome.status is Status.broken
        self._num_broken += is_broken
        self._num_judged += not is_broken
        if not self._num_judged and self._num_broken >= min(ENOUGH_BROKEN, len(self._programs)):
            raise RequestError(
                f"the sandbox ({self._backend.name}) cannot judge any program: {outcome.message}; "
                f"{self._backend.how_to_see_why()}",
                problem_id="sandbox-broken",
            )

    def _check_runner(self, last_change: float) -> None:
        """Give up on a runner that is dead or judges nothing. Raises: RequestError, DataError."""
        handover = self._backend.handover
        try:
            beat = handover.read_beat()
        except ValueError as error:
            raise _damaged(handover.folder / RUNNER_FILE, error) from error
        patience_s = PATIENCE_S + max(self._programs[number].time_limit_s for number in self._waiting)
        if beat is None or not is_alive(beat):
            what = f"ended with {len(self._waiting)} programs at hand"
        elif time.monotonic() - last_change > patience_s:
            what = f"is alive, but judged nothing for {patience_s:.0f} s"
        else:
            return
        raise RequestError(
            f"the sandbox ({self._backend.name}) {what}; {self._backend.how_to_see_why()}", problem_id="sandbox-dead"
        )


def _damaged(file: Path, error: ValueError) -> DataError:
    return DataError(
        f"{file} is damaged ({error}); the runner writes it in one step, so something else changed it: see that "
        "nothing else writes there, and evaluate again",
        problem_id="sandbox-damaged",
    )
