"""`python -m tunebook.evaluate.sandbox.runner --handover DIR`: executes programs that a model wrote, until stopped.

It starts one worker per disk for programs (or `--workers`), starts those again that end, and says every second that it
is alive. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from tunebook.evaluate.sandbox.jobs import (
    BEAT_S,
    RUNNER_FILE,
    Beat,
    Handover,
    Outcome,
    Status,
    job_id,
    read_job,
    runner_version,
)
from tunebook.evaluate.sandbox.judge import judge
from tunebook.evaluate.sandbox.limits import Limits, adopt_orphans, die_with_parent
from tunebook.evaluate.sandbox.walls import USERS, WALLS, StuckError, Wall, WallError, kill_below, prepare_slots, reap

EXIT_WRONG_REQUEST = 2
RESULTS_KEPT_S = 3600.0  # an evaluation fetches them within milliseconds
IDLE_S, MAX_IDLE_S = 0.01, 0.2  # between looks into a folder without jobs: at first, and after a while
MOST_EXPENDABLE = "1000"  # of oom_score_adj: for want of memory the system ends programs, not the runner


class HandoverError(Exception):
    """The hand-over folder cannot be served; the message says why and what would help."""


def main(words: list[str] | None = None) -> int:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.evaluate.sandbox.runner", description=__doc__)
    parser.add_argument("--handover", type=Path, required=True, help="the folder that jobs come and results go through")
    parser.add_argument("--wall", choices=WALLS, default=USERS, help="what keeps programs in")
    parser.add_argument("--slots", type=Path, default=Path("/slots"), help="where the disks for programs are mounted")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="without --slots: programs at a time")
    arguments = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        with ExitStack() as stack:
            # The sandbox's container has no disk but those for programs, and needs no other.
            needs_scratch = arguments.wall != USERS
            scratch = stack.enter_context(tempfile.TemporaryDirectory()) if needs_scratch else os.devnull
            slots = prepare_slots(
                arguments.wall, slots=arguments.slots, scratch=Path(scratch), num_workers=arguments.workers,
                limits=Limits(),
            )  # fmt: skip
            supervise(stack.enter_context(serving(arguments.handover)), arguments.wall, slots)
    except (WallError, HandoverError) as error:
        print(f"sandbox: {error}", file=sys.stderr)
        return EXIT_WRONG_REQUEST
    except KeyboardInterrupt:
        pass
    print("sandbox: stopped", file=sys.stderr)
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def serving(folder: Path) -> Iterator[Handover]:
    """The hand-over folder, with what belongs into it; nobody else serves it meanwhile. Raises: HandoverError."""
    handover = Handover(folder)
    with ExitStack() as stack:
        try:
            if folder.stat().st_mode & 0o007:
                raise HandoverError(
                    f"{folder} is open to every user, so programs could forge results: chmod o= {folder}"
                )
            lock = os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            handover.make_folders()
            handover.take_back()
        except BlockingIOError:
            raise HandoverError(f"{folder} is served by another runner already; stop that one first") from None
        except OSError as error:
            groups = sorted({os.getegid(), *os.getgroups()})
            raise HandoverError(
                f"{folder} cannot be used by uid {os.geteuid()} with the groups {groups}: {error.strerror}; it must "
                "exist and be open to one of them: chmod 2770"
            ) from error
        stack.callback((folder / RUNNER_FILE).unlink, missing_ok=True)
        yield handover


def supervise(handover: Handover, wall: str, slots: list[Path]) -> None:
    """Keep the workers at work and say so, until stopped or left alone by the parent."""
    adopt_orphans()
    parent = os.getppid()
    version = runner_version()
    workers: dict[int, int] = {}  # process id -> number
    print(f"sandbox: {len(slots)} programs at a time behind {wall}, from {handover.folder}", file=sys.stderr)
    try:
        while os.getppid() == parent:
            for number in set(range(len(slots))) - set(workers.values()):
                workers[_start_worker(handover, wall, slots, number)] = number
            handover.write_beat(Beat(time=time.time(), version=version, wall=wall, num_workers=len(slots)))
            handover.sweep(RESULTS_KEPT_S)
            time.sleep(BEAT_S)
            for process in reap()[0] & workers.keys():
                handover.give_up_on(workers.pop(process))
            kill_below(spare=set(workers))
    finally:
        kill_below()


def _start_worker(handover: Handover, wall: str, slots: list[Path], number: int) -> int:
    """Fork a worker; returns its process id."""
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the runner ends its workers itself
            serve(handover, Wall(wall, Limits(), slots[number], number), number)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return process


def serve(handover: Handover, wall: Wall, worker: int) -> None:
    """Judge jobs one by one until the runner is gone. Raises: StuckError; this process must then judge no more."""
    adopt_orphans()
    die_with_parent()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(MOST_EXPENDABLE)
    parent = os.getppid()
    idle_s = IDLE_S
    while os.getppid() == parent:
        job = handover.claim_job(worker)
        if job is None:
            time.sleep(idle_s)
            idle_s = min(idle_s * 1.1, MAX_IDLE_S)
            continue
        idle_s = IDLE_S
        serve_one(handover, wall, job)
        job.unlink(missing_ok=True)


def serve_one(handover: Handover, wall: Wall, job: Path) -> None:
    """Judge one job and hand its outcome back, also where that is that the sandbox failed."""
    try:
        program, expires = read_job(job)
    except ValueError as error:
        handover.write_result(broken(job, f"the job cannot be read: {error}"))
        return
    if time.time() >= expires:
        return
    try:
        outcome = judge(program, wall)
    except StuckError as error:
        handover.write_result(broken(job, str(error)))
        raise
    except (OSError, subprocess.SubprocessError) as error:
        outcome = broken(job, f"its processes could not be started: {error}")
    handover.write_result(outcome)


def broken(job: Path, message: str) -> Outcome:
    """The outcome that says nothing about the program, but that the sandbox did not work."""
    return Outcome(id=job_id(job), status=Status.broken, message=message)


if __name__ == "__main__":
    sys.exit(main())
