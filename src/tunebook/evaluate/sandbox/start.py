"""Find a sandbox, and have programs judged in it: `run.py` in the `sandbox` service or in bubblewrap, never outside.

The service is a container, found by its socket. In bubblewrap, each program gets namespaces of its own. As root,
bubblewrap is started as `nobody`, because the kernel does not limit the number of root's processes.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from tunebook.config.unsafe_text import printable
from tunebook.errors import DataError, RequestError
from tunebook.evaluate.sandbox.run import FOLDER, LIMITS, SOCKET, version

RUN_FILE = Path(__file__).with_name("run.py")
HANDOVER_VARIABLE = "TUNEBOOK_HANDOVER"
SERVICE_HANDOVER = Path("/handover")  # where compose.yaml mounts the folder of the service's socket
START_SERVICE = "docker compose up -d --build sandbox"
PATIENCE_S = 60.0  # in addition to a program's time limit: the service may judge programs of others first
RETRY_AFTER_S = 5.0  # time a service may take to restart
ENOUGH_BROKEN = 3  # if this many programs in a row fail like this, the sandbox does not work
NOBODY = 65534


class Status(StrEnum):
    """Result of one program. Only `passed` counts; `broken` means that the sandbox itself failed."""

    passed = "passed"
    failed = "failed"  # a wrong answer, an exception, or an exit before the test ended
    timed_out = "timed_out"
    memory = "memory"
    disk = "disk"
    output = "output"
    crashed = "crashed"  # ended by a signal that it caused
    left_processes = "left_processes"  # passed its test, but left processes in the background
    broken = "broken"


@dataclass(frozen=True, kw_only=True)
class Program:
    """One sample: the program, and the test that runs with the program's names."""

    id: str
    source: str
    test: str
    time_limit_s: float = 3.0  # as in the harness' own code_eval


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of one program, and the reason for it."""

    id: str
    status: Status
    message: str
    last_lines: list[str] = field(default_factory=list)  # printed by the program
    seconds: float = 0.0


class BrokenError(Exception):
    """The sandbox gave no verdict; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Sandbox:
    """One way to have programs judged."""

    name: str  # service or bubblewrap
    num_programs: int  # at a time
    ask: Callable[[bytes, float], bytes]  # gets lines for `run.py` and the seconds to wait; returns its answer

    def try_once(self, program: Program) -> Outcome:
        """Return the outcome of one program. Raises: BrokenError, RequestError if what answers is other code."""
        request = {"source": program.source, "test": program.test, "time_limit_s": program.time_limit_s}
        try:  # in ASCII, because programs may hold lone surrogates
            answer = self.ask(json.dumps(request).encode() + b"\n", program.time_limit_s + PATIENCE_S)
        except (OSError, subprocess.SubprocessError) as error:
            raise BrokenError(str(error)) from error
        outcome = _read_answer(program.id, answer)
        if outcome.status is Status.broken:
            raise BrokenError(outcome.message)
        return outcome

    def judge(self, program: Program) -> Outcome:
        """Return the outcome of one program; if the sandbox fails, the program is tried once more."""
        try:
            return self.try_once(program)
        except BrokenError:
            time.sleep(RETRY_AFTER_S)
        try:
            return self.try_once(program)
        except BrokenError as error:
            return Outcome(id=program.id, status=Status.broken, message=printable(str(error)))


def open_sandbox() -> Sandbox:
    """Return a sandbox that has judged a trial program. Raises: RequestError with what is missing and what to type."""
    folder = Path(os.environ.get(HANDOVER_VARIABLE) or SERVICE_HANDOVER)
    bubblewrap = shutil.which("bwrap")
    reasons = []
    sandboxes = [Sandbox(name="service", num_programs=1, ask=partial(_ask_service, folder))]
    # This Python may be out of reach for `nobody`.
    for python in dict.fromkeys(Path(name).resolve() for name in (sys.executable, "/usr/bin/python3")):
        if bubblewrap:
            ask = partial(_ask_bubblewrap, bubblewrap, python)
            sandboxes.append(Sandbox(name="bubblewrap", num_programs=len(os.sched_getaffinity(0)), ask=ask))
    for sandbox in sandboxes:
        try:
            outcome = sandbox.try_once(Program(id="trial", source="x = 1", test="assert x == 1", time_limit_s=30.0))
        except BrokenError as error:
            reasons.append(f"{sandbox.name}: {error}")
        else:
            if outcome.status is Status.passed:
                return sandbox
            reasons.append(f"{sandbox.name}: a trial program ended as {outcome.status}: {outcome.message}")
    if not bubblewrap:
        reasons.append("bubblewrap is not installed")
    why = "".join(f"\n  {reason}" for reason in reasons)
    raise RequestError(
        "programs that a model wrote are not executed, because nothing here would keep them from your files and the "
        f"network:{why}\nStart the service with `{START_SERVICE}`, or install bubblewrap with `apt install "
        "bubblewrap`. bubblewrap needs user namespaces: sysctl kernel.unprivileged_userns_clone=1, on Ubuntu "
        "kernel.apparmor_restrict_unprivileged_userns=0",
        problem_id="sandbox-missing",
    )


def run_programs(programs: Sequence[Program], sandbox: Sandbox) -> Iterator[Outcome]:
    """Yield the outcome of each program, in order.

    Raises: DataError for a program without a test, RequestError for a sandbox that fails again and again.
    """
    for program in programs:
        if not program.test.strip():
            raise DataError(
                f"{program.id} has no test, so it would pass whatever it does; name the test in the task's file",
                problem_id="sample-without-test",
            )
    num_broken = 0  # in a row
    pool = ThreadPoolExecutor(sandbox.num_programs)
    try:
        for outcome in pool.map(sandbox.judge, programs):
            num_broken = num_broken + 1 if outcome.status is Status.broken else 0
            if num_broken == min(ENOUGH_BROKEN, len(programs)):
                where = "docker compose logs sandbox" if sandbox.name == "service" else "dmesg"
                raise RequestError(
                    f"the sandbox ({sandbox.name}) judges no program: {outcome.message}; look for the reason with "
                    f"`{where}`, and evaluate again",
                    problem_id="sandbox-broken",
                )
            yield outcome
    finally:
        pool.shutdown(cancel_futures=True)


def _read_answer(id: str, answer: bytes) -> Outcome:
    """Read an answer of `run.py`. Raises: BrokenError if there is none, RequestError if its code is not this one's."""
    if not answer.endswith(b"\n"):
        raise BrokenError("it ended without a verdict; most likely the kernel killed it, because memory ran out")
    try:
        verdict = json.loads(answer)
        if verdict["version"] != version():
            raise ValueError("its code differs from this evaluation's")
        return Outcome(
            id=id,
            status=Status(verdict["status"]),
            message=printable(verdict["message"]),
            last_lines=[printable(line) for line in verdict["last_lines"]],
            seconds=float(verdict["seconds"]),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RequestError(
            f"the `sandbox` service is not this checkout's ({error}); build it again: {START_SERVICE}",
            problem_id="sandbox-version",
        ) from error


def _ask_service(folder: Path, lines: bytes, wait_s: float) -> bytes:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(wait_s)
        try:
            connection.connect(str(folder / SOCKET))
        except OSError as error:
            raise BrokenError(f"nothing answers at {folder / SOCKET} ({error.strerror or error})") from error
        connection.sendall(lines)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            return bytes(answer.read())


def _ask_bubblewrap(bubblewrap: str, python: Path, lines: bytes, wait_s: float) -> bytes:
    as_nobody: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}
    with RUN_FILE.open("rb") as source:
        done = subprocess.run(
            _bubblewrap_command(bubblewrap, python, source.fileno()), input=lines, capture_output=True,
            timeout=wait_s, check=False, cwd="/", env={}, pass_fds=[source.fileno()], **as_nobody,
        )  # fmt: skip
    if done.returncode != 0:
        raise BrokenError(f"exit code {done.returncode}: {done.stderr.decode(errors='replace').strip()[-500:]}")
    return bytes(done.stdout)


def _bubblewrap_command(bubblewrap: str, python: Path, source: int) -> list[str]:
    """Return the command that starts `run.py`, open as `source`, as the first process of namespaces of its own."""
    command = [bubblewrap, "--unshare-all", "--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--hostname", "sandbox", "--as-pid-1", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    installation = python.parent.parent
    folders = [Path(name) for name in ("/usr", "/bin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")]
    for path in [*folders, *([] if installation.is_relative_to("/usr") else [installation])]:
        if path.is_symlink():
            command += ["--symlink", str(path.readlink()), str(path)]
        elif path.exists():
            command += ["--ro-bind", str(path), str(path)]
    command += ["--ro-bind-data", str(source), "/run.py", "--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--size", str(LIMITS["disk_bytes"]), "--tmpfs", FOLDER, "--symlink", FOLDER, "/tmp"]
    # Read-only once everything is in place: bubblewrap's root is a disk without a size limit, like its /dev.
    return [*command, "--chdir", FOLDER, "--remount-ro", "/", "--", str(python), "-I", "-S", "-B", "/run.py"]
