"""`python -m tunebook.evaluate.sandbox.runner --handover DIR`: execute model-written programs until stopped.

One worker per disk for programs (or `--workers`) accepts connections on the folder's socket. Workers that end are
restarted. Standard library only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType

from tunebook.evaluate.sandbox.judge import judge
from tunebook.evaluate.sandbox.limits import Limits, adopt_orphans, die_with_parent
from tunebook.evaluate.sandbox.protocol import (
    MAX_REQUEST_BYTES,
    SOCKET,
    Outcome,
    Program,
    RunnerInfo,
    Status,
    parse,
    receive,
    runner_version,
    send,
    socket_address,
)
from tunebook.evaluate.sandbox.walls import USERS, WALLS, StuckError, Wall, WallError, kill_below, prepare_slots, reap

EXIT_WRONG_REQUEST = 2
SEND_TIMEOUT_S = 10.0  # timeout for a client that sends or reads one message
MAX_OOM_SCORE = "1000"  # oom_score_adj: the kernel kills programs first, not the runner


class HandoverError(Exception):
    """The handover folder cannot be served; the message says why and how to fix it."""


def main(arguments: list[str] | None = None) -> int:
    """Parse the arguments and serve."""
    parser = argparse.ArgumentParser(prog="python -m tunebook.evaluate.sandbox.runner", description=__doc__)
    parser.add_argument("--handover", type=Path, required=True, help="the folder of the socket")
    parser.add_argument("--wall", choices=WALLS, default=USERS, help="what contains programs")
    parser.add_argument("--slots", type=Path, default=Path("/slots"), help="where the disks for programs are mounted")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="without --slots: programs at a time")
    options = parser.parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        with ExitStack() as stack:
            # The sandbox container's only writable disks are those for programs, and it needs no other.
            needs_scratch = options.wall != USERS
            scratch = stack.enter_context(tempfile.TemporaryDirectory()) if needs_scratch else os.devnull
            slots = prepare_slots(
                options.wall, slots=options.slots, scratch=Path(scratch), num_workers=options.workers, limits=Limits()
            )
            supervise(stack.enter_context(listen(options.handover)), options.wall, slots)
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
def listen(folder: Path) -> Iterator[socket.socket]:
    """Yield the listening socket in a folder, locked against other runners. Raises: HandoverError."""
    with ExitStack() as stack:
        try:
            if folder.stat().st_mode & 0o007:
                raise HandoverError(
                    f"{folder} is open to every user, so programs could send requests: chmod o= {folder}"
                )
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            stack.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            (folder / SOCKET).unlink(missing_ok=True)  # left by a runner that was killed
            with socket_address(folder) as address:
                listener.bind(address)
            (folder / SOCKET).chmod(0o660)
            listener.listen()
        except BlockingIOError:
            raise HandoverError(f"{folder} is served by another runner already; stop that one first") from None
        except OSError as error:
            groups = sorted({os.getegid(), *os.getgroups()})
            raise HandoverError(
                f"{folder} cannot be used by uid {os.geteuid()} with the groups {groups}: {error.strerror}; it must "
                "exist and be open to one of them: chmod 2770"
            ) from error
        stack.callback((folder / SOCKET).unlink, missing_ok=True)
        yield listener


def supervise(listener: socket.socket, wall: str, slots: list[Path]) -> None:
    """Keep one worker per slot running, until stopped or until the parent process ends."""
    adopt_orphans()
    parent = os.getppid()
    info = RunnerInfo(version=runner_version(), wall=wall, num_workers=len(slots))
    workers: dict[int, int] = {}  # process id -> worker number
    print(f"sandbox: {len(slots)} programs at a time behind {wall}", file=sys.stderr)
    try:
        while os.getppid() == parent:
            for number in set(range(len(slots))) - set(workers.values()):
                workers[_start_worker(listener, info, slots[number], number)] = number
            time.sleep(0.5)
            for process in reap()[0] & workers.keys():
                del workers[process]
            kill_below(spare=set(workers))
    finally:
        # First nobody can connect: an evaluation sends a lost program again, and would lose it to this runner twice.
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        kill_below()


def _start_worker(listener: socket.socket, info: RunnerInfo, slot: Path, number: int) -> int:
    """Fork a worker; returns its process id."""
    process = os.fork()
    if process == 0:
        try:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the runner ends its workers
            adopt_orphans()
            die_with_parent()
            with suppress(OSError):
                Path("/proc/self/oom_score_adj").write_text(MAX_OOM_SCORE)
            wall = Wall(info.wall, Limits(), slot, number)
            while True:
                with listener.accept()[0] as connection:
                    serve(connection, wall, info)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return process


def serve(connection: socket.socket, wall: Wall, info: RunnerInfo) -> None:
    """Answer one request. Raises: StuckError, after which this process must judge no more programs."""
    with suppress(OSError):  # the evaluation is gone, so nobody needs the answer
        try:
            request = receive(connection, MAX_REQUEST_BYTES, SEND_TIMEOUT_S)
            if request == {}:
                send(connection, info)
            if not request or select.select([connection], [], [], 0)[0]:  # closed: nobody waits for the outcome
                return
            program: Program = parse(Program, request)
        except ValueError as error:
            send(connection, broken("", f"the request cannot be read: {error}"))
            return
        try:
            outcome = judge(program, wall)
        except StuckError as error:
            send(connection, broken(program.id, str(error)))
            raise
        except (OSError, subprocess.SubprocessError) as error:
            outcome = broken(program.id, f"its processes could not be started: {error}")
        send(connection, outcome)


def broken(id: str, message: str) -> Outcome:
    """Return an outcome that says only that the sandbox failed, nothing about the program."""
    return Outcome(id=id, status=Status.broken, message=message)


if __name__ == "__main__":
    sys.exit(main())
