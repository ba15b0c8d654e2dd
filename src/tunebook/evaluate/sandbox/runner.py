"""`python -m tunebook.evaluate.sandbox.runner --handover DIR`: executes programs that a model wrote, until stopped.

It starts one worker per disk for programs (or `--workers`), starts those again that end, and says every second that it
is alive. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TextIO

from tunebook.evaluate.sandbox import limits, processes
from tunebook.evaluate.sandbox.jobs import BEAT_S, RUNNER_FILE, Beat, Handover, runner_version
from tunebook.evaluate.sandbox.limits import Limits
from tunebook.evaluate.sandbox.walls import USERS, WALLS, WallError, Walls, build_walls
from tunebook.evaluate.sandbox.worker import serve

EXIT_WRONG_REQUEST = 2
RESULTS_KEPT_S = 3600.0  # an evaluation fetches them within milliseconds


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
            walls = build_walls(
                arguments.wall, slots=arguments.slots, scratch=Path(scratch), num_workers=arguments.workers,
                limits=Limits(),
            )  # fmt: skip
            handover = stack.enter_context(serving(arguments.handover))
            supervise(handover, walls)
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
    lock = _prepare(handover)
    try:
        yield handover
    finally:
        (folder / RUNNER_FILE).unlink(missing_ok=True)
        lock.close()


def _prepare(handover: Handover) -> TextIO:
    """Make it ready; returns the file that is locked as long as it is open."""
    folder = handover.folder
    try:
        if folder.stat().st_mode & 0o007:
            raise HandoverError(f"{folder} is open to every user, so programs could forge results: chmod o= {folder}")
        lock = os.fdopen(os.open(folder / "lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666), "w")
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        handover.make_folders()
        handover.take_back()
    except BlockingIOError:
        lock.close()
        raise HandoverError(f"{folder} is served by another runner already; stop that one first") from None
    except OSError as error:
        raise HandoverError(
            f"{folder} cannot be used by uid {os.geteuid()} with the groups {sorted({os.getegid(), *os.getgroups()})}: "
            f"{error.strerror}; it must exist and be open to one of them: chmod 2770"
        ) from error
    return lock


def supervise(handover: Handover, walls: Walls) -> None:
    """Keep the workers at work and say so, until stopped or left alone by who started this."""
    limits.adopt_orphans()
    parent = os.getppid()
    version = runner_version()
    num_workers = len(walls.folders)
    workers: dict[int, int] = {}  # process id -> number
    print(f"sandbox: {num_workers} programs at a time behind {walls.name}, from {handover.folder}", file=sys.stderr)
    try:
        while os.getppid() == parent:
            for number in set(range(num_workers)) - set(workers.values()):
                workers[_start_worker(handover, walls, number)] = number
            beat = Beat(time=time.time(), version=version, wall=walls.name, num_workers=num_workers)
            handover.write_beat(beat)
            handover.sweep(RESULTS_KEPT_S)
            time.sleep(BEAT_S)
            for number in _collect(workers):
                handover.give_up_on(number)
            processes.kill_below(os.getpid(), spare=set(workers))
    finally:
        processes.kill_below(os.getpid())


def _start_worker(handover: Handover, walls: Walls, number: int) -> int:
    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches everybody; the runner ends its workers itself
        serve(handover, walls, number)

    return processes.in_child(work)


def _collect(workers: dict[int, int]) -> list[int]:
    """Forget the workers that have ended; returns their numbers. Orphans of theirs are collected as well."""
    numbers: list[int] = []
    while True:
        try:
            process, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return numbers
        if process == 0:
            return numbers
        if process in workers:
            numbers.append(workers.pop(process))


if __name__ == "__main__":
    sys.exit(main())
