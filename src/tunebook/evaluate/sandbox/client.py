"""Find or start a runner, send it programs, and collect their outcomes.

The runner is the `sandbox` service, found by its socket, or one started here for a single evaluation. The latter runs
behind bubblewrap or, if the user confirmed it, unprotected.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import tunebook
from tunebook.errors import DataError, RequestError
from tunebook.evaluate.sandbox.protocol import (
    MAX_ANSWER_BYTES,
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
from tunebook.evaluate.sandbox.walls import BUBBLEWRAP, MAX_WORKERS, NONE

HANDOVER_VARIABLE = "TUNEBOOK_HANDOVER"
SERVICE_HANDOVER = Path("/handover")  # where compose.yaml mounts it
RUNNER_LOG = "runner.log"
START_SERVICE = "docker compose up -d --build sandbox"
RESTART_S = 10.0  # time a service may take to restart during an evaluation
START_WITHIN_S = 30.0
PATIENCE_S = 60.0  # in addition to a program's time limit; other evaluations may be served first
ANSWER_S = 10.0  # time to read one answer, which the runner sends at once
ENOUGH_BROKEN = 3  # if this many first programs all fail like this, the sandbox does not work at all
QUOTED_BYTES = 1000  # tail of a runner's log quoted in a message


@dataclass(frozen=True, kw_only=True)
class Backend:
    """A runner that is ready for programs."""

    name: str  # service, bubblewrap or unsafe
    folder: Path  # folder of its socket
    info: RunnerInfo
    confirm_run_unsafe_code: bool

    def where_to_look(self) -> str:
        """Say where to find the reason for a failure: the service's log, or the output of the runner started here."""
        if self.name == "service":
            return f"see `docker compose logs sandbox`, start it again with `{START_SERVICE}` and evaluate again"
        return f"its runner printed: {_end_of(self.folder / RUNNER_LOG) or 'nothing'}; evaluate again"

    def record(self) -> dict[str, Any]:
        """Describe how the programs were executed, for the record of an evaluation."""
        return {
            "backend": self.name,
            "wall": self.info.wall,
            "runner_version": self.info.version,
            "confirm_run_unsafe_code": self.confirm_run_unsafe_code,
        }


@contextmanager
def open_backend(*, handover: Path | None = None, confirm_run_unsafe_code: bool = False) -> Iterator[Backend]:
    """Yield the safest backend available. Raises: RequestError with what each backend lacks, and what to type.

    `handover` is the service's folder, if not the default one. `confirm_run_unsafe_code` takes effect only if nothing
    else works.
    """
    folder = handover or Path(os.environ.get(HANDOVER_VARIABLE) or SERVICE_HANDOVER)
    service = ask_service(folder)
    if isinstance(service, RunnerInfo):
        yield Backend(name="service", folder=folder, info=service, confirm_run_unsafe_code=confirm_run_unsafe_code)
        return
    reasons = [service]
    walls = {"bubblewrap": BUBBLEWRAP} | ({"unsafe": NONE} if confirm_run_unsafe_code else {})
    for name, wall in walls.items():
        with (
            tempfile.TemporaryDirectory(prefix="tunebook-handover-") as temporary,
            _own_runner(Path(temporary), wall) as started,
        ):
            if isinstance(started, RunnerInfo):
                yield Backend(
                    name=name, folder=Path(temporary), info=started, confirm_run_unsafe_code=confirm_run_unsafe_code
                )
                return
            reasons.append(started)
    why = "".join(f"\n  {reason}" for reason in reasons)
    raise RequestError(
        "programs that a model wrote are not executed, because nothing here would keep them from your files and the "
        f"network:{why}\nStart the service with `{START_SERVICE}`, or install bubblewrap with `apt install "
        "bubblewrap`. Only if you trust every sample: --confirm_run_unsafe_code, in a training "
        "evaluation.confirm_run_unsafe_code=true",
        problem_id="sandbox-missing",
    )


def ask_service(folder: Path) -> RunnerInfo | str:
    """Return the service behind a folder, or why there is none. Raises: RequestError if the service cannot be used."""
    try:
        info = _ask(folder, PATIENCE_S)
    except PermissionError as error:
        groups = sorted({os.getgid(), *os.getgroups()})
        raise RequestError(
            f"the socket of the `sandbox` service in {folder} is not open to uid {os.getuid()} with the groups "
            f"{groups}, so no program can be sent to it; run the evaluation as compose.yaml does, with "
            "`docker compose run --rm eval`, or give its group the folder: chmod 2770",
            problem_id="sandbox-handover",
        ) from error
    except ValueError as error:
        raise RequestError(
            f"what answers in {folder} is not a runner ({error}); give the service an empty folder: docker compose "
            f"down sandbox; docker volume ls --filter name=handover; {START_SERVICE}",
            problem_id="sandbox-damaged",
        ) from error
    except OSError as error:
        return f"the `sandbox` service does not run: nothing answers in {folder} ({error.strerror or 'timed out'})"
    if info.version != runner_version():
        raise RequestError(
            f"the `sandbox` service runs other code ({info.version[:12]}) than this evaluation ({runner_version()[:12]}"
            f"), so its results may mean something else; build it again: {START_SERVICE}",
            problem_id="sandbox-version",
        )
    return info


def _ask(folder: Path, timeout_s: float) -> RunnerInfo:
    """Ask a runner to describe itself. Raises: OSError if none answers, ValueError for an invalid answer."""
    with _connect(folder) as connection:
        send(connection, None)
        info: RunnerInfo = parse(RunnerInfo, receive(connection, MAX_ANSWER_BYTES, timeout_s) or {})
        if not 1 <= info.num_workers <= MAX_WORKERS:
            raise ValueError(f"`num_workers` is {info.num_workers}")
        return info


def _connect(folder: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        with socket_address(folder) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def _own_runner(folder: Path, wall: str) -> Iterator[RunnerInfo | str]:
    """Start a runner behind a wall and stop it afterwards; yield its info, or why it did not start."""
    python = find_python()
    if python is None:
        yield f"{wall}: no Python 3.11 or later here that every user may execute, as programs are; install one"
        return
    command = [str(python), "-S", "-B", "-m", "tunebook.evaluate.sandbox.runner", "--handover", str(folder)]
    environment = {"PATH": os.environ.get("PATH", os.defpath), "PYTHONPATH": str(Path(tunebook.__file__).parent.parent)}
    log = folder / RUNNER_LOG
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [*command, "--wall", wall, "--workers", str(len(os.sched_getaffinity(0)))],
            env=environment, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream,
        )  # fmt: skip
    info = None
    end = time.monotonic() + START_WITHIN_S
    try:
        while info is None and process.poll() is None and time.monotonic() < end:
            try:
                info = _ask(folder, START_WITHIN_S)
            except (OSError, ValueError):
                time.sleep(0.02)
        yield info or f"{wall}: {_end_of(log).removeprefix('sandbox: ') or 'its runner did not start'}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _end_of(log: Path) -> str:
    """Return the last lines of a runner's log; empty if the log is missing or a link, which no runner creates."""
    try:
        with os.fdopen(os.open(log, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as stream:
            stream.seek(max(0, stream.seek(0, os.SEEK_END) - QUOTED_BYTES))
            return stream.read(QUOTED_BYTES).decode(errors="replace").strip()
    except OSError:
        return ""


def find_python() -> Path | None:
    """Find a Python for programs. As root, each program gets its own uid, and all uids must be able to execute it."""
    candidates = [Path(sys.executable).resolve(), Path("/usr/bin/python3"), Path("/usr/local/bin/python3")]
    if os.geteuid() != 0:
        return candidates[0]
    check = "import sys; sys.exit(sys.version_info < (3, 11))"
    for python in filter(Path.exists, candidates):
        is_open = all(folder.stat().st_mode & 0o001 for folder in [python, *python.parents])
        if is_open and subprocess.run([python, "-I", "-S", "-c", check], check=False).returncode == 0:
            return python
    return None


def run_programs(
    programs: Sequence[Program], backend: Backend, *, report: Callable[[Outcome], None] = lambda outcome: None
) -> list[Outcome]:
    """Return the outcome of each program, in order; `report` gets each outcome as soon as it arrives.

    If the sandbox itself fails, the program is tried once more. Raises: DataError for samples that are not text and for
    damaged answers, RequestError for a runner that dies.
    """
    check_programs(programs)
    outcomes: dict[int, Outcome] = {}
    todo = deque(range(len(programs)))
    waiting: dict[socket.socket, int] = {}  # connection -> index of the program
    retried: set[int] = set()
    try:
        while todo or waiting:
            while todo and len(waiting) < 2 * backend.info.num_workers:  # one in each worker, one queued
                number = todo.popleft()
                waiting[_submit(programs[number], backend, len(programs) - len(outcomes))] = number
            patience_s = PATIENCE_S + max(programs[number].time_limit_s for number in waiting.values())
            answering = select.select(list(waiting), [], [], patience_s)[0]
            if not answering:
                raise _dead(backend, f"is alive, but judged nothing for {patience_s:.0f} s")
            for connection in answering:
                number = waiting.pop(connection)
                with connection:
                    outcome = replace(_read_outcome(connection), id=programs[number].id)
                if outcome.status is Status.broken and number not in retried:
                    retried.add(number)
                    todo.append(number)
                    continue
                outcomes[number] = outcome
                _refuse_broken(outcomes, len(programs), backend)
                report(outcome)
    finally:
        for connection in waiting:
            connection.close()
    return [outcomes[number] for number in range(len(programs))]


def check_programs(programs: Sequence[Program]) -> None:
    """Refuse samples that cannot be judged, before anything is executed. Raises: DataError, RequestError."""
    for number, program in enumerate(programs, 1):
        sample = f"sample {number} of {len(programs)} ({program.id})"
        if not isinstance(program.source, str):
            raise DataError(
                f"{sample} is {type(program.source).__name__}, not text, so it is not a program; generate it again, or "
                'count it as wrong by passing ""',
                problem_id="sample-not-text",
            )
        if not isinstance(program.test, str) or not program.test.strip():
            raise DataError(
                f"{sample} has no test, so it would pass whatever it does; name the test in the task's file",
                problem_id="sample-without-test",
            )
        if not 0 < program.time_limit_s < inf:
            raise RequestError(
                f"{sample} has a time limit of {program.time_limit_s} s; it must be above 0 and finite, such as 3.0",
                problem_id="sample-time-limit",
            )


def _submit(program: Program, backend: Backend, num_left: int) -> socket.socket:
    """Send a program to a runner, with retries in case it is restarting. Raises: RequestError."""
    end = time.monotonic() + RESTART_S
    while True:
        try:
            connection = _connect(backend.folder)
            connection.settimeout(PATIENCE_S)
            send(connection, program)
            return connection
        except OSError as error:
            if time.monotonic() > end:
                raise _dead(backend, f"ended with {num_left} programs left ({error.strerror or error})") from error
            time.sleep(0.1)


def _read_outcome(connection: socket.socket) -> Outcome:
    """Read the answer about one program. Raises: DataError."""
    try:
        answer = receive(connection, MAX_ANSWER_BYTES, ANSWER_S)
        if answer is not None:
            outcome: Outcome = parse(Outcome, answer)
            return outcome
    except ConnectionError:
        pass
    except (ValueError, TimeoutError) as error:
        raise DataError(
            f"an answer of the sandbox is damaged ({error or 'it is incomplete'}); its runner sends nothing like this, "
            f"so a program may have taken it over: start it again ({START_SERVICE}), and evaluate again",
            problem_id="sandbox-damaged",
        ) from error
    message = "the worker that judged it was killed, most likely by the kernel, because memory ran out"
    return Outcome(id="", status=Status.broken, message=message)


def _refuse_broken(outcomes: dict[int, Outcome], num_programs: int, backend: Backend) -> None:
    """Give up on a runner that fails on the first programs. Raises: RequestError."""
    if len(outcomes) < min(ENOUGH_BROKEN, num_programs):
        return
    if all(outcome.status is Status.broken for outcome in outcomes.values()):
        message = next(iter(outcomes.values())).message
        raise RequestError(
            f"the sandbox ({backend.name}) cannot judge any program: {message}; {backend.where_to_look()}",
            problem_id="sandbox-broken",
        )


def _dead(backend: Backend, what: str) -> RequestError:
    return RequestError(f"the sandbox ({backend.name}) {what}; {backend.where_to_look()}", problem_id="sandbox-dead")
