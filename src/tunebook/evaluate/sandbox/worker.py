"""One of the runner's processes: takes jobs from the hand-over folder, judges them one by one, hands outcomes back."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tunebook.evaluate.sandbox import limits
from tunebook.evaluate.sandbox.jobs import Handover, Outcome, Program, Status, job_id, read_job
from tunebook.evaluate.sandbox.judge import Judge
from tunebook.evaluate.sandbox.processes import StartError, StuckError
from tunebook.evaluate.sandbox.walls import Walls

IDLE_S = 0.01  # between looks into a folder without jobs
MAX_IDLE_S = 0.2  # after a while without any


def serve(handover: Handover, walls: Walls, worker: int) -> None:
    """Serve jobs for ever. Raises: StuckError, after which this process must not judge any more."""
    limits.adopt_orphans()
    limits.die_with_parent()
    parent = os.getppid()
    judge = Judge(walls.of_worker(worker), walls.limits)
    idle_s = IDLE_S
    while os.getppid() == parent:
        job = handover.claim_job(worker)
        if job is None:
            time.sleep(idle_s)
            idle_s = min(idle_s * 1.1, MAX_IDLE_S)
            continue
        idle_s = IDLE_S
        serve_one(handover, judge, job)


def serve_one(handover: Handover, judge: Judge, job: Path) -> None:
    """Judge one job and hand its outcome back, also where that is that the sandbox failed."""
    try:
        program, expires = read_job(job)
    except ValueError as error:
        handover.write_result(broken(job_id(job), f"the job cannot be read: {error}"))
    else:
        if time.time() < expires:
            _judge(handover, judge, program)
    job.unlink(missing_ok=True)


def _judge(handover: Handover, judge: Judge, program: Program) -> None:
    try:
        handover.write_result(judge.judge(program))
    except StartError as error:
        handover.write_result(broken(program.id, str(error)))
    except StuckError as error:
        handover.write_result(broken(program.id, str(error)))
        raise


def broken(id: str, message: str) -> Outcome:
    """The outcome that says nothing about the program, but that the sandbox did not work."""
    return Outcome(id=id, status=Status.broken, message=message)
